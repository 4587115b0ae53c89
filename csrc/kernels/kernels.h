// What one instruction set offers: a table of functions, filled by csrc/kernels/isa_<name>.cpp.
#pragma once

#include "../plait_native.h"

namespace plait {

// out[t * out_stride + r] = x_t . w_r + bias[r] + add[t * add_stride + r] for tokens [token0, token1) and the rows of
// panels [panel0, panel1). Every number is computed in one order, whatever the ranges are: results do not depend on how
// work is cut or on how many tokens there are.
struct MatmulArgs {
  const PlaitMatrix *matrix;
  const uint8_t *x;  // records or floats, x_stride bytes apart
  int64_t x_stride;
  float *out;
  int64_t out_stride;  // in floats
  const float *bias;   // or null
  const float *add;    // or null; may be `out`
  int64_t add_stride;
};
using Matmul = void (*)(const MatmulArgs &, int64_t panel0, int64_t panel1, int64_t token0, int64_t token1);

// Where a sequence's keys and values lie and what attends to them. Token t of the query stands at position first + t.
struct AttendArgs {
  PlaitCache cache;
  const int32_t *table;  // blocks of the sequence
  int64_t first;
  int32_t heads;
  float scale, soft_cap;  // soft_cap 0 = none
  int32_t window;         // 0 = none; else keys with query - key >= window are hidden
  const float *sinks;     // [heads] logits that take part in the softmax without a value, or null
  const float *q;  // row of token t at q + t * q_stride: the kv head's queries [heads of the group, key_width]
  int64_t q_stride;
  float *out;  // row of token t at out + t * out_stride: [heads of the group, value width]
  int64_t out_stride;
};

// One token's choice of experts: see PLAIT_OP_ROUTE.
struct RouteArgs {
  const float *logits;  // [experts], at most kMaxExperts
  const float *bias;    // [experts] or null
  int64_t experts, top_k;
  int32_t scores;       // PLAIT_SCORES_...
  bool renormalise;
  float scale, jitter, least_sum;
  int64_t groups, top_groups;  // groups 0 = none
  bool two_best, masked_zero;
};
constexpr int64_t kMaxExperts = 1024;  // kernels keep numbers per expert in fixed memory

struct Kernels {
  const char *name;
  // CPU features, up to a null. A list: code of the set itself could not be run to find out.
  const char *needs[12];

  Matmul matmul[PLAIT_LAYOUT_COUNT];
  void (*unpack_row)(const PlaitMatrix &matrix, int64_t row, float *out);

  // Blocks [block0, block1) of 32 numbers of a record of `cols` numbers; x points at the first number of block0. The
  // record lies apart from x.
  void (*quantise)(const float *x, int64_t cols, int64_t block0, int64_t block1, uint8_t *record);
  // Rows of `n` numbers; out may be x or y.
  void (*rms_norm)(const float *x, const float *w, int64_t n, float eps, bool unit_offset, float *out);
  void (*layer_norm)(const float *x, const float *w, const float *b, int64_t n, float eps, float *out);
  void (*positions)(int64_t position, const float *inv_freq, int64_t n, float magnitude, float *out);
  void (*rotate)(const float *x, const float *angles, int64_t heads, int64_t width, int64_t turning, bool adjacent,
                 float *out);
  void (*activate)(int32_t kind, const float *x, int64_t n, float *out);
  void (*gate)(int32_t kind, const float *x, const float *y, int64_t n, float *out);
  void (*clamped_swiglu)(const float *x, const float *y, int64_t n, float alpha, float limit, float *out);
  void (*xielu)(const float *x, int64_t n, float alpha_p, float alpha_n, float beta, float eps, float *out);
  void (*add)(const float *x, const float *y, int64_t n, float *out);
  void (*scale)(const float *x, float factor, int64_t n, float *out);
  void (*soft_cap)(const float *x, float limit, int64_t n, float *out);
  void (*clip)(const float *x, float limit, int64_t n, float *out);
  // The first largest of x[0 .. n): its index; *best its value, NaN where any number is NaN.
  int64_t (*arg_max)(const float *x, int64_t n, float *best);
  void (*route)(const RouteArgs &args, int32_t *ids, float *weights);
  // out = sum over j < rows of weights[j] * row[j][0 .. n), in this order.
  void (*weighted_sum)(const float *const *row, const float *weights, int64_t rows, int64_t n, float *out);

