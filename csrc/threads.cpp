#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "files.h"
#include "float_mode.h"
#include "item_range.h"
#include "kernels/kernels.h"
#include "lost_time.h"

namespace plait {
namespace {

// How long an idle worker spins: between the stages of a region, and after one (the next step may be near).
constexpr int64_t kSpinInRegion = 500'000, kSpinAfter = 30'000;  // ns
// Spinning gives way to sched_yield after this long: whoever is waited for may need this very core.
constexpr int64_t kSpinBeforeYield = 50'000;  // ns
// Contention is judged over this much time awake, and workers are left out for this long, doubling while it goes on.
constexpr int64_t kWindow = 150'000'000, kFirstPenalty = 25'000'000, kLastPenalty = 400'000'000;  // ns
constexpr int64_t kMaskInterval = 1'000'000'000;  // ns between looks at the affinity mask
constexpr size_t kLeastStack = 1 << 20;           // bytes; musl gives 128 KB, a product may take 150

void pause() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

#if defined(__linux__)
using Mask = cpu_set_t;
bool read_mask(Mask *mask) { return sched_getaffinity(0, sizeof *mask, mask) == 0; }
bool same_mask(const Mask &a, const Mask &b) { return CPU_EQUAL(&a, &b); }
void pin(pthread_t thread, const Mask &mask) { pthread_setaffinity_np(thread, sizeof mask, &mask); }

// The mask's CPUs, core by core.
std::vector<std::vector<int>> cores_of(const Mask &mask) {
  std::vector<std::vector<int>> cores;
  std::vector<std::string> names;  // hardware threads of one core name the same list of siblings
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    const std::string directory = "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
    std::string name = read_line(directory + "/topology/thread_siblings_list");
    if (name.empty()) name = directory;
    const size_t core = std::find(names.begin(), names.end(), name) - names.begin();
    if (core == names.size()) {
      names.push_back(name);
      cores.emplace_back();
    }
    cores[core].push_back(cpu);
  }
  return cores;
}
#endif

// CPUs that this process may keep busy.
int usable_cpus() {
  PlaitTopology topology;
  if (plait_topology("", &topology) == 0) return topology.usable_cpus;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Threads worth having: the CPUs that may be used, one per core. A core's second thread shares the units that the
// kernels keep busy, and takes them from the first when it spins.
int useful_threads() {
  PlaitTopology topology;
  if (plait_topology("", &topology) != 0) return std::min(usable_cpus(), kMaxThreads);
  return std::max(1, std::min({topology.usable_cpus, topology.physical_cores, kMaxThreads}));
}

std::atomic<int> wanted_threads{0};  // as plait_set_threads was told; 0 = useful_threads()

thread_local int my_number = 0;
thread_local bool in_region = false;  // this thread opened the present region
thread_local bool in_item = false;    // this thread runs an item

class Pool;

struct Worker {
  Pool *pool = nullptr;
  int number = 0;  // from 1
  pthread_t thread{};
  LostTime time;
};

// What set_fetch() asked for.
struct alignas(kLine) Fetch {
  std::atomic<int> count{0};
  std::atomic<const uint8_t *> from[kFetches] = {};
};

class Pool {
 public:
  Pool() { workers_.reserve(kMaxThreads); }  // so that a worker that runs is always in the list

  // Throws nothing: the lock would stay.
  void open() noexcept {
    turn_.lock();
    in_region = true;
    const int64_t time = now();
    resize(time);
    adapt(time);
    if (team() == 0) return;
    callers_time_.start();
    place();
    open_.store(true);
    wake();
  }

  void close() {
    if (open_.load(std::memory_order_relaxed)) {
      open_.store(false);
      callers_time_.add();
    }
    in_region = false;
    turn_.unlock();
  }

  void stage(int64_t items, void (*work)(void *, int64_t), void *context) {
    if (items <= 0) return;
    if (items == 1 || team() == 0) {
      in_item = true;
      for (int64_t item = 0; item < items; item++) work(context, item);
      in_item = false;
      return;
    }
    // Nobody holds an item here, so nobody reads what follows, and ranges of a stage that has not begun are left alone.
    work_ = work;
    context_ = context;
    items_ = items;
    group_ = (items + kMostGroups - 1) / kMostGroups;
    float_mode_ = float_mode();
    const int64_t groups = (items + group_ - 1) / group_, sharers = std::min<int64_t>(team() + 1, groups);
    const uint32_t stage = stage_.load(std::memory_order_relaxed) + 1;
    for (int64_t k = 0; k < sharers; k++)
      ranges_[k].set(stage, groups * k / sharers, groups * (k + 1) / sharers);
    done_.store(0, std::memory_order_relaxed);
    left_.store(groups);
    stage_.store(stage, std::memory_order_release);
    if (sleepers_.load() > 0) wake();
    run_items(0);
    wait(groups);
  }

  void set_fetch(int thread, const uint8_t *const *from, int count) {
    Fetch &fetch = fetches_[thread];
    for (int i = 0; i < count; i++) fetch.from[i].store(from[i], std::memory_order_relaxed);
    fetch.count.store(count, std::memory_order_relaxed);
  }

  int threads() { return in_region ? threads_ : wanted(); }

  // Threads that may hold an item, now or in the next region. A worker that was just left out, or is no longer wanted,
  // may still take one: it asks team() and takes the item in two steps.
  int limit() { return std::max(threads(), started_.load() + 1); }

  // Keeps regions from being opened, and waits for the present one to end.
  void stop() { turn_.lock(); }
  void go_on() { turn_.unlock(); }

 private:
  // Workers that take part now, beside the caller.
  int team() const { return team_.load(std::memory_order_relaxed); }

  int wanted() {
    const int wanted = wanted_threads.load(std::memory_order_relaxed);
    if (wanted > 0) return wanted;
    int useful = useful_.load(std::memory_order_relaxed);
    if (useful == 0) useful_.store(useful = useful_threads(), std::memory_order_relaxed);
    return useful;
  }

  // Takes groups of items until there are none.
  void run_items(int number) {
    in_item = true;
    const uint32_t stage = stage_.load(std::memory_order_acquire);
    bool any = false;
    int64_t group;
    while (number <= team() && left_.load(std::memory_order_relaxed) > 0 && claim(stage, number, &group)) {
      left_.fetch_sub(1, std::memory_order_relaxed);
      set_float_mode(float_mode_);
      const int64_t end = std::min(items_, (group + 1) * group_);
      for (int64_t item = group * group_; item < end; item++) work_(context_, item);
      done_.fetch_add(1, std::memory_order_release);
      any = true;
    }
    in_item = false;
    if (any) fetch(&fetches_[number]);
  }

  static void fetch(Fetch *fetch) {
    const int count = fetch->count.load(std::memory_order_relaxed);
    fetch->count.store(0, std::memory_order_relaxed);
    for (int k = 0; k < count; k++) {
      const uint8_t *from = fetch->from[k].load(std::memory_order_relaxed);
      for (int64_t i = 0; i < kFetchBytes; i += 64) __builtin_prefetch(from + i);
    }
  }

  // The next of the thread's own range, or of another one's second half, which then is its own.
  bool claim(uint32_t stage, int number, int64_t *group) {
    if (ranges_[number].take_first(stage, group)) return true;
    const int ranges = started_.load(std::memory_order_relaxed) + 1;
    for (int k = 1; k < ranges; k++) {
      int64_t end;
      if (!ranges_[(number + k) % ranges].take_half(stage, group, &end)) continue;
      if (*group + 1 < end) ranges_[number].set(stage, *group + 1, end);
      return true;
    }
    return false;
  }

  void wait(int64_t groups) {
    int64_t since = 0;
    for (int spins = 0; done_.load(std::memory_order_acquire) != groups; spins++) {
      pause();
      if (spins % 256 != 255) continue;
      const int64_t time = now();
      if (since == 0) since = time;
      if (crowded_ || time - since > kSpinBeforeYield) sched_yield();
    }
    // A long region judges its workers on the way.
    if (since != 0 && now() - judged_ > 2 * kWindow) adapt(now());
  }

  void wake() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      calls_++;
    }
    called_.notify_all();
  }

