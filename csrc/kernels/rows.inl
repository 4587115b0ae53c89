// Operations on single rows of fp32. `out` may be an operand.

namespace plait {
namespace PLAIT_ISA_NAMESPACE {

namespace rows {

// out[i] = f(x[i]) for vectors, the last one padded with zeros.
template <class F>
PLAIT_INLINE void each(const float *x, int64_t n, float *out, F f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, f(load(x + i)));
  if (i < n) store_part(out + i, f(load_part(x + i, (int)(n - i))), (int)(n - i));
}
template <class F>
PLAIT_INLINE void each_pair(const float *x, const float *y, int64_t n, float *out, F f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, f(load(x + i), load(y + i)));
  if (i < n) {
    const int rest = (int)(n - i);
    store_part(out + i, f(load_part(x + i, rest), load_part(y + i, rest)), rest);
  }
}

// out[i] = f(x[i]) * y[i] for long functions, kTogether vectors at a time; y null: f(x[i]). f replaces an array.
constexpr int kTogether = 4;
template <class F>
PLAIT_INLINE void each_long(const float *x, const float *y, int64_t n, float *out, F f) {
  int64_t i = 0;
  for (; i + kTogether * W <= n; i += kTogether * W) {
    vf v[kTogether];
#pragma GCC unroll 8
    for (int k = 0; k < kTogether; k++) v[k] = load(x + i + k * W);
    f(v);
#pragma GCC unroll 8
    for (int k = 0; k < kTogether; k++) store(out + i + k * W, y ? v[k] * load(y + i + k * W) : v[k]);
  }
  for (; i < n; i += W) {
    const int rest = n - i < W ? (int)(n - i) : W;
    vf v[1] = {rest < W ? load_part(x + i, rest) : load(x + i)};
    f(v);
    if (y) v[0] *= rest < W ? load_part(y + i, rest) : load(y + i);
    if (rest < W) {
      store_part(out + i, v[0], rest);
    } else {
      store(out + i, v[0]);
    }
  }
}

// The sum of f(x[i]): four chains per lane.
template <class F>
PLAIT_INLINE float total(const float *x, int64_t n, F f) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; j++) sums[j] += f(load(x + i + j * W));
  for (int j = 0; i + W <= n; i += W, j++) sums[j] += f(load(x + i));
  float tail = 0;
  for (; i < n; i++) tail += f(splat(x[i]))[0];
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail;
}

// 1 / (1 + e^-x) and x times it; the latter without a detour that would lose small results.
template <int N>
PLAIT_INLINE void sigmoid(vf (&x)[N]) {
  for (int i = 0; i < N; i++) x[i] = -x[i];
  exp(x);
  for (int i = 0; i < N; i++) x[i] = splat(1.0f) / (splat(1.0f) + x[i]);
}
template <int N>
PLAIT_INLINE void silu(vf (&x)[N]) {
  vf e[N];
  for (int i = 0; i < N; i++) e[i] = -x[i];
  exp(e);
  for (int i = 0; i < N; i++) x[i] = x[i] / (splat(1.0f) + e[i]);
}

// tanh: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel, and that beyond.
PLAIT_INLINE vf tanh(vf x) {
  const vf z = x * x;
  vf p = splat(-5.6669754e-3f);
  p = fma(p, z, splat(2.06061751e-2f));
  p = fma(p, z, splat(-5.37300067e-2f));
  p = fma(p, z, splat(1.3331331e-1f));
  p = fma(p, z, splat(-3.33332781e-1f));
  const vf near = fma(p * z, x, x);
  const vf size = abs(x);
  const vf far = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
  const vf signed_far = as_float(as_bits(far) | (as_bits(x) & 0x80000000u));
  return size < splat(0.625f) ? near : signed_far;
}

