#include "../cpu.h"
#include "kernels.h"

#define PLAIT_ISA_NAMESPACE avx512
#define PLAIT_ISA_NAME "avx512"
#define PLAIT_ISA_RUNS cpu_has("avx512f") && cpu_has("avx512bw") && cpu_has("avx512dq") && cpu_has("avx512vl") && cpu_has("f16c")
#include "table.inl"