  static void *worker_main(void *argument) {
    Worker *worker = static_cast<Worker *>(argument);
    my_number = worker->number;
    worker->pool->serve(*worker);
    return nullptr;
  }

  void serve(Worker &worker) {
    for (;;) {
      worker.time.start();
      int64_t idle_since = now();
      for (int spins = 0;; spins++) {
        if (worker.number <= team() && left_.load(std::memory_order_relaxed) > 0) {
          run_items(worker.number);
          idle_since = now();
          if (idle_since - worker.time.since() > kWindow / 4) worker.time.add();
          spins = 0;
          continue;
        }
        pause();
        if (spins % 64 != 63) continue;
        const int64_t idle = now() - idle_since;
        if (crowded_.load(std::memory_order_relaxed) || worker.number > team()) break;
        if (idle > (open_.load(std::memory_order_relaxed) ? kSpinInRegion : kSpinAfter)) break;
        if (idle > kSpinBeforeYield) sched_yield();
      }
      worker.time.add();
      sleep(worker);
    }
  }

  // Until the next call, or until a stage has items that this worker may take.
  void sleep(const Worker &worker) {
    std::unique_lock<std::mutex> lock(sleep_);
    // A worker that is left out is woken by the call that lets it in again, and is not counted until then.
    while (worker.number > team()) left_out_.wait(lock);
    const int64_t calls = calls_;
    sleepers_.fetch_add(1);
    called_.wait(lock, [&] { return calls_ != calls || left_.load() > 0; });
    sleepers_.fetch_sub(1);
  }

