// Runs plans: every stage is cut into items that the threads take one by one.
//
// How a stage is cut follows the step's size and the number of threads; the numbers do not depend on it, because every
// kernel computes each number in one order.
#include <string.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <initializer_list>

#include "adapters.h"
#include "cut.h"
#include "experts_stage.h"
#include "gated_tile.h"
#include "head_rows.h"
#include "plan.h"
#include "rows.h"
#include "threads.h"

namespace plait {
namespace {

// Whether `a` is the better one: any at all, a NaN before numbers, then the higher value, then the lower id.
bool goes_before(const Best &a, const Best &b) {
  if (a.id < 0 || b.id < 0) return b.id < 0 && a.id >= 0;
  const bool nan = a.value != a.value, other_nan = b.value != b.value;
  if (nan || other_nan) return nan && (!other_nan || a.id < b.id);
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

class Run {
 public:
  Run(PlaitPlan &plan, const PlaitStep &step) : plan_(plan), step_(step), kernels_(*plan.kernels) {
    decoding_ = step.num_tokens == step.num_sequences;
    for (int32_t q = 0; q < step.num_sequences && decoding_; q++) decoding_ = step.query_start[q] == q;
  }

  int check();
  int check_positions(const PlaitOp &op) const;
  void begin();
  void copy_blocks();
  void stage(const Stage &stage);
  // Whether attention does what the stage does.
  bool left_out(const Stage &stage) const { return stage.kind == Stage::kRows && stage.head_rows >= 0 && decoding_; }
  bool failed() const { return failed_; }  // after fail()

 private:
  int64_t count(int32_t rows) const { return rows == PLAIT_ROWS_LOGITS ? step_.num_rows : step_.num_tokens; }
  uint8_t *scratch() const { return plan_.scratch.data() + thread_number() * plan_.thread_scratch; }

  void rows(const Stage &stage);
  void row_op(const PlaitOp &op, int64_t row0, int64_t row1);
  void write_kv(const PlaitOp &op, int64_t row0, int64_t row1);
  // Columns that nobody samples are computed only where the logits are wanted.
  int64_t logit_columns(const PlaitOp &op) const {
    return step_.logits != nullptr ? plan_.matrices[op.w[0]].rows : plan_.sampled_ids;
  }
  Cut cut(const PlaitOp &op, int64_t tokens) const;
  // What the step's adapters add to an operation's products, their narrow half done.
  Adapted adapted(const PlaitOp &op) const {
    const Adapted found(&plan_, static_cast<int32_t>(&op - plan_.ops.data()), plan_.buffers[op.in[0]].rows);
    if (found.any()) found.prepare(threads_);
    return found;
  }
  void fetch_next(const Stage &stage) const;
  void fetch_weights(const Stage &next) const;
  void fetch_keys(const Stage &next) const;
  void linear(const PlaitOp &op, int64_t tokens);
  void gated(const PlaitOp &op, int64_t tokens);
  void experts(const Stage &stage, int64_t tokens);
  void attend(const Stage &stage);
  void attend_latent(const Stage &stage);
  void select(const PlaitOp &op);
  void logits(const PlaitOp &op);
  void logits_tile(const PlaitOp &op, int64_t panel0, int64_t panel1, int64_t row0, int64_t row1);

  PlaitPlan &plan_;
  const PlaitStep &step_;
  const Kernels &kernels_;
  const int32_t *const positions_ = step_.positions != nullptr ? step_.positions : plan_.positions.data();
  const int threads_ = thread_count();
  bool failed_ = false;
  bool decoding_;  // every sequence has one token
};

// What a step must hold to, so that nothing outside of the plan's memory is touched.
int Run::check() {
  const PlaitStep &s = step_;
  if (s.num_tokens < 0 || s.num_tokens > plan_.max_tokens)
    return fail("a step of %d tokens, the plan takes %d", s.num_tokens, plan_.max_tokens);
  if (s.num_rows < 0 || s.num_rows > plan_.max_rows)
    return fail("a step with logits of %d rows, the plan takes %d", s.num_rows, plan_.max_rows);
  if (s.num_sequences < 0 || s.num_copies < 0 || s.num_groups < 0 || s.table_width < 0)
    return fail("a step with a negative number of something");
  for (int32_t r = 0; r < s.num_rows; r++)
    if (s.logit_rows[r] < 0 || s.logit_rows[r] >= s.num_tokens)
      return fail("logits of row %d of %d", s.logit_rows[r], s.num_tokens);
  if (s.num_sequences > 0 ? s.query_start[0] != 0 || s.query_start[s.num_sequences] != s.num_tokens : s.num_tokens > 0)
    return fail("the sequences do not cover the step's %d tokens", s.num_tokens);
  for (int32_t q = 0; q < s.num_sequences; q++) {
    const int64_t tokens = int64_t{s.query_start[q + 1]} - s.query_start[q];
    if (tokens < 0 || tokens > s.context_len[q] || s.query_start[q + 1] > s.num_tokens)
      return fail("sequence %d: %lld tokens in a context of %d", q, static_cast<long long>(tokens), s.context_len[q]);
  }
  const int64_t blocks = plan_.block_bytes > 0 ? plan_.slot_stride / plan_.block_bytes : 0;
  for (int32_t c = 0; c < 2 * s.num_copies; c++)
    if (plan_.copy_slots > 0 && (s.copies[c] < 0 || s.copies[c] >= blocks))
      return fail("a copy of block %d of %lld", s.copies[c], static_cast<long long>(blocks));
  for (size_t k = 0; k < plan_.caches.size(); k++) {
    const PlaitCache &cache = plan_.caches[k];
    bool known = false;  // layers of one group share the table
    for (size_t j = 0; j < k; j++)
      known |= plan_.caches[j].group == cache.group && plan_.caches[j].block_tokens == cache.block_tokens;
    if (known || s.num_tokens == 0) continue;
    if (cache.group >= s.num_groups)
      return fail("a step with %d block tables: none for group %d", s.num_groups, cache.group);
    for (int32_t q = 0; q < s.num_sequences; q++) {
      const int32_t *table = s.block_table + (int64_t{cache.group} * s.num_sequences + q) * s.table_width;
      const int64_t context = s.context_len[q], tokens = s.query_start[q + 1] - s.query_start[q];
      const int64_t used = divide_up(context, cache.block_tokens);
      const int64_t written = (context - tokens) / cache.block_tokens;  // the first block that is written
      if (used > s.table_width)
        return fail("sequence %d: %lld tokens need %lld blocks, the table has %d", q, static_cast<long long>(context),
                    static_cast<long long>(used), s.table_width);
      for (int64_t b = 0; b < used; b++) {
        if (table[b] < 0 || (blocks > 0 && table[b] >= blocks))
          return fail("sequence %d: block %d of %lld", q, table[b], static_cast<long long>(blocks));
        if (tokens > 0 && b >= written && table[b] == 0) return fail("sequence %d: a token without a block", q);
      }
    }
  }
  if (check_adapters(plan_, s) != 0) return -1;
  for (const PlaitOp &op : plan_.ops) {
    if (op.kind == PLAIT_OP_LOGITS && s.num_rows > 0 && (s.best_ids == nullptr || s.best_values == nullptr))
      return fail("nowhere to put the best ids");
    if (op.kind != PLAIT_OP_EMBED) continue;
    if (op.i[0] != 0) {
      if (check_positions(op) != 0) return -1;
      continue;
    }
    for (int32_t t = 0; t < s.num_tokens; t++)
      if (s.token_ids[t] < 0 || s.token_ids[t] >= plan_.matrices[op.w[0]].rows)
        return fail("token id %d of %lld", s.token_ids[t], static_cast<long long>(plan_.matrices[op.w[0]].rows));
  }
  return 0;
}

// That a table of positions has a row for every token.
int Run::check_positions(const PlaitOp &op) const {
  const PlaitStep &s = step_;
  const int64_t rows = plan_.matrices[op.w[0]].rows;
  const auto known = [&](int64_t position) { return position >= 0 && position + op.i[1] < rows; };
  const auto no = [&](int64_t position) {
    return fail("position %lld of a table of %lld", static_cast<long long>(position),
                static_cast<long long>(rows - op.i[1]));
  };
  for (int32_t t = 0; t < s.num_tokens && s.positions != nullptr; t++)
    if (!known(s.positions[t])) return no(s.positions[t]);
  for (int32_t q = 0; q < s.num_sequences && s.positions == nullptr; q++)
    if (s.query_start[q + 1] > s.query_start[q] && !known(int64_t{s.context_len[q]} - 1))
      return no(int64_t{s.context_len[q]} - 1);
  return 0;
}

void Run::begin() {
  for (int32_t q = 0; q < step_.num_sequences; q++)
    std::fill(plan_.owner.begin() + step_.query_start[q], plan_.owner.begin() + step_.query_start[q + 1], q);
  if (step_.positions == nullptr) {
    for (int32_t q = 0; q < step_.num_sequences; q++)
      for (int32_t t = step_.query_start[q]; t < step_.query_start[q + 1]; t++)
        plan_.positions[t] = step_.context_len[q] - step_.query_start[q + 1] + t;
  }
  begin_adapters(&plan_, step_);
  for (Attention &attention : plan_.attentions) cut_attention(step_, attention.layer, threads_, &attention.work);
  for (LatentAttention &attention : plan_.latents) cut_latent(step_, attention.layer, threads_, &attention.work);
}

// Pairs are copied in their order, in every slot.
void Run::copy_blocks() {
  if (step_.num_copies == 0) return;
  parallel(plan_.copy_slots, [&](int64_t slot) {
    uint8_t *blocks = plan_.pool + slot * plan_.slot_stride;
    for (int32_t c = 0; c < step_.num_copies; c++) {
      const int64_t from = step_.copies[2 * c], to = step_.copies[2 * c + 1];
      if (from != to) memcpy(blocks + to * plan_.block_bytes, blocks + from * plan_.block_bytes, plan_.block_bytes);
    }
  });
}

void Run::stage(const Stage &stage) {
  const PlaitOp &op = plan_.ops[stage.first];
  const int64_t n = count(stage.rows);
  if (n == 0) return;
  if (stage.kind == Stage::kLinear || stage.kind == Stage::kGated || stage.kind == Stage::kAttend) fetch_next(stage);
  switch (stage.kind) {
    case Stage::kRows: return rows(stage);
    case Stage::kLinear: return linear(op, n);
    case Stage::kGated: return gated(op, n);
    case Stage::kExperts: return experts(stage, n);
    case Stage::kAttend: return attend(stage);
    case Stage::kLatent: return attend_latent(stage);
    case Stage::kSelect: return select(op);
    case Stage::kLogits: return logits(op);
    case Stage::kHost: return;
  }
}

void Run::rows(const Stage &stage) {
  const int64_t n = count(stage.rows);
  const bool shared = threads_ > 1 && stage.row_ns * double(n) > kAlone;
  // A chunk's rows go through all operations while they are in the cache.
  int64_t chunk = std::min<int64_t>(n, 32);
  if (shared) chunk = std::min(chunk, std::min(divide_up(n, 2 * threads_), 1 + int64_t(kAlone / stage.row_ns)));
  const int64_t chunks = divide_up(n, chunk);
  const auto run_chunk = [&](int64_t item) {
    const int64_t row0 = item * chunk, row1 = std::min(n, row0 + chunk);
    for (int32_t i = stage.first; i < stage.end; i++) {
      const PlaitOp &op = plan_.ops[i];
      if (op.kind == PLAIT_OP_WRITE_KV) {
        write_kv(op, row0, row1);
      } else if (op.kind == PLAIT_OP_HIDDEN) {
        const int64_t width = plan_.buffers[op.in[0]].width;
        for (int64_t r = row0; r < row1 && step_.hidden != nullptr; r++)
          memcpy(step_.hidden + r * width, plan_.row(op.in[0], r), width * sizeof(float));
      } else {
        row_op(op, row0, row1);
      }
    }
  };
  if (shared) return parallel(chunks, run_chunk);
  for (int64_t item = 0; item < chunks; item++) run_chunk(item);
}

void Run::row_op(const PlaitOp &op, int64_t row0, int64_t row1) {
  const PlaitMatrix *w[6];
  for (int k = 0; k < 6; k++) w[k] = op.w[k] < 0 ? nullptr : &plan_.matrices[op.w[k]];
  const int64_t width = plan_.buffers[op.out[0]].width;
  const bool by_position = op.kind == PLAIT_OP_POSITIONS || (op.kind == PLAIT_OP_EMBED && op.i[0] != 0);
  const int32_t *numbers = by_position ? positions_ : op.kind == PLAIT_OP_EMBED ? step_.token_ids : nullptr;
  const int64_t offset = op.kind == PLAIT_OP_EMBED && by_position ? op.i[1] : 0;
  for (int64_t r = row0; r < row1; r++) {
    const float *in[3];
    float *out[3];
    for (int k = 0; k < 3; k++) {
      in[k] = op.in[k] < 0 ? nullptr : plan_.row(op.in[k], r);
      out[k] = op.out[k] < 0 ? nullptr : plan_.row(op.out[k], r);
    }
    run_row_op(kernels_, op, width, in, out, w, plan_.tables.data(), numbers == nullptr ? 0 : numbers[r] + offset);
  }
}

void Run::write_kv(const PlaitOp &op, int64_t row0, int64_t row1) {
  const PlaitCache &cache = plan_.caches[op.i[0]];
  for (int64_t t = row0; t < row1; t++) {
    const int64_t sequence = plan_.owner[t];
    // Where the token stands in the cache; step.positions may say otherwise (they turn the vectors only).
    const int64_t at = step_.context_len[sequence] - step_.query_start[sequence + 1] + t;
    const int64_t line = cache.group * int64_t{step_.num_sequences} + sequence;
    const int32_t *table = step_.block_table + line * step_.table_width;
    kernels_.write_kv(cache, 0, cache.num_kv_heads, table[at / cache.block_tokens], at % cache.block_tokens, plan_.row(op.in[0], t),
                      op.in[1] < 0 ? nullptr : plan_.row(op.in[1], t));
  }
}

// How the stage of a product is cut: LINEAR and LOGITS in panels (of all matrices in their order), GATED and ACTIVATED in
// groups of outputs.
Cut Run::cut(const PlaitOp &op, int64_t tokens) const {
  const bool groups = op.kind == PLAIT_OP_GATED || op.kind == PLAIT_OP_ACTIVATED;
  const int32_t matrices = op.kind == PLAIT_OP_LINEAR ? op.i[0] : op.kind == PLAIT_OP_GATED ? 2 : 1;
  double bytes = 0, macs = 0;  // of all
  int64_t panels = 0;
  for (int32_t k = 0; k < matrices; k++) {
    const PlaitMatrix &matrix = plan_.matrices[op.w[2 * k]];
    panels += panels_of(matrix);
    bytes += double(panels_of(matrix)) * double(matrix.panel_bytes);
    macs += double(panels_of(matrix)) * double(kPanelRows) * double(matrix.cols);
  }
  const int64_t units = groups ? divide_up(plan_.matrices[op.w[0]].rows, kGroupOutputs) : panels;
  const int64_t used = op.kind == PLAIT_OP_LOGITS ? divide_up(logit_columns(op), kPanelRows) : units;
  return cut_product(plan_.l2_bytes, used, bytes / double(units), macs / double(units), tokens,
                     plan_.buffers[op.in[0]].row_bytes, threads_);
}

// Tells every thread what it will read first in the next stage that reads much, to fetch when it has nothing left to do
// in the present one. For few tokens, where reading takes the time.
void Run::fetch_next(const Stage &stage) const {
  if (threads_ == 1) return;
  const Stage *next = &stage + 1, *const end = plan_.stages.data() + plan_.stages.size();
  while (next < end && (next->kind == Stage::kRows || next->kind == Stage::kSelect)) next++;
  if (next == end || count(next->rows) > kFewTokens) return;
  if (next->kind == Stage::kAttend) return fetch_keys(*next);
  if (next->kind == Stage::kLinear || next->kind == Stage::kGated || next->kind == Stage::kLogits) fetch_weights(*next);
}

void Run::fetch_weights(const Stage &next) const {
  const int64_t n = count(next.rows);
  if (n == 0) return;
  const PlaitOp &op = plan_.ops[next.first];
  const Cut cut = this->cut(op, n);
  const int64_t sharers = std::min<int64_t>(threads_, cut.items());
  for (int64_t thread = 0; thread < sharers; thread++) {
    const uint8_t *at[4];
    int found = 0;
    const auto add = [&](const PlaitMatrix &matrix, int64_t panel) {
      at[found++] = static_cast<const uint8_t *>(matrix.data) + panel * matrix.panel_bytes;
      at[found] = at[found - 1] + kFetchBytes;
      found++;
    };
    int64_t unit = cut.items() * thread / sharers % cut.unit_items * cut.units;
    if (next.kind == Stage::kGated) {
      for (int k = 0; k < (op.kind == PLAIT_OP_GATED ? 2 : 1); k++)
        add(plan_.matrices[op.w[2 * k]], unit * (kGroupOutputs / kPanelRows));
    } else {
      for (int32_t k = 0; k < (op.kind == PLAIT_OP_LINEAR ? op.i[0] : 1); k++) {
        const PlaitMatrix &matrix = plan_.matrices[op.w[2 * k]];
        if (unit < panels_of(matrix)) {
          add(matrix, unit);
          break;
        }
        unit -= panels_of(matrix);
      }
    }
    set_fetch(static_cast<int>(thread), at, found);
  }
}

void Run::fetch_keys(const Stage &next) const {
  const std::vector<AttendItem> &items = plan_.attentions[next.attention].work.items;
  const PlaitCache &cache = plan_.caches[plan_.ops[next.first].i[0]];
  const int64_t size = cache.kv_type == PLAIT_KV_F32 ? 4 : 2, all = items.size();
  const int64_t key_bytes = cache.block_tokens * cache.key_width * size;
  const int64_t value_bytes = cache.block_tokens * cache.value_width * size;
  const int64_t sharers = std::min<int64_t>(threads_, all);
  for (int64_t thread = 0; thread < sharers; thread++) {
    const uint8_t *at[kFetches];
    int found = 0;
    const auto add = [&](const uint8_t *from, int64_t bytes) {
      for (int64_t i = 0; i < bytes && found < kFetches; i += kFetchBytes) at[found++] = from + i;
    };
    for (int64_t i = all * thread / sharers; i < all * (thread + 1) / sharers && found < kFetches; i++) {
      const AttendItem &item = items[i];
      const int64_t line = cache.group * int64_t{step_.num_sequences} + item.sequence;
      const int32_t *table = step_.block_table + line * step_.table_width;
      const int64_t last = (item.key1 - 1) / cache.block_tokens;
      for (int64_t b = last; b >= item.key0 / cache.block_tokens && found < kFetches; b--) {
        const uint8_t *block = cache.base + table[b] * cache.block_stride;
        add(block + item.kv_head * key_bytes, key_bytes);
        add(block + cache.num_kv_heads * key_bytes + item.kv_head * value_bytes, value_bytes);
      }
    }
    set_fetch(static_cast<int>(thread), at, found);
  }
}

void Run::linear(const PlaitOp &op, int64_t tokens) {
  int64_t end[4] = {0, 0, 0, 0};  // panels of the matrices before
  for (int32_t k = 0; k < op.i[0]; k++) end[k + 1] = end[k] + panels_of(plan_.matrices[op.w[2 * k]]);
  const int64_t panels = end[op.i[0]], row_bytes = plan_.buffers[op.in[0]].row_bytes;
  const Cut cut = this->cut(op, tokens);
  const Adapted adapted = this->adapted(op);
  parallel(cut.items(), [&](int64_t item) {
    const int64_t token0 = item / cut.unit_items * cut.tokens, token1 = std::min(tokens, token0 + cut.tokens);
    const int64_t from = item % cut.unit_items * cut.units, to = std::min(panels, from + cut.units);
    for (int32_t k = 0; k < op.i[0]; k++) {
      const int64_t panel0 = std::max(from, end[k]) - end[k], panel1 = std::min(to, end[k + 1]) - end[k];
      if (panel0 >= panel1) continue;
      MatmulArgs args{};
      args.matrix = &plan_.matrices[op.w[2 * k]];
      args.x = plan_.at(op.in[0]);
      args.x_stride = row_bytes;
      args.out = plan_.row(op.out[k], 0);
      args.out_stride = plan_.stride(op.out[k]);
      args.bias = plan_.vector(op.w[2 * k + 1]);
      if (k == 0 && op.in[1] >= 0) {
        args.add = plan_.row(op.in[1], 0);
        args.add_stride = plan_.stride(op.in[1]);
      }
      kernels_.matmul[args.matrix->layout](args, panel0, panel1, token0, token1);
      if (adapted.any())
        adapted.add(k, panel0, panel1, token0, token1, args.out + token0 * args.out_stride + panel0 * kPanelRows,
                    args.out_stride);
    }
  });
}

void Run::gated(const PlaitOp &op, int64_t tokens) {
  const PlaitBuffer &in = plan_.buffers[op.in[0]], &out = plan_.buffers[op.out[0]];
  GatedProduct product{};
  product.two = op.kind == PLAIT_OP_GATED;
  product.gate = plan_.matrices[op.w[0]];
  product.gate_bias = plan_.vector(op.w[1]);
  if (product.two) {
    product.up = plan_.matrices[op.w[2]];
    product.up_bias = plan_.vector(op.w[3]);
  }
  product.activation = op.i[0];
  product.alpha = op.f[0];
  product.limit = op.f[1];
  product.x = plan_.at(op.in[0]);
  product.x_stride = in.row_bytes;
  product.out = plan_.at(op.out[0]);
  product.out_stride = out.row_bytes;
  product.quantised = out.kind == PLAIT_KIND_Q8;
  const Adapted adapted = this->adapted(op);
  product.adapted = adapted.any() ? &adapted : nullptr;
  const int64_t groups = divide_up(product.gate.rows, kGroupOutputs);
  const Cut cut = this->cut(op, tokens);
  parallel(cut.items(), [&](int64_t item) {
    const int64_t token0 = item / cut.unit_items * cut.tokens, token1 = std::min(tokens, token0 + cut.tokens);
    const int64_t from = item % cut.unit_items * cut.units, to = std::min(groups, from + cut.units);
    run_gated(kernels_, product, from, to, token0, token1, reinterpret_cast<float *>(scratch()));
  });
}

void Run::experts(const Stage &stage, int64_t tokens) {
  Experts experts(plan_, plan_.ops[stage.first], tokens, threads_);
  failed_ = experts.sort() != 0;
  if (failed_) return;
  experts.gated();
  fetch_next(stage);
  experts.down();
}

void Run::attend(const Stage &stage) {
  const PlaitOp &op = plan_.ops[stage.first];
  AttendWork &work = plan_.attentions[stage.attention].work;
  AttendLayer layer{};
  layer.cache = plan_.caches[op.i[0]];
  layer.heads = op.i[1];
  layer.window = op.i[2];
  layer.scale = op.f[0];
  layer.soft_cap = op.f[1];
  layer.sinks = plan_.vector(op.w[0]);
  layer.q = plan_.row(op.in[0], 0);
  layer.q_stride = plan_.stride(op.in[0]);
  if (plan_.buffers[op.out[0]].kind == PLAIT_KIND_Q8) {
    layer.record = plan_.at(op.out[0]);
    layer.record_stride = plan_.buffers[op.out[0]].row_bytes;
  } else {
    layer.out = plan_.row(op.out[0], 0);
    layer.out_stride = plan_.stride(op.out[0]);
  }
  const HeadRows *rows = stage.head_rows >= 0 && decoding_ ? &plan_.head_rows[stage.head_rows] : nullptr;
  parallel(static_cast<int64_t>(work.items.size()), [&](int64_t item) {
    float *mine = reinterpret_cast<float *>(scratch());
    const float *q = nullptr;
    if (rows != nullptr)
      q = run_head_rows(plan_, step_, *rows, op, work.items[item], mine + attend_item_scratch(layer));
    run_attend_item(kernels_, layer, step_, work, item, q, mine);
  });
}

void Run::attend_latent(const Stage &stage) {
  const LatentLayer layer = latent_layer(plan_, plan_.ops[stage.first]);
  LatentWork &work = plan_.latents[stage.attention].work;
  Latent latent(kernels_, layer, step_, work, plan_.l2_bytes, threads_, plan_.scratch.data(), plan_.thread_scratch);
  if (work.num_slabs == 0) return latent.attend(0);
  for (int64_t slab = 0; slab < work.num_slabs; slab++) {
    latent.queries(slab);
    latent.attend(slab);
    if (slab + 1 == work.num_slabs) fetch_next(stage);
    latent.results(slab);
  }
}

void Run::select(const PlaitOp &op) {
  const PlaitBuffer &out = plan_.buffers[op.out[0]];
  const int64_t bytes = out.kind == PLAIT_KIND_Q8 ? plait_quantised_row_bytes(out.width) : 4 * int64_t{out.width};
  for (int64_t r = 0; r < step_.num_rows; r++)
    memcpy(plan_.row(op.out[0], r), plan_.row(op.in[0], step_.logit_rows[r]), bytes);
}

void Run::logits(const PlaitOp &op) {
  const int64_t rows = step_.num_rows;
  const int64_t panels = divide_up(logit_columns(op), kPanelRows);
  const Cut cut = this->cut(op, rows);
  Best *best = plan_.best.data();
  for (int thread = 0; thread < plan_.scratch_threads; thread++)
    std::fill(best + int64_t{thread} * plan_.max_rows, best + int64_t{thread} * plan_.max_rows + rows, Best{0, -1});
  parallel(cut.items(), [&](int64_t item) {
    const int64_t row0 = item / cut.unit_items * cut.tokens, row1 = std::min(rows, row0 + cut.tokens);
    const int64_t from = item % cut.unit_items * cut.units, to = std::min(panels, from + cut.units);
    for (int64_t panel = from; panel < to; panel += kLogitPanels)
      for (int64_t r = row0; r < row1; r += kLogitRows)
        logits_tile(op, panel, std::min(to, panel + kLogitPanels), r, std::min(row1, r + kLogitRows));
  });
  for (int64_t r = 0; r < rows; r++) {
    Best found{0, -1};
    for (int thread = 0; thread < plan_.scratch_threads; thread++) {
      const Best &candidate = best[int64_t{thread} * plan_.max_rows + r];
      if (goes_before(candidate, found)) found = candidate;
    }
    step_.best_ids[r] = found.id;
    step_.best_values[r] = found.value;
  }
}

void Run::logits_tile(const PlaitOp &op, int64_t panel0, int64_t panel1, int64_t row0, int64_t row1) {
  const PlaitMatrix matrix = part(plan_.matrices[op.w[0]], panel0, panel1 - panel0);
  const int64_t column = panel0 * kPanelRows, row_bytes = plan_.buffers[op.in[0]].row_bytes;
  MatmulArgs args{};
  args.matrix = &matrix;
  args.x = plan_.at(op.in[0]) + row0 * row_bytes;
  args.x_stride = row_bytes;
  if (step_.logits != nullptr) {
    args.out = step_.logits + row0 * plan_.vocab_size + column;
    args.out_stride = plan_.vocab_size;
  } else {
    args.out = reinterpret_cast<float *>(scratch());
    args.out_stride = kLogitPanels * kPanelRows;
  }
  const float *bias = plan_.vector(op.w[1]);
  args.bias = bias == nullptr ? nullptr : bias + column;
  kernels_.matmul[matrix.layout](args, 0, panel1 - panel0, 0, row1 - row0);
  const int64_t sampled = std::min(matrix.rows, plan_.sampled_ids - column);
  for (int64_t r = row0; r < row1; r++) {
    float *x = args.out + (r - row0) * args.out_stride;
    if (op.f[0] > 0) kernels_.soft_cap(x, op.f[0], matrix.rows, x);
    if (sampled <= 0) continue;
    Best &best = plan_.best[int64_t{thread_number()} * plan_.max_rows + r];
    float value;
    const int64_t at = kernels_.arg_max(x, sampled, &value);
    const Best candidate{value, static_cast<int32_t>(column + at)};
    if (goes_before(candidate, best)) best = candidate;
  }
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int32_t run_from(PlaitPlan &plan, const PlaitStep &step, int32_t from) {
  ParallelRegion region;  // the plan is this thread's alone
  const int32_t num_ops = static_cast<int32_t>(plan.ops.size());
  size_t s = 0;
  while (s < plan.stages.size() && plan.stages[s].first < from) s++;
  if (from < 0 || (s < plan.stages.size() ? plan.stages[s].first != from : from != num_ops))
    return fail("a plan of %d operations cannot be run from operation %d", num_ops, from);
  if (!reserve_scratch(&plan, thread_limit())) return fail("no memory for scratch");
  Run run(plan, step);
  if (run.check() != 0) return -1;
  if (from == 0) {
    run.begin();
    run.copy_blocks();
  }
  double before = plan.profiling ? seconds() : 0;
  for (; s < plan.stages.size(); s++) {
    const Stage &stage = plan.stages[s];
    if (stage.kind == Stage::kHost) return stage.first;
    if (run.left_out(stage)) continue;
    run.stage(stage);
    if (run.failed()) return -1;
    if (!plan.profiling) continue;
    const double after = seconds();
    plan.stage_seconds[s] += after - before;
    before = after;
  }
  return num_ops;
}

}  // namespace plait

int32_t plait_plan_run(PlaitPlan *plan, const PlaitStep *step, int32_t from) try {
  return plait::run_from(*plan, *step, from);
} catch (...) {
  return plait::fail_with_exception();
}
