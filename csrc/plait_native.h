// The C interface of plait's native library: the one header that Python's loader mirrors.
//
// Plain C types only, no exceptions across the border, no state kept between calls. Change
// PLAIT_ABI_VERSION whenever a signature or a struct changes: the loader refuses any other number.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define PLAIT_API __declspec(dllexport)
#else
#define PLAIT_API __attribute__((visibility("default")))
#endif

#define PLAIT_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

// What the machine has and how much of it this process may use. Sizes are per cache instance; 0 = unknown.
typedef struct PlaitTopology {
  int32_t logical_cpus;    // online in the machine
  int32_t affinity_cpus;   // that this process may run on
  int32_t usable_cpus;     // threads worth starting: affinity, lowered to whole CPUs of the quota, at least 1
  int32_t physical_cores;  // distinct cores among the affinity CPUs
  int32_t numa_nodes;      // nodes that hold an affinity CPU
  int32_t reserved;
  double cpu_quota;  // CPUs' worth of time that the control group grants; 0 = no limit
  int64_t l1d_bytes;
  int64_t l2_bytes;
  int64_t l3_bytes;
} PlaitTopology;

PLAIT_API int32_t plait_abi_version(void);

// Bit b is set when the CPU has feature b and the operating system saves the registers it needs.
PLAIT_API uint64_t plait_cpu_features(void);

// Name of feature bit b, spelled as Linux spells it in /proc/cpuinfo; NULL past the last one.
PLAIT_API const char *plait_cpu_feature_name(int32_t bit);

// `root` is put before every path read under /proc and /sys: "" for this machine, a directory in tests.
// Returns 0, or -1 where the system offers no such files (the caller then asks the standard library).
PLAIT_API int32_t plait_topology(const char *root, PlaitTopology *out);

// Bytes that can be taken without swapping: the smallest of the machine's available memory and of what
// is left in each control group above this process. -1 = unknown.
PLAIT_API int64_t plait_available_memory_bytes(const char *root);

#ifdef __cplusplus
}
#endif
