// Products of quantised activations (int8 records) with quantised matrices, the quantiser, and rows of packed matrices.
//
// One template serves all formats and instruction sets. Of a block of 32 columns a register holds W rows ("lanes") with
// 4 neighbouring columns each: sub-register j = 0 .. 7 are columns 4j .. 4j + 3. A format says how to make one from its
// bits and which scales its rows have. A token contributes the same 4 bytes to all lanes, so that products add up
// inside a lane and no sum across a register is ever needed.
//
// Every output is computed as: for blocks in ascending order, exact integer dot product D of the block (or half block),
// then acc = fma(D * s, d, acc) and, for formats with a minimum, acc = fma(m, S, acc); with s the token's scale, S its
// sum, d and m the row's scale and minimum. Nothing there depends on tiles, tokens or panels.
#include "layouts.h"

namespace plait {
namespace PLAIT_ISA_NAMESPACE {

constexpr int kHalves = 16 / W;  // registers that hold the 16 rows of a panel

typedef int16_t vs __attribute__((vector_size(W * 4)));
typedef uint8_t vbytes __attribute__((vector_size(W * 4)));

PLAIT_INLINE vu load_words(const uint8_t *p) { vu v; memcpy(&v, p, sizeof v); return v; }
PLAIT_INLINE void store_words(uint8_t *p, vu v) { memcpy(p, &v, sizeof v); }
PLAIT_INLINE float load_float(const uint8_t *p) { float f; memcpy(&f, p, 4); return f; }
PLAIT_INLINE uint32_t load_word(const uint8_t *p) { uint32_t u; memcpy(&u, p, 4); return u; }
PLAIT_INLINE vf load_halves(const uint8_t *p) { return load_half((const uint16_t *)p); }

// One rounding where the CPU can. Spelled out: with a * b + c the compiler may choose which of two products it fuses,
// and differently in every instance of a template.
PLAIT_INLINE vf mul_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

PLAIT_INLINE vf to_float(vi v) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps((__m256i)v);
#else
  return __builtin_convertvector(v, vf);
#endif
}

// W bytes as floats.
PLAIT_INLINE vf load_u8(const uint8_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = (float)p[i];
  return v;
#endif
}
PLAIT_INLINE vf load_i8(const uint8_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = (float)(int8_t)p[i];
  return v;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Formats
//
// kAdd: how many products of a pair (two columns) fit into 16 bits: with activations up to 127, a pair is at most
// 2 * 127 * (largest quant). kParts: scales per block of 32. kFixed: what is subtracted from the stored quant. kApart:
// from how many tokens on it pays to take a panel apart once for all tiles; 0 = never. kStreams: comes from memory.

#if defined(__AVX512VNNI__)
constexpr int kFrom = 0;
#else
constexpr int kFrom = 9;
#endif

enum Kind { kPlain, kOffset, kAffine };

PLAIT_INLINE vu nibbles(const uint8_t *p, int j, int lane) {
  const vu word = load_words(p + (j & 3) * 64 + lane * 4);
  return (j < 4 ? word : word >> 4) & 0x0f0f0f0fu;
}
// The fifth bits of sub-register j, in place.
PLAIT_INLINE vu fifth(const uint8_t *p, int j, int lane) {
  const vu word = load_words(p + lane * 4);
  return (j <= 4 ? word << (4 - j) : word >> (j - 4)) & 0x10101010u;
}
PLAIT_INLINE vu fifth_sixth(const uint8_t *p, int j, int lane) {
  const vu word = load_words(p + j / 4 * 64 + lane * 4);
  return (j % 4 <= 2 ? word << (4 - 2 * (j % 4)) : word >> 2) & 0x30303030u;
}

struct Q4_0 {
  static constexpr int kLayout = PLAIT_LAYOUT_Q4_0, kBlocks = 1, kAdd = 8, kParts = 1, kFixed = 8, kApart = 0;
  static constexpr bool kStreams = true;
  static constexpr Kind kKind = kOffset;
  static PLAIT_INLINE vu quants(const uint8_t *unit, int, int j, int lane) { return nibbles(unit + 32, j, lane); }
  static PLAIT_INLINE vf scale(const uint8_t *unit, int, int, int lane) { return load_halves(unit + lane * 2); }
  static PLAIT_INLINE vf min(const uint8_t *, int, int) { return vf{}; }
};
struct Q4_1 {
  static constexpr int kLayout = PLAIT_LAYOUT_Q4_1, kBlocks = 1, kAdd = 8, kParts = 1, kFixed = 0, kApart = 0;
  static constexpr bool kStreams = true;
  static constexpr Kind kKind = kAffine;
  static PLAIT_INLINE vu quants(const uint8_t *unit, int, int j, int lane) { return nibbles(unit + 64, j, lane); }
  static PLAIT_INLINE vf scale(const uint8_t *unit, int, int, int lane) { return load_halves(unit + lane * 2); }
  static PLAIT_INLINE vf min(const uint8_t *unit, int, int lane) { return load_halves(unit + 32 + lane * 2); }
};
struct Q5_0 {
  static constexpr int kLayout = PLAIT_LAYOUT_Q5_0, kBlocks = 1, kAdd = 4, kParts = 1, kFixed = 16, kApart = kFrom;
  static constexpr bool kStreams = true;
  static constexpr Kind kKind = kOffset;
  static PLAIT_INLINE vu quants(const uint8_t *unit, int, int j, int lane) {
    return nibbles(unit + 96, j, lane) | fifth(unit + 32, j, lane);
  }
  static PLAIT_INLINE vf scale(const uint8_t *unit, int, int, int lane) { return load_halves(unit + lane * 2); }
  static PLAIT_INLINE vf min(const uint8_t *, int, int) { return vf{}; }
};
struct Q5_1 {
  static constexpr int kLayout = PLAIT_LAYOUT_Q5_1, kBlocks = 1, kAdd = 4, kParts = 1, kFixed = 0, kApart = kFrom;
  static constexpr bool kStreams = true;
  static constexpr Kind kKind = kAffine;
  static PLAIT_INLINE vu quants(const uint8_t *unit, int, int j, int lane) {
    return nibbles(unit + 128, j, lane) | fifth(unit + 64, j, lane);
  }
  static PLAIT_INLINE vf scale(const uint8_t *unit, int, int, int lane) { return load_halves(unit + lane * 2); }
  static PLAIT_INLINE vf min(const uint8_t *unit, int, int lane) { return load_halves(unit + 32 + lane * 2); }
};
struct Q8_0 {
  static constexpr int kLayout = PLAIT_LAYOUT_Q8_0, kBlocks = 1, kAdd = 1, kParts = 1, kFixed = 0, kApart = 0;
  static constexpr bool kStreams = true;
  static constexpr Kind kKind = kPlain;
  static PLAIT_INLINE vu quants(const uint8_t *unit, int, int j, int lane) {
    return load_words(unit + 32 + j * 64 + lane * 4);
  }
  static PLAIT_INLINE vf scale(const uint8_t *unit, int, int, int lane) { return load_halves(unit + lane * 2); }
  static PLAIT_INLINE vf min(const uint8_t *, int, int) { return vf{}; }
};
// d and dmin have 11 bits, the scales 6: their products are exact.
struct Q4_K {
  static constexpr int kLayout = PLAIT_LAYOUT_Q4_K, kBlocks = 8, kAdd = 8, kParts = 1, kFixed = 0, kApart = kFrom;
  static constexpr bool kStreams = true;
  static constexpr Kind kKind = kAffine;
  static PLAIT_INLINE vu quants(const uint8_t *unit, int b, int j, int lane) {
    return nibbles(unit + 320 + b * 256, j, lane);
  }
  static PLAIT_INLINE vf scale(const uint8_t *unit, int b, int, int lane) {
    return load_halves(unit + lane * 2) * load_u8(unit + 64 + b * 16 + lane);
  }
  static PLAIT_INLINE vf min(const uint8_t *unit, int b, int lane) {
    return -load_halves(unit + 32 + lane * 2) * load_u8(unit + 192 + b * 16 + lane);
  }
};
struct Q5_K {
  static constexpr int kLayout = PLAIT_LAYOUT_Q5_K, kBlocks = 8, kAdd = 4, kParts = 1, kFixed = 0, kApart = kFrom;
  static constexpr bool kStreams = true;
  static constexpr Kind kKind = kAffine;
  static PLAIT_INLINE vu quants(const uint8_t *unit, int b, int j, int lane) {
    return nibbles(unit + 384 + b * 320, j, lane) | fifth(unit + 320 + b * 320, j, lane);
  }
  static PLAIT_INLINE vf scale(const uint8_t *unit, int b, int part, int lane) {
    return Q4_K::scale(unit, b, part, lane);
  }
  static PLAIT_INLINE vf min(const uint8_t *unit, int b, int lane) { return Q4_K::min(unit, b, lane); }
};
struct Q6_K {
  static constexpr int kLayout = PLAIT_LAYOUT_Q6_K, kBlocks = 8, kAdd = 2, kParts = 2, kFixed = 32, kApart = kFrom;
  static constexpr bool kStreams = true;
  static constexpr Kind kKind = kOffset;
  static PLAIT_INLINE vu quants(const uint8_t *unit, int b, int j, int lane) {
    return nibbles(unit + 416 + b * 384, j, lane) | fifth_sixth(unit + 288 + b * 384, j, lane);
  }
  static PLAIT_INLINE vf scale(const uint8_t *unit, int b, int part, int lane) {
    return load_halves(unit + lane * 2) * load_i8(unit + 32 + (2 * b + part) * 16 + lane);
  }
  static PLAIT_INLINE vf min(const uint8_t *, int, int) { return vf{}; }
};

// A block of F whose bits have been taken apart: 8 sub-registers of 16 lanes, then scales, then minima.
template <class F>
struct Unpacked {
  static constexpr int kBlocks = 1, kAdd = F::kAdd, kParts = F::kParts, kFixed = F::kFixed;
  static constexpr bool kStreams = false;
  static constexpr Kind kKind = F::kKind;
  static constexpr int kBytes = 512 + 64 * (F::kParts + (F::kKind == kAffine));
  static PLAIT_INLINE vu quants(const uint8_t *unit, int, int j, int lane) {
    return load_words(unit + j * 64 + lane * 4);
  }
  static PLAIT_INLINE vf scale(const uint8_t *unit, int, int part, int lane) {
    return as_float(load_words(unit + 512 + part * 64 + lane * 4));
  }
  static PLAIT_INLINE vf min(const uint8_t *unit, int, int lane) {
    if (F::kKind != kAffine) return vf{};  // there are none to read
    return as_float(load_words(unit + 512 + F::kParts * 64 + lane * 4));
  }
};
template <class F>
struct UnitBytes { static constexpr int value = kLayoutUnits[F::kLayout].bytes; };
template <class F>
struct UnitBytes<Unpacked<F>> { static constexpr int value = Unpacked<F>::kBytes; };

// ---------------------------------------------------------------------------------------------------------------------
// Dot products of 4 columns in all lanes

#if defined(__AVX512VNNI__)

struct Word { vu bytes; };
struct Weights { vu bytes; };
struct Sum { vi total; };
PLAIT_INLINE Word word(const uint8_t *x) { return {vu{} + load_word(x)}; }
// Signed weights become unsigned ones, 128 too large: the sum starts at -128 times the sum of the activations.
template <class F>
PLAIT_INLINE Weights weights(vu quants) { return {F::kKind == kPlain ? quants ^ 0x80808080u : quants}; }
template <class F>
PLAIT_INLINE void add_product(Sum &sum, int, const Weights &w, const Word &a) {
  sum.total = (vi)_mm512_dpbusd_epi32((__m512i)sum.total, (__m512i)w.bytes, (__m512i)a.bytes);
}
PLAIT_INLINE Sum start(int32_t correction) { return {vi{} + correction}; }
constexpr bool kNeedsCorrection = true;

#else

struct Sum { vi total; vs run; };

// Keeps an addition where it stands. Without it the compiler collects all products of a block before it adds the first
// two and has to park them in memory (a third of the speed).
#if defined(PLAIT_PIN)  // a test that emulates instructions
#elif defined(__x86_64__)
#define PLAIT_PIN(v) asm volatile("" : "+v"(v))
#elif defined(__aarch64__)
#define PLAIT_PIN(v) asm volatile("" : "+w"(v))
#else
#define PLAIT_PIN(v)
#endif


#if defined(__AVX2__)

struct Word { vu bytes; };
struct Weights { vu bytes; };
PLAIT_INLINE Word word(const uint8_t *x) { return {vu{} + load_word(x)}; }
template <class F>
PLAIT_INLINE Weights weights(vu quants) { return {quants}; }
template <class F>
PLAIT_INLINE vs pair_products(const Weights &w, const Word &a) {
#if defined(__AVX512F__)
  if (F::kKind == kPlain) {
    const __m512i bytes = (__m512i)w.bytes, x = (__m512i)a.bytes;
    const __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(bytes), _mm512_setzero_si512(), x);
    return (vs)_mm512_maddubs_epi16(_mm512_abs_epi8(bytes), turned);
  }
  return (vs)_mm512_maddubs_epi16((__m512i)w.bytes, (__m512i)a.bytes);
#else
  // The instruction multiplies unsigned by signed numbers: the weight's sign moves to the activation.
  if (F::kKind == kPlain)
    return (vs)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w.bytes),
                                    _mm256_sign_epi8((__m256i)a.bytes, (__m256i)w.bytes));
  return (vs)_mm256_maddubs_epi16((__m256i)w.bytes, (__m256i)a.bytes);
