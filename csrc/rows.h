// Operations that work on one row at a time: the switch that plans and plait_row_op share.
#pragma once

#include "kernels/kernels.h"

namespace plait {

// Whether run_row_op knows this operation: EMBED, POSITIONS, RMS_NORM, LAYER_NORM, ROTATE, GATE, ACTIVATE, ADD, SCALE,
// SOFT_CAP, CLIP, QUANTISE, COPY, ROUTE. (WRITE_KV and HIDDEN are row-local too, but need the step: the plan does them.)
bool is_row_op(int32_t kind);

// Whether the numbers of a ROUTE go together; false after fail().
bool route_holds(const PlaitOp &op);

// One row of `op`. in, out: where the row of each operand lies (the buffer numbers in `op` are not looked at; a Q8
// output is a record); out0 may be in0 or in1. width: numbers in a row of out0. w: the matrices of op.w, null for -1.
// table: all rotary frequencies. number: the row of EMBED, the position of POSITIONS; else unused. Nothing is checked
// here.
void run_row_op(const Kernels &kernels, const PlaitOp &op, int64_t width, const float *const in[3], float *const out[3],
                const PlaitMatrix *const w[6], const float *table, int64_t number);

}  // namespace plait
