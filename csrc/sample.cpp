// From logits to tokens: the filters and the draw of plait.engine.filters, row by row on the process's threads.
//
// Rows are not sorted. A filter keeps a prefix of some order (most likely first; nearest to the mean first), so that
// its end is a key: a histogram of the weights over the keys says in which bucket it lies, and the few tokens of that
// bucket are looked at again. The largest logit of every block lets most passes skip what cannot matter.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <functional>

#include "cpu.h"
#include "kernels/kernels.h"
#include "sample.h"
#include "threads.h"

namespace plait {
namespace {

constexpr int64_t kSort = 128;  // so few are sorted
constexpr int64_t kBuckets = kSampleBuckets;
constexpr int32_t kAnyId = INT32_MAX;

const SampleLoops &loops() {
  static const SampleLoops &chosen = [&]() -> const SampleLoops & {
#if defined(__x86_64__)
    const Kernels *kernels = find_kernels(nullptr);
    if (cpu_has("avx2") && !(kernels && strcmp(kernels->name, "portable") == 0)) return sample_loops_avx2();
#endif
    return sample_loops_portable();
  }();
  return chosen;
}

struct Draw {
  double u, coin;
};

// Philox4x32-10 (Salmon et al. 2011); the top 53 bits of two pairs of words.
Draw draw_of(const PlaitSampling &p) {
  if (!p.seeded) return {p.u, p.coin};
  uint32_t c[4] = {p.position, p.choice, 0, 0};
  uint32_t k0 = (uint32_t)p.seed, k1 = (uint32_t)(p.seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
    const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k1,
                              (uint32_t)a};
    memcpy(c, next, sizeof c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const auto unit = [](uint32_t high, uint32_t low) { return (double)((uint64_t)high << 21 | low >> 11) * 0x1p-53; };
  return {unit(c[0], c[1]), unit(c[2], c[3])};
}

// A growing buffer of one thread; null where memory ends.
template <class T>
struct Buffer {
  T *data = nullptr;
  int64_t size = 0;
  ~Buffer() { free(data); }
  T *get(int64_t count) {
    if (count > size) {
      free(data);
      data = static_cast<T *>(malloc(count * sizeof(T)));
      size = data ? count : 0;
    }
    return data;
  }
};

struct Scratch {
  Buffer<float> block_max, left_x, part_x, numbers;
  Buffer<int32_t> left_ids, part_ids;
  Buffer<int64_t> sums, buckets;
  bool reserve(int64_t n) {
    const int64_t blocks = (n + kSampleBlock - 1) / kSampleBlock;
    return block_max.get(blocks) && left_x.get(n + 8) && part_x.get(n + 8) && numbers.get(blocks) &&
           left_ids.get(n + 8) && part_ids.get(n + 8) && sums.get(blocks) &&
           buckets.get(kSampleLanes * kBuckets);
  }
};

// Some tokens of the row, by ascending id: ids null means 0, 1, 2, ...
struct Tokens {
  const float *x;
  const int32_t *ids;
  int64_t n;
  int32_t id(int64_t i) const { return ids ? ids[i] : (int32_t)i; }
};

// Where a prefix of an order ends: at this key, and of the tokens that have it at this id.
struct End {
  int32_t key, id;
};

class Row {
 public:
  Row(const float *x, int64_t n, const PlaitSampling &params, Scratch &scratch)
      : x_(x), n_(n), params_(params), s_(scratch), f_(loops()), left_{x, nullptr, n} {}

  int32_t token() {
    float highest;
    if (!f_.scan(x_, n_, s_.block_max.data, &highest) || !isfinite(highest)) return -1;
    scale_ = {highest, (float)(1 / params_.temperature)};
    if (!isfinite(scale_.factor)) return first_of(highest);  // 0, or so little that it is the same
    if (params_.min_p > 0) keep_above(highest + (float)(params_.temperature * log(params_.min_p)));
    if (params_.top_k > 0 && params_.top_k < left_.n) keep_k(params_.top_k);
    if (params_.typical_p < 1) keep_typical(params_.typical_p);
    if (params_.top_p < 1) keep_top(params_.top_p);
    const Draw random = draw_of(params_);
    if (random.coin < params_.xtc_probability) exclude_top(params_.xtc_threshold);
    return draw(random.u);
  }

 private:
  int32_t first_of(float highest) const {
    int64_t block = 0;
    while (s_.block_max.data[block] != highest) block++;
    int64_t i = block * kSampleBlock;
    while (x_[i] != highest) i++;
    return (int32_t)i;
  }

  bool whole() const { return left_.ids == nullptr; }
  float z_of(float x) const { return (x - scale_.highest) * scale_.factor; }
  int64_t blocks() const { return (n_ + kSampleBlock - 1) / kSampleBlock; }

  // Calls f(first place, count) for chunks of the tokens. Of the whole row, blocks without a z >= bound are left out.
  template <class F>
  void chunks(const Tokens &tokens, float bound, F f) const {
    if (tokens.ids || bound == -INFINITY) {
      for (int64_t start = 0; start < tokens.n; start += kSampleChunk)
        f(start, std::min(kSampleChunk, tokens.n - start));
      return;
    }
    const float *top = s_.block_max.data;
    const int64_t count = blocks(), most = kSampleChunk / kSampleBlock;
    for (int64_t b = 0; b < count;) {
      if (!(z_of(top[b]) >= bound)) {
        b++;
        continue;
      }
      int64_t end = b + 1;
      while (end < count && end - b < most && z_of(top[end]) >= bound) end++;
      f(b * kSampleBlock, std::min(end * kSampleBlock, n_) - b * kSampleBlock);
      b = end;
    }
  }
  template <class F>
  void chunks(const Tokens &tokens, F f) const {
    chunks(tokens, -INFINITY, f);
  }

  // Keys of a chunk and, where w is not null, weights: 1 each in the order of logits. Returns the weights' sum.
  int64_t look(SampleOrder order, const float *x, int64_t count, int32_t *keys, int64_t *w) const {
    if (order == kByLogit) {
      f_.keys(order, x, count, 0, keys);
      if (w) std::fill(w, w + count, 1);
      return count;
    }
    float z[kSampleChunk];
    f_.scaled(x, count, scale_, z);
    f_.keys(order, z, count, centre_, keys);
    return w ? f_.weigh(z, count, w) : 0;
  }
  // A z below which no token has a key <= `key`.
  float bound_of(SampleOrder order, int32_t key) const {
    if (order != kByZ) return -INFINITY;
    float size;
    memcpy(&size, &key, sizeof size);
    return -size;
  }

  // Tokens with low <= key < high, or key == high and an id up to tie, into a list.
  Tokens filtered(const Tokens &from, SampleOrder order, int32_t low, int32_t high, int32_t tie, float *x,
                  int32_t *ids) const {
    int64_t kept = 0;
    int32_t keys[kSampleChunk];
    chunks(from, bound_of(order, high), [&](int64_t start, int64_t count) {
      look(order, from.x + start, count, keys, nullptr);
      const int32_t *own = from.ids ? from.ids + start : nullptr;
      kept += f_.keep(keys, from.x + start, own, (int32_t)start, count, low, high, tie, x + kept, ids + kept);
    });
    return {x, ids, kept};
  }
  void keep(SampleOrder order, End end) {
    left_ = filtered(left_, order, INT32_MIN, end.key, end.id, s_.left_x.data, s_.left_ids.data);
  }

  // Of the whole row, the tokens with a logit >= bound.
  void keep_above(float bound) {
    int64_t kept = 0;
    int32_t keys[kSampleBlock], high;
    f_.keys(kByLogit, &bound, 1, 0, &high);
    for (int64_t start = 0, b = 0; start < n_; start += kSampleBlock, b++)
      if (s_.block_max.data[b] >= bound) {
        const int64_t count = std::min(kSampleBlock, n_ - start);
        f_.keys(kByLogit, x_ + start, count, 0, keys);
        kept += f_.keep(keys, x_ + start, nullptr, (int32_t)start, count, INT32_MIN, high, kAnyId,
                        s_.left_x.data + kept, s_.left_ids.data + kept);
      }
    left_ = {s_.left_x.data, s_.left_ids.data, kept};
  }

  void keep_k(int64_t k) {
    if (whole() && k <= blocks() / 4) {
      // Each block's largest is an entry: the k-th largest of them bounds the k-th largest entry from below.
      float *top = s_.numbers.data;
      memcpy(top, s_.block_max.data, blocks() * sizeof(float));
      std::nth_element(top, top + k - 1, top + blocks(), std::greater<float>());
      keep_above(top[k - 1]);
    }
    keep(kByLogit, {find_end(kByLogit, k).key, kAnyId});
  }

  void keep_typical(double p) {
    int64_t sum = 0, moment = 0;
    float z[kSampleChunk];
    int64_t w[kSampleChunk];
    chunks(left_, kWeightless, [&](int64_t start, int64_t count) {
      f_.scaled(left_.x + start, count, scale_, z);
      sum += f_.weigh(z, count, w);
      moment += f_.moment(z, w, count);
    });
    centre_ = (float)((double)moment / (double)sum);
    keep(kByDistance, find_end(kByDistance, goal(p, sum)));
  }

  static int64_t goal(double p, int64_t sum) { return std::max<int64_t>(1, (int64_t)ceil(p * (double)sum)); }

  void keep_top(double p) {
    const End end = find_end(kByZ, 0, p);
    // Of a whole row perhaps all but a few tokens stay: the draw looks at the end itself then.
    if (whole()) end_ = end;
    else keep(kByZ, end);
  }

  // The last token, in the order, that has less than `mass` before it, which is at most the sum of all weights; p >= 0:
  // mass is that part of the sum.
  // Drops tokens behind it from what is left, where that makes it much shorter.
  End find_end(SampleOrder order, int64_t mass, double p = -1) {
    Tokens now = left_;
    int32_t low, high;
    range_of(order, now, low, high);
    int64_t passed = 0;  // weights of the tokens before those of `now`, which are all that have low <= key <= high
    while (now.n > kSort || p >= 0) {
      int shift = 0;
      while ((((int64_t)high - low) >> shift) >= kBuckets) shift++;
      const int64_t sum = fill(now, order, low, shift);
      if (p >= 0) mass = goal(p, sum);
      p = -1;
      const int64_t *bucket = s_.buckets.data;
      int64_t b = 0;
      while (b < kBuckets - 1 && passed + bucket[b] < mass) passed += bucket[b++];
      const int64_t first = low + (b << shift), last = first + ((int64_t)1 << shift) - 1;
      low = (int32_t)first;
      high = b == kBuckets - 1 ? high : (int32_t)std::min<int64_t>(last, high);
      if (now.x == left_.x && few_up_to(order, high)) {
        left_ = now = filtered(left_, order, INT32_MIN, high, kAnyId, s_.left_x.data, s_.left_ids.data);
      }
      now = filtered(now, order, low, high, kAnyId, s_.part_x.data, s_.part_ids.data);
      if (now.n > kSort) range_of_list(order, now, low, high);
      if (low == high) return walk(now, order, mass - passed);
    }
    return last_of(now, order, mass - passed);
  }

  // Whether probably less than half of what is left has a key up to `key`.
  bool few_up_to(SampleOrder order, int32_t key) const {
    constexpr int64_t kLook = 64;
    if (left_.n < 4 * kLook) return true;
    float x[kLook];
    int32_t keys[kLook];
    for (int64_t i = 0; i < kLook; i++) x[i] = left_.x[i * left_.n / kLook];
    look(order, x, kLook, keys, nullptr);
    return std::count_if(keys, keys + kLook, [&](int32_t k) { return k <= key; }) < kLook / 2;
  }

  // Keys that have all the weight: outside of them there are only tokens without any.
  void range_of(SampleOrder order, const Tokens &tokens, int32_t &low, int32_t &high) const {
    if (order == kByLogit) return range_of_list(order, tokens, low, high);
    const float most = order == kByZ ? -kWeightless : -kWeightless + fabsf(centre_);
    low = 0;
    memcpy(&high, &most, sizeof high);
  }
  void range_of_list(SampleOrder order, const Tokens &tokens, int32_t &low, int32_t &high) const {
    int32_t keys[kSampleChunk], least = INT32_MAX, most = INT32_MIN;
    chunks(tokens, [&](int64_t start, int64_t count) {
      look(order, tokens.x + start, count, keys, nullptr);
      f_.range(keys, count, &least, &most);
    });
    low = least, high = most;
  }

  // Sums of weights per bucket of keys; keys beyond the last bucket count there. Returns the sum of all.
  int64_t fill(const Tokens &tokens, SampleOrder order, int32_t low, int shift) const {
    int64_t *bucket = s_.buckets.data, sum = 0;
    memset(bucket, 0, kSampleLanes * kBuckets * sizeof *bucket);
    int32_t keys[kSampleChunk];
    int64_t w[kSampleChunk];
    const bool logits = order == kByLogit;
    chunks(tokens, logits ? -INFINITY : kWeightless, [&](int64_t start, int64_t count) {
      sum += look(order, tokens.x + start, count, keys, logits ? nullptr : w);
      f_.fill(keys, logits ? nullptr : w, count, low, shift, bucket);
    });
    for (int64_t lane = 1; lane < kSampleLanes; lane++)
      for (int64_t b = 0; b < kBuckets; b++) bucket[b] += bucket[lane * kBuckets + b];
    return sum;
  }

  // The end among tokens of one key, which are in order of their ids.
  End walk(const Tokens &tokens, SampleOrder order, int64_t mass) const {
    int32_t keys[kSampleChunk];
    int64_t w[kSampleChunk];
    int64_t passed = 0;
    int32_t last = tokens.id(0);
    for (int64_t start = 0; start < tokens.n && passed < mass; start += kSampleChunk) {
      const int64_t count = std::min(kSampleChunk, tokens.n - start);
      look(order, tokens.x + start, count, keys, w);
      for (int64_t i = 0; i < count && passed < mass; i++) {
        passed += w[i];
        last = tokens.id(start + i);
      }
    }
    look(order, tokens.x, 1, keys, nullptr);
    return {keys[0], last};
  }

  struct Entry {
    int32_t key, id;
    int64_t weight;
  };

  End last_of(const Tokens &tokens, SampleOrder order, int64_t mass) const {
    Entry entries[kSort];
    int32_t keys[kSampleChunk];
    int64_t w[kSampleChunk];
    look(order, tokens.x, tokens.n, keys, w);
    for (int64_t i = 0; i < tokens.n; i++) entries[i] = {keys[i], tokens.id(i), w[i]};
    std::sort(entries, entries + tokens.n,
              [](const Entry &a, const Entry &b) { return a.key != b.key ? a.key < b.key : a.id < b.id; });
    int64_t passed = 0, i = 0;
    for (; i < tokens.n - 1; i++) {
      passed += entries[i].weight;
      if (passed >= mass) break;
    }
    return {entries[i].key, entries[i].id};
  }

  // Of the tokens with at least `threshold` of the mass only the least likely stays (of equals the highest id).
  void exclude_top(double threshold) {
    if (threshold > 0.5) return;
    if (end_.key >= 0) keep(kByZ, end_);
    end_ = {-1, 0};
    if (left_.n < 2) return;
    int64_t sum = 0;
    chunks(left_, kWeightless, [&](int64_t start, int64_t count) { sum += f_.total(left_.x + start, count, scale_); });
    const int64_t bound = goal(threshold, sum);
    if (bound > (int64_t)1 << 40) return;  // no weight is larger
    // A z that is certainly below those of all such tokens; weights are rounded.
    const float lowest = (float)log(((double)bound - 0.5) * 0x1p-40) - 0.01f;
    int32_t keys[kSampleChunk];
    int64_t w[kSampleChunk];
    int64_t reached = 0;
    End least = {-1, 0};
    chunks(left_, lowest, [&](int64_t start, int64_t count) {
      look(kByZ, left_.x + start, count, keys, w);
      for (int64_t i = 0; i < count; i++)
        if (w[i] >= bound) {
          reached++;
          if (keys[i] >= least.key) least = {keys[i], left_.id(start + i)};
        }
    });
    if (reached < 2) return;
    int64_t kept = 0;
    float *x = s_.left_x.data;
    int32_t *ids = s_.left_ids.data;
    chunks(left_, kWeightless, [&](int64_t start, int64_t count) {
      look(kByZ, left_.x + start, count, keys, w);
      for (int64_t i = 0; i < count; i++) {
        const int32_t id = left_.id(start + i);
        x[kept] = left_.x[start + i];
        ids[kept] = id;
        kept += (w[i] < bound) | (id == least.id);
      }
    });
    left_ = {x, ids, kept};
  }

  int32_t draw(double u) const {
    int32_t keys[kSampleChunk];
    int64_t w[kSampleChunk];
    int64_t sum = 0, number = 0;
    int64_t *sums = s_.sums.data;  // per chunk
    const bool ends = end_.key >= 0;
    const float bound = ends ? std::max(kWeightless, bound_of(kByZ, end_.key)) : kWeightless;
    const auto chunk = [&](int64_t start, int64_t count) {
      look(kByZ, left_.x + start, count, keys, w);
      return f_.limit(keys, w, count, (int32_t)start, end_.key, end_.id);
    };
    chunks(left_, bound, [&](int64_t start, int64_t count) {
      sum += sums[number++] = ends ? chunk(start, count) : f_.total(left_.x + start, count, scale_);
    });
    int64_t target = std::min((int64_t)(u * (double)sum), sum - 1);
    int32_t token = -1;
    number = 0;
    chunks(left_, bound, [&](int64_t start, int64_t count) {
      const int64_t own = sums[number++];
      if (token < 0 && target < own) {
        if (ends) chunk(start, count);
        else look(kByZ, left_.x + start, count, keys, w);
        int64_t i = 0;
        for (; w[i] <= target; i++) target -= w[i];
        token = left_.id(start + i);
      }
      target -= own;
    });
    return token;
  }

  const float *x_;
  int64_t n_;
  const PlaitSampling &params_;
  Scratch &s_;
  const SampleLoops &f_;
  Tokens left_;
  Scale scale_ = {};
  End end_ = {-1, 0};  // of the whole row, by z; key -1: none
  float centre_ = 0;
};

}  // namespace
}  // namespace plait

int32_t plait_sample(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const PlaitSampling *params,
                     int32_t *ids) try {
  using namespace plait;
  if (rows < 0 || vocab < 1 || vocab > INT32_MAX - 8 || stride < vocab) return fail("sample: bad arguments");
  std::atomic<bool> full{false};
  parallel(rows, [&](int64_t r) {
    thread_local Scratch scratch;
    if (params[r].temperature < 0) return;  // not asked for
    if (!scratch.reserve(vocab)) {
      full = true;
      return;
    }
    ids[r] = Row(logits + r * stride, vocab, params[r], scratch).token();
  });
  return full ? fail("sample: no memory for a row of %lld logits", (long long)vocab) : 0;
} catch (...) {
  return plait::fail_with_exception();
}
