// The Python extension. Private API: src/kt_kernel checks what users pass before it comes here;
// tensors cross as addresses, so that a call costs no conversions.
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
  bind_layer(m);
  bind_products(m);
  bind_stream(m);
  bind_cuda(m);
}
