// The Python extension. Its API is private, but every function checks its arguments and raises
// ValueError or TypeError for an invalid one (tests/kernels/test_entries.py calls them all). If a
// call must not cost conversions, it takes addresses of tensors, which are only checked for 0.
#include "../sys/team.h"
#include "bind.h"
#include "kt/format.h"

NB_MODULE(KT_MODULE_NAME, m) {
  m.doc() = "Compiled core of kt_kernel (private).";
  // Engine processes end with their layers alive, which nanobind would list in the server's log.
  nb::set_leak_warnings(false);
  m.attr("layout_version") = kt::kLayoutVersion;
  m.attr("beside_team") = kt::sys::kBesideTeam;
  bind_machine(m);
  bind_formats(m);
  bind_layer(m);
  bind_sft(m);
  bind_stream(m);
  bind_cuda(m);
  bind_cache(m);
  bind_testing(m);
}
