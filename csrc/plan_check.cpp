// What a plan must hold to. Every check says in words what is wrong, with the operation's number and name.
#include "plan_check.h"

#include <algorithm>
#include <utility>

#include <stdint.h>
#include <stdio.h>

#include "rows.h"

namespace plait {
namespace {

const char *const kOpNames[] = {"embed",  "positions",  "linear", "gated", "activated", "rms_norm", "layer_norm",
                                "rotate", "write_kv",   "attend", "gate",  "activate",  "add",      "scale",
                                "soft_cap", "clip",     "quantise", "copy", "select_rows", "logits", "hidden",
                                "host",   "route",      "experts", "attend_latent"};
constexpr int32_t kOpKinds = sizeof kOpNames / sizeof kOpNames[0];
constexpr int64_t kMaxHeads = 1 << 16;

// Checks one operation, or the parts of a plan that operations name.
class Checker {
 public:
  explicit Checker(const PlaitPlan &plan, int64_t num_table_floats = 0) : plan_(plan), num_table_floats_(num_table_floats) {}

  bool plan_as_a_whole() const {
    const PlaitPlan &p = plan_;
    if (p.max_tokens < 1 || p.max_rows < 0) return no("max_tokens %d, max_rows %d", p.max_tokens, p.max_rows);
    const bool no_pool = p.pool == nullptr || p.block_bytes < 1 || p.slot_stride < p.block_bytes;
    if (p.copy_slots < 0 || (p.copy_slots > 0 && no_pool))
      return no("copies over %d slots need a pool, with blocks inside its slots", p.copy_slots);
    for (size_t b = 0; b < p.buffers.size(); b++)
      if (!buffer_holds(static_cast<int32_t>(b))) return false;
    for (size_t m = 0; m < p.matrices.size(); m++)
      if (!matrix_holds(static_cast<int32_t>(m))) return false;
    for (size_t c = 0; c < p.caches.size(); c++)
      if (!cache_holds(static_cast<int32_t>(c))) return false;
    return true;
  }

