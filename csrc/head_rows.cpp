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

}  // namespace

bool find_head_rows(const PlaitPlan &plan, int32_t first, int32_t attend, HeadRows *rows) {
  const PlaitOp &op = plan.ops[attend], &write = plan.ops[attend - 1];
  const PlaitCache &cache = plan.caches[op.i[0]];
  if (write.kind != PLAIT_OP_WRITE_KV || write.i[0] != op.i[0]) return false;
  rows->write = attend - 1;
  rows->queries = chain_of(plan, first, attend - 1, op.in[0], op.i[1], cache.key_width);
  rows->keys = chain_of(plan, first, attend - 1, write.in[0], cache.num_kv_heads, cache.key_width);
  if (int64_t(rows->queries.size() + rows->keys.size()) != attend - 1 - first) return false;
  for (int32_t i = first; i < attend; i++) {
    // What is made here is not made where others could read it, and what is read must last until attention is done.
    const int32_t made = plan.ops[i].out[0];
    for (size_t other = 0; other < plan.ops.size() && made >= 0; other++)
      for (const int32_t in : plan.ops[other].in)
        if (in == made && (int64_t(other) < first || int64_t(other) > attend)) return false;
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
    const int32_t source = chain.empty() ? buffer : plan.ops[chain[0]].in[0];
    const float *x = plan.row(source, row) + item.kv_head * heads * cache.key_width;
    for (const int32_t i : chain) {
      PlaitOp op = plan.ops[i];
      op.i[0] = static_cast<int32_t>(heads);
      const PlaitMatrix *w[6] = {};
      for (int k = 0; k < 2; k++) w[k] = op.w[k] < 0 ? nullptr : &plan.matrices[op.w[k]];
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
    const float *v = cache.value_width == 0 ? nullptr : plan.row(write.in[1], row) + item.kv_head * cache.value_width;
    const int64_t at = item.key1 - 1, line = cache.group * int64_t{step.num_sequences} + item.sequence;
    const int32_t *table = step.block_table + line * step.table_width;
    plan.kernels->write_kv(cache, item.kv_head, item.kv_head + 1, table[at / cache.block_tokens],
                           at % cache.block_tokens, k, v);
  }
  return run(rows.queries, attend.in[0], group, scratch);
}

}  // namespace plait
