#include "kernels.h"

#define PLAIT_ISA_NAMESPACE avx512_vnni
#define PLAIT_ISA_NAME "avx512_vnni"
#define PLAIT_ISA_NEEDS "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"
#include "table.inl"