  bool op_holds(int32_t index) {
    index_ = index;
    op_ = &plan_.ops[index];
    if (op_->kind < 0 || op_->kind >= kOpKinds) return no("operation %d: unknown kind %d", index, op_->kind);
    name_ = kOpNames[op_->kind];
    for (const int32_t b : op_->in)
      if (b < -1 || b >= int64_t(plan_.buffers.size())) return wrong("no buffer %d", b);
    for (const int32_t b : op_->out)
      if (b < -1 || b >= int64_t(plan_.buffers.size())) return wrong("no buffer %d", b);
    for (const int32_t m : op_->w)
      if (m < -1 || m >= int64_t(plan_.matrices.size())) return wrong("no matrix %d", m);
    const PlaitOp &op = *op_;
    switch (op.kind) {
      case PLAIT_OP_EMBED:
        if (op.i[0] != 0 && op.i[1] < 0) return wrong("rows from position + %d on", op.i[1]);
        return matrix(0) && out(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, weight(0).cols);
      case PLAIT_OP_POSITIONS:
        if (op.i[1] < 1 || op.i[0] < 0 || int64_t{op.i[0]} + op.i[1] > num_table_floats_)
          return wrong("frequencies %d + %d of a table of %lld", op.i[0], op.i[1],
                       static_cast<long long>(num_table_floats_));
        return out(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, 2 * int64_t{op.i[1]});
      case PLAIT_OP_LINEAR:
        return linear();
      case PLAIT_OP_GATED:
      case PLAIT_OP_ACTIVATED:
        return gated();
      case PLAIT_OP_RMS_NORM:
      case PLAIT_OP_LAYER_NORM:
        if (op.i[0] < 1 || op.i[1] < 1) return wrong("%d heads of width %d", op.i[0], op.i[1]);
        return vector_or_none(0, norm_weights()) &&
               vector_or_none(op.kind == PLAIT_OP_LAYER_NORM ? 1 : 0, norm_weights()) &&
               map(int64_t{op.i[0]} * op.i[1], 1);
      case PLAIT_OP_ROTATE:
        if (op.i[0] < 1 || op.i[2] < 2 || op.i[2] % 2 != 0 || op.i[4] < 0 || int64_t{op.i[4]} + op.i[2] > op.i[1])
          return wrong("%d of a width of %d cannot rotate, from %d on", op.i[2], op.i[1], op.i[4]);
        if (!map(int64_t{op.i[0]} * op.i[1], 1) || !in(1, PLAIT_KIND_F32, out_rows(), op.i[2])) return false;
        return !overlap(op.out[0], op.in[1]) || wrong("the angles (buffer %d) are written over", op.in[1]);
      case PLAIT_OP_WRITE_KV: {
        if (!cache(op.i[0])) return false;
        const PlaitCache &cache = plan_.caches[op.i[0]];
        if (cache.value_width == 0) {
          const int64_t rest = cache.key_width - cache.latent_width;
          if (rest == 0 && op.in[1] >= 0) return wrong("the key is %d wide without buffer %d", cache.key_width, op.in[1]);
          return in(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, cache.latent_width) &&
                 (rest == 0 || in(1, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, rest));
        }
        return in(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, int64_t{cache.num_kv_heads} * cache.key_width) &&
               in(1, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, int64_t{cache.num_kv_heads} * cache.value_width);
      }
      case PLAIT_OP_ATTEND: {
        if (!cache(op.i[0])) return false;
        const PlaitCache &cache = plan_.caches[op.i[0]];
        const int64_t heads = op.i[1];
        if (heads < 1 || heads % cache.num_kv_heads != 0)
          return wrong("%d heads over %d key/value heads", op.i[1], cache.num_kv_heads);
        if (op.i[2] < 0) return wrong("window %d", op.i[2]);
        if (op.out[0] >= 0 && buffer(op.out[0]).kind == PLAIT_KIND_Q8 && value_width(cache) % 32 != 0)
          return wrong("heads of width %lld cannot be quantised here", static_cast<long long>(value_width(cache)));
        return vector_or_none(0, heads) && in(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, heads * cache.key_width) &&
               out_any(0, PLAIT_ROWS_TOKENS, heads * value_width(cache)) && apart();
      }
      case PLAIT_OP_ATTEND_LATENT:
        return attend_latent();
      case PLAIT_OP_GATE:
        if (op.i[1] != 0) return activation() && one_factor();
        return activation(true) && map(-1, 2);
      case PLAIT_OP_ACTIVATE:
        return (op.i[0] == PLAIT_ACT_XIELU ? four_numbers() : activation()) && map(-1, 1);
      case PLAIT_OP_ADD:
        return map(-1, 2);
      case PLAIT_OP_SCALE:
      case PLAIT_OP_SOFT_CAP:
      case PLAIT_OP_CLIP:
      case PLAIT_OP_COPY:
        return map(-1, 1);
      case PLAIT_OP_QUANTISE:
        return is_buffer(op.out[0], "output") &&
               out(0, PLAIT_KIND_Q8, out_rows(), buffer(op.out[0]).width) &&
               in(0, PLAIT_KIND_F32, out_rows(), buffer(op.out[0]).width) && apart();
      case PLAIT_OP_SELECT_ROWS:
        return is_buffer(op.in[0], "input") && is_buffer(op.out[0], "output") &&
               in(0, buffer(op.in[0]).kind, PLAIT_ROWS_TOKENS, buffer(op.in[0]).width) &&
               out(0, buffer(op.in[0]).kind, PLAIT_ROWS_LOGITS, buffer(op.in[0]).width) && apart();
      case PLAIT_OP_LOGITS:
        if (!matrix(0) || !in(0, input_kind(0), PLAIT_ROWS_LOGITS, weight(0).cols)) return false;
        if (weight(0).rows != plan_.vocab_size) return wrong("the head has %lld rows, the vocabulary %d",
                                                             static_cast<long long>(weight(0).rows), plan_.vocab_size);
        if (plan_.sampled_ids < 1 || plan_.sampled_ids > plan_.vocab_size)
          return wrong("%d of %d columns to sample from", plan_.sampled_ids, plan_.vocab_size);
        return vector_or_none(1, plan_.vocab_size);
      case PLAIT_OP_HIDDEN:
        return is_buffer(op.in[0], "input") &&
               in(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, buffer(op.in[0]).width);
      case PLAIT_OP_ROUTE:
        return route();
      case PLAIT_OP_EXPERTS:
        return experts();
      default:  // PLAIT_OP_HOST: the caller's own business
        return true;
    }
  }