// x times the share of the normal distribution below x. With a = |x|, the share beyond a is e^(-a q(a)) / 2, where q is
// a polynomial fitted to an error of 1e-8 in the result; it grows without end, so that large a give 0.
template <int N>
PLAIT_INLINE void gelu(vf (&x)[N]) {
  vf e[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    const vf a = abs(x[i]);
    vf q = splat(1.31841167e-6f);
    q = fma(q, a, splat(-1.94475927e-5f));
    q = fma(q, a, splat(9.11303133e-5f));
    q = fma(q, a, splat(1.88588473e-4f));
    q = fma(q, a, splat(-5.02214321e-3f));
    q = fma(q, a, splat(3.647868e-2f));
    q = fma(q, a, splat(3.18266945e-1f));
    q = fma(q, a, splat(7.97889376e-1f));
    e[i] = -(a * q);
  }
  exp(e);
  for (int i = 0; i < N; i++) {
    const vf beyond = splat(0.5f) * e[i];
    x[i] = x[i] * (x[i] < vf{} ? beyond : splat(1.0f) - beyond);
  }
}

// x / 2 (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
template <int N>
PLAIT_INLINE void gelu_tanh(vf (&x)[N]) {
  vf u[N];
  for (int i = 0; i < N; i++)
    u[i] = x[i] * fma(x[i] * x[i], splat(-2.0f * 0.7978845608f * 0.044715f), splat(-2.0f * 0.7978845608f));
  exp(u);
  for (int i = 0; i < N; i++) x[i] = x[i] / (splat(1.0f) + u[i]);
}

PLAIT_INLINE vf relu(vf x) { return x < vf{} ? vf{} : x; }

// Calls g(f) with the activation `kind` as f, which replaces an array of vectors.
template <class G>
PLAIT_INLINE void with_activation(int32_t kind, G g) {
#define PLAIT_ACTIVATION(statement) \
  g([](auto &x) PLAIT_LAMBDA_INLINE { statement; }); \
  break
#define PLAIT_ONE_BY_ONE(value) PLAIT_ACTIVATION(for (vf &v : x) v = value)
  switch (kind) {
    case PLAIT_ACT_SILU: PLAIT_ACTIVATION(silu(x));
    case PLAIT_ACT_GELU: PLAIT_ACTIVATION(gelu(x));
    case PLAIT_ACT_GELU_TANH: PLAIT_ACTIVATION(gelu_tanh(x));
    case PLAIT_ACT_RELU: PLAIT_ONE_BY_ONE(relu(v));
    case PLAIT_ACT_RELU_SQUARED: PLAIT_ONE_BY_ONE(relu(v) * relu(v));
    case PLAIT_ACT_SIGMOID: PLAIT_ACTIVATION(sigmoid(x));
  }
#undef PLAIT_ONE_BY_ONE
#undef PLAIT_ACTIVATION
}

// Neighbours of a vector change places.
PLAIT_INLINE vf swap_neighbours(vf x) {
#if defined(__clang__)
  if constexpr (W == 16) return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  else if constexpr (W == 8) return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
  else return __builtin_shufflevector(x, x, 1, 0, 3, 2);
#else
  vi order;
  for (int i = 0; i < W; i++) order[i] = i ^ 1;
  return __builtin_shuffle(x, order);
#endif
}

}  // namespace rows

static void rms_norm(const float *x, const float *w, int64_t n, float eps, bool unit_offset, float *out) {
  const float mean = rows::total(x, n, [](vf v) { return v * v; }) / (float)n;
  const vf factor = splat(1.0f / __builtin_sqrtf(mean + eps));
  if (w == nullptr)
    rows::each(x, n, out, [=](vf v) { return v * factor; });
  else if (unit_offset)
    rows::each_pair(x, w, n, out, [=](vf v, vf u) { return v * factor * (splat(1.0f) + u); });
  else
    rows::each_pair(x, w, n, out, [=](vf v, vf u) { return v * factor * u; });
}

