// Reading the small text files of /proc and /sys.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kt::sys {

// The whole file with trailing white space removed; nullopt where it cannot be read.
std::optional<std::string> read_text(const std::string& path);

// A non-negative decimal number that fills the whole text; nullopt otherwise.
std::optional<long long> parse_number(std::string_view text);

// The kernel's list format, "0-3,8" -> {0, 1, 2, 3, 8}, ascending and without repeats; an empty
// text is an empty list. nullopt for anything else, or for ids beyond 65535.
std::optional<std::vector<int>> parse_list(std::string_view text);

}  // namespace kt::sys
