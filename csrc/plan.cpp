// Makes plans: cuts them into stages, reserves the memory.
#include "plan.h"

#include <algorithm>
#include <memory>
#include <new>

#include <stdint.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

#include "experts_stage.h"
#include "gated_tile.h"
#include "head_rows.h"
#include "plan_check.h"
#include "rows.h"
#include "threads.h"

namespace plait {
namespace {

constexpr int64_t kHugePage = 2 << 20;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Whether the operation may run row by row together with its neighbours.
bool is_row_local(int32_t kind) { return is_row_op(kind) || kind == PLAIT_OP_WRITE_KV || kind == PLAIT_OP_HIDDEN; }

// Rows that a row-local operation goes over.
int32_t rows_of(const PlaitPlan &plan, const PlaitOp &op) {
  const bool without_output = op.kind == PLAIT_OP_WRITE_KV || op.kind == PLAIT_OP_HIDDEN;
  return plan.buffers[without_output ? op.in[0] : op.out[0]].rows;
}

// A guess at the time of one row, to decide whether rows are worth sharing out.
double row_ns(const PlaitPlan &plan, const PlaitOp &op) {
  double numbers = 0;
  for (const int32_t b : op.in)
    if (b >= 0) numbers += plan.buffers[b].width;
  for (const int32_t b : op.out)
    if (b >= 0) numbers += plan.buffers[b].width;
  const bool heavy = op.kind == PLAIT_OP_GATE || op.kind == PLAIT_OP_ACTIVATE || op.kind == PLAIT_OP_SOFT_CAP ||
                     op.kind == PLAIT_OP_POSITIONS || op.kind == PLAIT_OP_EMBED || op.kind == PLAIT_OP_WRITE_KV ||
                     op.kind == PLAIT_OP_ROUTE;
  if (op.kind == PLAIT_OP_ROUTE) numbers += 0.2 * op.i[0] * op.i[1];  // all logits are gone over for every choice
  return 20 + numbers * (heavy ? 0.6 : 0.2);
}

// Room for the choices of the largest step.
void reserve_experts(PlaitPlan *plan, const PlaitOp &op) {
  const PlaitBuffer &ids = plan->buffers[op.in[1]];
  const size_t tokens = ids.rows == PLAIT_ROWS_LOGITS ? plan->max_rows : plan->max_tokens;
  plan->experts.start.reserve(op.i[1] + 1);
  plan->experts.apart.reserve(op.i[1]);
  plan->experts.choice.reserve(tokens * ids.width);
  plan->experts.row.reserve(tokens * ids.width);
}

bool same_shape(const PlaitCache &x, const PlaitCache &y) {
  return x.group == y.group && x.block_tokens == y.block_tokens && x.num_kv_heads == y.num_kv_heads &&
         x.key_width == y.key_width && x.value_width == y.value_width && x.latent_width == y.latent_width &&
         x.kv_type == y.kv_type;
}

bool same_shape(const AttendLayer &a, const AttendLayer &b) {
  return a.heads == b.heads && a.window == b.window && same_shape(a.cache, b.cache);
}

bool same_shape(const LatentLayer &a, const LatentLayer &b) {
  return a.heads == b.heads && a.nope == b.nope && a.value == b.value && a.form == b.form &&
         a.attend_cost == b.attend_cost && same_shape(a.cache, b.cache);
}

// Number of the first of `known` that is cut alike.
template <class Known, class Layer>
int32_t find_shape(std::vector<Known> *known, const Layer &layer) {
  size_t a = 0;
  while (a < known->size() && !same_shape((*known)[a].layer, layer)) a++;
  if (a == known->size()) known->push_back({layer, {}});
  return static_cast<int32_t>(a);
}

template <class T>
void copy_array(const T *from, int32_t count, std::vector<T> *to) {
  if (count > 0) to->assign(from, from + count);
}

}  // namespace

bool Pages::reserve(int64_t bytes) {
  release();
  if (bytes <= 0) return true;
#if defined(__unix__) || defined(__APPLE__)
  const bool huge = bytes >= kHugePage;
  const int64_t wanted = huge ? round_up(bytes, kHugePage) + kHugePage : bytes;
  void *map = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return false;
  map_ = map;
  map_bytes_ = wanted;
  const uintptr_t start = reinterpret_cast<uintptr_t>(map);
  data_ = static_cast<uint8_t *>(map) + (huge ? round_up(start, kHugePage) - start : 0);
#if defined(MADV_HUGEPAGE)
  if (huge) madvise(data_, round_up(bytes, kHugePage), MADV_HUGEPAGE);
#endif
#else
  map_ = ::operator new(bytes, std::align_val_t(64), std::nothrow);
  if (map_ == nullptr) return false;
  data_ = static_cast<uint8_t *>(map_);
  std::fill(data_, data_ + bytes, uint8_t{0});
#endif
  bytes_ = bytes;
  return true;
}

void Pages::release() {
  if (map_ == nullptr) return;
#if defined(__unix__) || defined(__APPLE__)
  munmap(map_, map_bytes_);
#else
  ::operator delete(map_, std::align_val_t(64));
#endif
  map_ = nullptr;
  data_ = nullptr;
  bytes_ = map_bytes_ = 0;
}

int build_stages(PlaitPlan *plan, int32_t num_table_floats) {
  if (!plan_holds(*plan)) return -1;
  const int32_t num_ops = static_cast<int32_t>(plan->ops.size());
  int64_t scratch = 0;
  for (int32_t i = 0; i < num_ops; i++) {
    if (!op_holds(*plan, i, num_table_floats)) return -1;
    const PlaitOp &op = plan->ops[i];
    if (is_row_local(op.kind)) {
      const int32_t rows = rows_of(*plan, op);
      std::vector<Stage> &stages = plan->stages;
      if (stages.empty() || stages.back().kind != Stage::kRows || stages.back().rows != rows)
        stages.push_back({Stage::kRows, i, i, rows, -1, 0});
      stages.back().end = i + 1;
      stages.back().row_ns += row_ns(*plan, op);
      continue;
    }
    Stage stage{Stage::kHost, i, i + 1, PLAIT_ROWS_TOKENS, -1, 0};
    if (op.kind == PLAIT_OP_SELECT_ROWS || op.kind == PLAIT_OP_LOGITS) stage.rows = PLAIT_ROWS_LOGITS;
    if (op.kind == PLAIT_OP_LINEAR) stage.kind = Stage::kLinear;
    if (op.kind == PLAIT_OP_GATED || op.kind == PLAIT_OP_ACTIVATED) {
      stage.kind = Stage::kGated;
      scratch = std::max<int64_t>(scratch, 2 * kGatedScratch * sizeof(float));
    }
    if (op.kind == PLAIT_OP_EXPERTS) {
      stage.kind = Stage::kExperts;
      scratch = std::max(scratch, experts_scratch());
      reserve_experts(plan, op);
    }
    if (op.kind == PLAIT_OP_SELECT_ROWS) stage.kind = Stage::kSelect;
    if (op.kind == PLAIT_OP_LOGITS) {
      stage.kind = Stage::kLogits;
      scratch = std::max<int64_t>(scratch, kLogitRows * kLogitPanels * kPanelRows * sizeof(float));
    }
    if (op.kind == PLAIT_OP_ATTEND) {
      stage.kind = Stage::kAttend;
      AttendLayer layer{};
      layer.cache = plan->caches[op.i[0]];
      layer.heads = op.i[1];
      layer.window = op.i[2];
      const int64_t numbers = attend_item_scratch(layer) + head_rows_scratch(layer);
      scratch = std::max<int64_t>(scratch, numbers * sizeof(float));
      stage.attention = find_shape(&plan->attentions, layer);
      HeadRows rows;
      Stage *before = plan->stages.empty() ? nullptr : &plan->stages.back();
      if (before != nullptr && before->kind == Stage::kRows && find_head_rows(*plan, before->first, i, &rows)) {
        stage.head_rows = before->head_rows = static_cast<int32_t>(plan->head_rows.size());
        plan->head_rows.push_back(rows);
      }
    }
    if (op.kind == PLAIT_OP_ATTEND_LATENT) {
      stage.kind = Stage::kLatent;
      const LatentLayer layer = latent_layer(*plan, op);
      scratch = std::max(scratch, latent_scratch(layer, plan->max_tokens));
      stage.attention = find_shape(&plan->latents, layer);
    }
    if (op.kind == PLAIT_OP_LINEAR || stage.kind == Stage::kGated || stage.kind == Stage::kExperts)
      stage.rows = plan->buffers[op.in[0]].rows;
    plan->stages.push_back(stage);
  }
  for (const Stage &stage : plan->stages)
    if (stage.kind == Stage::kRows && !stage_holds(*plan, stage.first, stage.end)) return -1;
  plan->thread_scratch = round_up(scratch, 4096);  // threads do not share pages
  return 0;
}

LatentLayer latent_layer(const PlaitPlan &plan, const PlaitOp &op) {
  LatentLayer layer{};
  layer.cache = plan.caches[op.i[0]];
  layer.heads = op.i[1];
  layer.nope = op.i[2];
  layer.value = op.i[3];
  layer.form = op.i[4];
  layer.scale = op.f[0];
  layer.attend_cost = double(op.f[1]);
  layer.weight = plan.matrices[op.w[0]];
  layer.transposed = plan.matrices[op.w[1]];
  layer.q = plan.row(op.in[0], 0);
  layer.q_stride = plan.stride(op.in[0]);
  layer.out = plan.row(op.out[0], 0);
  layer.out_stride = plan.stride(op.out[0]);
  return layer;
}

bool reserve_scratch(PlaitPlan *plan, int threads) {
  if (threads <= plan->scratch_threads) return true;
  plan->scratch_threads = 0;  // until both are there
  plan->best.resize(size_t(threads) * plan->max_rows);
  if (!plan->scratch.reserve(plan->thread_scratch * threads)) return false;
  plan->scratch_threads = threads;
  return true;
}

}  // namespace plait

