// One step of an optimiser, all pieces in one call. Work is cut by the sizes of the pieces alone, so that no number
// depends on how many threads there are.
#include <math.h>

#include <algorithm>
#include <vector>

#include "kernels/kernels.h"
#include "threads.h"

namespace plait {
namespace {

constexpr int64_t kChunk = 16384;  // numbers of an item: a few streams of 64 KB
// Numbers whose gradients MARS reads twice in a row, the second time out of a cache.
constexpr int64_t kWave = int64_t{1} << 20;

struct Item {
  int64_t update, begin, end;
};

void cut(const PlaitUpdate *updates, int64_t i, std::vector<Item> *items) {
  for (int64_t begin = 0; begin < updates[i].count; begin += kChunk)
    items->push_back({i, begin, std::min(updates[i].count, begin + kChunk)});
}

// Pieces [first, last) of MARS: the norms of all, then the step of all.
void mars_wave(const Kernels &kernels, PlaitUpdate *updates, const std::vector<Item> &items) {
  std::vector<double> squares(items.size());
  parallel(static_cast<int64_t>(items.size()), [&](int64_t k) {
    squares[k] = kernels.mars_squares(updates[items[k].update], items[k].begin, items[k].end);
  });
  for (const Item &item : items) updates[item.update].measured = 0;
  for (size_t k = 0; k < items.size(); k++) updates[items[k].update].measured += squares[k];
  for (const Item &item : items)
    if (item.begin == 0) updates[item.update].measured = sqrt(updates[item.update].measured);
  parallel(static_cast<int64_t>(items.size()), [&](int64_t k) {
    const PlaitUpdate &u = updates[items[k].update];
    const float clip = u.measured > 1 ? static_cast<float>(1 / u.measured) : 1.0f;
    kernels.mars(u, clip, items[k].begin, items[k].end);
  });
}

void run_mars(const Kernels &kernels, PlaitUpdate *updates, int64_t count) {
  std::vector<Item> items;
  int64_t numbers = 0;
  for (int64_t i = 0; i < count; i++) {
    if (updates[i].rule != PLAIT_RULE_MARS) continue;
    if (!items.empty() && numbers + updates[i].count > kWave) {
      mars_wave(kernels, updates, items);
      items.clear();
      numbers = 0;
    }
    cut(updates, i, &items);
    numbers += updates[i].count;
  }
  if (!items.empty()) mars_wave(kernels, updates, items);
}

void run_others(const Kernels &kernels, PlaitUpdate *updates, int64_t count) {
  std::vector<Item> items;
  for (int64_t i = 0; i < count; i++)
    if (updates[i].rule != PLAIT_RULE_MARS) cut(updates, i, &items);
  std::vector<int64_t> unclipped(items.size());
  parallel(static_cast<int64_t>(items.size()), [&](int64_t k) {
    const PlaitUpdate &u = updates[items[k].update];
    switch (u.rule) {
      case PLAIT_RULE_ADAMW: kernels.adamw(u, items[k].begin, items[k].end); break;
      case PLAIT_RULE_LION: kernels.lion(u, items[k].begin, items[k].end); break;
      default: unclipped[k] = kernels.sophia(u, items[k].begin, items[k].end);
    }
  });
  for (size_t k = 0; k < items.size(); k++) updates[items[k].update].measured += static_cast<double>(unclipped[k]);
}

// Tensors of the state that a rule uses.
int state_count(int32_t rule) {
  return rule == PLAIT_RULE_LION ? 1 : rule == PLAIT_RULE_MARS ? 3 : 2;
}

int check(const PlaitUpdate *updates, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const PlaitUpdate &u = updates[i];
    const long long number = i;
    if (u.rule < 0 || u.rule >= PLAIT_RULE_COUNT) return fail("update %lld: there is no rule %d", number, u.rule);
    if (u.count < 0) return fail("update %lld: %lld numbers", number, static_cast<long long>(u.count));
    if (u.parameter == nullptr || u.gradient == nullptr) return fail("update %lld: no parameter or gradient", number);
    for (int k = 0; k < state_count(u.rule); k++)
      if (u.state[k] == nullptr) return fail("update %lld: rule %d needs state %d", number, u.rule, k);
  }
  return 0;
}

}  // namespace
}  // namespace plait

int32_t plait_optimise(const char *isa, PlaitUpdate *updates, int64_t count) try {
  const plait::Kernels *kernels = plait::find_kernels(isa);
  if (kernels == nullptr) return plait::fail("no instruction set %s here", isa ? isa : "as PLAIT_ISA names");
  if (plait::check(updates, count) != 0) return -1;
  plait::ParallelRegion region;
  for (int64_t i = 0; i < count; i++) updates[i].measured = 0;
  plait::run_mars(*kernels, updates, count);
  plait::run_others(*kernels, updates, count);
  return 0;
} catch (...) {
  return plait::fail_with_exception();
}
