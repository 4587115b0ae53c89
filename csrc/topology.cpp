#include "plait_native.h"

#include "cgroup.h"
#include "files.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#if defined(__linux__)
#include <cerrno>
#include <sched.h>
#endif

namespace {

#if defined(__linux__)

// The CPUs that this process may run on, ascending; empty where the kernel does not say.
std::vector<int> affinity() {
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {  // grown until the kernel's mask fits
    cpu_set_t *mask = CPU_ALLOC(capacity);
    if (mask == nullptr) return {};
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    std::vector<int> cpus;
    const bool read = sched_getaffinity(0, bytes, mask) == 0;
    const bool too_small = !read && errno == EINVAL;
    for (int cpu = 0; read && cpu < capacity; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, mask)) cpus.push_back(cpu);
    }
    CPU_FREE(mask);
    if (!too_small) return cpus;
  }
  return {};
}

// Hardware threads of one core name the same list of siblings; a CPU without one counts as a core.
int count_cores(const std::string &cpu_directory, const std::vector<int> &cpus) {
  std::set<std::string> cores;
  for (const int cpu : cpus) {
    const std::string name = "cpu" + std::to_string(cpu);
    const std::string siblings = plait::read_line(cpu_directory + "/" + name + "/topology/thread_siblings_list");
    cores.insert(siblings.empty() ? name : siblings);
  }
  return static_cast<int>(cores.size());
}

void read_caches(const std::string &cpu, PlaitTopology *out) {
  for (int index = 0; index < 16; ++index) {
    const std::string directory = cpu + "/cache/index" + std::to_string(index) + "/";
    const std::string level = plait::read_line(directory + "level");
    if (level.empty() || plait::read_line(directory + "type") == "Instruction") continue;
    const int64_t bytes = plait::parse_size(plait::read_line(directory + "size"));
    if (level == "1") out->l1d_bytes = bytes;
    if (level == "2") out->l2_bytes = bytes;
    if (level == "3") out->l3_bytes = bytes;
  }
}

int count_numa_nodes(const std::string &node_directory, const std::vector<int> &cpus) {
  int count = 0;
  for (const int node : plait::parse_cpu_list(plait::read_line(node_directory + "/online"))) {
    const std::string list = node_directory + "/node" + std::to_string(node) + "/cpulist";
    for (const int cpu : plait::parse_cpu_list(plait::read_line(list))) {
      if (std::binary_search(cpus.begin(), cpus.end(), cpu)) {
        ++count;
        break;
      }
    }
  }
  return std::max(1, count);
}

#endif

}  // namespace

int32_t plait_topology(const char *root, PlaitTopology *out) try {
  *out = PlaitTopology{};
#if defined(__linux__)
  const std::string system = std::string(root) + "/sys/devices/system";
  const std::vector<int> cpus = affinity();
  if (cpus.empty()) return -1;
  const int allowed = static_cast<int>(cpus.size());
  const int online = static_cast<int>(plait::parse_cpu_list(plait::read_line(system + "/cpu/online")).size());
  out->logical_cpus = online > 0 ? online : allowed;
  out->affinity_cpus = allowed;
  out->cpu_quota = plait::cgroup_cpu_quota(root).value_or(0.0);
  // Rounded down: a thread more than the quota pays for gets the whole process throttled.
  const int granted = out->cpu_quota > 0 ? static_cast<int>(std::min(std::floor(out->cpu_quota), 1e6)) : allowed;
  out->usable_cpus = std::max(1, std::min(allowed, granted));
  out->physical_cores = count_cores(system + "/cpu", cpus);
  out->numa_nodes = count_numa_nodes(system + "/node", cpus);
  read_caches(system + "/cpu/cpu" + std::to_string(cpus.front()), out);
  return 0;
#else
  (void)root;
  return -1;
#endif
} catch (...) {
  return -1;  // no memory: as where the system offers no such files
}
