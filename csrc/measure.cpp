// The rate at which memory can be read: a limit that benchmarks compare with.
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels/kernels.h"

namespace {

typedef uint64_t Words __attribute__((vector_size(16)));

// Reads [p, end), a multiple of 256 bytes; the result keeps the compiler from leaving it out.
__attribute__((noinline)) uint64_t read_all(const uint8_t *p, const uint8_t *end) {
  Words sums[8] = {};
  for (; p < end; p += 256) {
    __builtin_prefetch(p + 4096);
    __builtin_prefetch(p + 4160);
    __builtin_prefetch(p + 4224);
    __builtin_prefetch(p + 4288);
    const Words *words = reinterpret_cast<const Words *>(p);
    for (int i = 0; i < 16; i++) sums[i % 8] += words[i];
  }
  uint64_t sum = 0;
  for (const Words &s : sums) sum += s[0] + s[1];
  return sum;
}

// Everybody waits until all `threads` are here. Yields: there may be more threads than CPUs.
struct Barrier {
  const int threads;
  std::atomic<int> arrived{0};
  std::atomic<int> round{0};
  void wait() {
    const int mine = round.load();
    if (arrived.fetch_add(1) + 1 == threads) {
      arrived = 0;
      round = mine + 1;
    } else {
      while (round.load() == mine) std::this_thread::yield();
    }
  }
};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

double plait_measure_read(int64_t bytes, int32_t threads, int32_t rounds) try {
  if (threads <= 0) threads = plait_threads();
  if (threads < 1 || threads > 1024 || rounds < 1 || bytes < 256 * threads) {
    plait::fail("nothing to measure: %lld bytes, %d threads, %d rounds", static_cast<long long>(bytes), threads,
                rounds);
    return 0;
  }
  const int64_t part = bytes / threads / 256 * 256;
  constexpr size_t kHugePage = size_t(2) << 20;
  const size_t size = (static_cast<size_t>(part) * threads + kHugePage - 1) / kHugePage * kHugePage;
  const std::unique_ptr<uint8_t, decltype(&free)> memory(static_cast<uint8_t *>(aligned_alloc(kHugePage, size)), free);
  uint8_t *buffer = memory.get();
  if (buffer == nullptr) {
    plait::fail("no memory for %zu bytes to read", size);
    return 0;
  }
#if defined(__linux__)
  madvise(buffer, size, MADV_HUGEPAGE);  // the most that memory gives; a kernel without them says no, which is fine
#endif

  struct Times {
    double start, end;
  };
  std::vector<Times> times(static_cast<size_t>(threads) * rounds);
  std::atomic<uint64_t> result{0};
  std::atomic<int> go{0};  // 1: measure, -1: not every thread could be started
  Barrier barrier{threads};
  const auto work = [&](int thread) {
    while (go.load() == 0) std::this_thread::yield();
    if (go.load() < 0) return;
    uint8_t *mine = buffer + thread * part;
    // Written by the thread that reads it: untouched pages would all be one page of zeros, in the cache.
    for (int64_t i = 0; i < part; i += 8) {
      const uint64_t word = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u + thread;
      memcpy(mine + i, &word, 8);
    }
    for (int r = 0; r < rounds; r++) {
      barrier.wait();
      Times &t = times[static_cast<size_t>(r) * threads + thread];
      t.start = seconds();
      result += read_all(mine, mine + part);
      t.end = seconds();
    }
  };
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < threads; i++) others.emplace_back(work, i);
    go = 1;
  } catch (const std::exception &) {
    go = -1;
  }
  work(0);
  for (std::thread &other : others) other.join();
  if (go.load() < 0) {
    plait::fail("%d threads could not be started", threads);
    return 0;
  }

  // The median: what lasts, to set beside other medians.
  std::vector<double> rates;
  for (int r = 0; r < rounds; r++) {
    double start = times[static_cast<size_t>(r) * threads].start, end = 0;
    for (int i = 0; i < threads; i++) {
      const Times &t = times[static_cast<size_t>(r) * threads + i];
      start = t.start < start ? t.start : start;
      end = t.end > end ? t.end : end;
    }
    rates.push_back(end > start ? static_cast<double>(part) * threads / (end - start) : 0);
  }
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
} catch (...) {
  plait::fail_with_exception();
  return 0;
}