  // Keys and values of one token (k [kv heads, key_width], v [kv heads, value_width]) into row `slot` of `block`, for
  // heads [head0, head1) only, of which k and v are the rows. Where values are a part of the keys (value_width 0), v is
  // null, or the key's numbers from latent_width on, which then are not read from k.
  void (*write_kv)(const PlaitCache &cache, int64_t head0, int64_t head1, int64_t block, int64_t slot, const float *k,
                   const float *v);
  // Row t of out, out_stride floats apart: the key of kv head 0 in row slot + t of `block`, for t < count.
  void (*read_keys)(const PlaitCache &cache, int64_t block, int64_t slot, int64_t count, float *out, int64_t out_stride);
  // Attention of tokens [t0, t1) for one kv head over keys [key0, key1), which begin at a multiple of the chunk.
  // partial null: these are all the keys, the result goes to `out`. Else per (token, query head of the group), from
  // partial on: highest score, sum of exponentials, from kPartialHead on value_width unnormalised sums. scratch:
  // attend_scratch floats.
  void (*attend)(const AttendArgs &args, int32_t kv_head, int64_t t0, int64_t t1, int64_t key0, int64_t key1,
                 float *partial, float *scratch);
  // Puts `chunks` partials (each `stride` floats after the one before) of tokens [t0, t1) and one kv head together;
  // the first one's memory is used up.
  void (*attend_merge)(const AttendArgs &args, int32_t kv_head, int64_t t0, int64_t t1, float *partials,
                       int64_t chunks, int64_t stride);

  // Steps of optimisers over numbers [begin, end) of a piece. mars_squares: the sum of the squares of the corrected
  // gradient, which mars then multiplies with `clip`; sophia: returns how many numbers are not clipped.
  void (*adamw)(const PlaitUpdate &update, int64_t begin, int64_t end);
  void (*lion)(const PlaitUpdate &update, int64_t begin, int64_t end);
  double (*mars_squares)(const PlaitUpdate &update, int64_t begin, int64_t end);
  void (*mars)(const PlaitUpdate &update, float clip, int64_t begin, int64_t end);
  int64_t (*sophia)(const PlaitUpdate &update, int64_t begin, int64_t end);
};

// Sets that this build has, worst first; null-terminated.
const Kernels *const *all_kernels();
// By name; null where the build lacks it or the CPU cannot run it. Null name: the best, or PLAIT_ISA.
const Kernels *find_kernels(const char *name);

// Keys that one attention item covers at most; context is split at multiples of it, so that the sums of a sequence do
// not depend on the batch.
constexpr int64_t kAttendChunk = 512;
// Query tokens that one attention item covers at most, and query rows (tokens times heads) that share one pass over the
// keys.
constexpr int64_t kAttendTile = 16;
constexpr int64_t kAttendRows = 45;
constexpr int64_t kScoreStride = kAttendChunk + 16;  // rows of scores start in different sets of the cache
constexpr int64_t kPartialHead = 16;  // floats before a partial's sums: their rows begin like lines of the cache
// Floats of scratch for one item.
int64_t attend_scratch(const PlaitCache &cache);
static inline int64_t value_width(const PlaitCache &cache) {
  return cache.value_width ? cache.value_width : cache.latent_width;
}

static inline bool is_quantised(int32_t layout) { return layout >= PLAIT_LAYOUT_Q4_0 && layout < PLAIT_LAYOUT_COUNT; }
constexpr int64_t kPanelRows = 16;

// For errors that cross the C interface: kept per thread for plait_last_error.
int fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
// The same with the words of the exception that is being caught: none crosses the C interface.
int fail_with_exception();

}  // namespace plait
