// Small text files of /proc and /sys, and the notations found in them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace plait {

// The whole file, or nothing where it cannot be read.
std::optional<std::string> read_file(const std::string &path);

// The file's text without the white space around it, or "".
std::string read_line(const std::string &path);

// A decimal number and nothing else.
std::optional<int64_t> parse_int(const std::string &text);

// "0-3,8" -> {0, 1, 2, 3, 8}. Anything malformed ends the list.
std::vector<int> parse_cpu_list(const std::string &text);

// "32K", "1M", "2G", "512" -> bytes; 0 where malformed.
int64_t parse_size(const std::string &text);

std::vector<std::string> split(const std::string &text, char separator);

}  // namespace plait
