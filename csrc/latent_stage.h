// The stage of ATTEND_LATENT: each sequence of a step in the form that costs it less (see csrc/plait_native.h).
//
//   once per step and per distinct shape:  cut_latent(...)
//   per layer:  Latent stage(...); for every slab: queries(slab), attend(slab), results(slab)
//
// Absorbed tokens go through three phases, a slab of them at a time, so that what lies between the phases is bounded:
// products with W_uk^T of every head, attention of all heads to the cached rows (attend_stage.h), products with W_uv.
// An item of the expanded form is one head of one sequence: a chunk of rows is read back from the cache and multiplied
// into keys and values in the thread's own memory, in the layout of a cache, over which the kernels of attention run for
// all of the sequence's queries; chunks are folded in ascending order. No number depends on how anything is cut, on the
// batch or on the threads.
#pragma once

#include <vector>

#include "attend_stage.h"

namespace plait {

// One layer. Of what is cut, only the shape counts: cache, heads, widths, form and cost.
struct LatentLayer {
  PlaitCache cache;
  int64_t heads, nope, value;
  int32_t form;  // PLAIT_LATENT_...
  double attend_cost;
  float scale;
  PlaitMatrix weight, transposed;  // W_uk and W_uv of every head, W_uk^T of every head
  const float *q;  // row of the step's token t at q + t * q_stride: [heads, query()]
  int64_t q_stride;  // in floats
  float *out;  // row of token t at out + t * out_stride: [heads, value]
  int64_t out_stride;

  int64_t latent() const { return cache.latent_width; }
  int64_t row() const { return cache.key_width; }
  int64_t rotary() const { return row() - latent(); }
  int64_t query() const { return nope + rotary(); }
};

// Tokens [token, token + count) of the step, one after the other, are rows [row, row + count) of a slab.
struct LatentRun {
  int32_t token, row, count;
};

// Some of the absorbed tokens as a step of its own, over which attend_stage runs.
struct LatentSlab {
  int32_t rows = 0;
  std::vector<LatentRun> runs;
  std::vector<int32_t> query_start, context_len, block_table;
  PlaitStep step = {};
  int32_t head_tile = 0;
  AttendWork attend;
};

// One head of a sequence in the expanded form.
struct LatentItem {
  int32_t sequence, head;
};

// How a step is cut, and what lies between the phases. Everything is reused from step to step: memory grows to what the
// largest step needs and stays.
struct LatentWork {
  std::vector<LatentSlab> slabs;  // the first num_slabs count
  int64_t num_slabs = 0;
  std::vector<LatentItem> expanded;  // with the most work first
  std::vector<int32_t> table;        // of a thread's own keys and values: blocks of a chunk over and over
  std::vector<float> queries;        // [rows of a slab, heads, row()]
  std::vector<float> results;        // [rows of a slab, heads, latent()]

  int64_t bytes() const;
};

// Whether a sequence with so many tokens in the step, these among its context, takes the expanded form.
bool expands(const LatentLayer &layer, int64_t tokens, int64_t context);

// Cuts the step for `threads` threads. Called before the stage, by one thread.
void cut_latent(const PlaitStep &step, const LatentLayer &layer, int threads, LatentWork *work);

// Bytes of scratch that every thread needs, in steps of at most max_tokens tokens.
int64_t latent_scratch(const LatentLayer &layer, int64_t max_tokens);

class Latent {
 public:
  // A layer in a step that was cut for its shape, in a ParallelRegion. scratch: of thread 0, those of the others lie
  // thread_scratch bytes apart.
  Latent(const Kernels &kernels, const LatentLayer &layer, const PlaitStep &step, LatentWork &work, int64_t l2_bytes,
         int threads, uint8_t *scratch, int64_t thread_scratch);

  void queries(int64_t slab);
  // With the first slab, or without any: the expanded sequences too.
  void attend(int64_t slab);
  void results(int64_t slab);

  static int64_t scratch_of_expanded(const LatentLayer &layer, int64_t max_tokens);  // bytes

 private:
  struct Room;
  void run_expanded(const LatentItem &item, uint8_t *scratch) const;
  void expand(const LatentItem &item, int64_t key0, int64_t key1, const Room &room) const;
  AttendLayer absorbed(const LatentSlab &slab) const;
  uint8_t *scratch() const;

  const Kernels &kernels_;
  const LatentLayer &layer_;
  const PlaitStep &step_;
  LatentWork &work_;
  const int64_t l2_bytes_;
  const int threads_;
  uint8_t *const scratch_;
  const int64_t thread_scratch_;
};

}  // namespace plait
