// What the control groups (Linux cgroups, version 1 and 2) allow this process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace plait {

// CPUs' worth of time per period: the smallest of this process's group and all groups above it.
std::optional<double> cgroup_cpu_quota(const std::string &root);

// Bytes still free under the tightest memory limit of the groups. Page cache that the kernel can drop at
// once (inactive_file) counts as free: a model file that was read must not look like used memory.
std::optional<int64_t> cgroup_free_memory_bytes(const std::string &root);

}  // namespace plait
