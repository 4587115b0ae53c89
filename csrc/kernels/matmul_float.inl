// Products with fp32, bf16 and fp16 panels: lanes are rows of weights, tokens come from broadcasts.
//
// Every output is one chain of fused multiply-adds over ascending columns from 0, then + bias, then + add. A tile holds
// `P` panels x `T` tokens of such chains in registers: few tokens take several panels at once, because one multiply-add
// must wait for the one before it in its chain. Cutting columns into blocks parks the chains in memory as they are, so
// no cut changes a number.

namespace plait {
namespace PLAIT_ISA_NAMESPACE {

namespace float_matmul {

constexpr int V = 16 / W;  // vectors per panel and column

// Tokens of the largest tile, and panels beside each other for T tokens: about 12 accumulators of 16 registers, 24 of
// 32, and at least 8 chains for two multiply-adds a cycle that take four cycles each.
#if defined(__AVX512F__)
constexpr int kTile = 12;
// Not 8 for one token: panels of a multiple of 4 KiB would share 8 lines of the cache with what is fetched.
constexpr int panels_for(int tokens) { return tokens <= 4 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int kTile = 6;
constexpr int panels_for(int tokens) { return tokens == 1 ? 4 : tokens <= 3 ? 2 : 1; }
#elif defined(__aarch64__)
constexpr int kTile = 6;
constexpr int panels_for(int tokens) { return tokens == 1 ? 2 : 1; }
#else
constexpr int kTile = 2;
constexpr int panels_for(int tokens) { return tokens == 1 ? 2 : 1; }
#endif

constexpr int64_t kTokens = 8 * kTile;   // tokens that go over a panel before the next one's turn
constexpr int64_t kColumns = 256;        // columns of a panel that stay in the first-level cache meanwhile
constexpr int64_t kExpandFrom = 3 * kTile;  // tokens that repay expanding bf16 and fp16 to fp32 first
constexpr int64_t kAhead = 4096;         // bytes that weights out of memory are fetched ahead

// Where the CPU multiplies pairs of bfloat16 (at twice the rate), bf16 weights meet activations rounded to bf16: kDot,
// whose "columns" are pairs of columns.
#if defined(__AVX512BF16__)
constexpr bool kHasDot = true;
PLAIT_INLINE vf dot(vu x, vu w, vf sum) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)w, (__m512bh)(__m512i)x);
}
PLAIT_INLINE void round_pairs(const float *x, uint16_t *out) {  // 32 numbers
  const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)load(x + 16), (__m512)load(x));
  memcpy(out, &pairs, sizeof pairs);
}
#else
constexpr bool kHasDot = false;
PLAIT_INLINE vf dot(vu, vu, vf sum) { return sum; }
PLAIT_INLINE void round_pairs(const float *, uint16_t *) {}
#endif

enum Format { kF32, kBF16, kF16, kDot };
constexpr int64_t column_bytes(Format format) { return format == kF32 || format == kDot ? 64 : 32; }

// What a tile reads: panel p at w + p * panel_stride, token t at x + t * x_stride; `columns` columns of both (an odd
// number of bf16 columns only at a row's end). Meanwhile it fetches what will be needed next: with column k the line at
// fetch + k * fetch_step, and as much for every panel, fetch_stride apart.
struct TileArgs {
  const uint8_t *w;
  int64_t panel_stride;
  const uint8_t *x;
  int64_t x_stride;
  int64_t columns;
  const uint8_t *fetch;
  int64_t fetch_stride, fetch_step;
};

