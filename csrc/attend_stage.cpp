// Cuts a step's attention into items and runs them.
#include "attend_stage.h"

#include <algorithm>

namespace plait {

namespace {

// An item may be this share of what one thread has to do before it is worth cutting.
constexpr int64_t kItemsPerThread = 3;

// Query heads of an item.
int64_t tile_heads(const AttendLayer &layer) {
  const int64_t group = layer.heads / layer.cache.num_kv_heads;
  return layer.head_tile > 0 ? std::min<int64_t>(layer.head_tile, group) : group;
}

int64_t tile_tokens(const AttendLayer &layer) {
  return std::max<int64_t>(1, std::min(kAttendTile, kAttendRows / tile_heads(layer)));
}

int64_t context_begin(int64_t first_query, int32_t window) {
  const int64_t oldest = window > 0 ? std::max<int64_t>(0, first_query - window + 1) : 0;
  return oldest / kAttendChunk * kAttendChunk;
}

// Work of an item in arbitrary units: every key costs reading it and a product per query row.
int64_t cost(const AttendItem &item) {
  return int64_t(item.key1 - item.key0) * (int64_t{item.t1 - item.t0} * item.heads + 4);
}

AttendArgs arguments(const AttendLayer &layer, const PlaitStep &step, const AttendItem &item, float *tile) {
  const int64_t group = layer.heads / layer.cache.num_kv_heads, head = item.kv_head * group + item.head0;
  const int64_t begin = step.query_start[item.sequence], row = begin + item.t0;
  AttendArgs args;
  args.cache = layer.cache;
  args.table = step.block_table + (int64_t(layer.cache.group) * step.num_sequences + item.sequence) * step.table_width;
  args.first = step.context_len[item.sequence] - (step.query_start[item.sequence + 1] - begin) + item.t0;
  args.heads = item.heads * layer.cache.num_kv_heads;  // as if the kv head had no others
  args.scale = layer.scale;
  args.soft_cap = layer.soft_cap;
  args.window = layer.window;
  args.sinks = layer.sinks == nullptr ? nullptr : layer.sinks + head - int64_t{item.kv_head} * item.heads;
  args.q = layer.q + row * layer.q_stride + head * layer.cache.key_width;
  args.q_stride = layer.q_stride;
  const int64_t width = value_width(layer.cache);
  args.out = layer.record ? tile : layer.out + row * layer.out_stride + head * width;
  args.out_stride = layer.record ? item.heads * width : layer.out_stride;
  return args;
}

int64_t partial_size(const PlaitCache &cache) { return kPartialHead + value_width(cache); }

}  // namespace

int64_t attend_scratch(const PlaitCache &cache) {
  // Scaled queries, scores, and two partials of every row.
  return kAttendRows * (cache.key_width + kScoreStride + 2 * partial_size(cache));
}

int64_t attend_item_scratch(const AttendLayer &layer) {
  // Behind the kernel's own: a tile's result before it is quantised.
  return attend_scratch(layer.cache) + tile_tokens(layer) * tile_heads(layer) * value_width(layer.cache);
}

void cut_attention(const PlaitStep &step, const AttendLayer &layer, int threads, AttendWork *work) {
  const int64_t group = layer.heads / layer.cache.num_kv_heads, tokens = tile_tokens(layer);
  const int32_t heads = int32_t(tile_heads(layer));
  auto &items = work->items;
  items.clear();
  work->tiles.clear();
  int64_t total = 0;
  for (int32_t s = 0; s < step.num_sequences; s++) {
    const int32_t count = step.query_start[s + 1] - step.query_start[s], first = step.context_len[s] - count;
    for (int64_t t0 = 0; t0 < count; t0 += tokens) {
      const int64_t t1 = std::min<int64_t>(count, t0 + tokens);
      for (int32_t head = 0; head < layer.cache.num_kv_heads; head++)
        for (int32_t head0 = 0; head0 < group; head0 += heads) {
          items.push_back({s, head, head0, std::min(heads, int32_t(group) - head0), int32_t(t0), int32_t(t1),
                           int32_t(context_begin(first + t0, layer.window)), int32_t(first + t1), -1, 0});
          total += cost(items.back());
        }
    }
  }
  if (threads <= 1) return;

  // Items that would leave other threads waiting are cut into chunks.
  int64_t numbers = 0;
  const int64_t whole = items.size();
  for (int64_t i = 0; i < whole; i++) {
    const AttendItem item = items[i];
    const int32_t chunks = int32_t((item.key1 - item.key0 + kAttendChunk - 1) / kAttendChunk);
    if (chunks < 2 || cost(item) * kItemsPerThread * threads <= total) continue;
    const int64_t stride = int64_t{item.t1 - item.t0} * item.heads * partial_size(layer.cache);
    for (int32_t chunk = 0; chunk < chunks; chunk++) {
      AttendItem part = item;
      part.key0 = item.key0 + chunk * int32_t(kAttendChunk);
      part.key1 = std::min(item.key1, part.key0 + int32_t(kAttendChunk));
      part.tile = int32_t(work->tiles.size());
      part.chunk = chunk;
      if (chunk == 0) {
        items[i] = part;
      } else {
        items.push_back(part);
      }
    }
    work->tiles.push_back({chunks, chunks, numbers, stride});
    numbers += chunks * stride;
  }
  if (int64_t(work->partials.size()) < numbers) work->partials.resize(numbers);

  // The longest first, so that no thread begins a long one when the others are done.
  std::sort(items.begin(), items.end(), [](const AttendItem &a, const AttendItem &b) {
    const int64_t x = cost(a), y = cost(b);
    if (x != y) return x > y;
    if (a.sequence != b.sequence) return a.sequence < b.sequence;
    if (a.t0 != b.t0) return a.t0 < b.t0;
    if (a.kv_head != b.kv_head) return a.kv_head < b.kv_head;
    return a.head0 != b.head0 ? a.head0 < b.head0 : a.key0 < b.key0;
  });
}

void run_attend_item(const Kernels &kernels, const AttendLayer &layer, const PlaitStep &step, AttendWork &work,
                     int64_t index, const float *q, float *scratch) {
  const AttendItem &item = work.items[index];
  float *result = scratch + attend_scratch(layer.cache);
  AttendArgs args = arguments(layer, step, item, result);
  if (q != nullptr) args.q = q;
  const int64_t count = item.t1 - item.t0;
  if (item.tile < 0) {
    kernels.attend(args, item.kv_head, 0, count, item.key0, item.key1, nullptr, scratch);
  } else {
    AttendTile &tile = work.tiles[item.tile];
    float *partials = work.partials.data() + tile.partials;
    kernels.attend(args, item.kv_head, 0, count, item.key0, item.key1, partials + item.chunk * tile.stride, scratch);
    if (__atomic_sub_fetch(&tile.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
    __atomic_store_n(&tile.pending, tile.chunks, __ATOMIC_RELAXED);  // for the next layer, behind a barrier
    kernels.attend_merge(args, item.kv_head, 0, count, partials, tile.chunks, tile.stride);
  }
  if (layer.record == nullptr) return;
  const int64_t width = args.out_stride, cols = layer.heads * value_width(layer.cache);
  const int64_t first = (item.kv_head * (layer.heads / layer.cache.num_kv_heads) + item.head0) * value_width(layer.cache);
  uint8_t *record = layer.record + (step.query_start[item.sequence] + item.t0) * layer.record_stride;
  for (int64_t t = 0; t < count; t++)
    kernels.quantise(result + t * width, cols, first / 32, (first + width) / 32, record + t * layer.record_stride);
}

}  // namespace plait
