// Vectors of floats and integers for kernels that need no special instruction, on GCC's and Clang's vector extensions.
//
// Included by the kernel files only, inside one translation unit per instruction set: the compiler's flags there decide
// what a vector becomes. Everything lives in the set's own namespace (PLAIT_ISA_NAMESPACE), so that no two sets share a
// symbol. Never call templates of the standard library from a kernel: the linker could keep a copy that was compiled
// for another instruction set.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PLAIT_INLINE inline __attribute__((always_inline))
#define PLAIT_LAMBDA_INLINE __attribute__((always_inline))

namespace plait {
namespace PLAIT_ISA_NAMESPACE {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;  // SSE2 and NEON
#endif

// Vectors of W numbers.
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

PLAIT_INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
PLAIT_INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
PLAIT_INLINE vf splat(float x) { return x - vf{}; }
PLAIT_INLINE vf as_float(vu bits) { vf v; memcpy(&v, &bits, sizeof v); return v; }
PLAIT_INLINE vu as_bits(vf x) { vu v; memcpy(&v, &x, sizeof v); return v; }

// The first n < W numbers; the rest is zero on load and left alone on store.
PLAIT_INLINE vf load_part(const float *p, int n) { vf v{}; memcpy(&v, p, n * sizeof(float)); return v; }
PLAIT_INLINE void store_part(float *p, vf v, int n) { memcpy(p, &v, n * sizeof(float)); }

// Numbers of two vectors by their places; GCC has __builtin_shufflevector since version 12 only.
#if defined(__clang__)
#define PLAIT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PLAIT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// a * b + c; the build contracts it to one fused instruction where there is one (-ffp-contract=fast).
PLAIT_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
// b where either is NaN. GCC does not always see the instruction in a > b ? a : b.
#if defined(__AVX512F__)
PLAIT_INLINE vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
PLAIT_INLINE vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
PLAIT_INLINE vf max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
PLAIT_INLINE vf min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#elif defined(__SSE2__)
PLAIT_INLINE vf max(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
PLAIT_INLINE vf min(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
#else
PLAIT_INLINE vf max(vf a, vf b) { return a > b ? a : b; }
PLAIT_INLINE vf min(vf a, vf b) { return a < b ? a : b; }
#endif
PLAIT_INLINE vf abs(vf x) { return as_float(as_bits(x) & 0x7fffffffu); }

PLAIT_INLINE float sum(vf v) {
  float part[W];
  memcpy(part, &v, sizeof v);
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) part[i] += part[i + n];
  return part[0];
}
PLAIT_INLINE float max_of(vf v) {
  float part[W];
  memcpy(part, &v, sizeof v);
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) part[i] = part[i + n] > part[i] ? part[i + n] : part[i];
  return part[0];
}

// W pairs of bfloat16 that lie side by side (first, second, first, second, ...): the firsts and the seconds as floats.
PLAIT_INLINE vu load_pairs(const uint16_t *p) { vu v; memcpy(&v, p, sizeof v); return v; }
PLAIT_INLINE vf first_bf16(vu pairs) { return as_float(pairs << 16); }
PLAIT_INLINE vf second_bf16(vu pairs) { return as_float(pairs & 0xffff0000u); }

// To bfloat16, nearest even; a NaN stays one.
PLAIT_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
PLAIT_INLINE float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// IEEE half -> float, one and W at a time; float -> half, nearest even. Without hardware for it, subnormal halves go
// through integers: a thread that flushes subnormal floats to zero gets them right too.
PLAIT_INLINE float from_half(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  __fp16 half;
  memcpy(&half, &h, 2);
  return half;
#else
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fffu;
  float f = (float)rest * 5.9604644775390625e-8f;  // a subnormal half counts units of 2^-24
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (rest >= 0x400) bits = (rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u);
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
#endif
}
// Bits of halves, in lanes of 32 bits.
PLAIT_INLINE vf halves_to_floats(vu halves) {
  const vu rest = halves & 0x7fffu;
  const vf small = __builtin_convertvector((vi)rest, vf) * splat(5.9604644775390625e-8f);
  const vu large = (rest << 13) + ((vi)rest >= 0x7c00 ? (vu)(vi{} + 0x70000000) : (vu)(vi{} + 0x38000000));
  return as_float(((vi)rest >= 0x400 ? large : as_bits(small)) | (halves & 0x8000u) << 16);
}
PLAIT_INLINE vf load_half(const uint16_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  vh h;
  memcpy(&h, p, sizeof h);
  return halves_to_floats(__builtin_convertvector(h, vu));
#endif
}
PLAIT_INLINE uint16_t to_half(float x) {
#if defined(__F16C__)
  return (uint16_t)_cvtss_sh(x, 0);
#elif defined(__aarch64__)
  const __fp16 half = (__fp16)x;
  uint16_t h;
  memcpy(&h, &half, 2);
  return h;
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // rounds beyond the largest half
  if (magnitude < 0x38800000u) {                                   // subnormal half: a multiple of 2^-24
    float f;
    memcpy(&f, &magnitude, 4);
    f += 0.5f;  // 0.5 has units of 2^-24: the addition rounds to nearest even
    uint32_t sum_bits;
    memcpy(&sum_bits, &f, 4);
    return (uint16_t)(sign | (sum_bits - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
#endif
}

// e^x, relative error under 2 units in the last place; 0 below -104, infinity above 88.8, NaN for NaN.
// Range reduction by ln 2 in two parts (Cody and Waite 1980) and a polynomial of degree 6, fitted to a relative error
// of 4e-9 over half a step.
// N vectors step by step together: one alone is a chain of so many steps that the CPU's window holds too few of them.
template <int N>
PLAIT_INLINE void exp(vf (&x)[N]) {
  const vf low = splat(-104.0f), high = splat(89.0f);
  const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
  vf shifted[N], p[N];
#define PLAIT_STEP(statement)       \
  _Pragma("GCC unroll 8")           \
  for (int i = 0; i < N; i++) statement
  PLAIT_STEP(x[i] = min(high, max(low, x[i])));  // a NaN passes both
  PLAIT_STEP(shifted[i] = fma(x[i], splat(1.44269504f), shift));
  PLAIT_STEP(x[i] = fma(shifted[i] - shift, splat(-0.693145752f), x[i]));
  PLAIT_STEP(x[i] = fma(shifted[i] - shift, splat(-1.42860677e-6f), x[i]));
  PLAIT_STEP(p[i] = fma(splat(1.38131446e-3f), x[i], splat(8.3694189e-3f)));
  PLAIT_STEP(p[i] = fma(p[i], x[i], splat(4.16684568e-2f)));
  PLAIT_STEP(p[i] = fma(p[i], x[i], splat(1.66665148e-1f)));
  PLAIT_STEP(p[i] = fma(p[i], x[i], splat(4.99999931e-1f)));
  PLAIT_STEP(p[i] = fma(p[i], x[i], splat(1.0f)));
  PLAIT_STEP(p[i] = fma(p[i], x[i], splat(1.0f)));
#undef PLAIT_STEP
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    // 2^n in two halves, so that neither overflows nor vanishes before the product does.
    const vi k = (vi)as_bits(shifted[i]) - 0x4b400000;
    const vi half = k >> 1;
    const vf scale1 = as_float((vu)((half + 127) << 23)), scale2 = as_float((vu)((k - half + 127) << 23));
    x[i] = p[i] * scale1 * scale2;  // NaN: p is NaN, whatever the scales are
  }
}
PLAIT_INLINE vf exp(vf x) {
  vf one[1] = {x};
  exp(one);
  return one[0];
}

}  // namespace PLAIT_ISA_NAMESPACE
}  // namespace plait
