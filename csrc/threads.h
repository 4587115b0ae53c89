// The process's worker threads.
//
// One pool per process, made when first needed (a forked child makes its own). Work comes in stages: a stage hands out
// numbered items, the calling thread takes part, and the stage ends when every item is done. The caller waits only for
// threads that hold an item: a worker that sleeps, or whose core somebody else has, costs nothing.
//
// Between the stages of a region workers spin, so that a stage starts in well under a microsecond; outside of regions
// they sleep. Workers that are often thrown off their cores are left out for a while (see adapt in threads.cpp).
#pragma once

#include <stdint.h>

namespace plait {

// Calls work(context, item) once for every item in [0, items), on this thread and the workers, and returns when all are
// done. Every thread gets a range of neighbouring items, in ascending order, and takes half of another's range when it
// is through. One call at a time per process: a second caller waits. From inside an item: runs the items on this thread
// alone. Items must not throw.
void parallel_for(int64_t items, void (*work)(void *context, int64_t item), void *context);

template <class F>
void parallel(int64_t items, const F &f) {
  const auto work = [](void *context, int64_t item) noexcept { (*static_cast<const F *>(context))(item); };
  parallel_for(items, work, const_cast<F *>(&f));
}

// Many stages in a row by one thread: keeps the workers awake, and other callers out, until it goes out of scope.
// `parallel` inside it is a stage. Regions do not nest: an inner one does nothing. A fork by another thread waits for
// the region's end.
class ParallelRegion {
 public:
  ParallelRegion();
  ~ParallelRegion();
  ParallelRegion(const ParallelRegion &) = delete;
  ParallelRegion &operator=(const ParallelRegion &) = delete;

 private:
  bool opened_;
};

// Memory that the thread of this number should fetch, once, when it finds no item left in a stage: kFetchBytes from each
// of `count` <= kFetches addresses on. Set before the stage, by its caller.
constexpr int64_t kFetchBytes = 2048;
constexpr int kFetches = 64;
void set_fetch(int thread, const uint8_t *const *from, int count);

// Number of the calling thread, for memory of its own: 0 for the caller of a stage, else 1 .. thread_limit() - 1.
int thread_number();
// Threads that are to take part in the present region (outside of one: in the next), to cut work for.
int thread_count();
// Threads that there are: in a region, no thread_number() reaches it. One that is no longer wanted may still be about
// to take an item.
int thread_limit();
// Upper limit of plait_set_threads.
constexpr int kMaxThreads = 256;

}  // namespace plait
