#include "tables.h"

#include <stdexcept>

#include "../sys/cpu_features.h"

std::vector<std::string> usable_tables() {
  std::vector<std::string> names;
  for (auto t = kt::kKernelTables; *t; ++t)
    if (((*t)->features & ~kt::sys::cpu_features()) == 0) names.emplace_back((*t)->name);
  return names;
}

const kt::KernelTable* find_table(const std::string& name) {
  for (auto t = kt::kKernelTables; *t; ++t)
    if (name == (*t)->name && ((*t)->features & ~kt::sys::cpu_features()) == 0) return *t;
  std::string message = "kernel table \"" + name + "\" cannot run on this CPU; accepted:";
  for (const std::string& usable : usable_tables()) message += " " + usable;
  throw std::invalid_argument(message);
}