#endif
}
PLAIT_INLINE vi add_pairs(vs v) {
#if defined(__AVX512F__)
  return (vi)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi16(1));
#else
  return (vi)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1));
#endif
}

#else

// Even and odd columns in 16-bit numbers of their own.
struct Word { vs even, odd; };
struct Weights { vs even, odd; };
PLAIT_INLINE Word word(const uint8_t *x) {
  const vs all = (vs)(vu{} + load_word(x));
  return {(all << 8) >> 8, all >> 8};
}
template <class F>
PLAIT_INLINE Weights weights(vu quants) {
  if (F::kKind == kPlain) return {((vs)quants << 8) >> 8, (vs)quants >> 8};
  return {(vs)(quants & 0x00ff00ffu), (vs)(quants >> 8 & 0x00ff00ffu)};
}
template <class F>
PLAIT_INLINE vs pair_products(const Weights &w, const Word &a) { return w.even * a.even + w.odd * a.odd; }
PLAIT_INLINE vi add_pairs(vs v) { return (((vi)v << 16) >> 16) + ((vi)v >> 16); }

#endif

// Products run up in 16 bits as long as they are sure to fit.
template <class F>
PLAIT_INLINE void add_product(Sum &sum, int j, const Weights &w, const Word &a) {
  const vs product = pair_products<F>(w, a);
  sum.run = j % F::kAdd == 0 ? product : sum.run + product;
  PLAIT_PIN(sum.run);
  if (j % F::kAdd == F::kAdd - 1) sum.total = j < F::kAdd ? add_pairs(sum.run) : sum.total + add_pairs(sum.run);
}
PLAIT_INLINE Sum start(int32_t) { return {vi{}, vs{}}; }
constexpr bool kNeedsCorrection = false;

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

