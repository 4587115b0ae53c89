// What is done to the queries, keys and values of one key/value head between the projections and attention: norms and
// rotation per head, and the writing into the cache.
//
// These are row operations, and a stage of their own where a sequence has several tokens. Where every sequence has one,
// nobody but the items of that sequence and head reads what they make: then the items do it themselves, every thread
// for its own heads, and one meeting of the threads falls away. The numbers are the same.
#pragma once

#include "plan.h"

namespace plait {

// Fills `rows` where the row operations [first, attend) do nothing but what the attention `attend` behind them reads,
// head by head, and what they read lasts until attention is done.
bool find_head_rows(const PlaitPlan &plan, int32_t first, int32_t attend, HeadRows *rows);

// Floats of scratch that run_head_rows needs: a group's queries and one key.
int64_t head_rows_scratch(const AttendLayer &layer);

// For the head and the one token of an item; keys and values are written by the item that sees the newest. Returns the
// queries [group, key_width], in scratch or where they lie.
const float *run_head_rows(const PlaitPlan &plan, const PlaitStep &step, const HeadRows &rows, const PlaitOp &attend,
                           const AttendItem &item, float *scratch);

}  // namespace plait