// acc[t][p][16] += the products of the columns. Near: what is fetched stays out of the first-level cache.
template <Format F, int P, int T, bool Near>
PLAIT_INLINE void tile(const TileArgs &args, float *acc) {
  const uint8_t *w = args.w, *x = args.x;
  const int64_t panel_stride = args.panel_stride, x_stride = args.x_stride, columns = args.columns;
  vf sums[T][P][V];
#pragma GCC unroll 16
  for (int t = 0; t < T; t++)
#pragma GCC unroll 16
    for (int p = 0; p < P; p++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sums[t][p][v] = load(acc + (t * P + p) * 16 + v * W);

  const float *row[T];  // kDot: of pairs
#pragma GCC unroll 16
  for (int t = 0; t < T; t++) row[t] = (const float *)(x + t * x_stride);

  if constexpr (F == kBF16) {
    int64_t k = 0;
    for (; k + 2 <= columns; k += 2) {
#pragma GCC unroll 16
      for (int p = 0; p < P; p++)
        __builtin_prefetch(args.fetch + p * args.fetch_stride + k * args.fetch_step, 0, Near ? 2 : 3);
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) {
        vu pairs[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++)
          pairs[v] = load_pairs((const uint16_t *)(w + p * panel_stride + k * 32) + 2 * v * W);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++)
#pragma GCC unroll 16
          for (int v = 0; v < V; v++) sums[t][p][v] = fma(splat(row[t][k]), first_bf16(pairs[v]), sums[t][p][v]);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++)
#pragma GCC unroll 16
          for (int v = 0; v < V; v++) sums[t][p][v] = fma(splat(row[t][k + 1]), second_bf16(pairs[v]), sums[t][p][v]);
      }
    }
    if (k < columns) {
#pragma GCC unroll 16
      for (int p = 0; p < P; p++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
          const vf weights = first_bf16(load_pairs((const uint16_t *)(w + p * panel_stride + k * 32) + 2 * v * W));
#pragma GCC unroll 16
          for (int t = 0; t < T; t++) sums[t][p][v] = fma(splat(row[t][k]), weights, sums[t][p][v]);
        }
    }
  } else {
    for (int64_t k = 0; k < columns; k++) {
#pragma GCC unroll 16
      for (int p = 0; p < P; p++)
        __builtin_prefetch(args.fetch + p * args.fetch_stride + k * args.fetch_step, 0, Near ? 2 : 3);
      vf weights[P][V];
#pragma GCC unroll 16
      for (int p = 0; p < P; p++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
          const uint8_t *at = w + p * panel_stride + k * column_bytes(F);
          weights[p][v] = F == kF16 ? load_half((const uint16_t *)at + v * W) : load((const float *)at + v * W);
        }
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) {
        const vf number = splat(row[t][k]);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++)
#pragma GCC unroll 16
          for (int v = 0; v < V; v++)
            sums[t][p][v] = F == kDot ? dot(as_bits(number), as_bits(weights[p][v]), sums[t][p][v])
                                      : fma(number, weights[p][v], sums[t][p][v]);
      }
    }
  }

#pragma GCC unroll 16
  for (int t = 0; t < T; t++)
#pragma GCC unroll 16
    for (int p = 0; p < P; p++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) store(acc + (t * P + p) * 16 + v * W, sums[t][p][v]);
}

template <Format F, int P, int T>
__attribute__((noinline)) void near_tile(const TileArgs &args, float *acc) {
  tile<F, P, T, true>(args, acc);
}

// A tile whose weights come from memory: they are fetched kAhead before they are used, and args.fetch follows them.
template <Format F, int P, int T>
__attribute__((noinline)) void far_tile(const TileArgs &args, float *acc) {
  TileArgs part = args;
  part.columns = args.columns - kAhead / column_bytes(F);
  part.columns = part.columns > 0 ? part.columns & -2 : 0;
  part.fetch = args.w + kAhead;
  part.fetch_stride = args.panel_stride;
  part.fetch_step = column_bytes(F);
  tile<F, P, T, false>(part, acc);
  part.w += part.columns * column_bytes(F);
  part.x += part.columns * 4;
  part.columns = args.columns - part.columns;
  part.fetch = args.fetch;
  tile<F, P, T, false>(part, acc);
}

using Tile = void (*)(const TileArgs &, float *);

