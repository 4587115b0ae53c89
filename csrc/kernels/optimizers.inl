// One step of an optimiser over numbers [begin, end) of a piece: each number of parameter, gradient and state is read
// once and written once. Plain loops, which the compiler turns into vectors.

namespace plait {
namespace PLAIT_ISA_NAMESPACE {

namespace optimizers {

// m and v of AdamW meet `g`, and the parameter follows.
PLAIT_INLINE void adamw_number(const PlaitUpdate &u, float g, float *p, float *m, float *v) {
  const float first = u.beta1 * *m + u.rest1 * g, second = u.beta2 * *v + u.rest2 * (g * g);
  *m = first;
  *v = second;
  *p = u.decay * *p - u.rate * first / (__builtin_sqrtf(second) * u.root + u.eps);
}

static void adamw(const PlaitUpdate &update, int64_t begin, int64_t end) {
  const PlaitUpdate u = update;
  float *__restrict p = u.parameter, *__restrict m = u.state[0], *__restrict v = u.state[1];
  const float *__restrict g = u.gradient;
  for (int64_t i = begin; i < end; i++) adamw_number(u, g[i], p + i, m + i, v + i);
}

static void lion(const PlaitUpdate &update, int64_t begin, int64_t end) {
  const PlaitUpdate u = update;
  float *__restrict p = u.parameter, *__restrict m = u.state[0];
  const float *__restrict g = u.gradient;
  for (int64_t i = begin; i < end; i++) {
    const float direction = u.beta1 * m[i] + u.rest1 * g[i];
    const float step = direction > 0 ? u.rate : direction < 0 ? -u.rate : 0.0f;
    p[i] = u.decay * p[i] - step;
    m[i] = u.beta2 * m[i] + u.rest2 * g[i];
  }
}

// The gradient that MARS corrects, before it is clipped.
PLAIT_INLINE float corrected(float g, float last, float extra) { return g + extra * (g - last); }

static double mars_squares(const PlaitUpdate &u, int64_t begin, int64_t end) {
  const float *g = u.gradient, *last = u.state[2];
  const vf extra = splat(u.extra);
  vf sums[4] = {};
  int64_t i = begin;
  for (; i + 4 * W <= end; i += 4 * W)
    for (int k = 0; k < 4; k++) {
      const vf x = load(g + i + k * W), c = fma(extra, x - load(last + i + k * W), x);
      sums[k] = fma(c, c, sums[k]);
    }
  float tail = 0;
  for (; i < end; i++) {
    const float c = corrected(g[i], last[i], u.extra);
    tail += c * c;
  }
  return double(sum((sums[0] + sums[1]) + (sums[2] + sums[3]))) + tail;
}

static void mars(const PlaitUpdate &update, float clip, int64_t begin, int64_t end) {
  const PlaitUpdate u = update;
  float *__restrict p = u.parameter, *__restrict m = u.state[0], *__restrict v = u.state[1], *__restrict last = u.state[2];
  const float *__restrict g = u.gradient;
  for (int64_t i = begin; i < end; i++) {
    adamw_number(u, clip * corrected(g[i], last[i], u.extra), p + i, m + i, v + i);
    last[i] = g[i];
  }
}

// Returns how many numbers are not clipped.
static int64_t sophia(const PlaitUpdate &update, int64_t begin, int64_t end) {
  const PlaitUpdate u = update;
  float *__restrict p = u.parameter, *__restrict m = u.state[0];
  const float *__restrict g = u.gradient, *__restrict h = u.state[1];
  int32_t unclipped = 0;
  for (int64_t i = begin; i < end; i++) {
    const float first = u.beta1 * m[i] + u.rest1 * g[i];
    const float ratio = first / (u.extra * h[i] + u.eps), size = __builtin_fabsf(ratio);
    unclipped += size < 1.0f;
    m[i] = first;
    p[i] = u.decay * p[i] - u.rate * (size < 1.0f ? ratio : __builtin_copysignf(1.0f, ratio));
  }
  return unclipped;
}

}  // namespace optimizers

}  // namespace PLAIT_ISA_NAMESPACE
}  // namespace plait
