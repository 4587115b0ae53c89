#include "../cpu.h"
#include "kernels.h"

#define PLAIT_ISA_NAMESPACE avx2
#define PLAIT_ISA_NAME "avx2"
#define PLAIT_ISA_RUNS cpu_has("avx2") && cpu_has("fma") && cpu_has("f16c")
#include "table.inl"
