// Which instructions may be used: the CPU's own word, and the operating system's for the wide registers.
//
// x86: Intel SDM vol. 2, CPUID leaves 1 and 7; vol. 1 section 13.3 for XCR0. aarch64: the kernel's hwcaps.
#include "plait_native.h"

#include <cstddef>
#include <cstring>

#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

struct Feature {
  const char *name;
  bool (*present)();
};

#if defined(__x86_64__)

enum Register { EAX, EBX, ECX, EDX };

bool cpuid_bit(unsigned leaf, unsigned subleaf, Register reg, unsigned bit) {
  unsigned values[4] = {0, 0, 0, 0};
  if (!__get_cpuid_count(leaf, subleaf, &values[EAX], &values[EBX], &values[ECX], &values[EDX])) return false;
  return (values[reg] >> bit) & 1u;
}

// Leaf 7 says in EAX how many subleaves it has; a subleaf beyond reads as garbage on some CPUs.
bool leaf7_1_bit(Register reg, unsigned bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || a < 1) return false;
  return cpuid_bit(7, 1, reg, bit);
}

// True when the operating system saves and restores every register state of `mask`.
bool os_saves(uint64_t mask) {
  if (!cpuid_bit(1, 0, ECX, 27)) return false;  // OSXSAVE: without it xgetbv faults
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const uint64_t xcr0 = (static_cast<uint64_t>(high) << 32) | low;
  return (xcr0 & mask) == mask;
}

constexpr uint64_t kYmm = 0x6;                 // SSE, AVX
constexpr uint64_t kZmm = kYmm | 0xe0;         // opmask, upper halves of zmm0-15, zmm16-31
constexpr uint64_t kTiles = kYmm | 0x60000;    // tile configuration, tile data

bool avx() { return os_saves(kYmm) && cpuid_bit(1, 0, ECX, 28); }
bool avx512f() { return os_saves(kZmm) && cpuid_bit(7, 0, EBX, 16); }
bool amx_tile() { return os_saves(kTiles) && cpuid_bit(7, 0, EDX, 24); }

const Feature kFeatures[] = {
    {"fma", [] { return avx() && cpuid_bit(1, 0, ECX, 12); }},
    {"f16c", [] { return avx() && cpuid_bit(1, 0, ECX, 29); }},
    {"avx2", [] { return avx() && cpuid_bit(7, 0, EBX, 5); }},
    {"avx_vnni", [] { return avx() && leaf7_1_bit(EAX, 4); }},
    {"avx512f", [] { return avx512f(); }},
    {"avx512dq", [] { return avx512f() && cpuid_bit(7, 0, EBX, 17); }},
    {"avx512bw", [] { return avx512f() && cpuid_bit(7, 0, EBX, 30); }},
    {"avx512vl", [] { return avx512f() && cpuid_bit(7, 0, EBX, 31); }},
    {"avx512_vnni", [] { return avx512f() && cpuid_bit(7, 0, ECX, 11); }},
    {"avx512_bf16", [] { return avx512f() && leaf7_1_bit(EAX, 5); }},
    {"amx_tile", [] { return amx_tile(); }},
    {"amx_int8", [] { return amx_tile() && cpuid_bit(7, 0, EDX, 25); }},
    {"amx_bf16", [] { return amx_tile() && cpuid_bit(7, 0, EDX, 22); }},
};

#elif defined(__aarch64__) && defined(__linux__)

bool hwcap(unsigned bit) { return (getauxval(AT_HWCAP) >> bit) & 1u; }
bool hwcap2(unsigned bit) { return (getauxval(AT_HWCAP2) >> bit) & 1u; }

// Bit numbers as in the kernel's arch/arm64/include/uapi/asm/hwcap.h; older headers lack the later ones.
const Feature kFeatures[] = {
    {"asimd", [] { return hwcap(1); }},   {"asimdhp", [] { return hwcap(10); }},
    {"asimddp", [] { return hwcap(20); }}, {"sve", [] { return hwcap(22); }},
    {"i8mm", [] { return hwcap2(13); }},   {"bf16", [] { return hwcap2(14); }},
};

#else

const Feature kFeatures[] = {{nullptr, [] { return false; }}};

#endif

constexpr size_t kFeatureCount = sizeof(kFeatures) / sizeof(kFeatures[0]);

}  // namespace

uint64_t plait_cpu_features(void) {
  uint64_t bits = 0;
  for (size_t b = 0; b < kFeatureCount; ++b) {
    if (kFeatures[b].present()) bits |= uint64_t{1} << b;
  }
  return bits;
}

const char *plait_cpu_feature_name(int32_t bit) {
  if (bit < 0 || static_cast<size_t>(bit) >= kFeatureCount) return nullptr;
  return kFeatures[bit].name;
}

bool plait::cpu_has(const char *feature) {
  for (const Feature &known : kFeatures)
    if (known.name != nullptr && std::strcmp(known.name, feature) == 0) return known.present();
  return false;
}
