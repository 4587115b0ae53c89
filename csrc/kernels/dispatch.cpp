// Chooses the instruction set: the best that this CPU runs, or what PLAIT_ISA names.
#include <stdlib.h>
#include <string.h>

#include "../cpu.h"
#include "kernels.h"

namespace plait {

#define PLAIT_DECLARE(isa) \
  namespace isa {          \
  extern const Kernels kKernels; \
  }
PLAIT_DECLARE(portable)
PLAIT_DECLARE(avx2)
PLAIT_DECLARE(avx512)
PLAIT_DECLARE(avx512_vnni)
PLAIT_DECLARE(avx512_bf16)
#undef PLAIT_DECLARE

const Kernels *const *all_kernels() {
  // PLAIT_WITH_...: CMakeLists.txt builds the set.
  static const Kernels *const sets[] = {
      &portable::kKernels,
#if defined(PLAIT_WITH_avx2)
      &avx2::kKernels,
#endif
#if defined(PLAIT_WITH_avx512)
      &avx512::kKernels,
#endif
#if defined(PLAIT_WITH_avx512_vnni)
      &avx512_vnni::kKernels,
#endif
#if defined(PLAIT_WITH_avx512_bf16)
      &avx512_bf16::kKernels,
#endif
      nullptr};
  return sets;
}

namespace {

bool has_all(const char *const *features) {
  while (*features != nullptr && cpu_has(*features)) features++;
  return *features == nullptr;
}

// Whether this CPU runs the i-th set. Asked once: CPUID takes microseconds each time in a virtual machine.
bool runs_here(int i) {
  struct Answers {
    bool yes[8];
    Answers() {
      for (int k = 0; all_kernels()[k] != nullptr; k++) yes[k] = has_all(all_kernels()[k]->needs);
    }
  };
  static const Answers answers;
  return answers.yes[i];
}

}  // namespace

const Kernels *find_kernels(const char *name) {
  if (name == nullptr) name = getenv("PLAIT_ISA");
  const bool best = name == nullptr || *name == 0;
  const Kernels *found = nullptr;
  const Kernels *const *sets = all_kernels();
  for (int i = 0; sets[i] != nullptr; i++)
    if ((best || strcmp(name, sets[i]->name) == 0) && runs_here(i)) found = sets[i];
  return found;
}

}  // namespace plait

const char *plait_isa(void) {
  const plait::Kernels *kernels = plait::find_kernels(nullptr);
  return kernels == nullptr ? nullptr : kernels->name;
}

const char *plait_isa_name(int32_t index) {
  const plait::Kernels *const *sets = plait::all_kernels();
  for (int i = 0; sets[i] != nullptr; i++)
    if (plait::runs_here(i) && index-- == 0) return sets[i]->name;
  return nullptr;
}
