// LoRA adapters (Hu et al. 2021): what those of a step's sequences add to the products of a plan.
//
// A product out = x W^T becomes out = x W^T + (x A^T) B^T for the rows whose sequence has an adapter. The first, narrow
// product is made before the stage, for all products of one input together; the second one in the items of the stage,
// right after theirs. Rows without an adapter are computed as if there were none.
#pragma once

#include <vector>

#include "kernels/kernels.h"

struct PlaitPlan;

namespace plait {

// One adapter. of_op: index into sites by operation, -1 where it changes nothing; empty: there is no such adapter.
struct AdapterTable {
  std::vector<PlaitAdapterSite> sites;
  std::vector<int32_t> of_op;
};

// Rows [first, end) have one adapter.
struct AdapterRun {
  int64_t first, end;
  int32_t adapter;
};

// The adapters of a plan, and those of the present step.
struct AdapterWork {
  std::vector<AdapterTable> tables;  // of adapter 1, 2, ...
  std::vector<AdapterRun> runs[2];   // by PLAIT_ROWS_..., in ascending order
  std::vector<float> low;            // [tokens][low_stride] the narrow products of the present stage
  int64_t low_stride = 0;
  int64_t bytes() const;
};

// 0, or -1 after fail(): sequences of the step name an adapter that the plan does not have.
int check_adapters(const PlaitPlan &plan, const PlaitStep &step);
// Finds the rows of the step that have an adapter; plan.owner holds the sequence of each token.
void begin_adapters(PlaitPlan *plan, const PlaitStep &step);

// What adapters add to the products of one operation in the present step.
class Adapted {
 public:
  // rows: PLAIT_ROWS_... of the operation.
  Adapted(PlaitPlan *plan, int32_t op, int32_t rows);
  bool any() const { return any_; }
  // The narrow products of all rows, with up to `threads` threads.
  void prepare(int threads) const;
  // Adds to what product k of the operation gave for panels [panel0, panel1) and rows [row0, row1). out: the number of
  // the first of these rows and of the first row of panel0; out_stride: in floats.
  void add(int32_t k, int64_t panel0, int64_t panel1, int64_t row0, int64_t row1, float *out, int64_t out_stride) const;

 private:
  const PlaitAdapterSite *site(int32_t adapter) const;
  void narrow(const AdapterRun &run, int64_t panel0, int64_t panel1) const;

  PlaitPlan &plan_;
  int32_t op_;
  const std::vector<AdapterRun> &runs_;
  bool any_ = false;
};

}  // namespace plait
