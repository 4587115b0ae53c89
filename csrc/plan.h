// A plan: the operations of one step, checked and cut into stages, with the memory they work in.
//
// plan.cpp makes plans, adapters.cpp changes their products, plan_check.cpp refuses those that do not hold together, plan_run.cpp runs them, plan_steps.cpp
// runs several greedy steps in a row.
#pragma once

#include <vector>

#include "adapters.h"
#include "attend_stage.h"
#include "experts_work.h"
#include "kernels/kernels.h"
#include "latent_stage.h"

namespace plait {

// Zeroed memory of its own, in 2 MB pages where the system has them and it is large enough. bytes 0: none.
class Pages {
 public:
  Pages() = default;
  ~Pages() { release(); }
  Pages(const Pages &) = delete;
  Pages &operator=(const Pages &) = delete;
  bool reserve(int64_t bytes);  // in place of what there was; false where the system refuses
  uint8_t *data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void release();
  uint8_t *data_ = nullptr;
  void *map_ = nullptr;
  int64_t bytes_ = 0, map_bytes_ = 0;
};

// Row-local operations that follow one another over the same kind of rows are one stage, every other operation is one
// of its own. Threads meet between stages.
struct Stage {
  enum Kind { kRows, kLinear, kGated, kExperts, kAttend, kLatent, kSelect, kLogits, kHost };
  Kind kind;
  int32_t first, end;  // operations
  int32_t rows;        // PLAIT_ROWS_...
  int32_t attention;   // kAttend, kLatent: which of the plan's attentions or latents
  double row_ns;       // kRows: estimate of one row's time
  int32_t head_rows = -1;  // kRows and the kAttend behind it: which of the plan's, where attention can do these rows
};

// Row operations that attention can do head by head (head_rows.h), in their order.
struct HeadRows {
  std::vector<int32_t> queries, keys;
  int32_t write;  // the WRITE_KV
};

// Attention layers of one shape are cut alike: once per step.
struct Attention {
  AttendLayer layer;
  AttendWork work;
};

struct LatentAttention {
  LatentLayer layer;
  LatentWork work;
};

// The highest logit that one thread has seen of a row.
struct Best {
  float value;
  int32_t id;  // -1 = none yet
};

// Panels and rows of logits that lie in scratch at a time.
constexpr int64_t kLogitPanels = 8, kLogitRows = 32;

}  // namespace plait

// What changes after its making belongs to the thread that has a ParallelRegion.
struct PlaitPlan {
  const plait::Kernels *kernels = nullptr;
  std::vector<PlaitOp> ops;
  std::vector<PlaitBuffer> buffers;
  std::vector<PlaitMatrix> matrices;
  std::vector<PlaitCache> caches;
  std::vector<float> tables;
  int32_t max_tokens = 0, max_rows = 0, vocab_size = 0, sampled_ids = 0, copy_slots = 0;
  uint8_t *pool = nullptr;
  int64_t slot_stride = 0, block_bytes = 0;

  std::vector<plait::Stage> stages;
  std::vector<plait::Attention> attentions;
  std::vector<plait::LatentAttention> latents;
  std::vector<plait::HeadRows> head_rows;
  plait::ExpertWork experts;  // one EXPERTS runs at a time
  plait::AdapterWork adapters;
  plait::Pages arena, scratch;
  int64_t thread_scratch = 0;  // bytes of scratch per thread
  int scratch_threads = 0;
  int64_t l2_bytes = 0;
  std::vector<int32_t> owner;         // [max_tokens] sequence of a token of the present step
  std::vector<int32_t> positions;     // [max_tokens] where the caller gives none
  std::vector<plait::Best> best;      // [scratch_threads][max_rows]
  std::vector<double> stage_seconds;  // [stages]
  bool profiling = false;

  uint8_t *at(int32_t buffer) const { return arena.data() + buffers[buffer].offset; }
  float *row(int32_t buffer, int64_t r) const {
    return reinterpret_cast<float *>(at(buffer) + r * buffers[buffer].row_bytes);
  }
  // Floats between rows.
  int64_t stride(int32_t buffer) const { return buffers[buffer].row_bytes / 4; }
  const float *vector(int32_t matrix) const {
    return matrix < 0 ? nullptr : static_cast<const float *>(matrices[matrix].data);
  }
};

namespace plait {

// Checks the copied specification and fills plan->stages; 0, or -1 after fail().
int build_stages(PlaitPlan *plan, int32_t num_table_floats);
// Memory for threads of numbers below `threads` (see thread_limit); false where there is none.
bool reserve_scratch(PlaitPlan *plan, int threads);
// The layer of an ATTEND_LATENT.
LatentLayer latent_layer(const PlaitPlan &plan, const PlaitOp &op);
// plait_plan_run, which catches what this throws (plan_run.cpp).
int32_t run_from(PlaitPlan &plan, const PlaitStep &step, int32_t from);

}  // namespace plait
