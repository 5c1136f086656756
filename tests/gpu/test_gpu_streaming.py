"""Experts copied to a real GPU and unpacked there, against the layer on the CPU."""

from __future__ import annotations

import random

import divided_routes
import pytest
import torch
from grid import grid
from kernels.core import Format
from kernels.repacking import FORMS, check_repacked
from kernels.unpacking import ALL, Shape, check, same_bits

from kt_kernel import KTMoEWrapper
from kt_kernel.device.backend import CudaBackend
from kt_kernel.device.streaming.lane import CopyLane
from kt_kernel.device.streaming.prepared import PreparedKernel
from kt_kernel.device.streaming.streamer import ExpertStreamer
from kt_kernel.weights.formats import WeightForm

E, H, INNER, LAYERS = 24, 512, 256, 3
CUDA = torch.device("cuda", 0)


@grid(
    format=ALL,
    shape=[Shape(33, 300, 4), Shape(70, 1024, 4)],
    dtype=[torch.bfloat16, torch.float32],
)
def test_same_bits_as_the_core(format: Format, shape: Shape, dtype: torch.dtype) -> None:
    check(format, shape, dtype, "cuda")


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(33, 640), (256, 7168)])
def test_the_same_codes_and_scales(form: WeightForm, rows: int, columns: int) -> None:
    check_repacked(form, rows, columns, "cuda")


def layers(method: str, pools: int) -> list:
    g = torch.Generator().manual_seed(0)
    made = []
    for i in range(LAYERS):
        layer = KTMoEWrapper(
            i,
            E,
            4,
            H,
            INNER,
            num_gpu_experts=3,
            method=method,
            cpuinfer_threads=4,
            threadpool_count=pools,
        )
        gate, up = (torch.randn(E, INNER, H, generator=g).bfloat16() for _ in "gu")
        down = torch.randn(E, H, INNER, generator=g).bfloat16()
        layer.load_weights_from_tensors(gate, up, down, torch.arange(E))
        made.append(layer)
    return made


def weights_of(layer, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = [torch.empty(*shape) for shape in ((INNER, H), (INNER, H), (H, INNER))]
    for matrix, to in enumerate(made):
        layer._core.unpack(slot, matrix, to.numpy())
    gate, up, down = (weights.bfloat16() for weights in made)
    return torch.cat([gate, up]), down


@pytest.mark.parametrize("pools", [1, 2])
@pytest.mark.parametrize("method", ["BF16", "INT4_G32"])
@pytest.mark.parametrize("room", [1, 4, 30])
def test_groups(method: str, pools: int, room: int) -> None:
    """Many groups of random experts under way at once, read on a stream that is kept busy."""
    made = layers(method, pools)
    packed = [layer.packed_experts() for layer in made]
    backend, lane = CudaBackend(CUDA), CopyLane(CUDA)
    for experts in packed:
        experts.register(backend)
    one = 2 * packed[0].expert_bytes + 2 * packed[0].expert_values
    streamer = ExpertStreamer(lane, room * one, packed[0])
    want = [[weights_of(layer, slot) for slot in range(3, E)] for layer in made]
    busy = torch.randn(2048, 2048, device=CUDA)
    choose = random.Random(0)
    found = []
    for _ in range(10):
        for i, experts in enumerate(packed):
            slots = choose.sample(range(3, E), choose.randint(1, E - 3))
            for group in streamer.stream(experts, slots):
                for _ in range(choose.randrange(4)):
                    busy = (busy @ busy).clamp_(-1, 1)
                found.append((i, group.slots, group.w13.clone(), group.w2.clone()))
    torch.cuda.synchronize()
    for i, slots, w13, w2 in found:
        for place, slot in enumerate(slots):
            gate_up, down = want[i][slot - 3]
            assert same_bits(w13[place].cpu(), gate_up) and same_bits(w2[place].cpu(), down)
    for experts in packed:
        experts.release()


def test_memory_stays() -> None:
    [layer, *_] = layers("INT4_G32", 1)
    experts = layer.packed_experts()
    experts.register(CudaBackend(CUDA))
    streamer = ExpertStreamer(CopyLane(CUDA), 8 << 20, experts)
    for round in range(300):
        for group in streamer.stream(experts, experts.held):
            group.w2.sum()
        if round == 20:
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved(CUDA), torch.cuda.mem_get_info(CUDA)[0]
    torch.cuda.synchronize()
    assert (torch.cuda.memory_reserved(CUDA), torch.cuda.mem_get_info(CUDA)[0]) == before


def test_every_route_is_in_one_place() -> None:
    """Launches of one kernel with arguments of every kind, in an order of chance: compiled at
    first, and prepared afterwards."""
    kernel = PreparedKernel()
    for kind in divided_routes.KINDS[:60]:
        divided_routes.check(kernel, kind, "cuda")
