// Chooses how large the items of a product are.
#include "cut.h"

#include <cmath>

#include "gated_tile.h"

namespace plait {
namespace {

// Tokens per item are a multiple of the register tiles of all kernels, and of the 24 that quantised products take at a
// time.
constexpr int64_t kTokenUnit = 48;

}  // namespace

Cut cut_product(int64_t l2_bytes, int64_t units, double unit_bytes, double unit_macs, int64_t tokens, int64_t row_bytes,
                int threads) {
  // The tokens' inputs stay in half of the L2 cache while the weights stream by.
  int64_t block = tokens;
  const int64_t fitting = std::max(kTokenUnit, l2_bytes / 2 / row_bytes / kTokenUnit * kTokenUnit);
  int64_t blocks = divide_up(tokens, fitting);
  while (units * blocks < 4 * threads && divide_up(tokens, blocks) > kTokenUnit) blocks *= 2;
  if (blocks > 1) {
    block = divide_up(divide_up(tokens, blocks), kTokenUnit) * kTokenUnit;
    blocks = divide_up(tokens, block);
  }
  const double unit_ns = std::max(unit_bytes / kReadRate, unit_macs * double(block) / kMacRate);
  const double all = unit_ns * double(units * blocks);
  const double item = std::min(std::max(all / (8 * threads), kLeastItem), kMostItem);
  int64_t per_item = threads == 1 ? units : std::max<int64_t>(1, std::llround(item / unit_ns));
  // Kernels take several panels at a time for few tokens.
  for (const int64_t run : {8, 4})
    if (per_item > run || (run == 4 && per_item == 3 && tokens <= kFewTokens)) {
      per_item = divide_up(per_item, run) * run;
      break;
    }
  per_item = std::min(units, per_item);
  return {per_item, block, divide_up(units, per_item), blocks};
}

}  // namespace plait
