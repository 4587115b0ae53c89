// The loops of sample.h for one instruction set: included by one file per set, which defines PLAIT_SAMPLE_LOOPS as the
// name of the function. Built with -ffp-contract=off: a * b + c in one rounding would be another number.
#include <math.h>
#include <string.h>

#include "sample.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace plait {
namespace {

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef double D4 __attribute__((vector_size(32)));
typedef uint64_t L4 __attribute__((vector_size(32)));  // sums may wrap around and back
typedef float F4 __attribute__((vector_size(16)));

#define INLINE inline __attribute__((always_inline))

INLINE F8 load8(const float *p) { F8 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store8(float *p, F8 v) { memcpy(p, &v, sizeof v); }

// 2^40 e^z for z <= 0: 2^n e^r with |r| <= ln 2 / 2, and e^r = 1 + r + r^2 q(r), q fitted for the least relative error.
INLINE F8 exponential(F8 z) {
  const float round = 12582912.0f + 40;  // 1.5 * 2^23: the sum's low bits are the rounded number, here plus 40
  z = z > -40.0f ? z : F8{} - 40.0f;
  const F8 t = z * 1.44269504f + round;
  const F8 n = t - round;
  F8 r = z - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  const F8 r2 = r * r;
  const F8 low = r * 0.1666652113199234f + 0.4999999403953552f, high = r * 0.0083687175065279f + 0.04166838899254799f;
  const F8 q = (r2 * r2 * 0.0013814594130963087f + high * r2) + low;
  const F8 e = (q * r2 + r) + 1.0f;
  return (F8)((I8)e + ((I8)t << 23));
}

// Four weights, the nearest integers to e, ties to even, with kMagic added: the bits of a sum with 2^52.
constexpr uint64_t kMagic = 0x4330000000000000;
INLINE L4 shifted_weight(F4 e) {
#if defined(__AVX2__)
  const D4 wide = (D4)_mm256_cvtps_pd((__m128)e);
#else
  const D4 wide = __builtin_convertvector(e, D4);
#endif
  return (L4)(wide + 0x1p52);
}

INLINE void shifted_weights(F8 z, L4 &low, L4 &high) {
  const F8 e = exponential(z);
  F4 half[2];
  memcpy(half, &e, sizeof e);
  low = shifted_weight(half[0]);
  high = shifted_weight(half[1]);
}

bool scan(const float *x, int64_t n, float *block_max, float *highest) {
  I8 nan = {};
  float all = -INFINITY;
  for (int64_t start = 0, block = 0; start < n; start += kSampleBlock, block++) {
    const int64_t count = n - start < kSampleBlock ? n - start : kSampleBlock;
    const float *p = x + start;
    F8 m = F8{} - INFINITY;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const F8 v = load8(p + i);
      m = v > m ? v : m;
      nan |= v != v;
    }
    float best = -INFINITY;
    for (int k = 0; k < 8; k++) best = m[k] > best ? m[k] : best;
    for (; i < count; i++) {
      best = p[i] > best ? p[i] : best;
      nan[0] |= p[i] != p[i];
    }
    block_max[block] = best;
    all = best > all ? best : all;
  }
  *highest = all;
  int32_t any = 0;
  for (int k = 0; k < 8; k++) any |= nan[k];
  return any == 0;
}

void scaled(const float *x, int64_t n, Scale scale, float *z) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(z + i, (load8(x + i) - scale.highest) * scale.factor);
  for (; i < n; i++) z[i] = (x[i] - scale.highest) * scale.factor;
}

int64_t weigh(const float *z, int64_t n, int64_t *w) {
  L4 sum = {}, low, high;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    shifted_weights(load8(z + i), low, high);
    low -= kMagic, high -= kMagic;
    memcpy(w + i, &low, sizeof low);
    memcpy(w + i + 4, &high, sizeof high);
    sum += low + high;
  }
  int64_t all = (int64_t)(sum[0] + sum[1] + sum[2] + sum[3]);
  if (i < n) {
    F8 rest = {};
    memcpy(&rest, z + i, (n - i) * sizeof(float));
    uint64_t part[8];
    shifted_weights(rest, low, high);
    memcpy(part, &low, sizeof low);
    memcpy(part + 4, &high, sizeof high);
    for (int64_t k = 0; i < n; i++, k++) all += w[i] = (int64_t)(part[k] - kMagic);
  }
  return all;
}

int64_t total(const float *x, int64_t n, Scale scale) {
  L4 sum = {}, low, high;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    shifted_weights((load8(x + i) - scale.highest) * scale.factor, low, high);
    sum += low + high;
  }
  int64_t all = (int64_t)(sum[0] + sum[1] + sum[2] + sum[3] - (uint64_t)i * kMagic);
  if (i < n) {
    float z[8];
    int64_t w[8];
    for (int64_t k = i; k < n; k++) z[k - i] = (x[k] - scale.highest) * scale.factor;
    all += weigh(z, n - i, w);
  }
  return all;
}

#if defined(__AVX2__)
// Per mask of 8 lanes: which lanes are set, in order.
struct Lanes {
  int32_t of[256][8];
  constexpr Lanes() : of{} {
    for (int mask = 0; mask < 256; mask++) {
      int count = 0;
      for (int lane = 0; lane < 8; lane++)
        if (mask >> lane & 1) of[mask][count++] = lane;
    }
  }
};
alignas(32) constexpr Lanes kLanes;
#endif

