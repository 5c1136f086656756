// Kernel tables by their names.
#pragma once
#include <string>
#include <vector>

#include "kt/kernel_table.h"

// The tables that can run on this CPU, best first.
std::vector<std::string> usable_tables();

// Throws std::invalid_argument for a table that does not exist or cannot run on this CPU.
const kt::KernelTable* find_table(const std::string& name);
