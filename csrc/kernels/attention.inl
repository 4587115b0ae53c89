// Attention over paged keys and values, and writing them.
//
// A query row is one head of one token. All rows that share a key/value head go through the same keys and values
// together: lanes are keys for the scores and value features for the weighted sums, so that neither needs a sum across
// lanes, and a tile of kTileRows rows by two vectors stays in registers. Keys go in chunks at absolute multiples of
// kAttendChunk: scores, softmax and weighted sum of one chunk make a partial, and partials are folded in ascending
// order. Every number of a row is one chain of operations in an order that neither the row's neighbours nor the cut of
// the work changes: a neighbour's key that the row does not see enters with weight 0, which leaves every bit as it was
// (but for the sign of a zero). Where such a key's value may have been infinite or NaN, rows are done again alone: keys
// that a row does not see may hold anything, and never reach its sums.
namespace plait {
namespace PLAIT_ISA_NAMESPACE {

constexpr int kTileRows = 5;

// ---------------------------------------------------------------------------------------------------------------
// Two numbers per lane, as the cache keeps them: words of 4 bytes hold pairs of 16-bit numbers; floats lie `gap` bytes
// apart. LANES: how many words exist, 0 = `lanes` of them.

template <int LANES>
PLAIT_INLINE vu load_words(const uint8_t *p, int lanes) {
  vu v{};
  memcpy(&v, p, 4 * (LANES ? LANES : lanes));
  return v;
}

struct Bf16Pairs {
  static constexpr int64_t size = 2;
  template <int LANES>
  static PLAIT_INLINE vf first(const uint8_t *p, int lanes) { return first_bf16(load_words<LANES>(p, lanes)); }
  template <int LANES>
  static PLAIT_INLINE vf second(const uint8_t *p, int64_t, int lanes) {
    return second_bf16(load_words<LANES>(p, lanes));
  }
};

struct F16Pairs {
  static constexpr int64_t size = 2;
  template <int LANES>
  static PLAIT_INLINE vf first(const uint8_t *p, int lanes) {
    const vu words = load_words<LANES>(p, lanes);
#if defined(__AVX512F__)
    return PLAIT_SHUFFLE(low(words), high(words), 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif defined(__F16C__) && defined(__AVX2__)
    return PLAIT_SHUFFLE(low(words), high(words), 0, 2, 4, 6, 8, 10, 12, 14);
#else
    return halves_to_floats(words & 0xffffu);
#endif
  }
  template <int LANES>
  static PLAIT_INLINE vf second(const uint8_t *p, int64_t, int lanes) {
    const vu words = load_words<LANES>(p, lanes);
#if defined(__AVX512F__)
    return PLAIT_SHUFFLE(low(words), high(words), 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__F16C__) && defined(__AVX2__)
    return PLAIT_SHUFFLE(low(words), high(words), 1, 3, 5, 7, 9, 11, 13, 15);
#else
    return halves_to_floats(words >> 16);
#endif
  }
#if defined(__AVX512F__)
  static PLAIT_INLINE vf low(vu words) { return (vf)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)words)); }
  static PLAIT_INLINE vf high(vu words) { return (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)words, 1)); }
#elif defined(__F16C__) && defined(__AVX2__)
  static PLAIT_INLINE vf low(vu words) { return (vf)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)words)); }
  static PLAIT_INLINE vf high(vu words) { return (vf)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)words, 1)); }
#endif
};

struct Floats {
  static constexpr int64_t size = 4;
  template <int LANES>
  static PLAIT_INLINE vf first(const uint8_t *p, int lanes) { return as_float(load_words<LANES>(p, lanes)); }
  template <int LANES>
  static PLAIT_INLINE vf second(const uint8_t *p, int64_t gap, int lanes) { return first<LANES>(p + gap, lanes); }
};

// ---------------------------------------------------------------------------------------------------------------
// Softmax

// x = e^x for x <= 0; below -87 the smallest normal number or so instead of 0. Relative error 1.5e-7, exactly 1 at 0.
// All N step by step together: one alone is a chain of so many steps that the CPU's window holds too few of them.
template <int N>
PLAIT_INLINE void exp_low(vf (&x)[N]) {
  // 1.5 * 2^23: adding it rounds to an integer; 127 makes the low bits the exponent.
  const vf low = splat(-87.0f), shift = splat(12582912.0f + 127.0f);
  vf n[N], p[N];
#define PLAIT_STEP(statement) \
  _Pragma("GCC unroll 8")     \
  for (int i = 0; i < N; i++) statement
  PLAIT_STEP(x[i] = max(low, x[i]));  // NaN passes
  PLAIT_STEP(n[i] = fma(x[i], splat(1.44269504f), shift));
  PLAIT_STEP(x[i] = fma(n[i] - shift, splat(-0.693145752f), x[i]));
  PLAIT_STEP(x[i] = fma(n[i] - shift, splat(-1.42860677e-6f), x[i]));
  PLAIT_STEP(p[i] = fma(splat(8.312520571e-3f), x[i], splat(4.189015552e-2f)));
  PLAIT_STEP(p[i] = fma(p[i], x[i], splat(1.666711420e-1f)));
  PLAIT_STEP(p[i] = fma(p[i], x[i], splat(4.999923110e-1f)));
  PLAIT_STEP(p[i] = fma(p[i], x[i], splat(1.0f)));
  PLAIT_STEP(p[i] = fma(p[i], x[i], splat(1.0f)));
  PLAIT_STEP(x[i] = p[i] * as_float(as_bits(n[i]) << 23));
#undef PLAIT_STEP
}

