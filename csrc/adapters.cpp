#include "adapters.h"

#include <algorithm>

#include <stdint.h>

#include "cut.h"
#include "plan.h"
#include "threads.h"

namespace plait {
namespace {

constexpr int32_t kMostAdapters = 4096;
// Rows of one item of the narrow products; so many of its input lie in scratch where they are kept as records.
constexpr int64_t kNarrowRows = 16;
constexpr int64_t kBlock = 32;  // numbers of a record that share a scale

int32_t products_of(const PlaitOp &op) {
  return op.kind == PLAIT_OP_LINEAR ? op.i[0] : op.kind == PLAIT_OP_GATED ? 2 : 1;
}

bool packed_holds(const PlaitMatrix &m, const PlaitPlan &plan) {
  const bool floats = m.layout >= PLAIT_LAYOUT_F32 && m.layout <= PLAIT_LAYOUT_F16;
  if (!floats || m.rows < 1 || m.cols < 1 || m.data == nullptr || reinterpret_cast<uintptr_t>(m.data) % 64 != 0)
    return false;
  const int64_t bytes = plait_packed_bytes(m.layout, m.rows, m.cols);
  return bytes > 0 && m.panel_bytes == bytes / panels_of(m) && plan.kernels->matmul[m.layout] != nullptr;
}

int check_site(const PlaitPlan &plan, const PlaitAdapterSite &site) {
  if (site.op < 0 || site.op >= int64_t(plan.ops.size())) return fail("an adapter for operation %d", site.op);
  const PlaitOp &op = plan.ops[site.op];
  if (op.kind != PLAIT_OP_LINEAR && op.kind != PLAIT_OP_GATED && op.kind != PLAIT_OP_ACTIVATED)
    return fail("an adapter for operation %d, which has no products", site.op);
  if (!packed_holds(site.a, plan) || site.a.cols != plan.matrices[op.w[0]].cols)
    return fail("an adapter for operation %d: its first matrix does not fit", site.op);
  for (int32_t k = 0; k < 3; k++) {
    const PlaitMatrix &b = site.b[k];
    if (b.data == nullptr) continue;
    if (k >= products_of(op) || !packed_holds(b, plan) || b.rows != plan.matrices[op.w[2 * k]].rows ||
        site.first[k] < 0 || site.first[k] + b.cols > site.a.rows)
      return fail("an adapter for operation %d: its matrix for product %d does not fit", site.op, k);
  }
  return 0;
}

// What the plan needs for all its adapters.
bool reserve(PlaitPlan *plan) {
  AdapterWork &work = plan->adapters;
  int64_t stride = 0, scratch = 0;
  for (const AdapterTable &table : work.tables)
    for (const PlaitAdapterSite &site : table.sites) {
      stride = std::max(stride, panels_of(site.a) * kPanelRows);
      if (plan->buffers[plan->ops[site.op].in[0]].kind == PLAIT_KIND_Q8)
        scratch = std::max<int64_t>(scratch, kNarrowRows * site.a.cols * sizeof(float));
    }
  work.low_stride = stride;
  work.low.resize(size_t(std::max(plan->max_tokens, plan->max_rows)) * stride);
  for (std::vector<AdapterRun> &runs : work.runs) runs.reserve(std::max(plan->max_tokens, plan->max_rows));
  if (scratch > plan->thread_scratch) {
    plan->thread_scratch = divide_up(scratch, 4096) * 4096;
    plan->scratch_threads = 0;
  }
  return reserve_scratch(plan, thread_limit());
}

void append(std::vector<AdapterRun> *runs, int64_t first, int64_t end, int32_t adapter) {
  if (adapter == 0 || first == end) return;
  if (!runs->empty() && runs->back().end == first && runs->back().adapter == adapter)
    runs->back().end = end;
  else
    runs->push_back({first, end, adapter});
}

}  // namespace

int64_t AdapterWork::bytes() const {
  int64_t all = int64_t(low.capacity() * sizeof(float));
  for (const std::vector<AdapterRun> &r : runs) all += int64_t(r.capacity() * sizeof(AdapterRun));
  for (const AdapterTable &t : tables)
    all += int64_t(t.sites.capacity() * sizeof(PlaitAdapterSite) + t.of_op.capacity() * sizeof(int32_t));
  return all;
}

int check_adapters(const PlaitPlan &plan, const PlaitStep &step) {
  if (step.adapter_ids == nullptr) return 0;
  const std::vector<AdapterTable> &tables = plan.adapters.tables;
  for (int32_t q = 0; q < step.num_sequences; q++) {
    const int32_t adapter = step.adapter_ids[q];
    if (adapter < 0 || adapter > int64_t(tables.size()) || (adapter > 0 && tables[adapter - 1].of_op.empty()))
      return fail("sequence %d: no adapter %d", q, adapter);
  }
  return 0;
}

void begin_adapters(PlaitPlan *plan, const PlaitStep &step) {
  std::vector<AdapterRun> *runs = plan->adapters.runs;
  runs[PLAIT_ROWS_TOKENS].clear();
  runs[PLAIT_ROWS_LOGITS].clear();
  if (step.adapter_ids == nullptr) return;
  for (int32_t q = 0; q < step.num_sequences; q++)
    append(&runs[PLAIT_ROWS_TOKENS], step.query_start[q], step.query_start[q + 1], step.adapter_ids[q]);
  if (runs[PLAIT_ROWS_TOKENS].empty()) return;
  for (int32_t r = 0; r < step.num_rows; r++)
    append(&runs[PLAIT_ROWS_LOGITS], r, r + 1, step.adapter_ids[plan->owner[step.logit_rows[r]]]);
}

Adapted::Adapted(PlaitPlan *plan, int32_t op, int32_t rows)
    : plan_(*plan), op_(op), runs_(plan->adapters.runs[rows]) {
  for (const AdapterRun &run : runs_) any_ |= site(run.adapter) != nullptr;
}

const PlaitAdapterSite *Adapted::site(int32_t adapter) const {
  const AdapterTable &table = plan_.adapters.tables[adapter - 1];
  const int32_t index = table.of_op[op_];
  return index < 0 ? nullptr : &table.sites[index];
}

void Adapted::prepare(int threads) const {
  std::vector<AdapterRun> items;
  double ns = 0;
  int64_t panels = 0;
  for (const AdapterRun &run : runs_) {
    const PlaitAdapterSite *found = site(run.adapter);
    if (found == nullptr) continue;
    panels = std::max(panels, panels_of(found->a));
    const double macs = double(panels_of(found->a) * kPanelRows) * double(found->a.cols);
    ns += std::max(double(panels_of(found->a) * found->a.panel_bytes) / kReadRate,
                   macs * double(run.end - run.first) / kMacRate);
    for (int64_t row = run.first; row < run.end; row += kNarrowRows)
      items.push_back({row, std::min(run.end, row + kNarrowRows), run.adapter});
  }
  const int64_t count = int64_t(items.size());
  // Few rows of a wide input: the panels are shared out too.
  const int64_t cuts = count < threads ? panels : 1;
  const auto work = [&](int64_t item) {
    const AdapterRun &run = items[item / cuts];
    const int64_t all = panels_of(site(run.adapter)->a), panel = item % cuts;
    if (cuts == 1)
      narrow(run, 0, all);
    else if (panel < all)
      narrow(run, panel, panel + 1);
  };
  if (threads > 1 && ns > kAlone) return parallel(count * cuts, work);
  for (int64_t item = 0; item < count * cuts; item++) work(item);
}

void Adapted::narrow(const AdapterRun &run, int64_t panel0, int64_t panel1) const {
  const PlaitMatrix &a = site(run.adapter)->a;
  const int32_t input = plan_.ops[op_].in[0];
  AdapterWork &work = plan_.adapters;
  MatmulArgs args{};
  args.matrix = &a;
  args.x = plan_.at(input) + run.first * plan_.buffers[input].row_bytes;
  args.x_stride = plan_.buffers[input].row_bytes;
  args.out = work.low.data() + run.first * work.low_stride;
  args.out_stride = work.low_stride;
  if (plan_.buffers[input].kind == PLAIT_KIND_Q8) {
    float *const numbers =
        reinterpret_cast<float *>(plan_.scratch.data() + thread_number() * plan_.thread_scratch);
    for (int64_t row = 0; row < run.end - run.first; row++) {
      const int8_t *const q = reinterpret_cast<const int8_t *>(args.x + row * args.x_stride);
      const float *const scales = reinterpret_cast<const float *>(q + a.cols);
      float *const to = numbers + row * a.cols;
      for (int64_t block = 0; block < a.cols / kBlock; block++)
        for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i++) to[i] = scales[block] * float(q[i]);
    }
    args.x = reinterpret_cast<const uint8_t *>(numbers);
    args.x_stride = a.cols * int64_t(sizeof(float));
  }
  plan_.kernels->matmul[a.layout](args, panel0, panel1, 0, run.end - run.first);
}