static void layer_norm(const float *x, const float *w, const float *b, int64_t n, float eps, float *out) {
  // In two passes: the variance of numbers far from 0 would cancel in one.
  const float mean = rows::total(x, n, [](vf v) { return v; }) / (float)n;
  const vf m = splat(mean);
  const float variance = rows::total(x, n, [=](vf v) { return (v - m) * (v - m); }) / (float)n;
  const vf factor = splat(1.0f / __builtin_sqrtf(variance + eps));
  if (w == nullptr)
    rows::each(x, n, out, [=](vf v) { return (v - m) * factor; });
  else
    rows::each_pair(x, w, n, out, [=](vf v, vf u) { return (v - m) * factor * u; });
  if (b != nullptr) rows::each_pair(out, b, n, out, [](vf v, vf u) { return v + u; });
}

// The angle is rounded to fp32 before its cosine is taken: that is how models were trained.
static void positions(int64_t position, const float *inv_freq, int64_t n, float magnitude, float *out) {
  for (int64_t k = 0; k < n; k++) {
    const float angle = (float)position * inv_freq[k];
    out[k] = __builtin_cosf(angle) * magnitude;
    out[n + k] = __builtin_sinf(angle) * magnitude;
  }
}

namespace rows {

// Pairs of one head that stand side by side. c, s: [2 * pairs], each number twice, the sine of a pair's first negated.
PLAIT_INLINE void rotate_adjacent(const float *x, const float *c, const float *s, int64_t n, float *out) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const vf pairs = load(x + i);
    store(out + i, fma(pairs, load(c + i), swap_neighbours(pairs) * load(s + i)));
  }
  for (; i < n; i += 2) {
    const float a = x[i], b = x[i + 1];
    out[i] = a * c[i] + b * s[i];
    out[i + 1] = b * c[i] + a * s[i + 1];
  }
}

// Pairs of one head that stand `half` apart.
PLAIT_INLINE void rotate_halves(const float *x, const float *c, const float *s, int64_t half, float *out) {
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const vf a = load(x + i), b = load(x + half + i), cosine = load(c + i), sine = load(s + i);
    store(out + i, a * cosine - b * sine);
    store(out + half + i, b * cosine + a * sine);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    out[i] = a * c[i] - b * s[i];
    out[half + i] = b * c[i] + a * s[i];
  }
}

}  // namespace rows

static void rotate(const float *x, const float *angles, int64_t heads, int64_t width, int64_t turning, bool adjacent,
                   float *out) {
  const int64_t half = turning / 2;
  const float *cosines = angles, *sines = angles + half;
  if (adjacent) {
    constexpr int64_t kPairs = 64;
    float c[2 * kPairs], s[2 * kPairs];
    for (int64_t first = 0; first < half; first += kPairs) {
      const int64_t pairs = half - first < kPairs ? half - first : kPairs;
      for (int64_t i = 0; i < pairs; i++) {
        c[2 * i] = c[2 * i + 1] = cosines[first + i];
        s[2 * i] = -sines[first + i];
        s[2 * i + 1] = sines[first + i];
      }
      for (int64_t h = 0; h < heads; h++)
        rows::rotate_adjacent(x + h * width + 2 * first, c, s, 2 * pairs, out + h * width + 2 * first);
    }
  } else {
    for (int64_t h = 0; h < heads; h++) rows::rotate_halves(x + h * width, cosines, sines, half, out + h * width);
  }
  if (out != x && turning < width)
    for (int64_t h = 0; h < heads; h++)
      memcpy(out + h * width + turning, x + h * width + turning, (width - turning) * sizeof(float));
}

static void activate(int32_t kind, const float *x, int64_t n, float *out) {
  rows::with_activation(kind, [=](auto f) PLAIT_LAMBDA_INLINE { rows::each_long(x, nullptr, n, out, f); });
}

static void gate(int32_t kind, const float *x, const float *y, int64_t n, float *out) {
  rows::with_activation(kind, [=](auto f) PLAIT_LAMBDA_INLINE { rows::each_long(x, y, n, out, f); });
}

// A NaN passes every limit.
static void clamped_swiglu(const float *x, const float *y, int64_t n, float alpha, float limit, float *out) {
  const vf high = splat(limit), low = -high, factor = splat(alpha), one = splat(1.0f);
  rows::each_pair(x, y, n, out, [=](vf v, vf u) PLAIT_LAMBDA_INLINE {
    const vf g = high < v ? high : v, below = high < u ? high : u, w = low > below ? low : below;
    return g / (one + exp(-(factor * g))) * (w + one);
  });
}

