// The decisions of the live expert cache (kernels/cache).
#include "../cache/news.h"
#include "../cache/scores.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../sys/cuda_work.h"
#include "arrays.h"
#include "bind.h"

namespace {

using kt::CacheScores;

template <class T, int n> using Array = nb::ndarray<T, nb::ndim<n>, nb::c_contig, nb::device::cpu>;
using Moves = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

std::tuple<bool, Moves> look(CacheScores& scores, const Array<const int64_t, 2>& counters,
                             const Array<const bool, 2>& resident,
                             const Array<const bool, 2>& evictable, std::vector<int64_t> free,
                             int64_t per_layer, int64_t most, const kt::sys::SyncedCopies* fetch) {
  const size_t layers = scores.layers(), experts = scores.experts();
  need_shape("counters", counters, {layers, experts + CacheScores::kNumbers});
  need_shape("resident", resident, {layers, experts});
  need_shape("evictable", evictable, {layers, experts});
  kt::need(free.size() == layers, "free has " + std::to_string(free.size()) +
                                      " numbers; expected one for each of " +
                                      std::to_string(layers) + " layers");
  for (const auto& [name, value] : {std::pair("per_layer", per_layer), std::pair("most", most)})
    kt::need(value >= 1,
             std::string(name) + " is " + std::to_string(value) + "; accepted: 1 or more");
  const auto flags = [](const auto& array) {
    return reinterpret_cast<const uint8_t*>(array.data());
  };
  const nb::gil_scoped_release unlocked;
  if (fetch) fetch->run();
  const bool any = scores.see(counters.data());
  Moves moves;
  for (const kt::CacheMove& move : scores.wanted(
           {flags(resident), flags(evictable), std::move(free)}, size_t(per_layer), size_t(most)))
    moves.emplace_back(move.layer, move.expert, move.other);
  return {any, std::move(moves)};
}

const std::vector<double>& values(const CacheScores& scores, size_t policy) {
  kt::need(policy < scores.policies(), "policy " + std::to_string(policy) + "; accepted: 0 to " +
                                           std::to_string(scores.policies() - 1));
  return scores.values(policy);
}

void wait(double tick, double least, double most, const Array<const int64_t, 1>& passed,
          int64_t known, kt::sys::UploadQueue* queue, int64_t completed) {
  need_shape("passed", passed, {1});
  const nb::gil_scoped_release unlocked;
  kt::wait_for_news({passed.data(), known, queue, completed}, tick, least, most);
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::class_<CacheScores>(m, "CacheScores",
                          "Which experts deserve slots (kernels/cache/scores.h). policies: "
                          "(half-life in tokens, margin) each; slots: of each layer. One thread at "
                          "a time may use it.")
      .def(
          "__init__",
          [](CacheScores* self, const std::vector<std::pair<double, double>>& policies,
             std::vector<int64_t> slots, int64_t experts) {
            std::vector<kt::CachePolicy> given;
            for (const auto& [half_life, margin] : policies) given.push_back({half_life, margin});
            new (self) CacheScores(std::move(given), std::move(slots), experts);
          },
          "policies"_a, "slots"_a, "experts"_a, Unlocked())
      .def(
          "look", look, "counters"_a, "resident"_a, "evictable"_a, "free"_a, "per_layer"_a,
          "most"_a, "fetch"_a = nb::none(),
          "(whether there were new batches, [(layer, expert that should get a slot, expert that "
          "should lose its own)], the most valuable first). counters: int64 [L, E + 4]; "
          "resident, evictable: bool [L, E]; free: slots of each layer. fetch: a SyncedCopies that "
          "brings the counters, run first.")
      .def_prop_ro("policy", &CacheScores::policy)
      .def("values", values, "policy"_a, "The scores of all layers, L * E, by a policy.");

  m.def("wait_for_news", wait, "tick"_a, "least"_a, "most"_a, "passed"_a, "known"_a,
        "queue"_a.none(), "completed"_a,
        "Sleeps for ticks until `most` seconds have passed, more than `completed` uploads of the "
        "queue are complete, or, after `least` seconds, passed [1] is not `known` any more.");
}
