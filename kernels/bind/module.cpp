// The Python extension. A private API, but every function checks its arguments: an invalid one
// raises ValueError or TypeError (tests/kernels/test_entries.py calls them all). If a call must
// cost no conversions, it takes addresses of tensors, which are only checked for 0.
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
