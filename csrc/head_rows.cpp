#include "head_rows.h"

#include <algorithm>

#include "plan_check.h"
#include "rows.h"

namespace plait {

namespace {

// The operations of [first, end) that make `buffer` one after the other, each on `heads` heads of this width: the first
// one first.
std::vector<int32_t> chain_of(const PlaitPlan &plan, int32_t first, int32_t end, int32_t buffer, int32_t heads,
                              int32_t width) {
  std::vector<int32_t> chain;
  for (int32_t i = end - 1; i >= first; i--) {
    const PlaitOp &op = plan.ops[i];
    const bool per_head =
        op.kind == PLAIT_OP_ROTATE || op.kind == PLAIT_OP_RMS_NORM || op.kind == PLAIT_OP_LAYER_NORM;
    if (op.out[0] != buffer || !per_head || op.i[0] != heads || op.i[1] != width) continue;
    chain.insert(chain.begin(), i);
    buffer = op.in[0];
  }
  return chain;
}

// The buffer that a chain which ends in `buffer` begins with.
int32_t source_of(const PlaitPlan &plan, const std::vector<int32_t> &chain, int32_t buffer) {
  return chain.empty() ? buffer : plan.ops[chain[0]].in[0];
}

// [buffers] whether an operation has it as an output.
std::vector<bool> named_outputs(const PlaitPlan &plan) {
  std::vector<bool> named(plan.buffers.size());
  for (const PlaitOp &op : plan.ops)
    for (const int32_t out : op.out)
      if (out >= 0 && out < int64_t(named.size())) named[out] = true;
  return named;
}

}  // namespace

bool find_head_rows(const PlaitPlan &plan, int32_t first, int32_t attend, HeadRows *rows) {
  const PlaitOp &op = plan.ops[attend], &write = plan.ops[attend - 1];
  const PlaitCache &cache = plan.caches[op.i[0]];
  if (write.kind != PLAIT_OP_WRITE_KV || write.i[0] != op.i[0] || cache.value_width == 0) return false;
  rows->write = attend - 1;
  rows->queries = chain_of(plan, first, attend - 1, op.in[0], op.i[1], cache.key_width);
  rows->keys = chain_of(plan, first, attend - 1, write.in[0], cache.num_kv_heads, cache.key_width);
  if (int64_t(rows->queries.size() + rows->keys.size()) != attend - 1 - first) return false;
  if (std::find_first_of(rows->queries.begin(), rows->queries.end(), rows->keys.begin(), rows->keys.end()) !=
      rows->queries.end())
    return false;
  // What is made here goes to the next of its chain and is written nowhere: nobody else may read it.
  const auto reads_made = [&](const std::vector<int32_t> &chain, int32_t in) {
    return in >= 0 && std::any_of(chain.begin(), chain.end(),
                                  [&](int32_t i) { return buffers_overlap(plan, in, plan.ops[i].out[0]); });
  };
  if (reads_made(rows->queries, source_of(plan, rows->keys, write.in[0])) ||
      reads_made(rows->keys, source_of(plan, rows->queries, op.in[0])))
    return false;
  const std::vector<bool> named = named_outputs(plan);
  for (int32_t i = first; i < attend; i++) {
    // Values and angles.
    if (reads_made(rows->queries, plan.ops[i].in[1]) || reads_made(rows->keys, plan.ops[i].in[1])) return false;
    const int32_t made = plan.ops[i].out[0];
    for (size_t other = 0; other < plan.ops.size() && made >= 0; other++) {
      if (int64_t(other) >= first && int64_t(other) <= attend) continue;
      const PlaitOp &reader = plan.ops[other];
      // Those of the caller may read more than they have places to name.
      if (reader.kind == PLAIT_OP_HOST && reader.in[2] >= 0) return false;
      for (const int32_t in : reader.in) {
        if (in == made) return false;
        // A buffer that nobody writes by its own number is a part of another one. (Numbers are not checked yet.)
        const bool part = in >= 0 && in < int64_t(named.size()) && !named[in];
        if (part && buffers_overlap(plan, in, made)) return false;
      }
    }
    // What is read must last until attention is done.
    for (const int32_t in : plan.ops[i].in)
      if (in >= 0 && buffers_overlap(plan, in, op.out[0])) return false;
  }
  return true;
}

int64_t head_rows_scratch(const AttendLayer &layer) {
  return (layer.heads / layer.cache.num_kv_heads + 1) * int64_t{layer.cache.key_width};
}

const float *run_head_rows(const PlaitPlan &plan, const PlaitStep &step, const HeadRows &rows, const PlaitOp &attend,
                           const AttendItem &item, float *scratch) {
  const PlaitCache &cache = plan.caches[attend.i[0]];
  const int64_t group = attend.i[1] / cache.num_kv_heads, row = step.query_start[item.sequence];
  // Numbers of `buffer` that belong to the item's head, after the operations of `chain` on `heads` heads.
  const auto run = [&](const std::vector<int32_t> &chain, int32_t buffer, int64_t heads, float *to) -> const float * {
    const float *x = plan.row(source_of(plan, chain, buffer), row) + item.kv_head * heads * cache.key_width;
    for (const int32_t i : chain) {
      PlaitOp op = plan.ops[i];
      op.i[0] = static_cast<int32_t>(heads);
      const PlaitMatrix *w[6] = {};
      PlaitMatrix own[2];
      for (int k = 0; k < 2; k++) {
        if (op.w[k] < 0) continue;
        own[k] = plan.matrices[op.w[k]];
        if (op.kind == PLAIT_OP_LAYER_NORM && op.i[3] != 0)  // weights of these heads only
          own[k].data = static_cast<const float *>(own[k].data) + item.kv_head * heads * cache.key_width;
        w[k] = &own[k];
      }
      const float *const in[3] = {x, op.in[1] < 0 ? nullptr : plan.row(op.in[1], row), nullptr};
      float *const out[3] = {to, nullptr, nullptr};
      run_row_op(*plan.kernels, op, heads * cache.key_width, in, out, w, plan.tables.data(), 0);
      x = to;
    }
    return x;
  };
  if (item.key1 == step.context_len[item.sequence]) {
    const PlaitOp &write = plan.ops[rows.write];
    const float *k = run(rows.keys, write.in[0], 1, scratch + group * cache.key_width);
    const float *v = plan.row(write.in[1], row) + item.kv_head * cache.value_width;
    const int64_t at = item.key1 - 1, line = cache.group * int64_t{step.num_sequences} + item.sequence;
    const int32_t *table = step.block_table + line * step.table_width;
    plan.kernels->write_kv(cache, item.kv_head, item.kv_head + 1, table[at / cache.block_tokens],
                           at % cache.block_tokens, k, v);
  }
  return run(rows.queries, attend.in[0], group, scratch);
}

}  // namespace plait