#if defined(__AVX512F__)
constexpr int kTile = 12;
#elif defined(__AVX2__)
constexpr int kTile = 4;
#else
constexpr int kTile = 2;
#endif

// What a token adds to the dot products of a part of a block: the sum of its activations, times the offset for formats
// that have a fixed one. `pair`: the record's two sums of the block.
template <class F>
PLAIT_INLINE float summand(const uint8_t *pair, int part) {
  const float total = F::kParts == 2 ? load_float(pair + part * 4) : load_float(pair) + load_float(pair + 4);
  return F::kKind == kOffset ? (float)-F::kFixed * total : total;
}
// Made once for all panels where an instruction takes a number out of memory for all lanes: out of a register it would
// take a port that multiplies.
#if defined(__AVX512F__)
constexpr bool kPrepares = true;
#else
constexpr bool kPrepares = false;
#endif
template <class F>
static void summands(const uint8_t *sums, int64_t blocks, float *out) {
  for (int64_t b = 0; b < blocks; b++, sums += 8)
    for (int part = 0; part < F::kParts; part++) *out++ = summand<F>(sums, part);
}

// Where a tile of tokens meets a stream of blocks.
struct TileArgs {
  const uint8_t *stream;
  int64_t units;
  const uint8_t *x;           // first token's quants of the first block
  const uint8_t *scales;      // its scale of the first block
  const uint8_t *sums;        // its two sums of the first block, or what summands() made of them
  const int32_t *correction;  // its correction of the first block, or null
  int64_t x_stride, sums_stride, correction_stride;
  float *state;  // [tokens][16]: sums of the blocks before (unless first) and after
  bool first;
};

