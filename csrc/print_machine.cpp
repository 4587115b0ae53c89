// Prints what the library knows of this machine as one JSON document.
#include "plait_native.h"

#include <cinttypes>
#include <cstdio>

int main() {
  std::printf("{\"abi_version\": %" PRId32 ", \"features\": [", plait_abi_version());
  const uint64_t bits = plait_cpu_features();
  const char *comma = "";
  for (int32_t b = 0; plait_cpu_feature_name(b) != nullptr; ++b) {
    if (!((bits >> b) & 1u)) continue;
    std::printf("%s\"%s\"", comma, plait_cpu_feature_name(b));
    comma = ", ";
  }
  PlaitTopology t;
  if (plait_topology("", &t) != 0) {
    std::fprintf(stderr, "the topology of this system is unknown\n");
    return 1;
  }
  std::printf("], \"logical_cpus\": %" PRId32 ", \"affinity_cpus\": %" PRId32 ", \"usable_cpus\": %" PRId32, t.logical_cpus,
              t.affinity_cpus, t.usable_cpus);
  std::printf(", \"physical_cores\": %" PRId32 ", \"numa_nodes\": %" PRId32 ", \"cpu_quota\": %g", t.physical_cores,
              t.numa_nodes, t.cpu_quota);
  std::printf(", \"l1d_bytes\": %" PRId64 ", \"l2_bytes\": %" PRId64 ", \"l3_bytes\": %" PRId64, t.l1d_bytes, t.l2_bytes,
              t.l3_bytes);
  std::printf(", \"available_memory_bytes\": %" PRId64 "}\n", plait_available_memory_bytes(""));
  return 0;
}
