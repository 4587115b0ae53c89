// Routing to experts: one token's choice of experts out of its router's logits, and the sum of what they give.

namespace plait {
namespace PLAIT_ISA_NAMESPACE {

namespace routing {

// Integers in the order of the floats; both zeros are one. kTaken comes before all of them.
constexpr int32_t kTaken = INT32_MIN;
PLAIT_INLINE vi ordered(vf x) {
  const vi bits = (vi)as_bits(x + vf{});
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// keys[0 .. n) of x, then kTaken up to a whole vector.
PLAIT_INLINE void order(const float *x, int64_t n, int32_t *keys) {
  int64_t i = 0;
  for (; i < n; i += W) {
    const vi key = ordered(n - i < W ? load_part(x + i, (int)(n - i)) : load(x + i));
    memcpy(keys + i, &key, sizeof key);
  }
  for (int64_t k = n; k < i; k++) keys[k] = kTaken;
}

// The index of the first largest of n keys, which is taken then.
PLAIT_INLINE int64_t take_highest(int32_t *keys, int64_t n) {
  vi highest, key;
  memcpy(&highest, keys, sizeof highest);
  for (int64_t i = W; i < n; i += W) {
    memcpy(&key, keys + i, sizeof key);
    highest = key > highest ? key : highest;
  }
  int32_t wanted = highest[0];
  for (int j = 1; j < W; j++) wanted = highest[j] > wanted ? highest[j] : wanted;
  int64_t at = 0;
  while (keys[at] != wanted) at++;
  keys[at] = kTaken;
  return at;
}

// out = e^(x - highest) / their sum.
PLAIT_INLINE void softmax(const float *x, int64_t n, float highest, float *out) {
  const vf shift = splat(highest);
  for (int64_t i = 0; i < n; i += W) {
    const int rest = n - i < W ? (int)(n - i) : W;
    store_part(out + i, exp(load_part(x + i, rest) - shift), rest);
  }
  const vf sum = splat(rows::total(out, n, [](vf v) { return v; }));
  rows::each(out, n, out, [=](vf v) { return v / sum; });
}

// The experts of the best groups by their selection scores.
PLAIT_INLINE void best_groups(const RouteArgs &a, const float *selection, bool *eligible) {
  const int64_t size = a.experts / a.groups;
  float scores[kMaxExperts];
  int32_t keys[kMaxExperts];
  for (int64_t g = 0; g < a.groups; g++) {
    float first = -__builtin_inff(), second = first;
    for (int64_t e = g * size; e < (g + 1) * size; e++) {
      const float score = selection[e];
      second = score > first ? first : score > second ? score : second;
      first = score > first ? score : first;
    }
    scores[g] = a.two_best ? first + second : first;
  }
  order(scores, a.groups, keys);
  memset(eligible, 0, (size_t)a.experts);
  for (int64_t i = 0; i < a.top_groups; i++) memset(eligible + take_highest(keys, a.groups) * size, 1, (size_t)size);
}

// Of each of the two largest logits its share in the softmax of those that are close to it.
PLAIT_INLINE void sparse_mixer(const RouteArgs &a, int32_t *ids, float *weights) {
  float left[kMaxExperts], shares[kMaxExperts];
  memcpy(left, a.logits, (size_t)a.experts * sizeof(float));
  for (int j = 0; j < 2; j++) {
    float best;
    const int64_t at = arg_max(left, a.experts, &best);
    for (int64_t e = 0; e < a.experts; e++) {
      const float s = a.logits[e], size = s < 0 ? -s : s;
      const bool far = (best - s) / (size > best ? size : best) > 2 * a.jitter;
      shares[e] = far ? -__builtin_inff() : left[e];
    }
    softmax(shares, a.experts, best, shares);
    ids[j] = (int32_t)at;
    weights[j] = shares[at];
    left[at] = -__builtin_inff();
  }
}

}  // namespace routing

static void route(const RouteArgs &a, int32_t *ids, float *weights) {
  const int64_t n = a.experts, k = a.top_k;
  float scores[kMaxExperts], selection[kMaxExperts];
  int32_t keys[kMaxExperts];
  float highest;
  arg_max(a.logits, n, &highest);
  if (a.scores == PLAIT_SCORES_SOFTMAX)
    routing::softmax(a.logits, n, highest, scores);
  else if (a.scores == PLAIT_SCORES_SIGMOID)
    activate(PLAIT_ACT_SIGMOID, a.logits, n, scores);
  else
    memcpy(scores, a.logits, (size_t)n * sizeof(float));
  memcpy(selection, scores, (size_t)n * sizeof(float));
  if (a.bias != nullptr) add(scores, a.bias, n, selection);
  arg_max(selection, n, &highest);
  if (highest != highest) {  // a NaN has no place in an order, but must not get lost: every weight becomes one
    for (int64_t j = 0; j < k; j++) {
      ids[j] = (int32_t)j;
      weights[j] = highest;
    }
    return;
  }
  if (a.scores == PLAIT_SCORES_SPARSE_MIXER) {
    routing::sparse_mixer(a, ids, weights);
    if (a.scale != 1.0f) scale(weights, a.scale, k, weights);
    return;
  }
  if (a.groups > 0) {
    bool eligible[kMaxExperts];
    routing::best_groups(a, selection, eligible);
    for (int64_t e = 0; e < n; e++) {
      if (eligible[e]) continue;
      selection[e] = a.masked_zero ? 0.0f : -__builtin_inff();
      if (a.masked_zero) scores[e] = 0.0f;
    }
  }
  routing::order(selection, n, keys);
  for (int64_t j = 0; j < k; j++) {
    ids[j] = (int32_t)routing::take_highest(keys, n);
    weights[j] = scores[ids[j]];
  }
  if (a.scores == PLAIT_SCORES_TOPK_SOFTMAX) {
    arg_max(weights, k, &highest);
    routing::softmax(weights, k, highest, weights);
  }
  if (a.renormalise) {
    float sum = 0;
    for (int64_t j = 0; j < k; j++) sum += weights[j];
    const float divisor = a.least_sum > sum ? a.least_sum : a.least_sum > 0 ? sum : sum + 1e-20f;
    for (int64_t j = 0; j < k; j++) weights[j] /= divisor;
  }
  if (a.scale != 1.0f) scale(weights, a.scale, k, weights);
}

// Rows are added in their order; each step is one fused multiply-add where the CPU has it.
static void weighted_sum(const float *const *row, const float *weights, int64_t rows, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i += W) {
    const int rest = n - i < W ? (int)(n - i) : W;
    vf sum = splat(weights[0]) * (rest < W ? load_part(row[0] + i, rest) : load(row[0] + i));
    for (int64_t j = 1; j < rows; j++)
      sum = fma(splat(weights[j]), rest < W ? load_part(row[j] + i, rest) : load(row[j] + i), sum);
    if (rest < W) {
      store_part(out + i, sum, rest);
    } else {
      store(out + i, sum);
    }
  }
}

}  // namespace PLAIT_ISA_NAMESPACE
}  // namespace plait
