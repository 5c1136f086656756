"""The live expert cache on a real GPU: its kernel in CUDA graphs, and uploads into slots."""

from __future__ import annotations

import pytest
import torch
from kernels.repacking import FORMS, check_repacked
from restless import VARIABLE

from kt_kernel import KTMoEWrapper
from kt_kernel.device.backend import CudaBackend
from kt_kernel.device.cache import CudaCache, HostCache
from kt_kernel.device.slots import DenseSlots, PackedSlots, SlotWeights
from kt_kernel.device.uploads import CudaUploads, Upload
from kt_kernel.moe.placement import Placement
from kt_kernel.serving import cache_start
from kt_kernel.serving.cache import CachedLayer, ModelCache
from kt_kernel.serving.cache_slots import LayerSlots
from kt_kernel.serving.hot_packed import packed_hot
from kt_kernel.serving.hot_weights import HotShape
from kt_kernel.serving.options import KTOptions
from kt_kernel.weights.expert_tensors import MATRICES
from kt_kernel.weights.formats import WeightForm

CUDA = torch.device("cuda", 0)
E, K, H, INNER, SLOTS = 8, 2, 256, 384, 3


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_same_codes_and_scales(form: WeightForm) -> None:
    check_repacked(form, 33, 640, "cuda")
    check_repacked(form, 288, 640, "cuda", None if form.format.bits == 8 else torch.bfloat16)


@pytest.mark.parametrize(("experts", "k"), [(256, 8), (130, 3)])
def test_maps_and_counts_in_a_graph(experts: int, k: int) -> None:
    """Maps are published between replays, and the counts are those of the host's counterpart."""
    g, layers, tokens = torch.Generator().manual_seed(0), 3, 5
    gpu, host = CudaCache(CUDA, layers, experts), HostCache(torch.device("cpu"), layers, experts)
    ids = torch.zeros(tokens, k, dtype=torch.int32, device=CUDA)
    padding = torch.zeros(tokens, dtype=torch.bool, device=CUDA)
    gpu.begin_pass(0, ids, padding)  # compiles
    gpu.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for layer in range(layers):
            gpu.begin_pass(layer, ids, padding)
    gpu.clear()
    for step in range(40):
        if step % 3 == 0:
            for memory in (gpu, host):
                made = torch.Generator().manual_seed(step)
                maps = torch.randint(-1, 9, (layers, experts), generator=made, dtype=torch.int32)
                memory.wanted[:], memory.versions[:] = maps.numpy(), step + 1
                memory.publish()
        of_batch = torch.randint(-1, experts + 1, (tokens, k), generator=g, dtype=torch.int32)
        pads = torch.rand(tokens, generator=g) < 0.3
        ids.copy_(of_batch)
        padding.copy_(pads)
        graph.replay()
        for layer in range(layers):
            host.begin_pass(layer, of_batch, pads)
        torch.cuda.synchronize()
        assert torch.equal(gpu.live.cpu(), host.live)
        found, want = gpu.totals(), host.totals()
        for name in ("uses", "tokens", "routes", "hits", "versions"):
            assert (getattr(found, name) == getattr(want, name)).all(), name
        assert gpu.passed.tolist() == host.passed.tolist()


METHODS = pytest.mark.parametrize(
    ("method", "hot_format"),
    [("INT4_G32", "engine"), ("BF16", "engine"), ("INT4_G32", "packed"), ("MOE_INT8", "packed")],
)


