// Sizes of the packed layouts, for whoever packs and whoever reads. csrc/plait_native.h describes what is inside.
#pragma once

#include <stdint.h>

#include "../plait_native.h"

namespace plait {

// One unit is what a panel's stream repeats: a block of 32 columns, a super-block of 256, or 1 or 2 columns of floats.
struct LayoutUnit {
  int32_t cols;
  int32_t bytes;         // of a unit in a panel of 16 rows
  int32_t source_bytes;  // of the same columns of one row in a GGUF file or a plain matrix
};

// Internal linkage: kernel files are compiled for different instruction sets and must not share a copy.
static constexpr LayoutUnit kLayoutUnits[PLAIT_LAYOUT_COUNT] = {
    {1, 64, 4},                                  // F32
    {2, 64, 4},                                  // BF16
    {1, 32, 2},                                  // F16
    {32, 32 + 256, 18},                          // Q4_0
    {32, 64 + 256, 20},                          // Q4_1
    {32, 32 + 64 + 256, 22},                     // Q5_0
    {32, 64 + 64 + 256, 24},                     // Q5_1
    {32, 32 + 512, 34},                          // Q8_0
    {256, 64 + 2 * 128 + 8 * 256, 144},          // Q4_K
    {256, 64 + 2 * 128 + 8 * (64 + 256), 176},   // Q5_K
    {256, 32 + 16 * 16 + 8 * (128 + 256), 210},  // Q6_K
};

// Columns of a quantised matrix at most: kernels keep a number per block in fixed memory.
static constexpr int64_t kMaxQuantisedCols = 1 << 19;

}  // namespace plait
