#include "cgroup.h"

#include "files.h"

#include <algorithm>
#include <sstream>
#include <vector>

namespace plait {
namespace {

constexpr int kV1 = 1;
constexpr int kV2 = 2;

struct Group {
  std::string directory;
  int version;
};

struct Mount {
  std::string group_root;  // the group that the mount point shows
  std::string point;
  int version;
};

bool contains(const std::vector<std::string> &list, const std::string &item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

// /proc/self/mountinfo, proc(5): "id parent major:minor root point options... - type source super_options".
std::vector<Mount> mounts_of(const std::string &root, const std::string &controller) {
  std::vector<Mount> mounts;
  std::istringstream lines(read_file(root + "/proc/self/mountinfo").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream head(line.substr(0, dash)), tail(line.substr(dash + 3));
    std::string id, parent, device, group_root, point, type, source, super_options;
    head >> id >> parent >> device >> group_root >> point;
    tail >> type >> source >> super_options;
    if (type == "cgroup2") mounts.push_back({group_root, point, kV2});
    if (type == "cgroup" && contains(split(super_options, ','), controller)) {
      mounts.push_back({group_root, point, kV1});
    }
  }
  return mounts;
}

// /proc/self/cgroup, cgroups(7): "id:controllers:path"; version 2 is the line "0::path".
std::optional<std::string> path_of(const std::string &root, const std::string &controller, int version) {
  std::istringstream lines(read_file(root + "/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool match = version == kV2 ? controllers.empty() : contains(split(controllers, ','), controller);
    if (match) return line.substr(second + 1);
  }
  return std::nullopt;
}

// Path of the process's group below the mount point. In a container without a cgroup namespace the path is
// the host's and the mount shows only a part of it: what lies outside reads as the mount point itself.
std::string relative_path(const std::string &path, const std::string &group_root) {
  std::string relative = path;
  if (group_root != "/") {
    const bool below = path == group_root || path.rfind(group_root + "/", 0) == 0;
    relative = below ? path.substr(group_root.size()) : "";
  }
  if (relative.empty() || relative[0] != '/' || contains(split(relative, '/'), "..")) return "";
  while (!relative.empty() && relative.back() == '/') relative.pop_back();
  return relative;
}

// The process's group and every group above it that is visible here.
std::vector<Group> groups_of(const std::string &root, const std::string &controller) {
  std::vector<Group> groups;
  for (const Mount &mount : mounts_of(root, controller)) {
    const auto path = path_of(root, controller, mount.version);
    if (!path) continue;
    std::string relative = relative_path(*path, mount.group_root);
    while (true) {
      groups.push_back({root + mount.point + relative, mount.version});
      if (relative.empty()) break;
      relative.resize(relative.rfind('/'));
    }
  }
  return groups;
}

std::optional<double> quota_of(const Group &group) {
  std::string quota, period;
  if (group.version == kV2) {
    std::istringstream(read_line(group.directory + "/cpu.max")) >> quota >> period;
  } else {
    quota = read_line(group.directory + "/cpu.cfs_quota_us");
    period = read_line(group.directory + "/cpu.cfs_period_us");
  }
  const auto quota_us = parse_int(quota);
  const auto period_us = parse_int(period);
  if (!quota_us || !period_us || *quota_us <= 0 || *period_us <= 0) return std::nullopt;
  return static_cast<double>(*quota_us) / static_cast<double>(*period_us);
}

int64_t stat_value(const std::string &path, const std::string &key) {
  std::istringstream lines(read_file(path).value_or(""));
  std::string name, value;
  while (lines >> name >> value) {
    if (name == key) return parse_int(value).value_or(0);
  }
  return 0;
}

std::optional<int64_t> free_memory_of(const Group &group) {
  const bool v2 = group.version == kV2;
  const std::string directory = group.directory + "/memory.";
  const auto limit = parse_int(read_line(directory + (v2 ? "max" : "limit_in_bytes")));
  const auto used = parse_int(read_line(directory + (v2 ? "current" : "usage_in_bytes")));
  if (!limit || !used) return std::nullopt;  // "max" is no number: no limit
  const int64_t droppable = stat_value(directory + "stat", v2 ? "inactive_file" : "total_inactive_file");
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *used - droppable));
}

template <typename Value, typename Read>
std::optional<Value> smallest(const std::vector<Group> &groups, Read read) {
  std::optional<Value> least;
  for (const Group &group : groups) {
    const std::optional<Value> value = read(group);
    if (value && (!least || *value < *least)) least = value;
  }
  return least;
}

}  // namespace

std::optional<double> cgroup_cpu_quota(const std::string &root) {
  return smallest<double>(groups_of(root, "cpu"), quota_of);
}

std::optional<int64_t> cgroup_free_memory_bytes(const std::string &root) {
  return smallest<int64_t>(groups_of(root, "memory"), free_memory_of);
}

}  // namespace plait
