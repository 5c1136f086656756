// Reads the small text files of /proc and /sys.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kt::sys {

// The whole file without trailing white space; nullopt if it cannot be read.
std::optional<std::string> read_text(const std::string& path);

// A non-negative decimal number that is the whole text; nullopt otherwise.
std::optional<long long> parse_number(std::string_view text);

// The kernel's list format, "0-3,8" -> {0, 1, 2, 3, 8}, ascending and without repeats. An empty
// text is an empty list. nullopt for anything else, and for ids above 65535.
std::optional<std::vector<int>> parse_list(std::string_view text);

}  // namespace kt::sys