  // A thread works on its rows of all operations of a stage while others are elsewhere in it: two buffers of one stage
  // may share memory only row by row.
  bool stage_holds(int32_t first, int32_t end) const {
    std::vector<int32_t> used;
    for (int32_t i = first; i < end; i++) {
      for (const int32_t b : plan_.ops[i].in)
        if (b >= 0) used.push_back(b);
      for (const int32_t b : plan_.ops[i].out)
        if (b >= 0) used.push_back(b);
    }
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    for (size_t i = 0; i < used.size(); i++)
      for (size_t j = i + 1; j < used.size(); j++)
        if (overlap(used[i], used[j]) && !same_rows(used[i], used[j]))
          return no("operations %d to %d run row by row, but buffers %d and %d share memory", first, end - 1, used[i],
                    used[j]);
    return true;
  }

  bool overlap(int32_t a, int32_t b) const {
    const PlaitBuffer &x = buffer(a), &y = buffer(b);
    if (x.offset >= end_of(y) || y.offset >= end_of(x)) return false;
    if (x.row_bytes != y.row_bytes) return true;
    // Columns of one matrix: y's begin `at` bytes into a row of x.
    const int64_t at = ((y.offset - x.offset) % x.row_bytes + x.row_bytes) % x.row_bytes;
    return at < used_bytes(x) || at + used_bytes(y) > x.row_bytes;
  }

 private:
  template <class... Values>
  static bool no(const char *format, Values... values) {
    fail(format, values...);
    return false;
  }
  template <class... Values>
  bool wrong(const char *format, Values... values) const {
    char text[256];
    snprintf(text, sizeof text, format, values...);
    return no("operation %d (%s): %s", index_, name_, text);
  }
  bool wrong(const char *text) const { return no("operation %d (%s): %s", index_, name_, text); }

  const PlaitBuffer &buffer(int32_t b) const { return plan_.buffers[b]; }
  const PlaitMatrix &weight(int32_t k) const { return plan_.matrices[op_->w[k]]; }
  int32_t out_rows() const { return buffer(op_->out[0]).rows; }
  int32_t input_kind(int32_t k) const { return is_quantised(weight(k).layout) ? PLAIT_KIND_Q8 : PLAIT_KIND_F32; }
  int64_t row_count(const PlaitBuffer &b) const {
    return b.rows == PLAIT_ROWS_LOGITS ? plan_.max_rows : plan_.max_tokens;
  }

  // Bytes of a row that hold its numbers; the rest of row_bytes may belong to other columns of a wider buffer.
  static int64_t used_bytes(const PlaitBuffer &b) {
    return b.kind == PLAIT_KIND_Q8 ? plait_quantised_row_bytes(b.width) : 4 * int64_t{b.width};
  }
  int64_t end_of(const PlaitBuffer &b) const {
    return row_count(b) == 0 ? b.offset : b.offset + (row_count(b) - 1) * b.row_bytes + used_bytes(b);
  }

  bool buffer_holds(int32_t number) const {
    const PlaitBuffer &b = buffer(number);
    if (b.rows != PLAIT_ROWS_TOKENS && b.rows != PLAIT_ROWS_LOGITS) return no("buffer %d: rows %d", number, b.rows);
    if (b.kind < PLAIT_KIND_F32 || b.kind > PLAIT_KIND_Q8) return no("buffer %d: kind %d", number, b.kind);
    if (b.width < 1) return no("buffer %d: width %d", number, b.width);
    if (b.kind == PLAIT_KIND_Q8 && b.width % 32 != 0)
      return no("buffer %d: width %d of quantised rows is no multiple of 32", number, b.width);
    const int64_t least = used_bytes(b), unit = b.kind == PLAIT_KIND_Q8 ? 64 : 4;
    if (b.row_bytes < least || b.row_bytes % unit != 0 || b.row_bytes > kMostBytes / std::max<int64_t>(1, row_count(b)))
      return no("buffer %d: rows of %lld bytes for %d numbers", number, static_cast<long long>(b.row_bytes), b.width);
    if (b.offset < 0 || b.offset % 64 != 0 || b.offset > kMostBytes ||
        end_of(b) > plan_.arena.bytes())
      return no("buffer %d: %lld rows of %lld bytes at %lld do not lie inside the arena of %lld bytes", number,
                static_cast<long long>(row_count(b)), static_cast<long long>(b.row_bytes),
                static_cast<long long>(b.offset), static_cast<long long>(plan_.arena.bytes()));
    return true;
  }

