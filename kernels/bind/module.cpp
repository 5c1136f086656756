// The Python extension. Private API, but every entry checks its arguments: a wrong one raises
// ValueError or TypeError (tests/kernels/test_entries.py calls them all). Where a call must cost no
// conversions, tensors cross as addresses, of which no more can be checked than that they are not
// 0.
#include "../sys/team.h"
#include "bind.h"
#include "kt/format.h"

NB_MODULE(KT_MODULE_NAME, m) {
  m.doc() = "Compiled core of kt_kernel (private).";
  // Engine processes end with their layers alive; nanobind would list them in the server's log.
  nb::set_leak_warnings(false);
  m.attr("layout_version") = kt::kLayoutVersion;
  m.attr("beside_team") = kt::sys::kBesideTeam;
  bind_machine(m);
  bind_formats(m);
  bind_layer(m);
  bind_sft(m);
  bind_stream(m);
  bind_cuda(m);
  bind_testing(m);
}
