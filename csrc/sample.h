// The inner loops of the sampler, once per instruction set. Nothing here depends on the set: integers are summed, and
// the floating-point steps are single IEEE operations in one order, so that the same logits give the same token
// everywhere, in C++ and in numpy (plait.engine.filters states the arithmetic).
#pragma once

#include <stdint.h>

namespace plait {

constexpr int64_t kSampleBlock = 64;   // numbers whose largest is remembered
constexpr int64_t kSampleChunk = 512;  // numbers that are worked on at a time
constexpr int64_t kSampleBuckets = 1024;
constexpr int64_t kSampleLanes = 4;  // histograms side by side: equal tokens in a row would wait for one another
// Below this z the weight is 0: e^-29 * 2^40 is less than one half.
constexpr float kWeightless = -29.0f;

// z = (x - highest) * factor, where factor = 1 / temperature.
struct Scale {
  float highest, factor;
};

// Orders in which filters keep a prefix: largest logit first, largest z first, nearest z to the centre first. A token's
// key in an order is an integer, ascending: the number's own bits, which sort as it does.
enum SampleOrder { kByLogit, kByZ, kByDistance };

struct SampleLoops {
  // Largest of every block of x [n] and of all; false where there is a NaN.
  bool (*scan)(const float *x, int64_t n, float *block_max, float *highest);
  // z of x [n].
  void (*scaled)(const float *x, int64_t n, Scale scale, float *z);
  // Weights round(e^z * 2^40) of z [n]; returns their sum.
  int64_t (*weigh)(const float *z, int64_t n, int64_t *w);
  // The sum of the weights alone, of x [n].
  int64_t (*total)(const float *x, int64_t n, Scale scale);
  // Keys of numbers [n]: logits (kByLogit) or z; centre for kByDistance.
  void (*keys)(SampleOrder order, const float *numbers, int64_t n, float centre, int32_t *keys);
  // The sum of round(w z) of z and their weights [n].
  int64_t (*moment)(const float *z, const int64_t *w, int64_t n);
  // Makes weights [n] 0 where key > high, or key == high and the id first_id + i > tie; returns the sum of the others.
  int64_t (*limit)(const int32_t *keys, int64_t *w, int64_t n, int32_t first_id, int32_t high, int32_t tie);
  // Lowers *least and raises *most to the keys [n].
  void (*range)(const int32_t *keys, int64_t n, int32_t *least, int32_t *most);
  // Adds weights [n] (1 each where w is null) to the buckets [kSampleLanes][kSampleBuckets] of their keys: (key - low)
  // >> shift, at most the last.
  void (*fill)(const int32_t *keys, const int64_t *w, int64_t n, int32_t low, int shift, int64_t *buckets);
  // Numbers x[i] and ids (ids[i], or first_id + i where ids is null) whose key has low <= key < high, or key == high
  // and id <= tie. Returns how many; the outputs may be the inputs, and have room for 8 more.
  int64_t (*keep)(const int32_t *keys, const float *x, const int32_t *ids, int32_t first_id, int64_t n, int32_t low,
                  int32_t high, int32_t tie, float *x_out, int32_t *ids_out);
};

const SampleLoops &sample_loops_portable();
const SampleLoops &sample_loops_avx2();

}  // namespace plait