template <Format F, int P, int T>
constexpr Tile pick(bool far) { return far ? &far_tile<F, P, T> : &near_tile<F, P, T>; }

// The tile of `panels` (1 or panels_for(tokens)) x `tokens`.
template <Format F, int T = kTile>
Tile find_tile(int64_t panels, int64_t tokens, bool far) {
  if (tokens == T) return panels == 1 ? pick<F, 1, T>(far) : pick<F, panels_for(T), T>(far);
  if constexpr (T > 1) return find_tile<F, T - 1>(panels, tokens, far);
  return nullptr;
}

// fp32 panels of `columns` columns, side by side.
template <Format F>
void expand(const uint8_t *w, int64_t panel_stride, int64_t panels, int64_t columns, float *out) {
  for (int64_t p = 0; p < panels; p++, w += panel_stride) {
    const uint16_t *from = (const uint16_t *)w;
    float *to = out + p * kColumns * 16;
    if constexpr (F == kF16) {
      for (int64_t k = 0; k < columns * 16; k += W) store(to + k, load_half(from + k));
    } else {
      for (int64_t k = 0; k < columns; k += 2)  // an odd last column has a pad beside it, and `out` has room for it
        for (int v = 0; v < V; v++) {
          const vu pairs = load_pairs(from + k * 16 + 2 * v * W);
          store(to + k * 16 + v * W, first_bf16(pairs));
          store(to + k * 16 + 16 + v * W, second_bf16(pairs));
        }
    }
  }
}

// Sums of one panel and token -> out.
inline void finish(const MatmulArgs &a, int64_t panel, int64_t token, const float *sums) {
  const int64_t row0 = panel * 16, rows = a.matrix->rows - row0 < 16 ? a.matrix->rows - row0 : 16;
  float *out = a.out + token * a.out_stride + row0;
  const float *bias = a.bias ? a.bias + row0 : nullptr, *add = a.add ? a.add + token * a.add_stride + row0 : nullptr;
  for (int64_t r = 0; r < rows; r += W) {
    const int n = rows - r < W ? (int)(rows - r) : W;
    vf sum = load(sums + r);
    if (bias) sum += n == W ? load(bias + r) : load_part(bias + r, n);
    if (add) sum += n == W ? load(add + r) : load_part(add + r, n);
    if (n == W) store(out + r, sum);
    else store_part(out + r, sum, n);
  }
}

// Activations as pairs of bfloat16, an odd last number beside a zero: `columns` pairs from pair k on; rows lie `span`
// pairs apart.
inline void round_rows(const MatmulArgs &a, int64_t token0, int64_t tokens, int64_t k, int64_t columns, int64_t span,
                       uint16_t *out) {
  const int64_t numbers = a.matrix->cols - 2 * k < 2 * columns ? a.matrix->cols - 2 * k : 2 * columns;
  for (int64_t t = 0; t < tokens; t++, out += 2 * span) {
    const float *x = (const float *)(a.x + (token0 + t) * a.x_stride) + 2 * k;
    int64_t i = 0;
    for (; i + 32 <= numbers; i += 32) round_pairs(x + i, out + i);
    for (; i < numbers; i++) out[i] = to_bf16(x[i]);
    if (numbers < 2 * columns) out[numbers] = 0;
  }
}