  bool matrix_holds(int32_t number) const {
    const PlaitMatrix &m = plan_.matrices[number];
    if (m.data == nullptr) return no("matrix %d: no data", number);
    if (m.rows < 1 || m.cols < 1) return no("matrix %d: %lld x %lld", number, static_cast<long long>(m.rows),
                                            static_cast<long long>(m.cols));
    if (m.layout == PLAIT_LAYOUT_VECTOR) return m.rows == 1 || no("matrix %d: a vector has one row", number);
    const bool known = m.layout >= 0 && m.layout < PLAIT_LAYOUT_COUNT;
    const int64_t bytes = known ? plait_packed_bytes(m.layout, m.rows, m.cols) : -1;
    if (bytes < 0) return no("matrix %d: layout %d cannot hold %lld columns", number, m.layout,
                             static_cast<long long>(m.cols));
    const int64_t panels = (m.rows + kPanelRows - 1) / kPanelRows;
    if (m.panel_bytes != bytes / panels)
      return no("matrix %d: panels of %lld bytes, %lld expected", number, static_cast<long long>(m.panel_bytes),
                static_cast<long long>(bytes / panels));
    if (reinterpret_cast<uintptr_t>(m.data) % 64 != 0) return no("matrix %d: not aligned to 64 bytes", number);
    if (plan_.kernels->matmul[m.layout] == nullptr) return no("matrix %d: no kernel for layout %d", number, m.layout);
    return true;
  }

  bool cache_holds(int32_t number) const {
    const PlaitCache &c = plan_.caches[number];
    if (c.base == nullptr || c.group < 0) return no("cache %d: no memory or no group", number);
    if (c.kv_type < PLAIT_KV_F32 || c.kv_type > PLAIT_KV_F16) return no("cache %d: type %d", number, c.kv_type);
    if (c.block_tokens < 8 || c.block_tokens % 8 != 0 || c.block_tokens > 1 << 16)
      return no("cache %d: blocks of %d tokens (a multiple of 8 is needed)", number, c.block_tokens);
    if (c.num_kv_heads < 1 || c.key_width < 2 || c.key_width % 2 != 0 || c.value_width < 0 || c.value_width % 2 != 0)
      return no("cache %d: %d heads of widths %d and %d", number, c.num_kv_heads, c.key_width, c.value_width);
    const bool latent = c.latent_width >= 2 && c.latent_width % 2 == 0 && c.latent_width <= c.key_width;
    if (c.value_width == 0 && (c.num_kv_heads != 1 || !latent))
      return no("cache %d: %d heads, latent width %d of a key of %d", number, c.num_kv_heads, c.latent_width,
                c.key_width);
    const int64_t numbers = int64_t{c.num_kv_heads} * c.block_tokens * (int64_t{c.key_width} + c.value_width);
    if (c.block_stride < numbers * (c.kv_type == PLAIT_KV_F32 ? 4 : 2))
      return no("cache %d: blocks of %lld bytes do not hold %lld numbers", number,
                static_cast<long long>(c.block_stride), static_cast<long long>(numbers));
    return true;
  }

