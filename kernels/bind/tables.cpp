#include "tables.h"

#include <stdexcept>

#include "../sys/cpu_features.h"

const kt::KernelTable* find_table(const std::string& name) {
  for (auto t = kt::kKernelTables; *t; ++t)
    if (name == (*t)->name && ((*t)->features & ~kt::sys::cpu_features()) == 0) return *t;
  throw std::invalid_argument("kernel table \"" + name + "\" cannot run on this CPU");
}