// limit * tanh(x / limit): a polynomial near 0, where the formula with e^x would cancel.
PLAIT_INLINE vf capped(vf x, vf limit, vf inverse) {
  const vf y = x * inverse, z = y * y, a = abs(y);
  vf p = splat(-5.684338976e-3f);
  p = fma(p, z, splat(2.061966620e-2f));
  p = fma(p, z, splat(-5.373336002e-2f));
  p = fma(p, z, splat(1.333135813e-1f));
  p = fma(p, z, splat(-3.333327770e-1f));
  const vf near = fma(p * z, y, y);
  const vf far = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
  const vf signed_far = as_float(as_bits(far) | (as_bits(y) & 0x80000000u));
  return limit * (a < splat(0.625f) ? near : signed_far);  // a NaN goes the far way and stays
}

// s[0 .. W) = `other` in the lanes [from, to).
PLAIT_INLINE void put_lanes(float *s, int64_t from, int64_t to, float other) {
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  const vi inside = (vi)(lane >= (int32_t)from) & (vi)(lane < (int32_t)to);
  store(s, inside ? splat(other) : load(s));
}

// Scores s[low .. high) of one row (indices into its chunk) become weights e^(s - highest). Weights in [from, to)
// outside [low, high) become 0, and others beside them may. Returns the highest score; *total is the sum of weights.
static __attribute__((noinline)) float soften(float *s, int64_t low, int64_t high, int64_t from, int64_t to,
                                              float soft_cap, float *total) {
  *total = 0;
  const vf zero{};
  if (low >= high) {
    for (int64_t i = from / W * W; i < to; i += W) store(s + i, zero);
    return -__builtin_inff();
  }
  const int64_t begin = low / W * W, last = (high - 1) / W * W;
  if (soft_cap > 0) {
    const vf limit = splat(soft_cap), inverse = splat(1 / soft_cap);
    for (int64_t i = begin; i <= last; i += W) store(s + i, capped(load(s + i), limit, inverse));
  }
  // Whole vectors: a vector's load would wait for single numbers that were just stored.
  const bool starts = low > begin, ends = high < last + W;
  if (starts) put_lanes(s + begin, 0, low - begin, -__builtin_inff());
  if (ends) put_lanes(s + last, high - last, W, -__builtin_inff());
  vf highest[4];
  for (int k = 0; k < 4; k++) highest[k] = splat(-__builtin_inff());
  int64_t i = begin;
  for (; i + 3 * W <= last; i += 4 * W)
    for (int k = 0; k < 4; k++) highest[k] = max(highest[k], load(s + i + k * W));
  for (; i <= last; i += W) highest[0] = max(highest[0], load(s + i));
  const float top = max_of(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
  const vf base = splat(top);
  vf sums{};
  for (i = begin; i + 3 * W <= last; i += 4 * W) {
    vf p[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) p[k] = load(s + i + k * W) - base;
    exp_low(p);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) store(s + i + k * W, p[k]);
    for (int k = 0; k < 4; k++) sums += p[k];
  }
  for (; i <= last; i += W) {
    vf p[1] = {load(s + i) - base};
    exp_low(p);
    store(s + i, p[0]);
    sums += p[0];
  }
  *total = sum(sums);
  if (starts) put_lanes(s + begin, 0, low - begin, 0);
  if (ends) put_lanes(s + last, high - last, W, 0);
  for (i = from / W * W; i < begin; i += W) store(s + i, zero);
  for (i = last + W; i < to; i += W) store(s + i, zero);
  return top;
}

// ---------------------------------------------------------------------------------------------------------------
// The two products: tiles of R rows by NV vectors, kept in registers

template <int R, int NV>
struct Tile {
  vf at[R][NV];

  // at[r] += x[r * step] * a
  PLAIT_INLINE void add(const float *x, int64_t step, const vf (&a)[NV]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf y = splat(x[r * step]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) at[r][v] = fma(y, a[v], at[r][v]);
    }
  }
};

// The first LANES numbers; 0: the first `lanes`.
template <int LANES>
PLAIT_INLINE void store_lanes(float *p, vf v, int lanes) {
  memcpy(p, &v, 4 * (LANES ? LANES : lanes));
}