// How far ahead of its use the stream of weights is fetched.
constexpr int kAheadBytes = 2048;

template <class F, int T>
static __attribute__((noinline)) void tile(const TileArgs &args) {
  constexpr int unit_bytes = UnitBytes<F>::value, block_bytes = unit_bytes / F::kBlocks, subs = 8 / F::kParts;
  constexpr bool corrects = kNeedsCorrection && F::kKind == kPlain;
  const uint8_t *unit = args.stream, *x = args.x, *scales = args.scales, *sums = args.sums;
  const int64_t stride = args.x_stride, sums_stride = args.sums_stride;
  const int32_t *correction = args.correction;
  vf acc[T][kHalves];
#pragma GCC unroll 16
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int h = 0; h < kHalves; h++) acc[t][h] = args.first ? vf{} : load(args.state + t * 16 + h * W);
  for (int64_t u = 0; u < args.units; u++, unit += unit_bytes) {
    for (int b = 0; b < F::kBlocks; b++) {
      if (F::kStreams)
        for (int line = 0; line < block_bytes; line += 64)
          __builtin_prefetch(unit + b * block_bytes + kAheadBytes + line);
#pragma GCC unroll 2
      for (int part = 0; part < F::kParts; part++) {
        Sum sum[T][kHalves];
#pragma GCC unroll 16
        for (int t = 0; t < T; t++)
#pragma GCC unroll 4
          for (int h = 0; h < kHalves; h++) sum[t][h] = start(corrects ? correction[t * args.correction_stride] : 0);
#pragma GCC unroll 8
        for (int j = 0; j < subs; j++) {
          Weights w[kHalves];
#pragma GCC unroll 4
          for (int h = 0; h < kHalves; h++) w[h] = weights<F>(F::quants(unit, b, part * subs + j, h * W));
#pragma GCC unroll 16
          for (int t = 0; t < T; t++) {
            const Word a = word(x + t * stride + (part * subs + j) * 4);
#pragma GCC unroll 4
            for (int h = 0; h < kHalves; h++) add_product<F>(sum[t][h], j, w[h], a);
          }
        }
        vf d[kHalves], m[kHalves];
#pragma GCC unroll 4
        for (int h = 0; h < kHalves; h++) {
          d[h] = F::scale(unit, b, part, h * W);
          m[h] = F::min(unit, b, h * W);
        }
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
          const vf s = splat(load_float(scales + t * stride));
          const uint8_t *at = sums + t * sums_stride;
          const vf S = splat(kPrepares ? load_float(at + part * 4) : summand<F>(at, part));
#pragma GCC unroll 4
          for (int h = 0; h < kHalves; h++) {
            const vf dot = to_float(sum[t][h].total);
            const vf scaled = F::kKind == kOffset ? mul_add(dot, s, S) : dot * s;
            acc[t][h] = mul_add(scaled, d[h], acc[t][h]);
            if (F::kKind == kAffine) acc[t][h] = mul_add(m[h], S, acc[t][h]);
          }
        }
      }
      x += 32;
      scales += 4;
      sums += kPrepares ? F::kParts * 4 : 8;
      if (corrects) correction++;
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int h = 0; h < kHalves; h++) store(args.state + t * 16 + h * W, acc[t][h]);
}

