// The stage of EXPERTS: tokens are sorted by expert, and every expert runs once over its own.
//
// Each expert's two halves are cut into items like products of their own, in the order of the experts: threads read
// neighbouring weights, one token keeps all of them busy, and so does a single expert that all tokens choose. A number
// does not depend on how many tokens an expert has, nor a token's sum on anything but its own choices.
#pragma once

#include "plan.h"

namespace plait {

class Experts {
 public:
  // `op` over `tokens` rows of its operands, at least 1, in a ParallelRegion.
  Experts(PlaitPlan &plan, const PlaitOp &op, int64_t tokens, int threads);

  // Sorts the choices and cuts the work; -1 after fail() for an id that is no expert's.
  int sort();
  // Gate and up of every expert's tokens, into out1.
  void gated();
  // The experts' results, into out2, and their sums.
  void down();

 private:
  bool sort_choices();
  void cut();
  void gather();
  void fetch_down() const;
  int64_t rows_of(int64_t expert) const { return work_.start[expert + 1] - work_.start[expert]; }
  PlaitMatrix matrix(int32_t weight, int64_t number, int64_t rows) const;
  uint8_t *slot(int32_t buffer, int64_t row) const {
    return plan_.at(buffer) + row * (plan_.buffers[buffer].row_bytes / top_k_);
  }

  PlaitPlan &plan_;
  const PlaitOp &op_;
  ExpertWork &work_;
  const int64_t tokens_;
  const int threads_;
  const int64_t experts_, top_k_, parts_, hidden_, width_;
};

// Bytes of scratch that each thread needs.
int64_t experts_scratch();

}  // namespace plait
