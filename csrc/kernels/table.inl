// The table of one instruction set. Included last by csrc/kernels/isa_<name>.cpp, which defines PLAIT_ISA_NAMESPACE,
// PLAIT_ISA_NAME and PLAIT_ISA_NEEDS (the names of the CPU features that the compiler's flags use).
#include "vec.h"
#include "matmul_float.inl"
#include "matmul_quant.inl"
#include "rows.inl"
#include "route.inl"
#include "attention.inl"
#include "optimizers.inl"

namespace plait {
namespace PLAIT_ISA_NAMESPACE {

extern const Kernels kKernels;
const Kernels kKernels = {
    PLAIT_ISA_NAME,
    {PLAIT_ISA_NEEDS},
    {matmul_f32, matmul_bf16, matmul_f16, matmul_q4_0, matmul_q4_1, matmul_q5_0, matmul_q5_1, matmul_q8_0, matmul_q4_k,
     matmul_q5_k, matmul_q6_k},
    unpack_row,
    quantise, rms_norm, layer_norm, positions, rotate, activate, gate, clamped_swiglu, xielu, add, scale, soft_cap, clip, arg_max,
    route, weighted_sum,
    write_kv, read_keys, attend, attend_merge,
    optimizers::adamw, optimizers::lion, optimizers::mars_squares, optimizers::mars, optimizers::sophia,
};

}  // namespace PLAIT_ISA_NAMESPACE
}  // namespace plait