// Tiles of T tokens as long as there are as many.
template <class F, int T>
PLAIT_INLINE void tiles(TileArgs &args, int64_t &tokens) {
  for (; tokens >= T; tokens -= T) {
    tile<F, T>(args);
    args.x += T * args.x_stride;
    args.scales += T * args.x_stride;
    args.sums += T * args.sums_stride;
    if (args.correction != nullptr) args.correction += T * args.correction_stride;
    args.state += T * 16;
  }
}

template <class F>
static void all_tiles(TileArgs args, int64_t tokens) {
  tiles<F, kTile>(args, tokens);
  if constexpr (kTile > 8) tiles<F, 8>(args, tokens);
  if constexpr (kTile > 4) tiles<F, 4>(args, tokens);
  if constexpr (kTile > 3) tiles<F, 3>(args, tokens);
  tiles<F, 2>(args, tokens);
  tiles<F, 1>(args, tokens);
}

// Takes blocks apart for many tiles of tokens to read.
template <class F>
static __attribute__((noinline)) void unpack_blocks(const uint8_t *stream, int64_t units, uint8_t *out) {
  for (int64_t u = 0; u < units; u++, stream += UnitBytes<F>::value)
    for (int b = 0; b < F::kBlocks; b++, out += Unpacked<F>::kBytes)
#pragma GCC unroll 4
      for (int lane = 0; lane < 16; lane += W) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) store_words(out + j * 64 + lane * 4, F::quants(stream, b, j, lane));
        for (int part = 0; part < F::kParts; part++)
          store_words(out + 512 + part * 64 + lane * 4, as_bits(F::scale(stream, b, part, lane)));
        if (F::kKind == kAffine)
          store_words(out + 512 + F::kParts * 64 + lane * 4, as_bits(F::min(stream, b, lane)));
      }
}

