// The calling thread's way of rounding and of treating subnormal numbers.
#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace plait {

// Rounding and handling of subnormals: torch.set_flush_denormal changes it in the caller's thread, and the numbers of a
// stage must not depend on which thread computes them.
inline unsigned float_mode() {
#if defined(__SSE2__)
  return _mm_getcsr() & ~0x3fu;  // without the flags of what has happened
#elif defined(__aarch64__)
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return static_cast<unsigned>(mode);
#else
  return 0;
#endif
}

inline void set_float_mode(unsigned mode) {
#if defined(__SSE2__)
  if (float_mode() != mode) _mm_setcsr(mode);
#elif defined(__aarch64__)
  if (float_mode() != mode) __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{mode}));
#else
  (void)mode;
#endif
}

}  // namespace plait