  void set_team(int workers) {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      team_.store(workers, std::memory_order_relaxed);
    }
    left_out_.notify_all();
  }

  // Follows plait_set_threads and the affinity mask.
  void resize(int64_t time) {
#if defined(__linux__)
    if (time - looked_ > kMaskInterval) {
      looked_ = time;
      Mask mask;
      if (!read_mask(&mask)) CPU_ZERO(&mask);  // more CPUs than it has bits: nobody is placed
      if (usable_ == 0 || !same_mask(mask, mask_)) {
        mask_ = mask;
        useful_.store(useful_threads(), std::memory_order_relaxed);
        usable_ = usable_cpus();
        crowded_.store(threads_ > usable_, std::memory_order_relaxed);
        placed_ = -1;
        try {
          cores_ = cores_of(mask);
        } catch (const std::exception &) {  // no memory: nobody is placed
          cores_.clear();
        }
      }
    }
#else
    if (usable_ == 0) usable_ = usable_cpus();
#endif
    const int threads = wanted();
    if (threads == threads_) return;
    while (static_cast<int>(workers_.size()) < threads - 1 && start_worker()) {
    }
    threads_ = std::min(threads, static_cast<int>(workers_.size()) + 1);
    crowded_.store(threads_ > usable_, std::memory_order_relaxed);
    placed_ = -1;
    set_team(threads_ - 1);
    judge_from_now(time);
  }

  bool start_worker() {
    Worker *worker = new (std::nothrow) Worker;
    if (worker == nullptr) return false;
    worker->pool = this;
    worker->number = static_cast<int>(workers_.size()) + 1;
    // Signals are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_t attributes;
    size_t stack = 0;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_attr_getstacksize(&attributes, &stack) == 0 && stack < kLeastStack)
      pthread_attr_setstacksize(&attributes, kLeastStack);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool started = pthread_create(&worker->thread, &attributes, worker_main, worker) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (!started) {
      delete worker;
      return false;
    }
#if defined(__linux__)
    pthread_setname_np(worker->thread, ("plait-" + std::to_string(worker->number)).c_str());
#endif
    workers_.push_back(worker);
    started_.store(worker->number);
    return true;
  }

  // Every worker on a core of its own, and none on the caller's; anywhere where the cores do not suffice or are
  // contended for. The caller itself is not pinned: it is not ours.
  void place() {
#if defined(__linux__)
    const int here = sched_getcpu();
    const bool spread = static_cast<int>(cores_.size()) >= threads_ && team() == threads_ - 1;
    const int placed = spread ? here : -2;
    if (placed == placed_) return;
    placed_ = placed;
    if (!spread) {
      for (Worker *worker : workers_) pin(worker->thread, mask_);
      return;
    }
    int w = 0;
    for (const std::vector<int> &core : cores_) {
      if (w == threads_ - 1 || std::find(core.begin(), core.end(), here) != core.end()) continue;
      Mask mask;
      CPU_ZERO(&mask);
      for (const int cpu : core) CPU_SET(cpu, &mask);
      pin(workers_[w++]->thread, mask);
    }
    for (; w < static_cast<int>(workers_.size()); w++) pin(workers_[w]->thread, mask_);
#endif
  }

  // Leaves workers out while cores are contended for, and tries again later. Every stage waits for the slowest holder
  // of an item, so time that any thread lost is lost to all: with T threads and a share l of their time lost
  // (summed), T - 1 threads are faster when T (1 - l) < T - 1. The limit lies lower, because threads that share the
  // memory's bandwidth bring less than one thread's worth each.
  void adapt(int64_t time) {
    if (threads_ <= 1 || crowded_.load(std::memory_order_relaxed)) return;
    if (team() < threads_ - 1 && time >= out_until_) {
      set_team(threads_ - 1);
      judge_from_now(time);
      return;
    }
    if (in_region && open_.load(std::memory_order_relaxed)) callers_time_.add();
    if (team() == 0 || callers_time_.awake() - callers_awake_ < kWindow) return;
    double lost = share(callers_time_, callers_lost_, callers_awake_);
    int contended = lost > 0.15;
    for (int w = 0; w < team(); w++) {
      const double share_lost = share(workers_[w]->time, workers_lost_[w], workers_awake_[w]);
      lost += share_lost;
      contended += share_lost > 0.15;
    }
    const int taking_part = team() + 1;
    if (lost > 0.7 / taking_part) {
      set_team(std::max(0, team() - std::max(1, contended)));
      out_until_ = time + penalty_;
      penalty_ = std::min(2 * penalty_, kLastPenalty);
    } else if (time - out_until_ > kLastPenalty) {
      penalty_ = kFirstPenalty;
    }
    judge_from_now(time);
  }

  static double share(const LostTime &time, int64_t lost, int64_t awake) {
    return double(time.lost() - lost) / double(std::max<int64_t>(time.awake() - awake, kWindow / 2));
  }

  void judge_from_now(int64_t time) {
    judged_ = time;
    callers_lost_ = callers_time_.lost();
    callers_awake_ = callers_time_.awake();
    for (size_t w = 0; w < workers_.size(); w++) {
      workers_lost_[w] = workers_[w]->time.lost();
      workers_awake_[w] = workers_[w]->time.awake();
    }
  }

  // The present stage. Where there are very many items, `group_` of them are taken as one. left_: groups that nobody has
  // taken yet, or a little more.
  ItemRange ranges_[kMaxThreads + 1];
  Fetch fetches_[kMaxThreads + 1];
  alignas(kLine) std::atomic<int64_t> left_{0};
  std::atomic<uint32_t> stage_{0};  // its number
  alignas(kLine) std::atomic<int64_t> done_{0};
  alignas(kLine) void (*work_)(void *, int64_t) = nullptr;
  void *context_ = nullptr;
  int64_t items_ = 0, group_ = 1;
  unsigned float_mode_ = 0;

  alignas(kLine) std::atomic<bool> open_{false};
  std::atomic<bool> crowded_{false};  // more threads than CPUs: nobody spins
  std::atomic<int> team_{0};

  alignas(kLine) std::mutex sleep_;
  std::condition_variable called_, left_out_;
  int64_t calls_ = 0;
  std::atomic<int> sleepers_{0};

  // What follows belongs to the owner of turn_.
  std::mutex turn_;
  std::vector<Worker *> workers_;
  int threads_ = 0;  // as wanted, the caller among them
  std::atomic<int> useful_{0}, started_{0};
  int usable_ = 0, placed_ = -1;
  int64_t looked_ = -kMaskInterval - 1;