  bool is_buffer(int32_t b, const char *what) const { return b >= 0 || wrong("no %s", what); }
  bool operand(int32_t b, const char *what, int32_t kind, int32_t rows, int64_t width) const {
    if (!is_buffer(b, what)) return false;
    const PlaitBuffer &found = buffer(b);
    if (found.kind != kind) return wrong("%s (buffer %d) is of kind %d, %d is needed", what, b, found.kind, kind);
    if (found.rows != rows) return wrong("%s (buffer %d) has the wrong kind of rows", what, b);
    if (found.width != width)
      return wrong("%s (buffer %d) is %d wide, %lld are needed", what, b, found.width, static_cast<long long>(width));
    return true;
  }
  bool in(int32_t k, int32_t kind, int32_t rows, int64_t width) const {
    return operand(op_->in[k], "input", kind, rows, width);
  }
  bool out(int32_t k, int32_t kind, int32_t rows, int64_t width) const {
    return operand(op_->out[k], "output", kind, rows, width);
  }
  // Floats or quantised records.
  bool out_any(int32_t k, int32_t rows, int64_t width) const {
    if (!is_buffer(op_->out[k], "output")) return false;
    const int32_t kind = buffer(op_->out[k]).kind;
    return out(k, kind == PLAIT_KIND_Q8 ? PLAIT_KIND_Q8 : PLAIT_KIND_F32, rows, width);
  }
  // `inputs` inputs of the output's rows and width, each in its place or apart; width -1: any.
  bool map(int64_t width, int32_t inputs) const {
    if (!is_buffer(op_->out[0], "output")) return false;
    if (width < 0) width = buffer(op_->out[0]).width;
    for (int32_t k = 0; k < inputs; k++) {
      if (!in(k, PLAIT_KIND_F32, out_rows(), width)) return false;
      if (overlap(op_->out[0], op_->in[k]) && !same_place(op_->out[0], op_->in[k]))
        return wrong("output (buffer %d) and input (buffer %d) overlap", op_->out[0], op_->in[k]);
    }
    return out(0, PLAIT_KIND_F32, out_rows(), width);
  }
  // A row times one number.
  bool one_factor() const {
    const PlaitOp &op = *op_;
    if (!is_buffer(op.out[0], "output")) return false;
    const int64_t width = buffer(op.out[0]).width;
    if (!in(0, PLAIT_KIND_F32, out_rows(), 1) || !in(1, PLAIT_KIND_F32, out_rows(), width)) return false;
    if (overlap(op.out[0], op.in[0])) return wrong("the factor (buffer %d) is written over", op.in[0]);
    if (overlap(op.out[0], op.in[1]) && !same_place(op.out[0], op.in[1]))
      return wrong("output (buffer %d) and input (buffer %d) overlap", op.out[0], op.in[1]);
    return out(0, PLAIT_KIND_F32, out_rows(), width);
  }
  bool matrix(int32_t k) const {
    if (op_->w[k] < 0) return wrong("no matrix");
    return weight(k).layout != PLAIT_LAYOUT_VECTOR || wrong("matrix %d is a vector", op_->w[k]);
  }
  bool vector_or_none(int32_t k, int64_t width) const {
    if (op_->w[k] < 0) return true;
    const PlaitMatrix &w = weight(k);
    if (w.layout != PLAIT_LAYOUT_VECTOR || w.cols != width)
      return wrong("matrix %d is no vector of %lld numbers", op_->w[k], static_cast<long long>(width));
    return true;
  }
  bool cache(int32_t c) const {
    return (c >= 0 && c < int64_t(plan_.caches.size())) || wrong("no cache %d", c);
  }
  // gate: whether it may be one that makes something of the other factor too.
  bool activation(bool gate = false) const {
    const int32_t last = gate ? PLAIT_ACT_CLAMPED_SWIGLU : PLAIT_ACT_SIGMOID;
    if (op_->i[0] < PLAIT_ACT_SILU || op_->i[0] > last) return wrong("activation %d", op_->i[0]);
    return op_->i[0] != PLAIT_ACT_CLAMPED_SWIGLU || op_->f[1] > 0 || wrong("no limit above 0");
  }
  bool four_numbers() const {
    for (int32_t k = 0; k < 4; k++)
      if (op_->w[k] < 0 || !vector_or_none(k, 1)) return op_->w[k] >= 0 ? false : wrong("no number %d", k);
    return true;
  }
  // Of a norm: one head's, or every head's own.
  int64_t norm_weights() const {
    const bool own = op_->kind == PLAIT_OP_LAYER_NORM && op_->i[3] != 0;
    return own ? int64_t{op_->i[0]} * op_->i[1] : op_->i[1];
  }

  bool linear() const {
    const PlaitOp &op = *op_;
    if (op.i[0] < 1 || op.i[0] > 3) return wrong("a group of %d products", op.i[0]);
    if (!matrix(0) || !is_buffer(op.in[0], "input")) return false;
    const int32_t rows = buffer(op.in[0]).rows;
    for (int32_t k = 0; k < op.i[0]; k++) {
      if (!matrix(2 * k) || !vector_or_none(2 * k + 1, weight(2 * k).rows)) return false;
      if (!in(0, input_kind(2 * k), rows, weight(2 * k).cols)) return false;
      if (!out(k, PLAIT_KIND_F32, rows, weight(2 * k).rows)) return false;
    }
    if (op.in[1] >= 0 && !in(1, PLAIT_KIND_F32, rows, weight(0).rows)) return false;
    return apart();
  }