namespace rows {

// e^m - 1 - x for m = min(x, eps), x <= 0: near 0 by its series, where the difference of e^m and 1 would lose digits.
PLAIT_INLINE vf expm1_less(vf x, vf eps) {
  const vf m = eps < x ? eps : x;
  vf p = splat(1.0f / 40320);
  p = fma(p, m, splat(1.0f / 5040));
  p = fma(p, m, splat(1.0f / 720));
  p = fma(p, m, splat(1.0f / 120));
  p = fma(p, m, splat(1.0f / 24));
  p = fma(p, m, splat(1.0f / 6));
  p = fma(p, m, splat(0.5f));
  const vf near = fma(p * m, m, m - x), far = exp(m) - splat(1.0f) - x;
  return m > splat(-0.4f) ? near : far;
}

PLAIT_INLINE float softplus(float x) { return x > 20 ? x : __builtin_log1pf(__builtin_expf(x)); }

}  // namespace rows

static void xielu(const float *x, int64_t n, float alpha_p, float alpha_n, float beta, float eps, float *out) {
  const vf positive = splat(rows::softplus(alpha_p)), negative = splat(beta + rows::softplus(alpha_n));
  const vf slope = splat(beta), least = splat(eps);
  rows::each(x, n, out, [=](vf v) PLAIT_LAMBDA_INLINE {
    const vf curve = v > vf{} ? positive * v * v : negative * rows::expm1_less(v, least);
    return fma(slope, v, curve);
  });
}

static void add(const float *x, const float *y, int64_t n, float *out) {
  rows::each_pair(x, y, n, out, [](vf v, vf u) { return v + u; });
}

static void scale(const float *x, float factor, int64_t n, float *out) {
  const vf f = splat(factor);
  rows::each(x, n, out, [=](vf v) { return v * f; });
}

static void soft_cap(const float *x, float limit, int64_t n, float *out) {
  const vf cap = splat(limit), inverse = splat(1.0f / limit);
  rows::each(x, n, out, [=](vf v) PLAIT_LAMBDA_INLINE { return rows::tanh(v * inverse) * cap; });
}

static void clip(const float *x, float limit, int64_t n, float *out) {
  const vf high = splat(limit), low = -high;
  rows::each(x, n, out, [=](vf v) {  // a NaN passes both
    const vf above = low > v ? low : v;
    return high < above ? high : above;
  });
}

static int64_t arg_max(const float *x, int64_t n, float *best) {
  // First the largest number, then where it stands: both loops are shorter than one that carries indices.
  constexpr int kChains = 4;
  vf highest[kChains];
  vi unordered{};
  int64_t i = 0;
  float top = x[0];
  bool nan = false;
  if (n >= kChains * W) {
    for (int j = 0; j < kChains; j++) highest[j] = load(x + j * W);
    for (; i + kChains * W <= n; i += kChains * W)
      for (int j = 0; j < kChains; j++) {
        const vf v = load(x + i + j * W);
        unordered |= (vi)(v != v);
        highest[j] = max(v, highest[j]);
      }
    top = max_of(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
    for (int j = 0; j < W; j++) nan |= unordered[j] != 0;
  }
  for (; i < n; i++) {
    nan |= x[i] != x[i];
    top = x[i] > top ? x[i] : top;
  }
  if (nan) {
    *best = __builtin_nanf("");
    for (i = 0; x[i] == x[i];) i++;
    return i;
  }
  *best = top;
  const vf wanted = splat(top);
  for (i = 0; i + W <= n; i += W) {
    const vi equal = (vi)(load(x + i) == wanted);
    uint64_t words[W / 2], any = 0;
    memcpy(words, &equal, sizeof words);
    for (int j = 0; j < W / 2; j++) any |= words[j];
    if (any != 0) break;
  }
  while (x[i] != top) i++;
  return i;
}

}  // namespace PLAIT_ISA_NAMESPACE
}  // namespace plait
