// What the machine has, and which kernels run on it.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../sys/bandwidth.h"
#include "../sys/cpu_features.h"
#include "../sys/topology.h"
#include "bind.h"
#include "kt/kernel_table.h"
#include "tables.h"

namespace {

std::map<std::string, bool> feature_flags() {
  const uint32_t have = kt::sys::cpu_features();
  const std::pair<const char*, uint32_t> names[] = {
      {"avx2", kt::sys::kAvx2},
      {"avx512", kt::sys::kAvx512},
      {"avx512_vnni", kt::sys::kAvx512Vnni},
      {"avx512_vbmi", kt::sys::kAvx512Vbmi},
      {"avx512_bf16", kt::sys::kAvx512Bf16},
      {"amx_tile", kt::sys::kAmxTile},
      {"amx_int8", kt::sys::kAmxInt8},
      {"amx_bf16", kt::sys::kAmxBf16},
      {"avx_vnni", kt::sys::kAvxVnni},
  };
  std::map<std::string, bool> flags;
  for (const auto& [name, bit] : names) flags[name] = (have & bit) != 0;
  return flags;
}

auto all_kernels() {
  constexpr const char* kOperands[] = {"float32", "bf16", "int8 rows", "int16 groups"};  // ActKind
  std::vector<std::tuple<std::string, int, std::string, std::string>> found;
  for (const auto* table = kt::kKernelTables; *table; ++table)
    for (int format = 0; format < kt::kFormatCount; ++format) {
      const auto& kernels = (*table)->format[format];
      found.emplace_back((*table)->name, format, kOperands[int(kernels.gemv.act)],
                         kOperands[int(kernels.gemm.act)]);
    }
  return found;
}

}  // namespace

void bind_machine(nb::module_& m) {
  m.def("cpu_features", feature_flags, "Instruction sets that this CPU and system can run.");
  m.def("cpu_brand", kt::sys::cpu_brand);
  m.def("kernel_tables", usable_tables, "Kernel tables that run here, best first.");
  m.def(
      "kernels", all_kernels,
      "(table, weight format, A operand of its GEMV, of its GEMM) for every kernel of this module, "
      "including those that cannot run here; tables best first.");
  m.def(
      "topology",
      [] {
        std::vector<std::tuple<int, int, int>> nodes;
        for (const auto& n : kt::sys::topology())
          nodes.emplace_back(n.id, int(n.cpus.size()), n.cores);
        return nodes;
      },
      Unlocked(), "(node id, allowed CPUs, cores) of each NUMA node.");
  m.def("cpu_quota", kt::sys::cpu_quota, Unlocked());
  m.def("probe_read_bandwidth", kt::sys::probe_read_bandwidth, "max_threads"_a, Unlocked());
}
