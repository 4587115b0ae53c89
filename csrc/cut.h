// How the stage of a product is cut into items.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"

namespace plait {

// Guesses at speed, to size items: bytes of weights per ns that one thread reads, multiply-adds per ns that it does.
constexpr double kReadRate = 10, kMacRate = 40;
// Items should take this long: short enough to end together, long enough that handing them out costs nothing.
constexpr double kLeastItem = 2'000, kMostItem = 60'000;  // ns
// Rows of less work than this stay with the caller.
constexpr double kAlone = 4'000;  // ns

static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t panels_of(const PlaitMatrix &matrix) { return divide_up(matrix.rows, kPanelRows); }

// `panels` panels of a matrix as one of its own.
static inline PlaitMatrix part(const PlaitMatrix &matrix, int64_t panel, int64_t panels) {
  PlaitMatrix cut = matrix;
  cut.data = static_cast<const uint8_t *>(matrix.data) + panel * matrix.panel_bytes;
  cut.rows = std::min(matrix.rows - panel * kPanelRows, panels * kPanelRows);
  return cut;
}

// A product's stage: `units` (panels, or groups of outputs) times tokens, in items of some of either.
struct Cut {
  int64_t units, tokens;            // per item
  int64_t unit_items, token_items;  // their numbers; an item's tokens change slowest
  int64_t items() const { return unit_items * token_items; }
};

// `units` of unit_bytes of weights and unit_macs multiply-adds a token each, for tokens of row_bytes.
Cut cut_product(int64_t l2_bytes, int64_t units, double unit_bytes, double unit_macs, int64_t tokens, int64_t row_bytes,
                int threads);

}  // namespace plait