void Adapted::add(int32_t k, int64_t panel0, int64_t panel1, int64_t row0, int64_t row1, float *out,
                  int64_t out_stride) const {
  const AdapterWork &work = plan_.adapters;
  auto run = std::lower_bound(runs_.begin(), runs_.end(), row0,
                              [](const AdapterRun &r, int64_t row) { return r.end <= row; });
  for (; run != runs_.end() && run->first < row1; ++run) {
    const PlaitAdapterSite *found = site(run->adapter);
    if (found == nullptr || found->b[k].data == nullptr) continue;
    const PlaitMatrix b = part(found->b[k], panel0, panel1 - panel0);
    const int64_t first = std::max(row0, run->first), end = std::min(row1, run->end);
    MatmulArgs args{};
    args.matrix = &b;
    args.x = reinterpret_cast<const uint8_t *>(work.low.data() + first * work.low_stride + found->first[k]);
    args.x_stride = work.low_stride * int64_t(sizeof(float));
    args.out = out + (first - row0) * out_stride;
    args.out_stride = out_stride;
    args.add = args.out;
    args.add_stride = out_stride;
    plan_.kernels->matmul[b.layout](args, 0, panel1 - panel0, 0, end - first);
  }
}

}  // namespace plait

int32_t plait_plan_set_adapter(PlaitPlan *plan, int32_t adapter, const PlaitAdapterSite *sites, int32_t num_sites) try {
  using plait::fail;
  plait::ParallelRegion region;  // no step runs meanwhile
  if (adapter < 1 || adapter > plait::kMostAdapters || num_sites < 0)
    return fail("adapter %d with %d matrices: numbers are 1 to %d", adapter, num_sites, plait::kMostAdapters);
  plait::AdapterTable table;
  if (num_sites > 0) table.of_op.assign(plan->ops.size(), -1);
  for (int32_t s = 0; s < num_sites; s++) {
    if (plait::check_site(*plan, sites[s]) != 0) return -1;
    if (table.of_op[sites[s].op] >= 0) return fail("an adapter changes operation %d twice", sites[s].op);
    table.of_op[sites[s].op] = s;
    table.sites.push_back(sites[s]);
  }
  std::vector<plait::AdapterTable> &tables = plan->adapters.tables;
  if (adapter > int64_t(tables.size())) tables.resize(adapter);
  tables[adapter - 1] = std::move(table);
  if (!plait::reserve(plan)) {
    tables[adapter - 1] = {};
    return fail("no memory for scratch");
  }
  return 0;
} catch (...) {
  return plait::fail_with_exception();
}
