// Makes plans: checks that a specification holds together, cuts it into stages, reserves the memory.
#include "plan.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include <stdint.h>
#include <stdio.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

#include "rows.h"
#include "threads.h"

namespace plait {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kMostBytes = int64_t{1} << 46;

const char *const kOpNames[] = {"embed",  "positions",  "linear", "gated", "activated", "rms_norm", "layer_norm",
                                "rotate", "write_kv",   "attend", "gate",  "activate",  "add",      "scale",
                                "soft_cap", "clip",     "quantise", "copy", "select_rows", "logits", "hidden",
                                "host"};
constexpr int32_t kOpKinds = sizeof kOpNames / sizeof kOpNames[0];

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Whether the operation may run row by row together with its neighbours.
bool is_row_local(int32_t kind) { return is_row_op(kind) || kind == PLAIT_OP_WRITE_KV || kind == PLAIT_OP_HIDDEN; }

// Checks the operations of one plan. Every check says in words what is wrong, with the operation's number and name.
class Checker {
 public:
  Checker(const PlaitPlan &plan, int64_t num_table_floats) : plan_(plan), num_table_floats_(num_table_floats) {}

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
        return vector_or_none(0, op.i[1]) && vector_or_none(op.kind == PLAIT_OP_LAYER_NORM ? 1 : 0, op.i[1]) &&
               map(int64_t{op.i[0]} * op.i[1], 1);
      case PLAIT_OP_ROTATE:
        if (op.i[0] < 1 || op.i[2] < 2 || op.i[2] % 2 != 0 || op.i[2] > op.i[1])
          return wrong("%d of a width of %d cannot rotate", op.i[2], op.i[1]);
        if (!map(int64_t{op.i[0]} * op.i[1], 1) || !in(1, PLAIT_KIND_F32, out_rows(), op.i[2])) return false;
        return !overlap(op.out[0], op.in[1]) || wrong("the angles (buffer %d) are written over", op.in[1]);
      case PLAIT_OP_WRITE_KV: {
        if (!cache(op.i[0])) return false;
        const PlaitCache &cache = plan_.caches[op.i[0]];
        if (!in(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, int64_t{cache.num_kv_heads} * cache.key_width)) return false;
        return cache.value_width == 0 ||
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
      case PLAIT_OP_GATE:
        return activation() && map(-1, 2);
      case PLAIT_OP_ACTIVATE:
        return activation() && map(-1, 1);
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
        return true;
      case PLAIT_OP_HIDDEN:
        return is_buffer(op.in[0], "input") &&
               in(0, PLAIT_KIND_F32, PLAIT_ROWS_TOKENS, buffer(op.in[0]).width);
      default:  // PLAIT_OP_HOST: the caller's own business
        return true;
    }
  }

