// Checks of a plan that is being made: false after fail() where something does not hold together.
#pragma once

#include "plan.h"

namespace plait {

// Bytes of an arena, or of all rows of a buffer, at most.
constexpr int64_t kMostBytes = int64_t{1} << 46;

// Sizes, buffers, matrices and caches.
bool plan_holds(const PlaitPlan &plan);
// Operation `index`: that what it names is there, and of the shapes that its kernel takes. num_table_floats: rotary
// frequencies that there are.
bool op_holds(const PlaitPlan &plan, int32_t index, int64_t num_table_floats);
// Operations [first, end), all of them row-local: that threads can be at different ones of them.
bool stage_holds(const PlaitPlan &plan, int32_t first, int32_t end);
// Whether two buffers share memory that either uses.
bool buffers_overlap(const PlaitPlan &plan, int32_t a, int32_t b);

}  // namespace plait
