#include "experts_stage.h"

#include <string.h>

#include <algorithm>

#include "cut.h"
#include "gated_tile.h"
#include "threads.h"

namespace plait {
namespace {

// Guess at the bytes that one thread copies, or reads and adds up, in a ns.
constexpr double kCopyRate = 8;

// Calls f(row0, row1) for ranges of [0, rows) that take a thread row_ns each; few of them stay with the caller.
template <class F>
void share_rows(int64_t rows, double row_ns, int threads, const F &f) {
  if (threads == 1 || row_ns * double(rows) <= kAlone) return f(int64_t{0}, rows);
  const int64_t chunk = std::min(divide_up(rows, 2 * threads), 1 + int64_t(kAlone / row_ns));
  parallel(divide_up(rows, chunk), [&](int64_t item) { f(item * chunk, std::min(rows, (item + 1) * chunk)); });
}

}  // namespace

int64_t experts_scratch() { return 2 * kGatedScratch * int64_t(sizeof(float)); }

Experts::Experts(PlaitPlan &plan, const PlaitOp &op, int64_t tokens, int threads)
    : plan_(plan),
      op_(op),
      work_(plan.experts),
      tokens_(tokens),
      threads_(threads),
      experts_(op.i[1]),
      top_k_(plan.buffers[op.in[1]].width),
      parts_(op.i[2] != 0 ? 2 : 1),
      hidden_(plan.buffers[op.out[1]].width / top_k_),
      width_(plan.buffers[op.out[0]].width) {}

// One of the matrices of `rows` rows that a stack consists of.
PlaitMatrix Experts::matrix(int32_t weight, int64_t number, int64_t rows) const {
  PlaitMatrix one = plan_.matrices[op_.w[weight]];
  one.data = static_cast<const uint8_t *>(one.data) + number * divide_up(rows, kPanelRows) * one.panel_bytes;
  one.rows = rows;
  return one;
}

int Experts::sort() {
  if (!sort_choices()) return -1;
  cut();
  return 0;
}

bool Experts::sort_choices() {
  const int64_t choices = tokens_ * top_k_;
  work_.start.assign(experts_ + 1, 0);
  work_.choice.resize(choices);
  work_.row.resize(choices);
  for (int64_t t = 0; t < tokens_; t++) {
    const int32_t *ids = reinterpret_cast<const int32_t *>(plan_.row(op_.in[1], t));
    for (int64_t j = 0; j < top_k_; j++) {
      if (ids[j] < 0 || ids[j] >= experts_) {
        fail("row %lld chooses expert %d of %lld", static_cast<long long>(t), ids[j], static_cast<long long>(experts_));
        return false;
      }
      work_.start[ids[j] + 1]++;
    }
  }
  for (int64_t e = 0; e < experts_; e++) work_.start[e + 1] += work_.start[e];
  // start[e] runs over the rows of expert e, and then is where those of the next begin.
  for (int64_t t = 0, c = 0; t < tokens_; t++) {
    const int32_t *ids = reinterpret_cast<const int32_t *>(plan_.row(op_.in[1], t));
    for (int64_t j = 0; j < top_k_; j++, c++) {
      const int32_t row = work_.start[ids[j]]++;
      work_.row[c] = row;
      work_.choice[row] = static_cast<int32_t>(c);
    }
  }
  for (int64_t e = experts_; e > 0; e--) work_.start[e] = work_.start[e - 1];
  work_.start[0] = 0;
  return true;
}

void Experts::cut() {
  work_.gated.clear();
  work_.down.clear();
  work_.apart.assign(experts_, 0);
  const PlaitMatrix &up = plan_.matrices[op_.w[0]], &down = plan_.matrices[op_.w[2]];
  const double panel_bytes = double(parts_) * double(up.panel_bytes);
  const double panel_macs = double(parts_) * double(kPanelRows) * double(up.cols);
  constexpr int64_t group_panels = kGroupOutputs / kPanelRows;
  const auto put = [&](int64_t expert, int64_t units, const Cut &cut, std::vector<ExpertItem> *items) {
    const int64_t rows = rows_of(expert);
    for (int64_t row = 0; row < rows; row += cut.tokens)
      for (int64_t unit = 0; unit < units; unit += cut.units)
        items->push_back({int32_t(expert), int32_t(row), int32_t(std::min(rows, row + cut.tokens)), int32_t(unit),
                          int32_t(std::min(units, unit + cut.units))});
  };
  for (int64_t e = 0; e < experts_; e++) {
    const int64_t rows = rows_of(e), groups = divide_up(hidden_, kGroupOutputs), panels = divide_up(width_, kPanelRows);
    if (rows == 0) continue;
    put(e, groups,
        cut_product(plan_.l2_bytes, groups, double(group_panels) * panel_bytes, double(group_panels) * panel_macs, rows,
                    plan_.buffers[op_.in[0]].row_bytes, threads_),
        &work_.gated);
    put(e, panels,
        cut_product(plan_.l2_bytes, panels, double(down.panel_bytes), double(kPanelRows) * double(down.cols), rows,
                    plan_.buffers[op_.out[1]].row_bytes / top_k_, threads_),
        &work_.down);
    // Products read rows that lie equally far apart: most of few tokens do where they are.
    const int32_t *choice = work_.choice.data() + work_.start[e];
    const int64_t k = top_k_, apart = rows > 1 ? choice[1] / k - choice[0] / k : 1;
    bool even = apart > 0;
    for (int64_t r = 2; r < rows && even; r++) even = choice[r] / k - choice[r - 1] / k == apart;
    work_.apart[e] = even ? apart : 0;
  }
}

// Copies the tokens of experts whose rows do not lie equally far apart, in their order, to out2, which is not in use
// yet.
void Experts::gather() {
  const PlaitBuffer &in = plan_.buffers[op_.in[0]];
  const int64_t bytes =
      in.kind == PLAIT_KIND_Q8 ? plait_quantised_row_bytes(in.width) : in.width * int64_t{sizeof(float)};
  bool any = false;
  for (int64_t e = 0; e < experts_; e++) any |= rows_of(e) > 0 && work_.apart[e] == 0;
  if (!any) return;
  share_rows(tokens_ * top_k_, double(bytes) / kCopyRate, threads_, [&](int64_t row0, int64_t row1) {
    int64_t expert = std::upper_bound(work_.start.begin(), work_.start.end(), row0) - work_.start.begin() - 1;
    for (int64_t row = row0; row < row1; row++) {
      while (row >= work_.start[expert + 1]) expert++;
      if (work_.apart[expert] == 0)
        memcpy(slot(op_.out[2], row), plan_.at(op_.in[0]) + work_.choice[row] / top_k_ * in.row_bytes, bytes);
    }
  });
}

void Experts::gated() {
  gather();
  if (tokens_ <= kFewTokens) fetch_down();
  const PlaitBuffer &in = plan_.buffers[op_.in[0]], &out = plan_.buffers[op_.out[1]];
  const float *bias = plan_.vector(op_.w[1]);
  parallel(int64_t(work_.gated.size()), [&](int64_t number) {
    const ExpertItem &item = work_.gated[number];
    const int64_t e = item.expert, first = work_.start[e];
    GatedProduct product{};
    product.two = parts_ == 2;
    product.gate = product.up = matrix(0, parts_ * e, hidden_);
    product.gate_bias = bias == nullptr ? nullptr : bias + parts_ * e * hidden_;
    if (product.two) {
      product.up = matrix(0, parts_ * e + 1, hidden_);
      product.up_bias = bias == nullptr ? nullptr : bias + (parts_ * e + 1) * hidden_;
    }
    product.activation = op_.i[0];
    product.alpha = op_.f[0];
    product.limit = op_.f[1];
    if (work_.apart[e] == 0) {
      product.x = slot(op_.out[2], first);
      product.x_stride = plan_.buffers[op_.out[2]].row_bytes / top_k_;
    } else {
      product.x = plan_.at(op_.in[0]) + work_.choice[first] / top_k_ * in.row_bytes;
      product.x_stride = work_.apart[e] * in.row_bytes;
    }
    product.out = slot(op_.out[1], first);
    product.out_stride = out.row_bytes / top_k_;
    product.quantised = out.kind == PLAIT_KIND_Q8;
    run_gated(*plan_.kernels, product, item.unit0, item.unit1, item.row0, item.row1,
              reinterpret_cast<float *>(plan_.scratch.data() + thread_number() * plan_.thread_scratch));
  });
}

// Tells every thread where its part of the experts' second half begins, to fetch when it is through with the first.
void Experts::fetch_down() const {
  if (threads_ == 1) return;
  const int64_t items = int64_t(work_.down.size()), sharers = std::min<int64_t>(threads_, items);
  for (int64_t thread = 0; thread < sharers; thread++) {
    const ExpertItem &item = work_.down[items * thread / sharers];
    const PlaitMatrix down = matrix(2, item.expert, width_);
    const uint8_t *from = static_cast<const uint8_t *>(down.data) + item.unit0 * down.panel_bytes;
    const uint8_t *const at[2] = {from, from + kFetchBytes};
    set_fetch(static_cast<int>(thread), at, 2);
  }
}

void Experts::down() {
  const float *bias = plan_.vector(op_.w[3]);
  parallel(int64_t(work_.down.size()), [&](int64_t number) {
    const ExpertItem &item = work_.down[number];
    const int64_t e = item.expert, first = work_.start[e];
    const PlaitMatrix down = matrix(2, e, width_);
    MatmulArgs args{};
    args.matrix = &down;
    args.x = slot(op_.out[1], first);
    args.x_stride = plan_.buffers[op_.out[1]].row_bytes / top_k_;
    args.out = reinterpret_cast<float *>(slot(op_.out[2], first));
    args.out_stride = plan_.buffers[op_.out[2]].row_bytes / top_k_ / int64_t(sizeof(float));
    args.bias = bias == nullptr ? nullptr : bias + e * width_;
    plan_.kernels->matmul[down.layout](args, item.unit0, item.unit1, item.row0, item.row1);
  });
  const double row_ns = double(width_ * (top_k_ + 1)) * sizeof(float) / kCopyRate;
  share_rows(tokens_, row_ns, threads_, [&](int64_t token0, int64_t token1) {
    for (int64_t t = token0; t < token1; t++) {
      const float *rows[kMaxExperts];
      for (int64_t j = 0; j < top_k_; j++)
        rows[j] = reinterpret_cast<const float *>(slot(op_.out[2], work_.row[t * top_k_ + j]));
      plan_.kernels->weighted_sum(rows, plan_.row(op_.in[2], t), top_k_, width_, plan_.row(op_.out[0], t));
    }
  });
}

}  // namespace plait