// s[r][v][lane] = q_r . key: R rows, q_stride apart, by NV vectors of keys. One pair of the width lies `stride` bytes
// after the one before. ahead: the vectors of a later tile, which are fetched meanwhile; null where keys are in the
// cache.
template <class T, int R, int NV, int L>
static void score_tile(const float *q, int64_t q_stride, int64_t pairs, const uint8_t *const *keys,
                       const uint8_t *const *ahead, int64_t stride, int64_t gap, float *s) {
  const uint8_t *k[NV];
  int64_t distance[NV];
  Tile<R, NV> sums = {};
#pragma GCC unroll 8
  for (int v = 0; v < NV; v++) {
    k[v] = keys[v];
    distance[v] = ahead ? ahead[v] - keys[v] : 0;
  }
  for (int64_t pair = 0; pair < pairs; pair++) {
    if (ahead) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) __builtin_prefetch(k[v] + distance[v]);
    }
    // One half after the other: with both, registers would not suffice.
    vf numbers[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) numbers[v] = T::template first<L>(k[v], L);
    sums.add(q, q_stride, numbers);
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      numbers[v] = T::template second<L>(k[v], gap, L);
      k[v] += stride;
    }
    sums.add(q + 1, q_stride, numbers);
    q += 2;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) store_lanes<L>(s + r * kScoreStride + v * L, sums.at[r][v], L);
}

// Lanes [lanes - kept, lanes).
static __attribute__((noinline)) void store_end(float *p, vf v, int lanes, int kept) {
  float numbers[W];
  store(numbers, v);
  for (int i = lanes - kept; i < lanes; i++) p[i] = numbers[i];
}

// One layer's cache as one key/value head sees it.
struct Blocks {
  const int32_t *table;
  const uint8_t *keys, *values;  // of this head in block 0 of the pool
  int64_t block_stride, tokens;
  int64_t key_stride, key_gap;      // from one pair of the width to the next; within a pair (floats)
  int64_t value_stride, value_gap;  // from one pair of keys to the next; within a pair (floats)
};

// The values of keys [key0, key1); `ahead` keys (whole blocks) further on, up to the end, values are fetched meanwhile.
struct Range {
  int64_t key0, key1, ahead, end;
  int64_t block, ahead_blocks;  // block of key0, `ahead` in blocks: one division for all strips of features
};
PLAIT_INLINE Range range_of(const Blocks &blocks, int64_t key0, int64_t key1, int64_t ahead, int64_t end) {
  return {key0, key1, ahead, end, key0 / blocks.tokens, ahead / blocks.tokens};
}

// out[r][0 .. NV vectors) += sum over the range's keys of p[r][key] * value, in ascending order of keys. p points at
// key 0. LANES 0: one vector of `lanes` numbers. `kept` lanes, counted from the end, of the last vector are stored.
template <class T, int R, int NV, int LANES>
static void weigh_tile(const float *p, const Blocks &blocks, const Range &range, int64_t offset, int lanes, int kept,
                       float *out, int64_t out_stride) {
  const int64_t key0 = range.key0, key1 = range.key1;
  Tile<R, NV> sums;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++)
      sums.at[r][v] = LANES ? load(out + r * out_stride + v * W) : load_part(out + r * out_stride, lanes);
  const int64_t stride = blocks.value_stride, gap = blocks.value_gap;
  int64_t block = range.block, slot = key0 - block * blocks.tokens;
  for (int64_t key = key0; key < key1; block++, slot = 0) {
    int64_t count = blocks.tokens - slot;
    if (count > key1 - key) count = key1 - key;
    const uint8_t *values = blocks.values + blocks.table[block] * blocks.block_stride + slot / 2 * stride + offset;
    int64_t distance = 0;
    if (range.ahead && key + range.ahead < range.end) {
      const int64_t later = blocks.table[block + range.ahead_blocks] - blocks.table[block];
      distance = later * blocks.block_stride;
    }
    const float *weights = p + key;
    key += count;
    vf numbers[NV];
    const auto add_first = [&] {
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) numbers[v] = T::template first<LANES>(values + v * 4 * W, lanes);
      sums.add(weights, kScoreStride, numbers);
    };
    const auto add_second = [&] {
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) numbers[v] = T::template second<LANES>(values + v * 4 * W, gap, lanes);
      sums.add(weights + 1, kScoreStride, numbers);
    };
    if (slot & 1) {  // the pair's first key is not ours: it may hold anything
      weights--;
      add_second();
      values += stride, weights += 2, count--;
    }
    for (; count >= 2; count -= 2, values += stride, weights += 2) {
      if (distance) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) __builtin_prefetch(values + distance + v * 4 * W);
      }
      add_first();
      add_second();
    }
    if (count) add_first();  // nor is this pair's second
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      float *to = out + r * out_stride + v * W;
      if (LANES && (v < NV - 1 || kept == W)) {
        store(to, sums.at[r][v]);
      } else {
        store_end(to, sums.at[r][v], lanes, kept);
      }
    }
}

PLAIT_INLINE float lane_sum(vf v) {
  typedef float quad __attribute__((vector_size(16)));
  quad part[W / 4];
  memcpy(part, &v, sizeof v);
  for (int n = W / 8; n > 0; n /= 2)
    for (int i = 0; i < n; i++) part[i] += part[i + n];
  return (part[0][0] + part[0][2]) + (part[0][1] + part[0][3]);
}

