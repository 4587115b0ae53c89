// Several greedy steps in one call: between them nobody has to be asked, so nothing has to leave the library.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "plan.h"

namespace plait {
namespace {

// Whether every sequence just decodes and nothing but its best id is wanted of it: a step then says all of the next one.
int check_decoding(const PlaitPlan &plan, const PlaitStep &s) {
  if (s.num_tokens < 1 || s.num_tokens != s.num_sequences || s.num_tokens != s.num_rows)
    return fail("steps in a row need one token and one row of logits per sequence, not %d tokens, %d sequences, %d rows",
                s.num_tokens, s.num_sequences, s.num_rows);
  for (int32_t q = 0; q < s.num_sequences; q++)
    if (s.query_start[q] != q || s.logit_rows[q] != q)
      return fail("steps in a row: sequence %d begins at token %d, row %d is of token %d", q, s.query_start[q], q,
                  s.logit_rows[q]);
  if (s.positions != nullptr || s.logits != nullptr || s.hidden != nullptr)
    return fail("steps in a row take no positions, and give neither logits nor hidden states");
  bool best = false;
  for (const PlaitOp &op : plan.ops) {
    if (op.kind == PLAIT_OP_HOST) return fail("steps in a row cannot stop for an operation of the caller");
    best |= op.kind == PLAIT_OP_LOGITS;
  }
  return best ? 0 : fail("steps in a row: the plan finds no best ids");
}

int32_t run_steps(PlaitPlan &plan, const PlaitStep &first, int32_t steps, double seconds, const int32_t *stop_ids,
                  int32_t num_stop_ids, const int32_t *interrupt, int32_t *ids, float *values) {
  const auto start = std::chrono::steady_clock::now();
  if (steps < 1 || num_stop_ids < 0) return fail("%d steps in a row with %d ids that end them", steps, num_stop_ids);
  if (ids == nullptr || values == nullptr) return fail("nowhere to put the ids of steps in a row");
  const int32_t *const stops_end = num_stop_ids == 0 ? stop_ids : stop_ids + num_stop_ids;
  if (!std::is_sorted(stop_ids, stops_end)) return fail("the ids that end steps in a row do not ascend");
  if (check_decoding(plan, first) != 0) return -1;
  const int32_t rows = first.num_rows;
  std::vector<int32_t> context(first.context_len, first.context_len + rows);
  PlaitStep step = first;
  step.context_len = context.data();
  for (int32_t done = 0;;) {
    step.best_ids = ids + int64_t{done} * rows;
    step.best_values = values + int64_t{done} * rows;
    if (run_from(plan, step, 0) < 0) return -1;
    if (++done == steps) return done;
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() >= seconds) return done;
    if (interrupt != nullptr && __atomic_load_n(interrupt, __ATOMIC_RELAXED) != 0) return done;
    for (int32_t r = 0; r < rows; r++)
      if (!std::isfinite(step.best_values[r]) || std::binary_search(stop_ids, stops_end, step.best_ids[r])) return done;
    step.token_ids = step.best_ids;
    step.num_copies = 0;
    for (int32_t &length : context) length++;
  }
}

}  // namespace
}  // namespace plait

int32_t plait_plan_run_steps(PlaitPlan *plan, const PlaitStep *step, int32_t steps, double seconds,
                             const int32_t *stop_ids, int32_t num_stop_ids, const int32_t *interrupt, int32_t *ids,
                             float *values) try {
  return plait::run_steps(*plan, *step, steps, seconds, stop_ids, num_stop_ids, interrupt, ids, values);
} catch (...) {
  return plait::fail_with_exception();
}
