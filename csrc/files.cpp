#include "files.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace plait {

std::optional<std::string> read_file(const std::string &path) {
  std::FILE *file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return std::nullopt;
  std::string text;
  char chunk[4096];
  size_t count = 0;
  while ((count = std::fread(chunk, 1, sizeof chunk, file)) > 0) text.append(chunk, count);
  const bool failed = std::ferror(file) != 0;  // a directory opens, and fails here
  std::fclose(file);
  if (failed) return std::nullopt;
  return text;
}

std::string read_line(const std::string &path) {
  const std::string text = read_file(path).value_or("");
  const char *blank = " \t\r\n";
  const size_t first = text.find_first_not_of(blank);
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(blank) - first + 1);
}

std::optional<int64_t> parse_int(const std::string &text) {
  if (text.empty() || text.find_first_not_of("0123456789", text[0] == '-' ? 1 : 0) != std::string::npos) {
    return std::nullopt;
  }
  errno = 0;
  char *end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (errno != 0 || end == text.c_str() || *end != '\0') return std::nullopt;
  return value;
}

std::vector<int> parse_cpu_list(const std::string &text) {
  std::vector<int> cpus;
  for (const std::string &range : split(text, ',')) {
    const std::vector<std::string> ends = split(range, '-');
    const auto first = parse_int(ends.front());
    const auto last = parse_int(ends.back());
    if (ends.size() > 2 || !first || !last || *first < 0 || *last > 1 << 20) break;
    for (int64_t cpu = *first; cpu <= *last; ++cpu) cpus.push_back(static_cast<int>(cpu));
  }
  return cpus;
}

int64_t parse_size(const std::string &text) {
  if (text.empty()) return 0;
  const std::string units = "KMG";
  const size_t unit = units.find(text.back());
  const auto number = parse_int(unit == std::string::npos ? text : text.substr(0, text.size() - 1));
  if (!number || *number < 0 || *number > int64_t{1} << 32) return 0;
  return *number << (unit == std::string::npos ? 0 : 10 * (unit + 1));
}

std::vector<std::string> split(const std::string &text, char separator) {
  std::vector<std::string> parts;
  size_t start = 0;
  while (true) {
    const size_t end = text.find(separator, start);
    parts.push_back(text.substr(start, end - start));
    if (end == std::string::npos) return parts;
    start = end + 1;
  }
}

}  // namespace plait