// Bits of a number >= 0 sort as it does; those of one below 0 the other way round.
INLINE I8 descending(F8 x) {
  const I8 bits = (I8)(x + 0.0f);  // no negative zero
  return ~(bits ^ ((bits >> 31) & 0x7fffffff));
}
INLINE I8 size_bits(F8 x) { return (I8)x & 0x7fffffff; }

INLINE void store_keys(SampleOrder order, F8 v, float centre, int32_t *keys) {
  const I8 key = order == kByLogit ? descending(v) : size_bits(order == kByZ ? v : centre - v);
  memcpy(keys, &key, sizeof key);
}

void keys_of(SampleOrder order, const float *numbers, int64_t n, float centre, int32_t *keys) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store_keys(order, load8(numbers + i), centre, keys + i);
  if (i < n) {
    float rest[8] = {};
    int32_t part[8];
    memcpy(rest, numbers + i, (n - i) * sizeof(float));
    store_keys(order, load8(rest), centre, part);
    memcpy(keys + i, part, (n - i) * sizeof(int32_t));
  }
}

int64_t moment(const float *z, const int64_t *w, int64_t n) {
  int64_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    const double product = w[i] ? (double)w[i] * (double)z[i] : 0;  // above -2^40
    const double shifted = product + 0x1.8p52;                      // rounded to an integer, ties to even
    int64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    sum += bits - 0x4338000000000000;
  }
  return sum;
}

int64_t limit(const int32_t *keys, int64_t *w, int64_t n, int32_t first_id, int32_t high, int32_t tie) {
  int64_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t in = (keys[i] < high) | ((keys[i] == high) & (first_id + (int32_t)i <= tie));
    sum += w[i] &= -in;
  }
  return sum;
}

void range(const int32_t *keys, int64_t n, int32_t *least, int32_t *most) {
  int32_t low = *least, high = *most;
  for (int64_t i = 0; i < n; i++) {
    low = keys[i] < low ? keys[i] : low;
    high = keys[i] > high ? keys[i] : high;
  }
  *least = low, *most = high;
}

void fill(const int32_t *keys, const int64_t *w, int64_t n, int32_t low, int shift, int64_t *buckets) {
  uint32_t place[kSampleChunk];
  for (int64_t i = 0; i < n; i++) {
    const uint32_t b = ((uint32_t)keys[i] - (uint32_t)low) >> shift;
    place[i] = b < kSampleBuckets - 1 ? b : kSampleBuckets - 1;
  }
  int64_t *const b0 = buckets, *const b1 = b0 + kSampleBuckets, *const b2 = b1 + kSampleBuckets,
                 *const b3 = b2 + kSampleBuckets;
  int64_t i = 0;
  if (w) {
    for (; i + 4 <= n; i += 4) {
      b0[place[i]] += w[i];
      b1[place[i + 1]] += w[i + 1];
      b2[place[i + 2]] += w[i + 2];
      b3[place[i + 3]] += w[i + 3];
    }
    for (; i < n; i++) b0[place[i]] += w[i];
  } else {
    for (; i + 4 <= n; i += 4) {
      b0[place[i]]++;
      b1[place[i + 1]]++;
      b2[place[i + 2]]++;
      b3[place[i + 3]]++;
    }
    for (; i < n; i++) b0[place[i]]++;
  }
}

int64_t keep(const int32_t *keys, const float *x, const int32_t *ids, int32_t first_id, int64_t n, int32_t low,
             int32_t high, int32_t tie, float *x_out, int32_t *ids_out) {
  int64_t kept = 0, i = 0;
#if defined(__AVX2__)
  const __m256i lows = _mm256_set1_epi32(low), highs = _mm256_set1_epi32(high), ties = _mm256_set1_epi32(tie);
  const __m256i eight = _mm256_set1_epi32(8);
  __m256i own = _mm256_add_epi32(_mm256_set1_epi32(first_id), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  for (; i + 8 <= n; i += 8, own = _mm256_add_epi32(own, eight)) {
    const __m256i key = _mm256_loadu_si256((const __m256i *)(keys + i));
    const __m256i id = ids ? _mm256_loadu_si256((const __m256i *)(ids + i)) : own;
    const __m256i late = _mm256_and_si256(_mm256_cmpeq_epi32(key, highs), _mm256_cmpgt_epi32(id, ties));
    const __m256i beyond = _mm256_or_si256(late, _mm256_cmpgt_epi32(key, highs));
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(lows, key), beyond);
    const int mask = 255 ^ _mm256_movemask_ps(_mm256_castsi256_ps(out));
    const __m256i lanes = _mm256_load_si256((const __m256i *)kLanes.of[mask]);
    _mm256_storeu_ps(x_out + kept, _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + i), lanes));
    _mm256_storeu_si256((__m256i *)(ids_out + kept), _mm256_permutevar8x32_epi32(id, lanes));
    kept += __builtin_popcount((unsigned)mask);
  }
#endif
  for (; i < n; i++) {
    const int32_t id = ids ? ids[i] : first_id + (int32_t)i;
    const int32_t key = keys[i];
    const float number = x[i];
    x_out[kept] = number;
    ids_out[kept] = id;
    kept += (key >= low) & ((key < high) | ((key == high) & (id <= tie)));
  }
  return kept;
}

}  // namespace

const SampleLoops &PLAIT_SAMPLE_LOOPS() {
  static const SampleLoops loops = {scan, scaled, weigh, total, keys_of, moment, limit, range, fill, keep};
  return loops;
}

}  // namespace plait
