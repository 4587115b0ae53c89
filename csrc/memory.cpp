#include "plait_native.h"

#include "cgroup.h"
#include "files.h"

#include <algorithm>
#include <sstream>

namespace {

// MemAvailable of /proc/meminfo, the kernel's own estimate; kernels before 3.14 have MemFree only.
int64_t machine_available_bytes(const std::string &root) {
  std::istringstream lines(plait::read_file(root + "/proc/meminfo").value_or(""));
  int64_t free_bytes = -1;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string key;
    int64_t kib = 0;
    if (!(words >> key >> kib)) continue;
    if (key == "MemAvailable:") return kib * 1024;
    if (key == "MemFree:") free_bytes = kib * 1024;
  }
  return free_bytes;
}

}  // namespace

int64_t plait_available_memory_bytes(const char *root) try {
  const int64_t machine = machine_available_bytes(root);
  if (machine < 0) return -1;
  return std::min(machine, plait::cgroup_free_memory_bytes(root).value_or(machine));
} catch (...) {
  return -1;
}