// The finished sums of one token and panel: bias and the number to add come last.
PLAIT_INLINE void finish(const MatmulArgs &args, int64_t panel, int64_t token, const float *state) {
  const int64_t row = panel * 16, left = args.matrix->rows - row;
  float *out = args.out + token * args.out_stride + row;
  const float *bias = args.bias != nullptr ? args.bias + row : nullptr;
  const float *add = args.add != nullptr ? args.add + token * args.add_stride + row : nullptr;
  if (left >= 16) {
    for (int h = 0; h < 16; h += W) {
      vf v = load(state + h);
      if (bias != nullptr) v = v + load(bias + h);
      if (add != nullptr) v = v + load(add + h);
      store(out + h, v);
    }
  } else {
    for (int r = 0; r < left; r++) {
      float v = state[r];
      if (bias != nullptr) v += bias[r];
      if (add != nullptr) v += add[r];
      out[r] = v;
    }
  }
}

// -128 times the sum of each block's activations.
static void corrections(const uint8_t *x, int64_t blocks, int32_t *out) {
  for (int64_t b = 0; b < blocks; b++, x += 32) {
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) sum += (int8_t)x[i];
    out[b] = -128 * sum;
  }
}

template <class F>
static void matmul_quantised(const MatmulArgs &args, int64_t panel0, int64_t panel1, int64_t token0, int64_t token1) {
  // As many tokens as stay in the first cache beside a panel; one panel's blocks in pieces that do too.
  constexpr int kTokens = 24, kChunk = 16, kCorrections = kMaxQuantisedCols / 32;
  constexpr bool corrects = kNeedsCorrection && F::kKind == kPlain;
  const PlaitMatrix &matrix = *args.matrix;
  const int64_t blocks = matrix.cols / 32;
  constexpr bool prepares = kPrepares && F::kKind != kPlain;
  const int64_t fitting = corrects || prepares ? kCorrections / blocks : kTokens;
  const int64_t most = fitting < kTokens ? fitting : kTokens;
  alignas(64) float state[kTokens * 16];
  alignas(64) uint8_t apart[kChunk * Unpacked<F>::kBytes];
  int32_t correction[corrects ? kCorrections : 1];
  float prepared[prepares ? kCorrections * F::kParts : 1];
  for (int64_t first = token0; first < token1; first += most) {
    const int64_t tokens = token1 - first < most ? token1 - first : most;
    const uint8_t *x = args.x + first * args.x_stride;
    if (corrects)
      for (int64_t t = 0; t < tokens; t++) corrections(x + t * args.x_stride, blocks, correction + t * blocks);
    if (prepares)
      for (int64_t t = 0; t < tokens; t++)
        summands<F>(x + t * args.x_stride + matrix.cols + blocks * 4, blocks, prepared + t * blocks * F::kParts);
    const uint8_t *sums = prepares ? (const uint8_t *)prepared : x + matrix.cols + blocks * 4;
    const int64_t sums_stride = prepares ? blocks * F::kParts * 4 : args.x_stride;
    for (int64_t panel = panel0; panel < panel1; panel++) {
      const uint8_t *stream = (const uint8_t *)matrix.data + panel * matrix.panel_bytes;
      TileArgs t = {stream, blocks / F::kBlocks, x, x + matrix.cols, sums, corrects ? correction : nullptr,
                    args.x_stride, sums_stride, blocks, state, true};
      if (F::kApart == 0 || tokens < F::kApart) {
        all_tiles<F>(t, tokens);
      } else if constexpr (F::kApart != 0) {
        for (int64_t block = 0; block < blocks; block += kChunk) {
          t.units = blocks - block < kChunk ? blocks - block : kChunk;
          unpack_blocks<F>(stream + block / F::kBlocks * UnitBytes<F>::value, t.units / F::kBlocks, apart);
          t.stream = apart;
          t.x = x + block * 32;
          t.scales = x + matrix.cols + block * 4;
          t.sums = sums + block * (prepares ? F::kParts * 4 : 8);
          t.first = block == 0;
          all_tiles<Unpacked<F>>(t, tokens);
        }
      }
      for (int64_t i = 0; i < tokens; i++) finish(args, panel, first + i, state + i * 16);
    }
  }
}

