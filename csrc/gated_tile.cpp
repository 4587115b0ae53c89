// Gate and up products into scratch, then act(gate) * up, then floats or blocks of the records.
#include "gated_tile.h"

#include <algorithm>

#include "cut.h"

namespace plait {
namespace {

void tile(const Kernels &kernels, const GatedProduct &p, int64_t group0, int64_t group1, int64_t token0, int64_t token1,
          float *scratch) {
  const int64_t first = group0 * kGroupOutputs, stride = (group1 - group0) * kGroupOutputs;
  float *products[2] = {scratch, scratch + kGatedScratch};
  int64_t width = 0;
  for (int k = 0; k < (p.two ? 2 : 1); k++) {
    const PlaitMatrix matrix = part(k == 0 ? p.gate : p.up, first / kPanelRows, stride / kPanelRows);
    width = matrix.rows;
    MatmulArgs args{};
    args.matrix = &matrix;
    args.x = p.x + token0 * p.x_stride;
    args.x_stride = p.x_stride;
    args.out = products[k];
    args.out_stride = stride;
    const float *bias = k == 0 ? p.gate_bias : p.up_bias;
    args.bias = bias == nullptr ? nullptr : bias + first;
    kernels.matmul[matrix.layout](args, 0, panels_of(matrix), 0, token1 - token0);
    if (p.adapted != nullptr)
      p.adapted->add(k, first / kPanelRows, first / kPanelRows + panels_of(matrix), token0, token1, products[k], stride);
  }
  for (int64_t t = token0; t < token1; t++) {
    float *gate = products[0] + (t - token0) * stride, *up = products[1] + (t - token0) * stride;
    uint8_t *out = p.out + t * p.out_stride;
    float *to = p.quantised ? gate : reinterpret_cast<float *>(out) + first;
    if (p.two && p.activation == PLAIT_ACT_CLAMPED_SWIGLU)
      kernels.clamped_swiglu(gate, up, width, p.alpha, p.limit, to);
    else if (p.two)
      kernels.gate(p.activation, gate, up, width, to);
    else
      kernels.activate(p.activation, gate, width, to);
    if (p.quantised) kernels.quantise(to, p.gate.rows, group0, group1, out);
  }
}

}  // namespace

void run_gated(const Kernels &kernels, const GatedProduct &product, int64_t group0, int64_t group1, int64_t token0,
               int64_t token1, float *scratch) {
  const int64_t few = token1 - token0 <= kFewTokens ? kFewTokensGroups : kGatedGroups;
  for (int64_t group = group0; group < group1; group += few)
    for (int64_t t = token0; t < token1; t += kGatedTokens)
      tile(kernels, product, group, std::min(group1, group + few), t, std::min(token1, t + kGatedTokens), scratch);
}

}  // namespace plait
