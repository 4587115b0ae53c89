#include "../cpu.h"
#include "kernels.h"

#define PLAIT_ISA_NAMESPACE portable
#define PLAIT_ISA_NAME "portable"
#define PLAIT_ISA_RUNS true
#include "table.inl"