#if defined(__linux__)
  Mask mask_{};
  std::vector<std::vector<int>> cores_;
#endif
  LostTime callers_time_;
  int64_t callers_lost_ = 0, callers_awake_ = 0;
  int64_t workers_lost_[kMaxThreads] = {}, workers_awake_[kMaxThreads] = {};
  int64_t judged_ = 0, out_until_ = 0, penalty_ = kFirstPenalty;
};

std::atomic<Pool *> the_pool{nullptr};

// A fork waits for the present region to end: no plan is in the middle of a step, and none is held.
thread_local Pool *stopped = nullptr;
void stop_regions() {
  stopped = in_region ? nullptr : the_pool.load();
  if (stopped != nullptr) stopped->stop();
}
void let_regions_go_on() {
  if (stopped != nullptr) stopped->go_on();
}

// The child has none of the parent's threads, and locks as they happened to be: it starts with a new pool.
void forget_pool() {
  the_pool.store(nullptr);
  my_number = 0;
  in_region = in_item = false;
}

Pool &pool() {
  Pool *pool = the_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  static const int registered = pthread_atfork(stop_regions, let_regions_go_on, forget_pool);
  (void)registered;
  Pool *made = new Pool;  // never deleted: its threads run until the process ends
  if (!the_pool.compare_exchange_strong(pool, made)) {
    delete made;
    return *pool;
  }
  return *made;
}

}  // namespace

ParallelRegion::ParallelRegion() : opened_(!in_region && !in_item) {
  if (opened_) pool().open();
}

ParallelRegion::~ParallelRegion() {
  if (opened_) pool().close();
}

void parallel_for(int64_t items, void (*work)(void *context, int64_t item), void *context) {
  if (in_item) {
    for (int64_t item = 0; item < items; item++) work(context, item);
    return;
  }
  ParallelRegion region;
  pool().stage(items, work, context);
}

void set_fetch(int thread, const uint8_t *const *from, int count) { pool().set_fetch(thread, from, count); }

int thread_number() { return my_number; }

int thread_count() { return pool().threads(); }

int thread_limit() { return pool().limit(); }

}  // namespace plait

int32_t plait_set_threads(int32_t threads) {
  if (threads < 0 || threads > plait::kMaxThreads)
    return plait::fail("%d threads: 0 to %d can be had", threads, plait::kMaxThreads);
  plait::wanted_threads.store(threads);
  return 0;
}

int32_t plait_threads(void) try {
  return plait::thread_count();
} catch (...) {
  return plait::fail_with_exception();
}

int32_t plait_visit(int64_t items, int32_t *visits) try {
  plait::parallel(items, [&](int64_t item) {
    for (int64_t k = item % 64 * (item % 7); k > 0; k--) plait::pause();
    visits[item]++;
  });
  return 0;
} catch (...) {
  return plait::fail_with_exception();
}
