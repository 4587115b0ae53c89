#include "latent_stage.h"

#include <string.h>

#include <algorithm>

#include "cut.h"
#include "threads.h"

namespace plait {
namespace {

// Bytes of queries and results of a slab at most, and tokens that it holds in any case.
constexpr int64_t kSlabBytes = 32 << 20, kSlabTokens = 16;
// Rows of a product of the expanded form, or of records that are made at a time: a multiple of all register tiles.
constexpr int64_t kRows = 48;
// Tokens in a block of a thread's own keys and values: a vector of keys and its neighbours lie in one line.
constexpr int64_t kOwnBlock = 16;
constexpr int64_t kOwnBlocks = kAttendChunk / kOwnBlock;
// Items of attention that a thread should have, before heads are kept together.
constexpr int64_t kItems = 2;
// Heads of an item: whole tiles of rows in the kernels.
constexpr int64_t kHeadUnit = 5;

int64_t round_up(int64_t n, int64_t unit) { return divide_up(n, unit) * unit; }

int64_t slab_rows(const LatentLayer &layer) {
  const int64_t bytes = int64_t(sizeof(float)) * layer.heads * (layer.row() + layer.latent());
  return std::max(kSlabTokens, kSlabBytes / bytes);
}

// Keys and values of one head as a cache of one chunk.
PlaitCache own_cache(const LatentLayer &layer, float *base) {
  PlaitCache cache{};
  cache.base = reinterpret_cast<uint8_t *>(base);
  cache.block_stride = kOwnBlock * (layer.query() + layer.value) * int64_t(sizeof(float));
  cache.block_tokens = kOwnBlock;
  cache.num_kv_heads = 1;
  cache.key_width = static_cast<int32_t>(layer.query());
  cache.value_width = static_cast<int32_t>(layer.value);
  cache.kv_type = PLAIT_KV_F32;
  return cache;
}

// Heads that an item of attention to a slab takes. Where there are few items, heads are shared out.
int32_t tile_of_heads(const LatentLayer &layer, const LatentSlab &slab, int threads) {
  const int64_t whole = std::min<int64_t>(layer.heads, kAttendRows);
  if (threads <= 1) return static_cast<int32_t>(whole);
  int64_t items = 0;
  for (int32_t s = 0; s < slab.step.num_sequences; s++) {
    const int64_t tokens = slab.query_start[s + 1] - slab.query_start[s];
    items += divide_up(tokens * layer.heads, kAttendRows) * divide_up(slab.context_len[s], kAttendChunk);
  }
  if (items >= kItems * threads) return static_cast<int32_t>(whole);
  const int64_t parts = divide_up(kItems * threads, std::max<int64_t>(1, items));
  return static_cast<int32_t>(std::min(whole, round_up(divide_up(layer.heads, parts), kHeadUnit)));
}

// Tokens [token0, token1) of sequence s, which ends with its last token of the step, to the slab.
void put(const PlaitStep &step, const LatentLayer &layer, int32_t s, int32_t token0, int32_t token1, LatentSlab *slab) {
  const int32_t count = token1 - token0;
  if (!slab->runs.empty() && slab->runs.back().token + slab->runs.back().count == token0)
    slab->runs.back().count += count;
  else
    slab->runs.push_back({token0, slab->rows, count});
  slab->rows += count;
  slab->query_start.push_back(slab->rows);
  slab->context_len.push_back(step.context_len[s] - (step.query_start[s + 1] - token1));
  const int32_t *table = step.block_table + (int64_t{layer.cache.group} * step.num_sequences + s) * step.table_width;
  slab->block_table.insert(slab->block_table.end(), table, table + step.table_width);
}

void clear(LatentSlab *slab) {
  slab->rows = 0;
  slab->runs.clear();
  slab->query_start.assign(1, 0);
  slab->context_len.clear();
  slab->block_table.clear();
}

AttendLayer attend_layer(const LatentLayer &layer, int32_t head_tile) {
  AttendLayer all{};
  all.cache = layer.cache;
  all.cache.group = 0;
  all.heads = static_cast<int32_t>(layer.heads);
  all.head_tile = head_tile;
  all.scale = layer.scale;
  return all;
}

void finish(const PlaitStep &step, const LatentLayer &layer, int threads, LatentSlab *slab) {
  slab->step = {};
  slab->step.num_tokens = slab->rows;
  slab->step.num_sequences = static_cast<int32_t>(slab->context_len.size());
  slab->step.num_groups = 1;
  slab->step.table_width = step.table_width;
  slab->step.query_start = slab->query_start.data();
  slab->step.context_len = slab->context_len.data();
  slab->step.block_table = slab->block_table.data();
  slab->head_tile = tile_of_heads(layer, *slab, threads);
  cut_attention(slab->step, attend_layer(layer, slab->head_tile), threads, &slab->attend);
}

// Calls f(token, row, count) for the pieces of runs inside rows [row0, row1).
template <class F>
void each_run(const LatentSlab &slab, int64_t row0, int64_t row1, const F &f) {
  auto run = std::upper_bound(slab.runs.begin(), slab.runs.end(), row0,
                              [](int64_t row, const LatentRun &r) { return row < r.row; });
  for (--run; run != slab.runs.end() && run->row < row1; ++run) {
    const int64_t from = std::max<int64_t>(row0, run->row), to = std::min<int64_t>(row1, run->row + run->count);
    f(run->token + (from - run->row), from, to - from);
  }
}

}  // namespace

int64_t LatentWork::bytes() const {
  int64_t all = int64_t(expanded.capacity() * sizeof(LatentItem) + table.capacity() * sizeof(int32_t) +
                        (queries.capacity() + results.capacity()) * sizeof(float));
  for (const LatentSlab &slab : slabs)
    all += slab.attend.bytes() +
           int64_t(slab.runs.capacity() * sizeof(LatentRun) +
                   (slab.query_start.capacity() + slab.context_len.capacity() + slab.block_table.capacity()) *
                       sizeof(int32_t));
  return all;
}

// Every product but those with the cost is exact in a double, so that another implementation of this rule decides the
// same (plait.ops.latent.expands).
bool expands(const LatentLayer &layer, int64_t tokens, int64_t context) {
  if (layer.form != PLAIT_LATENT_AUTO) return layer.form == PLAIT_LATENT_EXPANDED;
  const int64_t product = layer.latent() * (layer.nope + layer.value), pairs = tokens * context;
  const double expanded = layer.attend_cost * double(pairs * (layer.query() + layer.value));
  const double absorbed = layer.attend_cost * double(pairs * (layer.row() + layer.latent()));
  return double(context * product) + expanded < double(tokens * product) + absorbed;
}

void cut_latent(const PlaitStep &step, const LatentLayer &layer, int threads, LatentWork *work) {
  work->num_slabs = 0;
  work->expanded.clear();
  const int64_t most = slab_rows(layer);
  int64_t rows = 0, longest = 0;  // of a slab; context of an expanded sequence
  std::vector<LatentItem> &items = work->expanded;
  LatentSlab *slab = nullptr;
  for (int32_t s = 0; s < step.num_sequences; s++) {
    const int32_t first = step.query_start[s], end = step.query_start[s + 1];
    if (first == end) continue;
    if (expands(layer, end - first, step.context_len[s])) {
      longest = std::max<int64_t>(longest, step.context_len[s]);
      for (int32_t head = 0; head < layer.heads; head++) items.push_back({s, head});
      continue;
    }
    for (int32_t token = first; token < end;) {
      if (slab == nullptr || slab->rows == most) {
        if (slab != nullptr) finish(step, layer, threads, slab);
        if (work->num_slabs == int64_t(work->slabs.size())) work->slabs.emplace_back();
        slab = &work->slabs[work->num_slabs++];
        clear(slab);
      }
      const int32_t next = static_cast<int32_t>(std::min<int64_t>(end, token + most - slab->rows));
      put(step, layer, s, token, next, slab);
      rows = std::max<int64_t>(rows, slab->rows);
      token = next;
    }
  }
  if (slab != nullptr) finish(step, layer, threads, slab);
  const auto grow = [](auto *memory, int64_t numbers) {
    if (int64_t(memory->size()) < numbers) memory->resize(numbers);
  };
  grow(&work->queries, rows * layer.heads * layer.row());
  grow(&work->results, rows * layer.heads * layer.latent());
  for (int64_t b = work->table.size(); b < divide_up(longest, kOwnBlock); b++)
    work->table.push_back(static_cast<int32_t>(b % kOwnBlocks));
  const auto work_of = [&](const LatentItem &item) {
    const int64_t context = step.context_len[item.sequence];
    const int64_t tokens = step.query_start[item.sequence + 1] - step.query_start[item.sequence];
    return context * (layer.latent() + tokens);
  };
  std::stable_sort(items.begin(), items.end(),
                   [&](const LatentItem &a, const LatentItem &b) { return work_of(a) > work_of(b); });
}

// Where an expanded item's numbers lie in its thread's scratch, in floats from its beginning.
struct Latent::Room {
  Room(const LatentLayer &layer, int64_t max_tokens, float *base) {
    const auto take = [&](int64_t numbers) {
      const int64_t at = size;
      size += round_up(numbers, kPanelRows);
      return base == nullptr ? nullptr : base + at;
    };
    const int64_t partial = kPartialHead + layer.value;
    own = take(kOwnBlocks * kOwnBlock * (layer.query() + layer.value));
    row_stride = round_up(layer.row(), kPanelRows);
    rows = take(kRows * row_stride);
    record_bytes = is_quantised(layer.weight.layout) ? plait_quantised_row_bytes(layer.latent()) : 0;
    records = reinterpret_cast<uint8_t *>(take(kRows * record_bytes / int64_t(sizeof(float))));
    keys = take(kRows * layer.query());
    values = take(kRows * layer.value);
    part = take(kAttendRows * partial);
    attend = take(attend_scratch(own_cache(layer, nullptr)));
    states = take(max_tokens * partial);
  }
  int64_t size = 0, row_stride, record_bytes;
  float *own, *rows, *keys, *values, *part, *attend, *states;
  uint8_t *records;
};

int64_t latent_scratch(const LatentLayer &layer, int64_t max_tokens) {
  const int64_t expanded = Latent::scratch_of_expanded(layer, max_tokens);
  const int64_t records = is_quantised(layer.weight.layout) ? kRows * plait_quantised_row_bytes(layer.latent()) : 0;
  return std::max({expanded, attend_scratch(layer.cache) * int64_t(sizeof(float)), records});
}

int64_t Latent::scratch_of_expanded(const LatentLayer &layer, int64_t max_tokens) {
  return Room(layer, max_tokens, nullptr).size * int64_t(sizeof(float));
}

Latent::Latent(const Kernels &kernels, const LatentLayer &layer, const PlaitStep &step, LatentWork &work,
               int64_t l2_bytes, int threads, uint8_t *scratch, int64_t thread_scratch)
    : kernels_(kernels),
      layer_(layer),
      step_(step),
      work_(work),
      l2_bytes_(l2_bytes),
      threads_(threads),
      scratch_(scratch),
      thread_scratch_(thread_scratch) {}

uint8_t *Latent::scratch() const { return scratch_ + thread_number() * thread_scratch_; }

// q~ of every head, and the rotary part of the query behind it.
void Latent::queries(int64_t number) {
  const LatentSlab &slab = work_.slabs[number];
  const int64_t panels = layer_.latent() / kPanelRows, stride = layer_.heads * layer_.row();
  const Cut cut = cut_product(l2_bytes_, layer_.heads * panels, double(layer_.transposed.panel_bytes),
                              double(kPanelRows) * double(layer_.nope), slab.rows,
                              layer_.nope * int64_t(sizeof(float)), threads_);
  parallel(cut.items(), [&](int64_t item) {
    const int64_t row0 = item / cut.unit_items * cut.tokens, row1 = std::min<int64_t>(slab.rows, row0 + cut.tokens);
    const int64_t from = item % cut.unit_items * cut.units, to = std::min(layer_.heads * panels, from + cut.units);
    for (int64_t unit = from; unit < to;) {
      const int64_t head = unit / panels, first = unit % panels, count = std::min(to - unit, panels - first);
      const PlaitMatrix matrix = part(layer_.transposed, unit, count);
      const float *q = layer_.q + head * layer_.query();
      float *made = work_.queries.data() + head * layer_.row();
      each_run(slab, row0, row1, [&](int64_t token, int64_t row, int64_t rows) {
        MatmulArgs args{};
        args.matrix = &matrix;
        args.x = reinterpret_cast<const uint8_t *>(q + token * layer_.q_stride);
        args.x_stride = layer_.q_stride * int64_t(sizeof(float));
        args.out = made + row * stride + first * kPanelRows;
        args.out_stride = stride;
        kernels_.matmul[matrix.layout](args, 0, count, 0, rows);
        for (int64_t t = 0; t < rows && first == 0; t++)
          memcpy(made + (row + t) * stride + layer_.latent(), q + (token + t) * layer_.q_stride + layer_.nope,
                 layer_.rotary() * sizeof(float));
      });
      unit += count;
    }
  });
}

AttendLayer Latent::absorbed(const LatentSlab &slab) const {
  AttendLayer all = attend_layer(layer_, slab.head_tile);
  all.q = work_.queries.data();
  all.q_stride = layer_.heads * layer_.row();
  all.out = work_.results.data();
  all.out_stride = layer_.heads * layer_.latent();
  return all;
}

void Latent::attend(int64_t number) {
  const int64_t expanded = number == 0 ? int64_t(work_.expanded.size()) : 0;
  if (number >= work_.num_slabs)
    return parallel(expanded, [&](int64_t item) { run_expanded(work_.expanded[item], scratch()); });
  LatentSlab &slab = work_.slabs[number];
  const AttendLayer layer = absorbed(slab);
  parallel(expanded + int64_t(slab.attend.items.size()), [&](int64_t item) {
    if (item < expanded) return run_expanded(work_.expanded[item], scratch());
    run_attend_item(kernels_, layer, slab.step, slab.attend, item - expanded, nullptr,
                    reinterpret_cast<float *>(scratch()));
  });
}

// W_uv of every head's result.
void Latent::results(int64_t number) {
  const LatentSlab &slab = work_.slabs[number];
  const int64_t panels = layer_.value / kPanelRows, stride = layer_.heads * layer_.latent();
  const bool quantised = is_quantised(layer_.weight.layout);
  const int64_t record = quantised ? plait_quantised_row_bytes(layer_.latent()) : 0;
  const Cut cut = cut_product(l2_bytes_, layer_.heads, double(panels) * double(layer_.weight.panel_bytes),
                              double(layer_.value) * double(layer_.latent()), slab.rows,
                              layer_.latent() * int64_t(sizeof(float)), threads_);
  parallel(cut.items(), [&](int64_t item) {
    const int64_t row0 = item / cut.unit_items * cut.tokens, row1 = std::min<int64_t>(slab.rows, row0 + cut.tokens);
    const int64_t from = item % cut.unit_items * cut.units, to = std::min(layer_.heads, from + cut.units);
    uint8_t *records = scratch();
    for (int64_t head = from; head < to; head++) {
      const PlaitMatrix matrix =
          part(layer_.weight, (head * (layer_.nope + layer_.value) + layer_.nope) / kPanelRows, panels);
      const float *x = work_.results.data() + head * layer_.latent();
      for (int64_t block = row0; block < row1; block += kRows) {
        const int64_t end = std::min(row1, block + kRows);
        for (int64_t row = block; row < end && quantised; row++)
          kernels_.quantise(x + row * stride, layer_.latent(), 0, layer_.latent() / 32,
                            records + (row - block) * record);
        each_run(slab, block, end, [&](int64_t token, int64_t row, int64_t rows) {
          MatmulArgs args{};
          args.matrix = &matrix;
          args.x = quantised ? records + (row - block) * record
                             : reinterpret_cast<const uint8_t *>(x + row * stride);
          args.x_stride = quantised ? record : stride * int64_t(sizeof(float));
          args.out = layer_.out + token * layer_.out_stride + head * layer_.value;
          args.out_stride = layer_.out_stride;
          kernels_.matmul[matrix.layout](args, 0, panels, 0, rows);
        });
      }
    }
  });
}

// Keys and values of the item's head for keys [key0, key1) of a chunk, into the thread's own cache.
void Latent::expand(const LatentItem &item, int64_t key0, int64_t key1, const Room &room) const {
  const PlaitCache &cache = layer_.cache, own = own_cache(layer_, room.own);
  const int32_t *table =
      step_.block_table + (int64_t{cache.group} * step_.num_sequences + item.sequence) * step_.table_width;
  const int64_t panel = item.head * (layer_.nope + layer_.value) / kPanelRows;
  const PlaitMatrix matrices[2] = {
      part(layer_.weight, panel, layer_.nope / kPanelRows),
      part(layer_.weight, panel + layer_.nope / kPanelRows, layer_.value / kPanelRows)};
  for (int64_t first = key0; first < key1; first += kRows) {
    const int64_t rows = std::min(kRows, key1 - first);
    for (int64_t key = first; key < first + rows;) {
      const int64_t slot = key % cache.block_tokens, count = std::min(cache.block_tokens - slot, first + rows - key);
      kernels_.read_keys(cache, table[key / cache.block_tokens], slot, count, room.rows + (key - first) * room.row_stride,
                         room.row_stride);
      key += count;
    }
    for (int64_t r = 0; r < rows && room.record_bytes > 0; r++)
      kernels_.quantise(room.rows + r * room.row_stride, layer_.latent(), 0, layer_.latent() / 32,
                        room.records + r * room.record_bytes);
    for (int k = 0; k < 2; k++) {
      MatmulArgs args{};
      args.matrix = &matrices[k];
      args.x = room.record_bytes > 0 ? room.records : reinterpret_cast<const uint8_t *>(room.rows);
      args.x_stride = room.record_bytes > 0 ? room.record_bytes : room.row_stride * int64_t(sizeof(float));
      args.out = k == 0 ? room.keys : room.values;
      args.out_stride = k == 0 ? layer_.query() : layer_.value;
      kernels_.matmul[layer_.weight.layout](args, 0, panels_of(matrices[k]), 0, rows);
    }
    for (int64_t r = 0; r < rows; r++) {
      float *key = room.keys + r * layer_.query();
      memcpy(key + layer_.nope, room.rows + r * room.row_stride + layer_.latent(), layer_.rotary() * sizeof(float));
      const int64_t at = first + r - key0;
      kernels_.write_kv(own, 0, 1, at / kOwnBlock, at % kOwnBlock, key, room.values + r * layer_.value);
    }
  }
}

void Latent::run_expanded(const LatentItem &item, uint8_t *scratch) const {
  const int64_t begin = step_.query_start[item.sequence], tokens = step_.query_start[item.sequence + 1] - begin;
  const int64_t context = step_.context_len[item.sequence], first = context - tokens;
  const Room room(layer_, tokens, reinterpret_cast<float *>(scratch));
  AttendArgs args{};
  args.cache = own_cache(layer_, room.own);
  args.table = work_.table.data();
  args.first = first;
  args.heads = 1;
  args.scale = layer_.scale;
  args.q = layer_.q + begin * layer_.q_stride + item.head * layer_.query();
  args.q_stride = layer_.q_stride;
  args.out = layer_.out + begin * layer_.out_stride + item.head * layer_.value;
  args.out_stride = layer_.out_stride;
  const int64_t partial = kPartialHead + layer_.value;
  for (int64_t key0 = 0; key0 < context; key0 += kAttendChunk) {
    const int64_t key1 = std::min(context, key0 + kAttendChunk);
    expand(item, key0, key1, room);
    for (int64_t t0 = 0; t0 < tokens; t0 += kAttendRows) {
      const int64_t t1 = std::min(tokens, t0 + kAttendRows), end = std::min(key1, first + t1);
      if (end <= key0) continue;  // the keys come later
      float *state = room.states + t0 * partial, *to = key0 == 0 ? state : room.part;
      kernels_.attend(args, 0, t0, t1, key0, end, to, room.attend);
      kernels_.attend_merge(args, 0, t0, t1, state, key0 == 0 ? 1 : 2, to - state);
    }
  }
}

}  // namespace plait
