#include "kernels.h"

#define PLAIT_ISA_NAMESPACE avx2
#define PLAIT_ISA_NAME "avx2"
#define PLAIT_ISA_NEEDS "avx2", "fma", "f16c"
#include "table.inl"
