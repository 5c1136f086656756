// Kernel tables by their names.
#pragma once
#include <string>

#include "kt/kernel_table.h"

// Throws std::invalid_argument for one that does not exist or cannot run on this CPU.
const kt::KernelTable* find_table(const std::string& name);
