#include "kernels.h"

#define PLAIT_ISA_NAMESPACE portable
#define PLAIT_ISA_NAME "portable"
#define PLAIT_ISA_NEEDS nullptr
#include "table.inl"