PlaitPlan *plait_plan_create(const PlaitPlanSpec *spec) try {
  using plait::fail;
  if (spec->num_ops < 0 || spec->num_buffers < 0 || spec->num_matrices < 0 || spec->num_caches < 0 ||
      spec->num_table_floats < 0)
    return fail("a plan with a negative number of something"), nullptr;
  std::unique_ptr<PlaitPlan> plan(new PlaitPlan);
  plan->kernels = plait::find_kernels(nullptr);
  if (plan->kernels == nullptr) return fail("PLAIT_ISA names no instruction set that this CPU runs"), nullptr;
  plait::copy_array(spec->ops, spec->num_ops, &plan->ops);
  plait::copy_array(spec->buffers, spec->num_buffers, &plan->buffers);
  plait::copy_array(spec->matrices, spec->num_matrices, &plan->matrices);
  plait::copy_array(spec->caches, spec->num_caches, &plan->caches);
  plait::copy_array(spec->tables, spec->num_table_floats, &plan->tables);
  plan->max_tokens = spec->max_tokens;
  plan->max_rows = spec->max_rows;
  plan->vocab_size = spec->vocab_size;
  plan->sampled_ids = spec->sampled_ids;
  plan->copy_slots = spec->copy_slots;
  plan->pool = spec->pool;
  plan->slot_stride = spec->slot_stride;
  plan->block_bytes = spec->block_bytes;
  if (spec->arena_bytes < 0 || spec->arena_bytes > plait::kMostBytes || !plan->arena.reserve(spec->arena_bytes))
    return fail("no memory for an arena of %lld bytes", static_cast<long long>(spec->arena_bytes)), nullptr;
  if (plait::build_stages(plan.get(), spec->num_table_floats) != 0) return nullptr;
  PlaitTopology topology;
  plan->l2_bytes = plait_topology("", &topology) == 0 && topology.l2_bytes > 0 ? topology.l2_bytes : 512 << 10;
  plan->owner.resize(plan->max_tokens);
  plan->positions.resize(plan->max_tokens);
  plan->stage_seconds.resize(plan->stages.size());
  if (!plait::reserve_scratch(plan.get(), plait::thread_limit())) return fail("no memory for scratch"), nullptr;
  return plan.release();
} catch (...) {
  plait::fail_with_exception();
  return nullptr;
}