  bool gated() const {
    const PlaitOp &op = *op_;
    const int32_t matrices = op.kind == PLAIT_OP_GATED ? 2 : 1;
    if (!activation(matrices == 2) || !matrix(0) || !is_buffer(op.in[0], "input")) return false;
    const int32_t rows = buffer(op.in[0]).rows;
    for (int32_t k = 0; k < matrices; k++) {
      if (!matrix(2 * k) || !vector_or_none(2 * k + 1, weight(2 * k).rows)) return false;
      if (!in(0, input_kind(2 * k), rows, weight(2 * k).cols)) return false;
      if (weight(2 * k).rows != weight(0).rows) return wrong("gate and up differ in rows");
    }
    return out_any(0, rows, weight(0).rows) && apart();
  }

  bool route() const {
    const PlaitOp &op = *op_;
    if (!route_holds(op) || !is_buffer(op.out[0], "output")) return false;
    if (op.i[2] == PLAIT_SCORES_SPARSE_MIXER && op.w[0] >= 0) return wrong("a sparse mixer has no bias");
    return vector_or_none(0, op.i[0]) && in(0, PLAIT_KIND_F32, out_rows(), op.i[0]) &&
           out(0, PLAIT_KIND_I32, out_rows(), op.i[1]) && out(1, PLAIT_KIND_F32, out_rows(), op.i[1]) && apart();
  }

  bool attend_latent() const {
    const PlaitOp &op = *op_;
    if (!cache(op.i[0])) return false;
    const PlaitCache &cache = plan_.caches[op.i[0]];
    if (cache.value_width != 0) return wrong("cache %d has values of its own", op.i[0]);
    const int64_t heads = op.i[1], nope = op.i[2], value = op.i[3], latent = cache.latent_width;
    if (heads < 1 || heads > kMaxHeads) return wrong("%d heads", op.i[1]);
    if (nope < 16 || nope % 16 != 0 || value < 16 || value % 16 != 0 || latent % 16 != 0)
      return wrong("widths %d, %d and %d: multiples of 16 are needed", op.i[2], op.i[3], cache.latent_width);
    if (op.i[4] < PLAIT_LATENT_AUTO || op.i[4] > PLAIT_LATENT_ABSORBED) return wrong("form %d", op.i[4]);
    if (!(op.f[1] >= 0 && op.f[1] <= 1e6f)) return wrong("attention at %g times its cost", op.f[1]);
    if (!matrix(0) || !matrix(1)) return false;
    if (weight(0).rows != heads * (nope + value) || weight(0).cols != latent)
      return wrong("a matrix of %lld x %lld, %lld x %lld is needed", static_cast<long long>(weight(0).rows),
                   static_cast<long long>(weight(0).cols), static_cast<long long>(heads * (nope + value)),
                   static_cast<long long>(latent));
    if (weight(1).rows != heads * latent || weight(1).cols != nope || is_quantised(weight(1).layout))
      return wrong("a second layout of %lld x %lld (layout %d), floats of %lld x %lld are needed",
                   static_cast<long long>(weight(1).rows), static_cast<long long>(weight(1).cols), weight(1).layout,
                   static_cast<long long>(heads * latent), static_cast<long long>(nope));
    for (int32_t k = 1; k < 3; k++)
      if (op.in[k] >= 0 || op.out[k] >= 0) return wrong("one input and one output are needed");
    return in(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, heads * (nope + cache.key_width - latent)) &&
           out(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, heads * value) && apart();
  }

