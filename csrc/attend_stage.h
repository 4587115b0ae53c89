// Attention of one step: cut into items that threads take one by one, whatever the instruction set.
//
// An item is a tile of query tokens of one sequence, for one key/value head: over all keys that the tile sees, or over
// one chunk of them where whole items would leave threads without work. Whoever finishes the last chunk of a tile puts
// its chunks together, so one parallel_for over the items is the whole stage. The numbers are the same however the step
// is cut.
//
//   once per step and per distinct (group, heads, kv heads, widths, window):  cut_attention(...)
//   per layer, as the items of one parallel_for:  run_attend_item(kernels, layer, step, work, item, scratch)
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace plait {

// One layer's attention. The result goes to `out` as floats or, where `record` is given, quantised to the tokens'
// records (value width a multiple of 32).
struct AttendLayer {
  PlaitCache cache;
  int32_t heads;
  int32_t window;          // 0 = none
  int32_t head_tile;       // query heads of a kv head that one item takes at most; 0 = all of them
  float scale, soft_cap;   // soft_cap 0 = none
  const float *sinks;      // [heads] or null
  const float *q;          // row of the step's token t at q + t * q_stride: [heads, key_width]
  int64_t q_stride;        // in floats
  float *out;              // row of token t at out + t * out_stride: [heads, value width]; unused with `record`
  int64_t out_stride;      // in floats
  uint8_t *record;         // record of token t at record + t * record_stride, or null
  int64_t record_stride;   // in bytes
};

struct AttendItem {
  int32_t sequence, kv_head;
  int32_t head0, heads;  // query heads [head0, head0 + heads) of the kv head's
  int32_t t0, t1;      // query tokens of the sequence, 0 = its first in this step
  int32_t key0, key1;  // all keys that the tile sees, or one chunk of them
  int32_t tile;        // index into AttendWork::tiles, -1 = not split
  int32_t chunk;       // which of the tile's chunks
};

struct AttendTile {
  int32_t chunks;
  int32_t pending;   // chunks not yet done; whoever takes it to 0 sets it back to `chunks`
  int64_t partials;  // index of the first chunk's first number in AttendWork::partials
  int64_t stride;    // numbers from one chunk to the next
};

// How a step is cut. Everything is reused from step to step: memory grows to what the largest step needs and stays.
struct AttendWork {
  std::vector<AttendItem> items;
  std::vector<AttendTile> tiles;
  std::vector<float> partials;

  int64_t bytes() const {
    return int64_t(items.capacity() * sizeof(AttendItem) + tiles.capacity() * sizeof(AttendTile) +
                   partials.capacity() * sizeof(float));
  }
};

// Cuts the step for `threads` threads. Of the layer, only the shape counts: cache.group and widths, heads, window: all
// layers of equal shape may share the result. Called before the stage, by one thread.
void cut_attention(const PlaitStep &step, const AttendLayer &layer, int threads, AttendWork *work);

// Floats of scratch that run_attend_item needs for this layer; every thread has its own, 64-byte aligned.
int64_t attend_item_scratch(const AttendLayer &layer);

// Runs item `item` of the layer; any number of threads at once, each item by one. q: queries [group, key_width] of an item
// of one token, in place of the layer's; null: those.
void run_attend_item(const Kernels &kernels, const AttendLayer &layer, const PlaitStep &step, AttendWork &work,
                     int64_t item, const float *q, float *scratch);

}  // namespace plait