static void matmul_q4_0(const MatmulArgs &args, int64_t p0, int64_t p1, int64_t t0, int64_t t1) {
  matmul_quantised<Q4_0>(args, p0, p1, t0, t1);
}
static void matmul_q4_1(const MatmulArgs &args, int64_t p0, int64_t p1, int64_t t0, int64_t t1) {
  matmul_quantised<Q4_1>(args, p0, p1, t0, t1);
}
static void matmul_q5_0(const MatmulArgs &args, int64_t p0, int64_t p1, int64_t t0, int64_t t1) {
  matmul_quantised<Q5_0>(args, p0, p1, t0, t1);
}
static void matmul_q5_1(const MatmulArgs &args, int64_t p0, int64_t p1, int64_t t0, int64_t t1) {
  matmul_quantised<Q5_1>(args, p0, p1, t0, t1);
}
static void matmul_q8_0(const MatmulArgs &args, int64_t p0, int64_t p1, int64_t t0, int64_t t1) {
  matmul_quantised<Q8_0>(args, p0, p1, t0, t1);
}
static void matmul_q4_k(const MatmulArgs &args, int64_t p0, int64_t p1, int64_t t0, int64_t t1) {
  matmul_quantised<Q4_K>(args, p0, p1, t0, t1);
}
static void matmul_q5_k(const MatmulArgs &args, int64_t p0, int64_t p1, int64_t t0, int64_t t1) {
  matmul_quantised<Q5_K>(args, p0, p1, t0, t1);
}
static void matmul_q6_k(const MatmulArgs &args, int64_t p0, int64_t p1, int64_t t0, int64_t t1) {
  matmul_quantised<Q6_K>(args, p0, p1, t0, t1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows of packed matrices

template <class F>
static void unpack_quantised(const uint8_t *panel, int lane, int64_t cols, float *out) {
  const int first = lane / W * W, r = lane % W;
  for (int64_t c = 0; c < cols; c += 32 * F::kBlocks, panel += UnitBytes<F>::value)
    for (int b = 0; b < F::kBlocks; b++)
      for (int j = 0; j < 8; j++) {
        const float d = F::scale(panel, b, j * F::kParts / 8, first)[r], m = F::min(panel, b, first)[r];
        const uint32_t quants = F::quants(panel, b, j, first)[r];
        for (int i = 0; i < 4; i++) {
          const uint8_t q = (uint8_t)(quants >> 8 * i);
          // d and q are short: the product is exact but for Q6_K, where nothing is added to it.
          const float value = d * (F::kKind == kPlain ? (float)(int8_t)q : (float)(q - F::kFixed));
          *out++ = F::kKind == kAffine ? value + m : value;
        }
      }
}

static void unpack_row(const PlaitMatrix &matrix, int64_t row, float *out) {
  const uint8_t *panel = (const uint8_t *)matrix.data + row / 16 * matrix.panel_bytes;
  const int lane = (int)(row % 16);
  const int64_t cols = matrix.cols;
  switch (matrix.layout) {
    case PLAIT_LAYOUT_F32:
      for (int64_t c = 0; c < cols; c++) out[c] = load_float(panel + (c * 16 + lane) * 4);
      break;
    case PLAIT_LAYOUT_BF16:
      for (int64_t c = 0; c < cols; c++) out[c] = from_bf16(((const uint16_t *)panel)[(c / 2 * 16 + lane) * 2 + c % 2]);
      break;
    case PLAIT_LAYOUT_F16:
      for (int64_t c = 0; c < cols; c++) out[c] = from_half(((const uint16_t *)panel)[c * 16 + lane]);
      break;
    case PLAIT_LAYOUT_Q4_0: unpack_quantised<Q4_0>(panel, lane, cols, out); break;
    case PLAIT_LAYOUT_Q4_1: unpack_quantised<Q4_1>(panel, lane, cols, out); break;
    case PLAIT_LAYOUT_Q5_0: unpack_quantised<Q5_0>(panel, lane, cols, out); break;
    case PLAIT_LAYOUT_Q5_1: unpack_quantised<Q5_1>(panel, lane, cols, out); break;
    case PLAIT_LAYOUT_Q8_0: unpack_quantised<Q8_0>(panel, lane, cols, out); break;
    case PLAIT_LAYOUT_Q4_K: unpack_quantised<Q4_K>(panel, lane, cols, out); break;
    case PLAIT_LAYOUT_Q5_K: unpack_quantised<Q5_K>(panel, lane, cols, out); break;
    case PLAIT_LAYOUT_Q6_K: unpack_quantised<Q6_K>(panel, lane, cols, out); break;
    case PLAIT_LAYOUT_VECTOR: memcpy(out, matrix.data, (size_t)cols * 4); break;
    default: break;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The quantiser

// The largest of 32 numbers' bits without their signs: these order like |x|, and those of infinities and NaNs come after
// all numbers.
PLAIT_INLINE int32_t highest_bits(const float *x) {
  vi top{};
  for (int i = 0; i < 32; i += W) {
    const vi bits = (vi)(as_bits(load(x + i)) & 0x7fffffffu);
    top = bits > top ? bits : top;
  }
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)top);
#elif defined(__AVX2__)
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)top), _mm256_extracti128_si256((__m256i)top, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtsi128_si32(four);
#else
  int32_t highest = 0;
  for (int i = 0; i < W; i++) highest = top[i] > highest ? top[i] : highest;
  return highest;
#endif
}

// 32 numbers times `inverse`, rounded to nearest even (all within 127), and the sums of either 16.
PLAIT_INLINE void round_block(const float *x, float inverse, int8_t *q, int32_t sum[2]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i n[4];
  for (int k = 0; k < 4; k++) n[k] = _mm256_cvtps_epi32((__m256)(load(x + 8 * k) * splat(inverse)));
  // Packing works within halves of the registers: groups of four numbers come out as 0 2 4 6 1 3 5 7.
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
  const __m256i bytes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i *)q, bytes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  sums = _mm256_hadd_epi32(sums, sums);
  sums = _mm256_hadd_epi32(sums, sums);
  sum[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(sums));
  sum[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
#else
  sum[0] = sum[1] = 0;
  for (int i = 0; i < 32; i += W) {
    const vf y = load(x + i) * splat(inverse);
    vi n;
#if defined(__AVX512F__)
    n = (vi)_mm512_cvtps_epi32((__m512)y);
    _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtepi32_epi8((__m512i)n));
    sum[i / 16] = _mm512_reduce_add_epi32((__m512i)n);
#else
#if defined(__aarch64__)
    n = (vi)vcvtnq_s32_f32((float32x4_t)y);  // an addition would be fused with the product, and round it once less
#else
    const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, nearest even
    n = (vi)as_bits(y + shift) - 0x4b400000;
#endif
    for (int k = 0; k < W; k++) {
      q[i + k] = (int8_t)n[k];
      sum[i / 16] += n[k];
    }
#endif
  }
#endif
}

static void quantise(const float *x, int64_t cols, int64_t block0, int64_t block1, uint8_t *record) {
  uint8_t *scales = record + cols, *sums = scales + cols / 32 * 4;
  for (int64_t b = block0; b < block1; b++, x += 32) {
    const int32_t highest = highest_bits(x);
    float most;
    memcpy(&most, &highest, 4);
    float scale = most / 127.0f;
    int8_t *q = (int8_t *)record + b * 32;
    int32_t sum[2] = {0, 0};
    // The inverse of less than 2^-121 overflows, and the scale comes near the subnormal numbers: such a block counts as
    // zero.
    if (highest >= 0x7f800000 || most < 0x1p-119f) {
      scale = highest >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
      memset(q, 0, 32);
    } else {
      round_block(x, 127.0f / most, q, sum);
    }
    memcpy(scales + b * 4, &scale, 4);
    for (int h = 0; h < 2; h++) {
      const float scaled = scale * (float)sum[h];
      memcpy(sums + (2 * b + h) * 4, &scaled, 4);
    }
  }
}

}  // namespace PLAIT_ISA_NAMESPACE
}  // namespace plait
