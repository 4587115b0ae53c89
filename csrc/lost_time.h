// What a thread loses of its core to others.
#pragma once

#include <stdint.h>

#include <atomic>
#include <chrono>

#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace plait {

// Nanoseconds of a clock that never goes back.
inline int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Time that a thread wanted to run and did not: what passed on the clock less what it got, where it was thrown out.
class LostTime {
 public:
  void start() {
    wall_ = now();
    read(&cpu_, &switches_);
  }
  // To be called by the thread itself after start().
  void add() {
    const int64_t wall = now();
    int64_t cpu = 0, switches = 0;
    read(&cpu, &switches);
    const int64_t lost = wall - wall_ - (cpu - cpu_);
    if (switches > switches_ && lost > 0) lost_.store(this->lost() + lost, std::memory_order_relaxed);
    awake_.store(awake() + wall - wall_, std::memory_order_relaxed);
    wall_ = wall;
    cpu_ = cpu;
    switches_ = switches;
  }
  int64_t since() const { return wall_; }
  int64_t lost() const { return lost_.load(std::memory_order_relaxed); }    // ns, any thread may ask
  int64_t awake() const { return awake_.load(std::memory_order_relaxed); }  // ns

 private:
  static void read(int64_t *cpu, int64_t *switches) {
#if defined(__linux__)
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    *cpu = (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1'000'000'000 +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1'000;
    *switches = usage.ru_nivcsw;
#else
    *cpu = now();
    *switches = 0;
#endif
  }
  int64_t wall_ = 0, cpu_ = 0, switches_ = 0;
  std::atomic<int64_t> lost_{0}, awake_{0};
};

}  // namespace plait
