// The first half of a feed-forward: both products of some outputs, the activation, and what the next product reads.
#pragma once

#include "adapters.h"
#include "kernels/kernels.h"

namespace plait {

// Gate and up products lie in scratch before they are multiplied: this many outputs of this many tokens at a time,
// more outputs where there are few tokens. Outputs are handed out in groups: one block of quantised records each.
constexpr int64_t kGatedTokens = 48, kGatedGroups = 2, kFewTokens = 12, kFewTokensGroups = 4, kGroupOutputs = 32;
constexpr int64_t kGatedScratch = kGatedTokens * kGatedGroups * kGroupOutputs;  // floats, of either product
static_assert(kFewTokens * kFewTokensGroups <= kGatedTokens * kGatedGroups, "scratch holds either");

// out = act(x gate^T + gate_bias) * (x up^T + up_bias), or the first factor alone.
struct GatedProduct {
  PlaitMatrix gate, up;
  const float *gate_bias, *up_bias;  // or null
  bool two;                          // whether there is `up`
  int32_t activation;
  float alpha, limit;                // the activation's numbers, where it has some
  const uint8_t *x;  // records or floats of token 0, x_stride bytes apart
  int64_t x_stride;
  uint8_t *out;  // records, where `quantised`, else floats; out_stride bytes apart
  int64_t out_stride;
  bool quantised;
  const Adapted *adapted;  // what is added to either product, or null
};

// Outputs of groups [group0, group1) of tokens [token0, token1). scratch: 2 * kGatedScratch floats.
void run_gated(const Kernels &kernels, const GatedProduct &product, int64_t group0, int64_t group1, int64_t token0,
               int64_t token1, float *scratch);

}  // namespace plait
