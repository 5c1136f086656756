#include "sys/sysfs.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>

namespace kt::sys {
namespace {
constexpr long long kMaxId = 65535;  // so that "0-4000000000" cannot exhaust memory
}  // namespace

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad()) return std::nullopt;
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

std::optional<long long> parse_number(std::string_view text) {
  long long value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < 0) return std::nullopt;
  return value;
}

std::optional<std::vector<int>> parse_list(std::string_view text) {
  std::vector<int> ids;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view range = text.substr(0, comma);
    const size_t dash = range.find('-');
    const auto first = parse_number(range.substr(0, dash));
    const auto last = dash == range.npos ? first : parse_number(range.substr(dash + 1));
    if (!first || !last || *first > *last || *last > kMaxId) return std::nullopt;
    for (long long id = *first; id <= *last; ++id) ids.push_back(static_cast<int>(id));
    if (comma == text.npos) break;
    text.remove_prefix(comma + 1);
    if (text.empty()) return std::nullopt;  // a range must follow a comma
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace kt::sys