template <Format F>
void matmul(const MatmulArgs &a, int64_t panel0, int64_t panel1, int64_t token0, int64_t token1) {
  const int64_t cols = F == kDot ? (a.matrix->cols + 1) / 2 : a.matrix->cols, stride = a.matrix->panel_bytes;
  // Groups of panels that share the rounding of activations.
  constexpr int64_t kGroups = F == kDot ? 4 : 1;
  alignas(64) float sums[kGroups * kTokens * 2 * 16];  // more panels than 2 in a group only for a few tokens
  alignas(64) float expanded[F == kBF16 || F == kF16 ? 2 * kColumns * 16 : 1];
  alignas(64) uint16_t pairs[F == kDot ? kTokens * 2 * kColumns : 1];

  for (int64_t block = token0; block < token1; block += kTokens) {
    const int64_t tokens = token1 - block < kTokens ? token1 - block : kTokens;
    // Tiles of nearly equal size: `large` of them have one token more than the rest.
    const int64_t tiles = (tokens + kTile - 1) / kTile, small = tokens / tiles, large = tokens % tiles;
    const bool expanding = (F == kBF16 || F == kF16) && tokens >= kExpandFrom;
    const int64_t group = tiles == 1 ? panels_for((int)tokens) : panels_for(kTile);
    // Few tokens read whole rows: weights then come from memory in one stream. What kDot rounds must fit into `pairs`.
    const int64_t step = tiles > 1 ? kColumns : F == kDot ? kTokens * kColumns / tokens : cols;
    const int64_t span = step < cols ? step : cols;
    for (int64_t panel = panel0, panels; panel < panel1; panel += panels) {
      panels = panel1 - panel < kGroups * group ? panel1 - panel : kGroups * group;
      memset(sums, 0, sizeof(float) * tokens * panels * 16);
      for (int64_t k = 0; k < cols; k += step) {
        const int64_t columns = cols - k < step ? cols - k : step;
        if (F == kDot) round_rows(a, block, tokens, k, columns, span, pairs);
        for (int64_t p = 0, width; p < panels; p += width) {
          width = panels - p >= group ? group : 1;
          TileArgs args;
          args.w = (const uint8_t *)a.matrix->data + (panel + p) * stride + k * column_bytes(F);
          args.panel_stride = args.fetch_stride = stride;
          args.x_stride = F == kDot ? 4 * span : a.x_stride;
          args.columns = columns;
          // Every tile fetches its share of the next columns' weights, or of the next panels'.
          const uint8_t *next = args.w + columns * column_bytes(F) + (k + columns == cols ? (width - 1) * stride : 0);
          args.fetch_step = (column_bytes(F) + tiles - 1) / tiles;
          if (expanding) {
            expand<F>(args.w, stride, width, columns, expanded);
            args.w = (const uint8_t *)expanded;
            args.panel_stride = kColumns * 64;
          }
          for (int64_t t = 0, i = 0, n; i < tiles; t += n, i++) {
            n = i < large ? small + 1 : small;
            args.x = F == kDot ? (const uint8_t *)(pairs + t * 2 * span) : a.x + (block + t) * a.x_stride + k * 4;
            args.fetch = next + i * columns * args.fetch_step;
            const Tile run = expanding ? find_tile<kF32>(width, n, false) : find_tile<F>(width, n, tiles == 1);
            run(args, sums + (p * tokens + t * width) * 16);
          }
        }
      }
      for (int64_t p = 0, width; p < panels; p += width) {
        width = panels - p >= group ? group : 1;
        for (int64_t t = 0; t < tokens; t++)
          for (int64_t i = 0; i < width; i++)
            finish(a, panel + p + i, block + t, sums + (p * tokens + t * width + i) * 16);
      }
    }
  }
}

}  // namespace float_matmul

static void matmul_f32(const MatmulArgs &args, int64_t panel0, int64_t panel1, int64_t token0, int64_t token1) {
  float_matmul::matmul<float_matmul::kF32>(args, panel0, panel1, token0, token1);
}
static void matmul_bf16(const MatmulArgs &args, int64_t panel0, int64_t panel1, int64_t token0, int64_t token1) {
  constexpr auto kFormat = float_matmul::kHasDot ? float_matmul::kDot : float_matmul::kBF16;
  float_matmul::matmul<kFormat>(args, panel0, panel1, token0, token1);
}
static void matmul_f16(const MatmulArgs &args, int64_t panel0, int64_t panel1, int64_t token0, int64_t token1) {
  float_matmul::matmul<float_matmul::kF16>(args, panel0, panel1, token0, token1);
}

}  // namespace PLAIT_ISA_NAMESPACE
}  // namespace plait
