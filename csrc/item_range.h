// Which items of a stage a thread is to do, and how others take some of them over.
#pragma once

#include <stdint.h>

#include <atomic>

namespace plait {

constexpr size_t kLine = 128;            // bytes; two cache lines, which x86 fetches together
constexpr int64_t kMostGroups = 0xffff;  // that a range can count

// Items that one thread is to do, [first, last) of a stage. Each thread goes through a range of neighbours, because it
// then reads on where it has just read: shared out one by one, a product's weights come from memory at two thirds of
// the rate. Whoever asks names the stage it works for: ranges of other stages have nothing for it.
class alignas(kLine) ItemRange {
 public:
  void set(uint32_t stage, int64_t first, int64_t last) {
    word_.store(pack(stage, first, last), std::memory_order_release);
  }

  bool take_first(uint32_t stage, int64_t *item) {
    uint64_t word = word_.load(std::memory_order_acquire);
    do {
      *item = first(word);
      if (stage_of(word) != stage || *item >= last(word)) return false;
    } while (!word_.compare_exchange_weak(word, pack(stage, *item + 1, last(word)), std::memory_order_acq_rel,
                                          std::memory_order_acquire));
    return true;
  }

  // [*item, *end): the second half, at least one item.
  bool take_half(uint32_t stage, int64_t *item, int64_t *end) {
    uint64_t word = word_.load(std::memory_order_acquire);
    do {
      *end = last(word);
      if (stage_of(word) != stage || first(word) >= *end) return false;
      *item = (first(word) + *end) / 2;
    } while (!word_.compare_exchange_weak(word, pack(stage, first(word), *item), std::memory_order_acq_rel,
                                          std::memory_order_acquire));
    return true;
  }

 private:
  static uint64_t pack(uint32_t stage, int64_t first, int64_t last) {
    return uint64_t{stage} << 32 | static_cast<uint64_t>(last) << 16 | static_cast<uint64_t>(first);
  }
  static uint32_t stage_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
  static int64_t first(uint64_t word) { return static_cast<int64_t>(word & 0xffff); }
  static int64_t last(uint64_t word) { return static_cast<int64_t>(word >> 16 & 0xffff); }
  std::atomic<uint64_t> word_{0};
};

}  // namespace plait