// The same where values are the first numbers of the keys: lanes are keys, weights outside [key0, key1) up to the next
// multiples of L are 0. Two features, `keys` bytes into the block.
template <class T, int R, int L>
static void weigh_latent_tile(const float *p, const Blocks &blocks, int64_t key0, int64_t key1, int64_t pair,
                              float *out, int64_t out_stride) {
  vf first[R], second[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) first[r] = second[r] = vf{};
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  int64_t key = key0 / L * L, block = key / blocks.tokens, slot = key - block * blocks.tokens;
  for (; key < key1; block++, slot = 0) {
    const uint8_t *row = blocks.keys + blocks.table[block] * blocks.block_stride + pair * blocks.key_stride;
    for (; slot < blocks.tokens && key < key1; slot += L, key += L) {
      vf a = T::template first<L>(row + 4 * slot, L), b = T::template second<L>(row + 4 * slot, blocks.key_gap, L);
      if (key < key0 || key + L > key1) {
        const vi at = lane + (int32_t)(key - key0);
        const vu seen = (vu)(at >= 0) & (vu)(at < (int32_t)(key1 - key0));
        a = as_float(as_bits(a) & seen);
        b = as_float(as_bits(b) & seen);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const vf x = as_float(load_words<L>((const uint8_t *)(p + r * kScoreStride + key), L));
        first[r] = fma(x, a, first[r]);
        second[r] = fma(x, b, second[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    out[r * out_stride] = lane_sum(first[r]);
    out[r * out_stride + 1] = lane_sum(second[r]);
  }
}

// ---------------------------------------------------------------------------------------------------------------
// One chunk

// Rows of an item: row i is head i % group of token i / group.
struct Rows {
  int64_t first;  // position of token 0
  int64_t group, window;
  // Keys of [key0, key1) that row i sees: [low, high), empty where low >= high.
  PLAIT_INLINE int64_t low(int64_t i, int64_t key0) const {
    const int64_t oldest = window ? first + i / group - window + 1 : 0;
    return oldest > key0 ? oldest : key0;
  }
  PLAIT_INLINE int64_t high(int64_t i, int64_t key1) const {
    const int64_t end = first + i / group + 1;
    return end < key1 ? end : key1;
  }
};

#define PLAIT_FOR_ROWS(call) \
  switch (rows) {            \
    case 1: call(1); break;  \
    case 2: call(2); break;  \
    case 3: call(3); break;  \
    case 4: call(4); break;  \
    default: call(5);        \
  }

// Vectors in a tile of few rows: about 12 sums hide the latency of an addition, and registers for them are there.
template <int R>
struct Wide {
  static constexpr int vectors = R <= 2 || (R == 3 && W == 16) ? 4 : R == 3 ? 3 : 2;
};
PLAIT_INLINE int wide(int rows) { return rows <= 2 ? 4 : rows == 3 ? Wide<3>::vectors : 2; }

template <class T, int L>
static void score_strip(int rows, int vectors, const float *q, int64_t q_stride, int64_t pairs,
                        const uint8_t *const *keys, const uint8_t *const *ahead, int64_t stride, int64_t gap,
                        float *s) {
  if (vectors == 1) {
#define CALL(R) score_tile<T, R, 1, L>(q, q_stride, pairs, keys, ahead, stride, gap, s)
    PLAIT_FOR_ROWS(CALL)
#undef CALL
  } else if (vectors == 2) {
#define CALL(R) score_tile<T, R, 2, L>(q, q_stride, pairs, keys, ahead, stride, gap, s)
    PLAIT_FOR_ROWS(CALL)
#undef CALL
  } else {
#define CALL(R) score_tile<T, R, Wide<R>::vectors, L>(q, q_stride, pairs, keys, ahead, stride, gap, s)
    PLAIT_FOR_ROWS(CALL)
#undef CALL
  }
}

// Features [f, f + vectors * W) of the value, or fewer at its end.
template <class T>
static void weigh_strip(int rows, int vectors, const float *p, const Blocks &blocks, const Range &range, int64_t f,
                        int64_t width, float *out, int64_t out_stride) {
  if (width < W) {
    const int lanes = (int)width;
#define CALL(R) weigh_tile<T, R, 1, 0>(p, blocks, range, 0, lanes, lanes, out, out_stride)
    PLAIT_FOR_ROWS(CALL)
#undef CALL
  } else if (vectors == 1) {
    // The last vector starts early where the width is no multiple: lanes that others own are not stored.
    const int kept = width - f < W ? (int)(width - f) : W;
    f += kept - W;
#define CALL(R) weigh_tile<T, R, 1, W>(p, blocks, range, 4 * f, W, kept, out + f, out_stride)
    PLAIT_FOR_ROWS(CALL)
#undef CALL
  } else if (vectors == 2) {
#define CALL(R) weigh_tile<T, R, 2, W>(p, blocks, range, 4 * f, W, W, out + f, out_stride)
    PLAIT_FOR_ROWS(CALL)
#undef CALL
  } else {
#define CALL(R) weigh_tile<T, R, Wide<R>::vectors, W>(p, blocks, range, 4 * f, W, W, out + f, out_stride)
    PLAIT_FOR_ROWS(CALL)
#undef CALL
  }
}

template <class T, int L>
static void weigh_latent(int rows, const float *p, const Blocks &blocks, int64_t key0, int64_t key1, int64_t pair,
                         float *out, int64_t out_stride) {
#define CALL(R) weigh_latent_tile<T, R, L>(p, blocks, key0, key1, pair, out, out_stride)
  PLAIT_FOR_ROWS(CALL)
#undef CALL
}

static __attribute__((noinline)) bool has_nan(const float *x, int64_t n) {
  vi found{};
  int64_t i = 0;
  for (; i + W <= n; i += W) found |= (vi)(load(x + i) != load(x + i));
  if (i < n) found |= (vi)(load_part(x + i, (int)(n - i)) != load_part(x + i, (int)(n - i)));
  int32_t any = 0;
  for (int k = 0; k < W; k++) any |= found[k];
  return any != 0;
}

// The weighted sums of one row over the keys [key0, key1) that it sees.
template <class T, int L>
static __attribute__((noinline)) void weigh_alone(const float *p, const Blocks &blocks, bool latent, int64_t key0,
                                                  int64_t key1, int64_t width, float *out) {
  memset(out, 0, width * sizeof(float));
  if (key0 >= key1) return;
  if (latent) {
    for (int64_t pair = 0; pair < width / 2; pair++)
      weigh_latent<T, L>(1, p, blocks, key0, key1, pair, out + 2 * pair, 0);
    return;
  }
  const Range range = range_of(blocks, key0, key1, 0, 0);
  for (int64_t f = 0; f < width; f += W) weigh_strip<T>(1, 1, p, blocks, range, f, width, out, 0);
}

// Values are passed over once per strip of features: this many bytes of them stay near meanwhile, in the first cache
// for one tile of rows, whose values come from memory, in the second for many.
constexpr int64_t kSegmentBytes = 8192, kLongSegmentBytes = 65536;

// Partials of rows [row0, row0 + count) over [key0, key1), a chunk or its beginning. q: scaled, [rows][width].
template <class T, int L>
static void attend_chunk(const AttendArgs &args, const Blocks &blocks, const Rows &rows, int64_t row0, int64_t count,
                         int64_t key0, int64_t key1, const float *q, float *s, float *partial) {
  const PlaitCache &cache = args.cache;
  const int64_t width = value_width(cache), out_stride = kPartialHead + width, pairs = cache.key_width / 2;
  const bool latent = cache.value_width == 0;
  const int64_t chunk = key0 / kAttendChunk * kAttendChunk;
  const int64_t begin = rows.low(row0, key0), end = rows.high(row0 + count - 1, key1);
  // What each tile sees: rows divide by the group, which is slow.
  int64_t lows[kAttendRows / kTileRows + 1], highs[kAttendRows / kTileRows + 1];
  for (int64_t tile = 0, k = 0; tile < count; tile += kTileRows, k++) {
    const int64_t n = count - tile < kTileRows ? count - tile : kTileRows;
    lows[k] = rows.low(row0 + tile, key0);
    highs[k] = rows.high(row0 + tile + n - 1, key1);
  }
  // One tile alone waits for memory: what comes next is fetched early, and the tile may be wide.
  const bool alone = count <= kTileRows;
  const int vectors = alone ? wide((int)count) : 2;
  const auto strip_at = [&](int64_t key, const uint8_t **keys) {
    int strip = vectors;
    if (key + strip * L > chunk + kAttendChunk || key + L >= end) {
      strip = 1;
    } else if (key + 2 * L >= end) {
      strip = 2;
    }
    for (int v = 0; v < strip; v++) {
      const int64_t at = key + v * L < end ? key + v * L : key, block = at / blocks.tokens;
      keys[v] = blocks.keys + blocks.table[block] * blocks.block_stride + 4 * (at - block * blocks.tokens);
    }
    return strip;
  };
  const uint8_t *pointers[2][4];
  int strip = begin < end ? strip_at(begin / L * L, pointers[0]) : 0;
  for (int64_t key = begin / L * L, turn = 0; key < end; turn ^= 1) {
    const uint8_t **keys = pointers[turn], **later = pointers[turn ^ 1];
    const int64_t next = key + strip * L;
    const int next_strip = next < end ? strip_at(next, later) : 0;
    const uint8_t **ahead = alone && next_strip == strip ? later : nullptr;
    for (int64_t tile = 0; tile < count; tile += kTileRows) {
      const int64_t n = count - tile < kTileRows ? count - tile : kTileRows;
      const int64_t high = highs[tile / kTileRows];
      if (lows[tile / kTileRows] < next && high > key)
        score_strip<T, L>((int)n, high <= key + L ? 1 : strip, q + tile * cache.key_width, cache.key_width, pairs, keys,
                          ahead, blocks.key_stride, blocks.key_gap, s + tile * kScoreStride + (key - chunk));
    }
    key = next;
    strip = next_strip;
  }
  const int64_t bytes_per_key = width * T::size;
  int64_t segment = (alone ? kSegmentBytes : kLongSegmentBytes) / (bytes_per_key * blocks.tokens) * blocks.tokens;
  if (segment == 0) segment = blocks.tokens;
  if (alone && !latent) {
    const int64_t stop = begin + segment < end ? begin + segment : end;
    for (int64_t block = begin / blocks.tokens; block * blocks.tokens < stop; block++) {
      const uint8_t *values = blocks.values + blocks.table[block] * blocks.block_stride;
      for (int64_t i = 0; i < blocks.tokens * bytes_per_key; i += 64) __builtin_prefetch(values + i);
    }
  }

  for (int64_t tile = 0; tile < count; tile += kTileRows) {
    const int64_t n = count - tile < kTileRows ? count - tile : kTileRows;
    int64_t from = lows[tile / kTileRows], to = highs[tile / kTileRows];
    if (latent) from = from / L * L, to = (to + L - 1) / L * L;
    for (int64_t i = tile; i < tile + n; i++) {
      float *head = partial + i * out_stride;
      head[0] = soften(s + i * kScoreStride, rows.low(row0 + i, key0) - chunk, rows.high(row0 + i, key1) - chunk,
                       from - chunk, to - chunk, args.soft_cap, head + 1);
      memset(head + 2, 0, (kPartialHead - 2 + width) * sizeof(float));
    }
  }

  const float *p = s - chunk;  // weight of key 0, were it there
  for (int64_t pair = 0; latent && pair < width / 2; pair++)
    for (int64_t tile = 0; tile < count; tile += kTileRows) {
      const int64_t n = count - tile < kTileRows ? count - tile : kTileRows;
      const int64_t from = lows[tile / kTileRows], to = highs[tile / kTileRows];
      if (from < to)
        weigh_latent<T, L>((int)n, p + tile * kScoreStride, blocks, from, to, pair,
                           partial + tile * out_stride + kPartialHead + 2 * pair, out_stride);
    }
  for (int64_t key = begin; !latent && key < end;) {
    int64_t stop = (key / segment + 1) * segment;
    if (stop > end) stop = end;
    for (int64_t tile = 0; tile < count; tile += kTileRows) {
      const int64_t n = count - tile < kTileRows ? count - tile : kTileRows;
      const int64_t low = lows[tile / kTileRows], high = highs[tile / kTileRows];
      const int64_t from = low > key ? low : key, to = high < stop ? high : stop;
      if (from >= to) continue;
      const Range range = range_of(blocks, from, to, alone ? segment : 0, end);
      for (int64_t f = 0; f < width;) {
        const int strip_vectors = width - f >= vectors * W ? vectors : width - f >= 2 * W ? 2 : 1;
        weigh_strip<T>((int)n, strip_vectors, p + tile * kScoreStride, blocks, range, f, width,
                       partial + tile * out_stride + kPartialHead, out_stride);
        f += strip_vectors * W;
      }
    }
    key = stop;
  }
  // 0 times infinity is NaN: the neighbours' keys may have spoilt a row's sums.
  if (rows.low(row0, key0) == rows.low(row0 + count - 1, key0) && rows.high(row0, key1) == end) return;
  if (!has_nan(partial, count * out_stride)) return;
  for (int64_t i = 0; i < count; i++)
    weigh_alone<T, L>(p + i * kScoreStride, blocks, latent, rows.low(row0 + i, key0), rows.high(row0 + i, key1), width,
                      partial + i * out_stride + kPartialHead);
}

// ---------------------------------------------------------------------------------------------------------------
// Putting chunks together

PLAIT_INLINE float exp_one(float x) { return exp(splat(x))[0]; }

// state = state and partial. A partial without keys has sum 0 and leaves the state as it is.
static __attribute__((noinline)) void fold(float *state, const float *partial, int64_t width) {
  if (partial[1] == 0) return;
  if (state[1] == 0) {
    memcpy(state, partial, (kPartialHead + width) * sizeof(float));
    return;
  }
  float old_factor = 1, new_factor = 1;
  if (partial[0] > state[0]) {
    old_factor = exp_one(state[0] - partial[0]);
    state[0] = partial[0];
  } else {
    new_factor = exp_one(partial[0] - state[0]);
  }
  const float sums = state[1] * old_factor;
  state[1] = sums + partial[1] * new_factor;
  const vf f = splat(old_factor), g = splat(new_factor);
  float *to = state + kPartialHead;
  const float *from = partial + kPartialHead;
  int64_t i = 0;
  for (; i + W <= width; i += W) store(to + i, fma(load(from + i), g, load(to + i) * f));
  if (i < width) {
    const int n = (int)(width - i);
    store_part(to + i, fma(load_part(from + i, n), g, load_part(to + i, n) * f), n);
  }
}

// out = the state's sums over the sum of exponentials, with one more logit in it where there is a sink.
static __attribute__((noinline)) void finish(const float *state, const float *sink, int64_t width, float *out) {
  float factor = 1, total = state[1];
  if (sink) {
    if (*sink > state[0]) {
      factor = exp_one(state[0] - *sink);
      total = total * factor + 1;
    } else {
      total += exp_one(*sink - state[0]);
    }
  }
  const vf f = splat(factor / total);
  int64_t i = 0;
  for (; i + W <= width; i += W) store(out + i, load(state + kPartialHead + i) * f);
  if (i < width) {
    const int n = (int)(width - i);
    store_part(out + i, load_part(state + kPartialHead + i, n) * f, n);
  }
}

static void finish_row(const AttendArgs &args, int32_t kv_head, int64_t t0, int64_t row, const float *state) {
  const int64_t group = args.heads / args.cache.num_kv_heads, width = value_width(args.cache);
  const int64_t token = row / group, head = row - token * group;
  finish(state, args.sinks ? args.sinks + kv_head * group + head : nullptr, width,
         args.out + (t0 + token) * args.out_stride + head * width);
}

static void scale_row(const float *x, float factor, int64_t n, float *out) {
  const vf f = splat(factor);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i) * f);
  for (; i < n; i++) out[i] = x[i] * factor;
}

template <class T, int L>
static void attend_rows(const AttendArgs &args, int32_t kv_head, int64_t t0, int64_t t1, int64_t key0, int64_t key1,
                        float *partial, float *scratch) {
  const PlaitCache &cache = args.cache;
  const int64_t group = args.heads / cache.num_kv_heads, dk = cache.key_width, width = value_width(cache);
  const int64_t stride = kPartialHead + width, tokens = cache.block_tokens;
  const int64_t key_bytes = tokens * dk * T::size;
  Blocks blocks;
  blocks.table = args.table;
  blocks.keys = cache.base + kv_head * key_bytes;
  blocks.values = cache.base + cache.num_kv_heads * key_bytes + kv_head * tokens * cache.value_width * T::size;
  blocks.block_stride = cache.block_stride;
  blocks.tokens = tokens;
  blocks.key_gap = tokens * T::size;
  blocks.key_stride = 2 * blocks.key_gap;
  blocks.value_gap = cache.value_width * T::size;
  blocks.value_stride = 2 * blocks.value_gap;
  const Rows rows{args.first + t0, group, args.window};

  float *q = scratch, *s = q + kAttendRows * dk, *state = s + kAttendRows * kScoreStride;
  float *part = state + kAttendRows * stride;
  const int64_t all = (t1 - t0) * group;
  for (int64_t row0 = 0; row0 < all; row0 += kAttendRows) {
    const int64_t count = all - row0 < kAttendRows ? all - row0 : kAttendRows;
    for (int64_t i = 0; i < count; i++) {
      const int64_t token = (row0 + i) / group, head = row0 + i - token * group;
      scale_row(args.q + (t0 + token) * args.q_stride + head * dk, args.scale, dk, q + i * dk);
    }
    if (partial) {
      attend_chunk<T, L>(args, blocks, rows, row0, count, key0, key1, q, s, partial + row0 * stride);
      continue;
    }
    for (int64_t key = key0; key < key1; key += kAttendChunk) {
      const int64_t end = key + kAttendChunk < key1 ? key + kAttendChunk : key1;
      float *to = key == key0 ? state : part;
      attend_chunk<T, L>(args, blocks, rows, row0, count, key, end, q, s, to);
      if (to == part)
        for (int64_t i = 0; i < count; i++) fold(state + i * stride, part + i * stride, width);
    }
    for (int64_t i = 0; i < count; i++) finish_row(args, kv_head, t0, row0 + i, state + i * stride);
  }
}

template <class T>
static void attend_kind(const AttendArgs &args, int32_t kv_head, int64_t t0, int64_t t1, int64_t key0, int64_t key1,
                        float *partial, float *scratch) {
  if (args.cache.block_tokens % W) {  // vectors of 16, blocks of 8, 24, ... tokens: half a vector at a time
    attend_rows<T, (W > 8 ? 8 : W)>(args, kv_head, t0, t1, key0, key1, partial, scratch);
  } else {
    attend_rows<T, W>(args, kv_head, t0, t1, key0, key1, partial, scratch);
  }
}

static void attend(const AttendArgs &args, int32_t kv_head, int64_t t0, int64_t t1, int64_t key0, int64_t key1,
                   float *partial, float *scratch) {
  switch (args.cache.kv_type) {
    case PLAIT_KV_F32: attend_kind<Floats>(args, kv_head, t0, t1, key0, key1, partial, scratch); break;
    case PLAIT_KV_F16: attend_kind<F16Pairs>(args, kv_head, t0, t1, key0, key1, partial, scratch); break;
    default: attend_kind<Bf16Pairs>(args, kv_head, t0, t1, key0, key1, partial, scratch);
  }
}

static void attend_merge(const AttendArgs &args, int32_t kv_head, int64_t t0, int64_t t1, float *partials,
                         int64_t chunks, int64_t stride) {
  const int64_t width = value_width(args.cache), rows = (t1 - t0) * (args.heads / args.cache.num_kv_heads);
  for (int64_t row = 0; row < rows; row++) {
    float *state = partials + row * (kPartialHead + width);
    for (int64_t chunk = 1; chunk < chunks; chunk++) fold(state, state + chunk * stride, width);
    finish_row(args, kv_head, t0, row, state);
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Writing

// Numbers as the cache keeps them, W at a time.
PLAIT_INLINE void to_16_bits(bool half, const float *x, int n, uint16_t *out) {
  if (half) {
    for (int i = 0; i < n; i++) out[i] = to_half(x[i]);
  } else {
    for (int i = 0; i < n; i++) out[i] = to_bf16(x[i]);
  }
}

// Numbers [first, first + n) of all keys of a block (both even), of row `slot`.
static void write_keys(const PlaitCache &cache, uint8_t *base, int64_t first, int64_t n, int64_t slot, const float *k) {
  const int64_t tokens = cache.block_tokens;
  if (cache.kv_type == PLAIT_KV_F32) {
    float *keys = (float *)base + first * tokens;
    for (int64_t d = 0; d < n; d++) keys[d * tokens + slot] = k[d];
    return;
  }
  const bool half = cache.kv_type == PLAIT_KV_F16;
  uint16_t *keys = (uint16_t *)base + first * tokens;
  uint16_t out[64];
  for (int64_t d = 0; d < n; d += 64) {  // the width is even: pairs run through all heads
    const int count = n - d < 64 ? (int)(n - d) : 64;
    to_16_bits(half, k + d, count, out);
    for (int i = 0; i < count; i += 2) memcpy(keys + (d + i) * tokens + 2 * slot, out + i, 4);
  }
}

static void write_kv(const PlaitCache &cache, int64_t head0, int64_t head1, int64_t block, int64_t slot, const float *k,
                     const float *v) {
  const int64_t tokens = cache.block_tokens, dk = cache.key_width, dv = cache.value_width, heads = head1 - head0;
  uint8_t *base = cache.base + block * cache.block_stride;
  if (dv == 0 && v != nullptr) {
    write_keys(cache, base, 0, cache.latent_width, slot, k);
    write_keys(cache, base, cache.latent_width, dk - cache.latent_width, slot, v);
    return;
  }
  write_keys(cache, base, head0 * dk, heads * dk, slot, k);
  if (cache.kv_type == PLAIT_KV_F32) {
    float *values = (float *)base + (cache.num_kv_heads * dk + head0 * dv) * tokens;
    for (int64_t h = 0; h < heads && dv; h++) memcpy(values + (h * tokens + slot) * dv, v + h * dv, dv * sizeof(float));
    return;
  }
  // Another thread may write the other key of a pair at the same time: values are stored number by number.
  const bool half = cache.kv_type == PLAIT_KV_F16;
  uint16_t *values = (uint16_t *)base + (cache.num_kv_heads * dk + head0 * dv) * tokens;
  uint16_t out[64];
  for (int64_t h = 0; h < heads && dv; h++)
    for (int64_t f = 0; f < dv; f += 64) {
      const int n = dv - f < 64 ? (int)(dv - f) : 64;
      to_16_bits(half, v + h * dv + f, n, out);
      uint16_t *to = values + ((h * (tokens / 2) + slot / 2) * dv + f) * 2 + (slot & 1);
      for (int i = 0; i < n; i++) to[2 * i] = out[i];
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Reading back

template <class T, int LANES>
PLAIT_INLINE void read_pairs(const uint8_t *p, int64_t stride, int64_t gap, int lanes, int64_t pairs, float *out,
                             int64_t out_stride) {
  for (int64_t pair = 0; pair < pairs; pair++, p += stride, out += 2) {
    float first[W], second[W];
    store(first, T::template first<LANES>(p, lanes));
    store(second, T::template second<LANES>(p, gap, lanes));
    for (int i = 0; i < lanes; i++) {
      const float both[2] = {first[i], second[i]};
      memcpy(out + i * out_stride, both, sizeof both);
    }
  }
}

template <class T>
static void read_keys_of(const PlaitCache &cache, int64_t block, int64_t slot, int64_t count, float *out,
                         int64_t out_stride) {
  const int64_t gap = cache.block_tokens * T::size, pairs = cache.key_width / 2;
  const uint8_t *p = cache.base + block * cache.block_stride + 4 * slot;
  for (; count >= W; count -= W, p += 4 * W, out += W * out_stride)
    read_pairs<T, W>(p, 2 * gap, gap, W, pairs, out, out_stride);
  if (count > 0) read_pairs<T, 0>(p, 2 * gap, gap, (int)count, pairs, out, out_stride);
}

static void read_keys(const PlaitCache &cache, int64_t block, int64_t slot, int64_t count, float *out,
                      int64_t out_stride) {
  switch (cache.kv_type) {
    case PLAIT_KV_F32: return read_keys_of<Floats>(cache, block, slot, count, out, out_stride);
    case PLAIT_KV_F16: return read_keys_of<F16Pairs>(cache, block, slot, count, out, out_stride);
    default: return read_keys_of<Bf16Pairs>(cache, block, slot, count, out, out_stride);
  }
}

}  // namespace PLAIT_ISA_NAMESPACE
}  // namespace plait
