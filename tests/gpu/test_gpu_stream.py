"""The hand-over on a real GPU, eager and in CUDA graphs, against the path on the CPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time

import pytest
import torch

from kt_kernel import KTMoEWrapper, model_scope
from kt_kernel.moe.placement import Placement
from kt_kernel.moe.routing import hot_routes

E, K, H, INNER, LAYERS = 16, 4, 512, 256, 4
CALLS = int(os.environ.get("KT_GPU_CALLS", "100000"))  # of the memory test; 1,000,000 for a release
CUDA = torch.device("cuda", 0)


def model(d: int = 0, seed: int = 0, hot: int = 3, method: str = "AMXINT8", **sizes: int) -> list:
    g = torch.Generator().manual_seed(seed)
    layers = []
    hidden, inter = sizes.get("hidden", H), sizes.get("inter", INNER)
    with model_scope():
        for layer in range(sizes.get("layers", LAYERS)):
            made = KTMoEWrapper(
                layer,
                E,
                K,
                hidden,
                inter,
                num_gpu_experts=hot,
                cpuinfer_threads=4,
                method=method,
                max_deferred_experts_per_token=d,
            )
            gate, up = (torch.randn(E, inter, hidden, generator=g) * hidden**-0.5 for _ in "gu")
            down = torch.randn(E, hidden, inter, generator=g) * inter**-0.5
            made.load_weights_from_tensors(gate, up, down, torch.arange(E))
            layers.append(made)
    return layers


def batch(tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16, hidden: int = H) -> tuple:
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, E, generator=g)
    weights, ids = scores.softmax(-1).topk(K)
    return torch.randn(tokens, hidden, generator=g).to(dtype), ids.int(), weights


def expected(layers: list, batches: list) -> list[torch.Tensor]:
    """The path without a device."""
    return [layer.forward(*one) for layer, one in zip(layers, batches, strict=True)]


def on_gpu(one: tuple) -> tuple:
    return tuple(t.to(CUDA) for t in one)


@pytest.mark.parametrize("d", [0, 1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_eager(d: int, dtype: torch.dtype) -> None:
    """Bit for bit; batch sizes that change, several passes, results used on the device."""
    layers, same = model(d), model(d)
    for number, tokens in enumerate([1, 3, 1, 64, 300, 1, 2000, 7]):
        batches = [batch(tokens, 10 * number + i, dtype) for i in range(LAYERS)]
        want = expected(same, batches)
        for layer, one, y in zip(layers, batches, want, strict=True):
            assert torch.equal(layer.forward(*on_gpu(one), None).cpu(), y), (number, tokens)


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("hidden", [H, 1000, 7168])
def test_kinds_of_inputs(ids_dtype, weights_dtype, hidden) -> None:
    [layer] = model(layers=1, hidden=hidden, method="BF16")
    slot_map = torch.full((E,), -1, dtype=torch.int32, device=CUDA)
    slot_map[:3] = torch.arange(3, dtype=torch.int32)
    for tokens in (1, 33):
        x, ids, weights = batch(tokens, 1, hidden=hidden)
        one = x, ids.to(ids_dtype), weights.to(weights_dtype)
        want = layer.forward(*one)
        x, ids, weights = on_gpu(one)
        routes = layer.submit_and_split(x, ids, weights, slot_map=slot_map, cold_slot=0)
        for mine, theirs in zip(routes, hot_routes(ids, weights, slot_map, 0), strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        hot = torch.randn(tokens, hidden, device=CUDA).bfloat16()
        total = (hot.cpu().float() + want.float()).bfloat16()
        assert torch.equal(layer.sync_and_add(x, hot=hot).cpu(), total)
        # Not contiguous, not aligned, with a dimension more, or with gradients.
        wide = torch.zeros(tokens, hidden + 1, dtype=x.dtype, device=CUDA)
        wide[:, 1:] = x
        assert torch.equal(layer.forward(wide[:, 1:], ids, weights).cpu(), want)
        leaf = x.clone().requires_grad_()
        assert torch.equal(layer.forward(leaf.view(1, tokens, hidden), ids, weights).cpu(), want)


@pytest.mark.parametrize("d", [0, 2])
@pytest.mark.parametrize("tokens", [1, 8])
def test_graph(d: int, tokens: int) -> None:
    """Replayed a thousand times, each with new inputs, between eager passes of other sizes."""
    layers, same = model(d), model(d)
    inputs = [on_gpu(batch(tokens, i)) for i in range(LAYERS)]

    def run() -> list[torch.Tensor]:
        return [layer.forward(*one).clone() for layer, one in zip(layers, inputs, strict=True)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    wrong = 0
    for number in range(1000):
        batches = [batch(tokens, 100 + number * LAYERS + i) for i in range(LAYERS)]
        for given, one in zip(inputs, batches, strict=True):
            for target, source in zip(given, one, strict=True):
                target.copy_(source)
        graph.replay()
        want = expected(same, batches)
        wrong += not all(torch.equal(y.cpu(), w) for y, w in zip(outputs, want, strict=True))
        if number % 100 == 0:
            other = [batch(3 + number // 100, i) for i in range(LAYERS)]
            for layer, one, y in zip(layers, other, expected(same, other), strict=True):
                assert torch.equal(layer.forward(*on_gpu(one)).cpu(), y)
    assert wrong == 0


@pytest.mark.parametrize("d", [0, 2])
def test_experts_move_between_replays(d: int) -> None:
    """The graph's routes and the CPU's plan follow the map and the mask, changed in place."""
    layers, same = model(d, hot=0), model(d, hot=0)
    inputs = [on_gpu(batch(8, i)) for i in range(LAYERS)]
    slot_map = torch.full((E,), -1, dtype=torch.int32, device=CUDA)

    def run() -> list[tuple[torch.Tensor, ...]]:
        found = []
        for layer, (x, ids, weights) in zip(layers, inputs, strict=True):
            routes = layer.submit_and_split(x, ids, weights, slot_map=slot_map, cold_slot=-1)
            found.append((*(part.clone() for part in routes), layer.sync_and_add(x)))
        return found

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
        with pytest.raises(RuntimeError, match="experts cannot move while a CUDA graph is capt"):
            layers[0].set_gpu_experts_mask(torch.ones(E, dtype=torch.bool))
    for number in range(50):
        hot = torch.randperm(E, generator=torch.Generator().manual_seed(number))[: number % 5]
        placement = Placement.from_mask(torch.isin(torch.arange(E), hot))
        graph.replay()  # may still run when the experts move
        for layer in (*layers, *same):
            layer.set_gpu_experts_mask(placement.mask)
        slot_map.copy_(placement.slot_map())
        graph.replay()
        for (slots, router, y), layer, one in zip(outputs, same, inputs, strict=True):
            routes = hot_routes(*one[1:], slot_map, -1)
            assert torch.equal(slots, routes[0]) and torch.equal(router, routes[1]), number
            assert torch.equal(y.cpu(), layer.forward(*(part.cpu() for part in one))), number


@pytest.mark.parametrize("d", [0, 2])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_padding_in_a_graph(d: int, kind: torch.dtype) -> None:
    """A buffer says which rows of a graph's batch are padding: read anew at each replay. They cost
    nothing, and the others are as without them."""
    tokens, layers, same = 8, model(d), model(d)
    inputs = [on_gpu(batch(tokens, i)) for i in range(LAYERS)]
    slot_map = torch.full((E,), -1, dtype=torch.int32, device=CUDA)
    slot_map[:3] = torch.arange(3, dtype=torch.int32)
    whole = torch.zeros(tokens + 1, dtype=kind, device=CUDA)
    # The engine's buffer begins at an aligned address; a view may not.
    padding = whole[1:] if d else whole[:tokens]

    def run() -> list[tuple[torch.Tensor, ...]]:
        found = []
        for layer, one in zip(layers, inputs, strict=True):
            routes = layer.submit_and_split(*one, slot_map=slot_map, cold_slot=0, padding=padding)
            kept = [route.clone() for route in routes]
            found.append((layer.sync_and_add(one[0]), *kept))
        return found

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    torch.cuda.synchronize()
    for number, real in enumerate([8, 3, 0, 1, 7, 8, 5] * 20):
        batches = [batch(tokens, 100 + number * LAYERS + i) for i in range(LAYERS)]
        for given, one in zip(inputs, batches, strict=True):
            for target, source in zip(given, one, strict=True):
                target.copy_(source)
        is_token = torch.arange(tokens) < real
        if number % 2:
            is_token = is_token[torch.randperm(tokens)]
        if kind == torch.bool:
            padding.copy_(~is_token)
        else:
            padding.copy_(torch.where(is_token, 2**33 + torch.arange(tokens), -1))
        before = [layer.stats()["expert_calls"] for layer in layers]
        graph.replay()
        torch.cuda.synchronize()
        left = [(x, ids.where(is_token[:, None], -1), w) for x, ids, w in batches]
        want = expected(same, left)
        for i, (out, slots, weights) in enumerate(outputs):
            assert torch.equal(out.cpu(), want[i]), (number, i)
            x, ids, w = batches[i]
            routes = hot_routes(ids, w, slot_map.cpu(), 0, ~is_token)
            assert torch.equal(slots.cpu(), routes[0]) and torch.equal(weights.cpu(), routes[1])
            if d == 0:
                cold = int((ids[is_token] >= 3).sum())
                assert layers[i].stats()["expert_calls"] - before[i] == cold, (number, i)
                if real:
                    alone = same[i].forward(x[is_token], ids[is_token], w[is_token])
                    assert torch.equal(out.cpu()[is_token], alone), (number, i)


def test_two_models() -> None:
    """In turns, on two streams at once, eager and captured."""
    models, same = [model(2, s) for s in (1, 2)], [model(2, s) for s in (1, 2)]
    side = [torch.cuda.Stream() for _ in models]
    for number in range(50):
        batches = [[batch(5, 100 * number + 10 * m + i) for i in range(LAYERS)] for m in (0, 1)]
        want = [expected(s, b) for s, b in zip(same, batches, strict=True)]
        moved = [[on_gpu(one) for one in b] for b in batches]
        torch.cuda.synchronize()
        found: list[list] = [[], []]
        for i in range(LAYERS):
            for m in (0, 1):
                handle = side[m] if number % 2 else side[m].cuda_stream
                models[m][i].submit_forward(*moved[m][i], handle)
            for m in (0, 1):
                y = models[m][i].sync_forward(moved[m][i][0], side[m])
                with torch.cuda.stream(side[m]):
                    found[m].append(y.clone())
        torch.cuda.synchronize()
        for ys, ws in zip(found, want, strict=True):
            assert all(torch.equal(y.cpu(), w) for y, w in zip(ys, ws, strict=True))


def memory() -> tuple[int, int]:
    """Resident bytes of this process, free bytes of the device."""
    torch.cuda.synchronize()
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, torch.cuda.mem_get_info()[0]


def test_nothing_is_kept_per_call() -> None:
    [layer] = model(layers=1, hidden=64, inter=32)
    one = on_gpu(batch(1, 0, hidden=64))
    layer.forward(*one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            layer.forward(*one)
    for _ in range(2000):
        layer.forward(*one)
    before = memory()
    start = time.monotonic()
    for _ in range(CALLS):
        layer.forward(*one)
    torch.cuda.synchronize()
    eager = time.monotonic()
    for _ in range(CALLS // 10):
        graph.replay()
    torch.cuda.synchronize()
    print(
        f"{CALLS} calls: eager {(eager - start) / CALLS * 1e6:.1f} us a call, in a graph "
        f"{(time.monotonic() - eager) / CALLS * 1e6:.1f} us"
    )
    after = memory()
    assert after[0] - before[0] < 8 << 20, (before, after)
    assert before[1] - after[1] < 8 << 20, (before, after)


def test_results_are_fixed_buffers() -> None:
    """In turns: valid until the next submit but one."""
    [layer] = model(layers=1)
    one = on_gpu(batch(4, 0))
    stream = torch.cuda.current_stream()
    want = layer.forward(*batch(4, 0))
    first = layer.forward(*one, stream)
    layer.submit_forward(one[0] * 2, *one[1:], stream.cuda_stream)
    second = layer.sync_forward(None, stream.cuda_stream)
    assert torch.equal(first.cpu(), want)
    assert layer.forward(*one).data_ptr() == first.data_ptr() != second.data_ptr()


def test_capture_of_a_size_that_never_ran() -> None:
    [layer] = model(layers=1, hidden=128)
    layer.forward(*on_gpu(batch(4, 0, hidden=128)))
    one = on_gpu(batch(1500, 0, hidden=128))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="1500 tokens is captured"), torch.cuda.graph(graph):
        layer.forward(*one)
    torch.cuda.synchronize()
    want = layer.forward(*(t.cpu() for t in one))  # and it goes on
    assert torch.equal(layer.forward(*one).cpu(), want)


def test_wrong_streams() -> None:
    [layer] = model(layers=1)
    one = on_gpu(batch(2, 0))
    with pytest.raises(TypeError, match="cuda_stream must be a CUDA stream, got str"):
        layer.forward(*one, "default")
    if torch.cuda.device_count() > 1:
        other = torch.cuda.Stream("cuda:1")
        with pytest.raises(ValueError, match="is on cuda:1"):
            layer.forward(*one, other)
    layer.forward(*one)


def test_a_layer_that_is_freed_at_once() -> None:
    one = on_gpu(batch(64, 0))
    want = model(layers=1)[0].forward(*(t.cpu() for t in one))
    for _ in range(20):
        assert torch.equal(model(layers=1)[0].forward(*one).cpu(), want)


def test_buffers_are_freed_on_request() -> None:
    [layer] = model(layers=1, hidden=192)
    layer.forward(*on_gpu(batch(64, 0, hidden=192)))
    del layer
    gc.collect()
    assert KTMoEWrapper.clear_buffer_cache() > 0
    [layer] = model(layers=1, hidden=192)
    one = batch(64, 0, hidden=192)
    assert torch.equal(layer.forward(*on_gpu(one)).cpu(), layer.forward(*one))


def _process(code: str, timeout: int = 120, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | environment,
    )


_SCRIPT = """
import torch
from test_gpu_stream import batch, model, on_gpu
layers = model()
one = on_gpu(batch(256, 0))
"""


@pytest.mark.parametrize(
    "end",
    [
        "for layer in layers * 50: layer.submit_forward(*one)",  # nobody collects
        "for layer in layers * 50: y = layer.forward(*one)",
        "g = torch.cuda.CUDAGraph(); layers[0].forward(*one)\n"
        "with torch.cuda.graph(g): layers[0].forward(*one)\n"
        "for _ in range(200): g.replay()",
        "layers[0].forward(*one); raise SystemExit(0)",
    ],
)
def test_a_process_ends_with_work_pending(end: str) -> None:
    done = _process(_SCRIPT + end)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_stuck_layer_is_named() -> None:
    done = _process(
        """
import torch
from kt_kernel import KTMoEWrapper
E, K, H, INNER = 64, 8, 4096, 2048
layer = KTMoEWrapper(7, E, K, H, INNER, cpuinfer_threads=1, method="BF16",
                     chunked_prefill_size=4096)
for expert in range(E):
    w = torch.ones(INNER, H, dtype=torch.bfloat16)
    layer.load_expert(expert, w, w, w.T.contiguous())
layer.finish_loading()
x = torch.ones(4096, H, device="cuda").bfloat16()
ids = torch.arange(8, device="cuda", dtype=torch.int32).expand(4096, 8).contiguous()
w = torch.ones(4096, 8, device="cuda")
layer.forward(x, ids, w)
torch.cuda.synchronize()
try:
    layer.forward(x, ids, w)
except RuntimeError as error:
    print("error:", error)
""",
        KT_WATCHDOG_SECONDS="0.2",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "layer 7" in done.stderr and "error:" in done.stdout and "layer 7" in done.stdout
