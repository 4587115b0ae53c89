#include "../cpu.h"
#include "kernels.h"

#define PLAIT_ISA_NAMESPACE avx512_bf16
#define PLAIT_ISA_NAME "avx512_bf16"
#define PLAIT_ISA_RUNS cpu_has("avx512f") && cpu_has("avx512bw") && cpu_has("avx512dq") && cpu_has("avx512vl") && cpu_has("f16c") && cpu_has("avx512_vnni") && cpu_has("avx512_bf16")
#include "table.inl"