  // Rows that a row-local operation goes over.
  int32_t rows_of(int32_t index) const {
    const PlaitOp &op = plan_.ops[index];
    const bool without_output = op.kind == PLAIT_OP_WRITE_KV || op.kind == PLAIT_OP_HIDDEN;
    return buffer(without_output ? op.in[0] : op.out[0]).rows;
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
  bool activation() const {
    return (op_->i[0] >= PLAIT_ACT_SILU && op_->i[0] <= PLAIT_ACT_SIGMOID) || wrong("activation %d", op_->i[0]);
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
    if (!activation() || !matrix(0) || !is_buffer(op.in[0], "input")) return false;
    const int32_t rows = buffer(op.in[0]).rows;
    for (int32_t k = 0; k < matrices; k++) {
      if (!matrix(2 * k) || !vector_or_none(2 * k + 1, weight(2 * k).rows)) return false;
      if (!in(0, input_kind(2 * k), rows, weight(2 * k).cols)) return false;
      if (weight(2 * k).rows != weight(0).rows) return wrong("gate and up differ in rows");
    }
    return out_any(0, rows, weight(0).rows) && apart();
  }

  bool overlap(int32_t a, int32_t b) const {
    const PlaitBuffer &x = buffer(a), &y = buffer(b);
    if (x.offset >= end_of(y) || y.offset >= end_of(x)) return false;
    if (x.row_bytes != y.row_bytes) return true;
    // Columns of one matrix: y's begin `at` bytes into a row of x.
    const int64_t at = ((y.offset - x.offset) % x.row_bytes + x.row_bytes) % x.row_bytes;
    return at < used_bytes(x) || at + used_bytes(y) > x.row_bytes;
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

// A guess at the time of one row, to decide whether rows are worth sharing out.
double row_ns(const PlaitPlan &plan, const PlaitOp &op) {
  double numbers = 0;
  for (const int32_t b : op.in)
    if (b >= 0) numbers += plan.buffers[b].width;
  for (const int32_t b : op.out)
    if (b >= 0) numbers += plan.buffers[b].width;
  const bool heavy = op.kind == PLAIT_OP_GATE || op.kind == PLAIT_OP_ACTIVATE || op.kind == PLAIT_OP_SOFT_CAP ||
                     op.kind == PLAIT_OP_POSITIONS || op.kind == PLAIT_OP_EMBED || op.kind == PLAIT_OP_WRITE_KV;
  return 20 + numbers * (heavy ? 0.6 : 0.2);
}

bool same_shape(const AttendLayer &a, const AttendLayer &b) {
  const PlaitCache &x = a.cache, &y = b.cache;
  return a.heads == b.heads && a.window == b.window && x.group == y.group && x.block_tokens == y.block_tokens &&
         x.num_kv_heads == y.num_kv_heads && x.key_width == y.key_width && x.value_width == y.value_width &&
         x.latent_width == y.latent_width && x.kv_type == y.kv_type;
}

template <class T>
void copy_array(const T *from, int32_t count, std::vector<T> *to) {
  if (count > 0) to->assign(from, from + count);
}

}  // namespace

bool Pages::reserve(int64_t bytes) {
  release();
  if (bytes <= 0) return true;
#if defined(__unix__) || defined(__APPLE__)
  const bool huge = bytes >= kHugePage;
  const int64_t wanted = huge ? round_up(bytes, kHugePage) + kHugePage : bytes;
  void *map = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return false;
  map_ = map;
  map_bytes_ = wanted;
  const uintptr_t start = reinterpret_cast<uintptr_t>(map);
  data_ = static_cast<uint8_t *>(map) + (huge ? round_up(start, kHugePage) - start : 0);
#if defined(MADV_HUGEPAGE)
  if (huge) madvise(data_, round_up(bytes, kHugePage), MADV_HUGEPAGE);
#endif
#else
  map_ = ::operator new(bytes, std::align_val_t(64), std::nothrow);
  if (map_ == nullptr) return false;
  data_ = static_cast<uint8_t *>(map_);
  std::fill(data_, data_ + bytes, uint8_t{0});
#endif
  bytes_ = bytes;
  return true;
}

void Pages::release() {
  if (map_ == nullptr) return;
#if defined(__unix__) || defined(__APPLE__)
  munmap(map_, map_bytes_);
#else
  ::operator delete(map_, std::align_val_t(64));
#endif
  map_ = nullptr;
  data_ = nullptr;
  bytes_ = map_bytes_ = 0;
}

int build_stages(PlaitPlan *plan, int32_t num_table_floats) {
  Checker checker(*plan, num_table_floats);
  if (!checker.plan_as_a_whole()) return -1;
  const int32_t num_ops = static_cast<int32_t>(plan->ops.size());
  int64_t scratch = 0;
  for (int32_t i = 0; i < num_ops; i++) {
    if (!checker.op_holds(i)) return -1;
    const PlaitOp &op = plan->ops[i];
    if (is_row_local(op.kind)) {
      const int32_t rows = checker.rows_of(i);
      std::vector<Stage> &stages = plan->stages;
      if (stages.empty() || stages.back().kind != Stage::kRows || stages.back().rows != rows)
        stages.push_back({Stage::kRows, i, i, rows, -1, 0});
      stages.back().end = i + 1;
      stages.back().row_ns += row_ns(*plan, op);
      continue;
    }
    Stage stage{Stage::kHost, i, i + 1, PLAIT_ROWS_TOKENS, -1, 0};
    if (op.kind == PLAIT_OP_SELECT_ROWS || op.kind == PLAIT_OP_LOGITS) stage.rows = PLAIT_ROWS_LOGITS;
    if (op.kind == PLAIT_OP_LINEAR) stage.kind = Stage::kLinear;
    if (op.kind == PLAIT_OP_GATED || op.kind == PLAIT_OP_ACTIVATED) {
      stage.kind = Stage::kGated;
      scratch = std::max<int64_t>(scratch, 2 * kGatedScratch * sizeof(float));
    }
    if (op.kind == PLAIT_OP_SELECT_ROWS) stage.kind = Stage::kSelect;
    if (op.kind == PLAIT_OP_LOGITS) {
      stage.kind = Stage::kLogits;
      scratch = std::max<int64_t>(scratch, kLogitRows * kLogitPanels * kPanelRows * sizeof(float));
    }
    if (op.kind == PLAIT_OP_ATTEND) {
      stage.kind = Stage::kAttend;
      AttendLayer layer{};
      layer.cache = plan->caches[op.i[0]];
      layer.heads = op.i[1];
      layer.window = op.i[2];
      scratch = std::max<int64_t>(scratch, attend_item_scratch(layer) * sizeof(float));
      std::vector<Attention> &known = plan->attentions;
      size_t a = 0;
      while (a < known.size() && !same_shape(known[a].layer, layer)) a++;
      if (a == known.size()) known.push_back({layer, {}});
      stage.attention = static_cast<int32_t>(a);
    }
    if (op.kind == PLAIT_OP_LINEAR || stage.kind == Stage::kGated) stage.rows = plan->buffers[op.in[0]].rows;
    plan->stages.push_back(stage);
  }
  for (const Stage &stage : plan->stages)
    if (stage.kind == Stage::kRows && !checker.stage_holds(stage.first, stage.end)) return -1;
  plan->thread_scratch = round_up(scratch, 4096);  // threads do not share pages
  return 0;
}

bool reserve_scratch(PlaitPlan *plan, int threads) {
  if (threads <= plan->scratch_threads) return true;
  plan->scratch_threads = 0;  // until both are there
  plan->best.resize(size_t(threads) * plan->max_rows);
  if (!plan->scratch.reserve(plan->thread_scratch * threads)) return false;
  plan->scratch_threads = threads;
  return true;
}

}  // namespace plait

PlaitPlan *plait_plan_create(const PlaitPlanSpec *spec) try {
  using plait::fail;
  if (spec->num_ops < 0 || spec->num_buffers < 0 || spec->num_matrices < 0 || spec->num_caches < 0 ||
      spec->num_table_floats < 0)
    return fail("a plan with a negative number of something"), nullptr;
  std::unique_ptr<PlaitPlan> plan(new PlaitPlan);
  plan->kernels = plait::find_kernels(nullptr);
  if (plan->kernels == nullptr) return fail("PLAIT_ISA names no instruction set that this CPU runs"), nullptr;
  plait::copy_array(spec->ops, spec->num_ops, &plan->ops);
  plait::copy_array(spec->buffers, spec->num_buffers, &plan->buffers);
  plait::copy_array(spec->matrices, spec->num_matrices, &plan->matrices);
  plait::copy_array(spec->caches, spec->num_caches, &plan->caches);
  plait::copy_array(spec->tables, spec->num_table_floats, &plan->tables);
  plan->max_tokens = spec->max_tokens;
  plan->max_rows = spec->max_rows;
  plan->vocab_size = spec->vocab_size;
  plan->sampled_ids = spec->sampled_ids;
  plan->copy_slots = spec->copy_slots;
  plan->pool = spec->pool;
  plan->slot_stride = spec->slot_stride;
  plan->block_bytes = spec->block_bytes;
  if (spec->arena_bytes < 0 || spec->arena_bytes > plait::kMostBytes || !plan->arena.reserve(spec->arena_bytes))
    return fail("no memory for an arena of %lld bytes", static_cast<long long>(spec->arena_bytes)), nullptr;
  if (plait::build_stages(plan.get(), spec->num_table_floats) != 0) return nullptr;
  PlaitTopology topology;
  plan->l2_bytes = plait_topology("", &topology) == 0 && topology.l2_bytes > 0 ? topology.l2_bytes : 512 << 10;
  plan->owner.resize(plan->max_tokens);
  plan->positions.resize(plan->max_tokens);
  plan->stage_seconds.resize(plan->stages.size());
  if (!plait::reserve_scratch(plan.get(), plait::thread_limit())) return fail("no memory for scratch"), nullptr;
  return plan.release();
} catch (...) {
  plait::fail_with_exception();
  return nullptr;
}

void plait_plan_destroy(PlaitPlan *plan) { delete plan; }

void *plait_plan_buffer(PlaitPlan *plan, int32_t buffer) {
  if (buffer < 0 || buffer >= static_cast<int64_t>(plan->buffers.size())) return nullptr;
  return plan->at(buffer);
}

int64_t plait_plan_bytes(const PlaitPlan *plan) {
  int64_t bytes = plan->arena.bytes() + plan->scratch.bytes();
  for (const plait::Attention &attention : plan->attentions) bytes += attention.work.bytes();
  return bytes + int64_t(plan->best.size() * sizeof(plait::Best) +
                         (plan->owner.size() + plan->positions.size()) * sizeof(int32_t));
}

void plait_plan_profile(PlaitPlan *plan, int32_t on, double *seconds) try {
  plait::ParallelRegion region;  // no step runs meanwhile
  if (seconds != nullptr) std::fill(seconds, seconds + plan->ops.size(), 0.0);
  for (size_t s = 0; s < plan->stages.size(); s++) {
    if (seconds != nullptr) seconds[plan->stages[s].first] = plan->stage_seconds[s];
    plan->stage_seconds[s] = 0;
  }
  plan->profiling = on != 0;
} catch (...) {
  plait::fail_with_exception();
}