def layer_of(method: str, hot_format: str) -> tuple[KTMoEWrapper, SlotWeights]:
    """A layer of random experts, and an engine's weights for some of them."""
    g = torch.Generator().manual_seed(0)
    wrapper = KTMoEWrapper(0, E, K, H, INNER, cpuinfer_threads=2, method=method)
    sizes = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
    every = [torch.randn(E, *sizes[which], generator=g) / 8 for which in MATRICES]
    wrapper.load_weights_from_tensors(*every, torch.arange(E))
    if hot_format == "packed":
        options = KTOptions.from_mapping({"method": method, "num_gpu_experts": SLOTS})
        placement, shape = Placement.first(E, SLOTS), HotShape(SLOTS, H, INNER)
        hot = packed_hot(options, 0, placement, shape, torch.bfloat16, CUDA)
        return wrapper, PackedSlots(hot.w13, hot.w2, hot.s13, hot.s2)
    made = {"dtype": torch.bfloat16, "device": CUDA}
    w13, w2 = torch.zeros(SLOTS, 2 * INNER, H, **made), torch.zeros(SLOTS, H, INNER, **made)
    return wrapper, DenseSlots(w13, w2)


@METHODS
def test_uploads_into_slots(method: str, hot_format: str) -> None:
    """Each slot gets the weights that the CPU has, several times, and the other slots keep
    theirs."""
    wrapper, slots = layer_of(method, hot_format)
    packed = wrapper.packed_experts()
    packed.register(CudaBackend(CUDA))
    uploads, held = CudaUploads(CUDA, [packed]), [-1] * SLOTS
    for number in range(12):  # each slot through Triton first, and then by the compiled core
        expert, slot = number * 3 % E, number * 2 % SLOTS
        assert (uploads.launches(slots, slot) is None) == (number < SLOTS)
        assert uploads.start([Upload(packed, slots, expert, slot)]) == number + 1
        uploads.wait()
        assert uploads.completed() == number + 1
        held[slot] = expert
        for at, there in enumerate(held):
            for which in MATRICES if there >= 0 else ():
                want = wrapper.unpacked(there, which).to(CUDA)
                assert slots.same(slots.values(at, which), want), (number, at, which)
    assert all(expert >= 0 for expert in held)
    many = [Upload(packed, slots, (slot + 5) % E, slot) for slot in range(SLOTS)]
    assert uploads.start(many) == 12 + SLOTS
    uploads.wait()
    for upload in many:
        for which in MATRICES:
            want = wrapper.unpacked(upload.expert, which).to(CUDA)
            assert slots.same(slots.values(upload.slot, which), want), (upload.slot, which)
    packed.release()


@METHODS
def test_forced_moves(monkeypatch: pytest.MonkeyPatch, method: str, hot_format: str) -> None:
    """The cache's thread moves experts all the time. What a batch reads on its stream after its map
    was taken into use are the weights of the experts that the map names."""
    monkeypatch.setenv(VARIABLE, "1")
    wrapper, slots = layer_of(method, hot_format)
    packed, memory = wrapper.packed_experts(), CudaCache(CUDA, 1, E)
    packed.register(CudaBackend(CUDA))
    uploads = CudaUploads(CUDA, [packed])
    first = LayerSlots(Placement.first(E, SLOTS), memory.wanted[0])
    layer = CachedLayer(packed, slots, first)
    cache_start._fill([layer], uploads)
    cache = ModelCache([layer], memory, uploads, None)
    cache.start(wrapper)
    cache.begin()
    want = [{m: wrapper.unpacked(e, m).to(CUDA) for m in MATRICES} for e in range(E)]
    placements = set()
    for number in range(400):
        cache.begin_pass(0, torch.tensor([[number % E, (number + 3) % E]], device=CUDA), None, None)
        live = cache.live_map(0).clone()
        held = [{m: slots.values(s, m).clone() for m in MATRICES} for s in range(SLOTS)]
        torch.cuda.synchronize()
        for expert, slot in enumerate(live.tolist()):
            for which in MATRICES if slot >= 0 else ():
                assert slots.same(held[slot][which], want[expert][which]), (number, expert, which)
        placements.add(tuple(live.tolist()))
    assert cache._thread is not None and cache._thread.is_alive()
    cache.close()
    assert cache.counters.cache_uploads > 20 and len(placements) > 10
    uploads.wait()
    packed.release()