  bool experts() const {
    const PlaitOp &op = *op_;
    const int64_t count = op.i[1], parts = op.i[2] != 0 ? 2 : 1;
    if (count < 1 || count > kMaxExperts) return wrong("%d experts", op.i[1]);
    if (!activation(parts == 2) || !matrix(0) || !matrix(2)) return false;
    for (int32_t k = 0; k < 3; k++)
      if (!is_buffer(op.in[k], "input") || !is_buffer(op.out[k], "output")) return false;
    const int64_t width = weight(0).cols, hidden = weight(2).cols, top_k = buffer(op.in[1]).width;
    const int32_t rows = buffer(op.in[0]).rows;
    if (top_k > count) return wrong("%lld of %d experts", static_cast<long long>(top_k), op.i[1]);
    if (row_count(buffer(op.in[1])) * top_k > INT32_MAX) return wrong("more choices of experts than can be counted");
    if (weight(0).rows != count * parts * padded(hidden) || weight(2).rows != count * padded(width))
      return wrong("stacks of %lld and %lld rows are not %d experts of widths %lld and %lld",
                   static_cast<long long>(weight(0).rows), static_cast<long long>(weight(2).rows), op.i[1],
                   static_cast<long long>(width), static_cast<long long>(hidden));
    if (!vector_or_none(1, count * parts * hidden) || !vector_or_none(3, count * width)) return false;
    return in(0, input_kind(0), rows, width) && in(1, PLAIT_KIND_I32, rows, top_k) &&
           in(2, PLAIT_KIND_F32, rows, top_k) && out(0, PLAIT_KIND_F32, rows, width) &&
           out(1, input_kind(2), rows, top_k * hidden) && out(2, PLAIT_KIND_F32, rows, top_k * width) &&
           slots(1, top_k, hidden, 0) && slots(2, top_k, width, used_bytes(buffer(op.in[0]))) && apart() &&
           whole_rows_apart(1) && whole_rows_apart(2);
  }
  static int64_t padded(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows * kPanelRows; }
  // Whether each of `count` slots of a row of an output has room for `width` numbers, and for `least` bytes.
  bool slots(int32_t k, int64_t count, int64_t width, int64_t least) const {
    const PlaitBuffer &found = buffer(op_->out[k]);
    const int64_t bytes = found.row_bytes / count;
    const int64_t used = found.kind == PLAIT_KIND_Q8 ? plait_quantised_row_bytes(width) : 4 * width;
    if (used < 0 || bytes * count != found.row_bytes || bytes % 64 != 0 || bytes < std::max(used, least))
      return wrong("rows of %lld bytes (buffer %d) have no slots for %lld times %lld numbers",
                   static_cast<long long>(found.row_bytes), op_->out[k], static_cast<long long>(count),
                   static_cast<long long>(width));
    return true;
  }

  // Whether all bytes of an output's rows are its own: its slots fill them.
  bool whole_rows_apart(int32_t k) const {
    const PlaitBuffer &b = buffer(op_->out[k]);
    const int64_t end = b.offset + row_count(b) * b.row_bytes;
    if (end > plan_.arena.bytes()) return wrong("the slots of buffer %d reach beyond the arena", op_->out[k]);
    for (int32_t i = 0; i < 6; i++) {
      const int32_t other = i < 3 ? op_->in[i] : op_->out[i - 3];
      if (other != op_->out[k] && buffer(other).offset < end && end_of(buffer(other)) > b.offset)
        return wrong("buffer %d lies between the slots of buffer %d", other, op_->out[k]);
    }
    return true;
  }

  bool same_place(int32_t a, int32_t b) const {
    return buffer(a).offset == buffer(b).offset && buffer(a).row_bytes == buffer(b).row_bytes;
  }
  // Whether row r of the one touches no row of the other but r.
  bool same_rows(int32_t a, int32_t b) const {
    const PlaitBuffer *x = &buffer(a), *y = &buffer(b);
    if (y->offset < x->offset) std::swap(x, y);
    return x->row_bytes == y->row_bytes && y->offset - x->offset + used_bytes(*y) <= x->row_bytes;
  }
  // Outputs that threads write while others still read the inputs: no shared memory, but for what is added in place.
  bool apart() const {
    for (int32_t k = 0; k < 3; k++) {
      const int32_t b = op_->out[k];
      if (b < 0) continue;
      for (int32_t i = 0; i < 3; i++) {
        const bool added = op_->kind == PLAIT_OP_LINEAR && i == 1 && k == 0;
        if (op_->in[i] >= 0 && overlap(b, op_->in[i]) && !(added && same_place(b, op_->in[i])))
          return wrong("output (buffer %d) and input (buffer %d) share memory", b, op_->in[i]);
      }
      for (int32_t other = 0; other < k; other++)
        if (op_->out[other] >= 0 && overlap(b, op_->out[other]))
          return wrong("outputs (buffers %d and %d) share memory", b, op_->out[other]);
    }
    return true;
  }

  const PlaitPlan &plan_;
  int64_t num_table_floats_;
  int32_t index_ = 0;
  const PlaitOp *op_ = nullptr;
  const char *name_ = "";
};

}  // namespace

bool plan_holds(const PlaitPlan &plan) { return Checker(plan).plan_as_a_whole(); }

bool op_holds(const PlaitPlan &plan, int32_t index, int64_t num_table_floats) {
  return Checker(plan, num_table_floats).op_holds(index);
}

bool buffers_overlap(const PlaitPlan &plan, int32_t a, int32_t b) { return Checker(plan).overlap(a, b); }

bool stage_holds(const PlaitPlan &plan, int32_t first, int32_t end) { return Checker(plan).stage_holds(first, end); }

}  // namespace plait