void plait_plan_destroy(PlaitPlan *plan) { delete plan; }

void *plait_plan_buffer(PlaitPlan *plan, int32_t buffer) {
  if (buffer < 0 || buffer >= static_cast<int64_t>(plan->buffers.size())) return nullptr;
  return plan->at(buffer);
}

int64_t plait_plan_bytes(const PlaitPlan *plan) {
  int64_t bytes = plan->arena.bytes() + plan->scratch.bytes() + plan->experts.bytes() + plan->adapters.bytes();
  for (const plait::Attention &attention : plan->attentions) bytes += attention.work.bytes();
  for (const plait::LatentAttention &attention : plan->latents) bytes += attention.work.bytes();
  return bytes + int64_t(plan->best.size() * sizeof(plait::Best) +
                         (plan->owner.size() + plan->positions.size()) * sizeof(int32_t));
}

void plait_plan_profile(PlaitPlan *plan, int32_t on, double *seconds) try {
  plait::ParallelRegion region;  // no step runs meanwhile
  if (seconds != nullptr) std::fill(seconds, seconds + plan->ops.size(), 0.0);
  for (size_t s = 0; s < plan->stages.size(); s++) {
    if (seconds != nullptr) seconds[plan->stages[s].first] = plan->stage_seconds[s];
    plan->stage_seconds[s] = 0;
  }
  plan->profiling = on != 0;
} catch (...) {
  plait::fail_with_exception();
}
