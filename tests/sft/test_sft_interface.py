"""The calls of mode="sft", in which order they work, and what is said when something is wrong."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import kt_kernel
from kt_kernel import KTMoEWrapper
from kt_kernel.experts_sft import BaseSFTMoEWrapper as FromExpertsSft
from kt_kernel.sft import KExpertsSFTBuffer
from kt_kernel.sft.base import BaseSFTMoEWrapper
from kt_kernel.sft.base import KExpertsSFTBuffer as FromBase
from kt_kernel.sft.config import KTConfig, get_sft_weight_path, part_of_rank
from kt_kernel.sft.lora import GRAD_NAMES, LORA_NAMES

from .layers import INTER, Batch, E, H, K, R, base_tensors, lora_tensors, make_wrapper, ready

IDENTITY = torch.arange(E)


def test_names_are_where_callers_look_for_them():
    assert kt_kernel.AMXSFTMoEWrapper is kt_kernel.BaseSFTMoEWrapper is BaseSFTMoEWrapper
    assert FromExpertsSft is BaseSFTMoEWrapper and FromBase is KExpertsSFTBuffer
    wrapper = make_wrapper(lora_dropout=0.25, max_cache_depth=3, chunked_prefill_size=64)
    assert isinstance(wrapper, BaseSFTMoEWrapper)
    assert (wrapper.mode, wrapper.method) == ("sft", "AMXBF16_SFT")
    assert (wrapper.lora_rank, wrapper.lora_alpha, wrapper.lora_scaling) == (R, 8.0, 2.0)
    assert (wrapper.lora_dropout, wrapper.max_cache_depth) == (0.25, 3)
    assert (wrapper.group_size, wrapper.zero_point, wrapper.full_weight_grad) == (128, True, False)
    assert wrapper.chunked_prefill_size == 64


@pytest.mark.parametrize(("table", "tokens"), [("amx", 2048), ("avx512_bf16", 1024)])
def test_chunks_are_larger_with_tiles(monkeypatch, table, tokens):
    monkeypatch.setattr("kt_kernel.sft.factory.kernel_table", lambda: table)
    assert make_wrapper()._settings.max_tokens == tokens
    assert make_wrapper(chunked_prefill_size=64)._settings.max_tokens == 64


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"lora_rank": 0}, ValueError, "lora_rank=0; accepted: 1 to 4096"),
        ({"lora_rank": 2.5}, TypeError, "lora_rank must be an integer, got float"),
        ({"lora_alpha": 0}, ValueError, "lora_alpha=0; accepted: a number above 0"),
        ({"lora_alpha": float("inf")}, ValueError, "lora_alpha=inf; accepted: a finite"),
        ({"lora_dropout": 1.0}, ValueError, "lora_dropout=1.0; accepted: 0 up to, but not, 1"),
        ({"lora_dropout": 0.999999999}, ValueError, "lora_dropout=0.999999999; accepted: 0 up to"),
        ({"lora_dropout": -0.1}, ValueError, "lora_dropout=-0.1; accepted"),
        ({"max_cache_depth": 0}, ValueError, "max_cache_depth=0; accepted: 1 or more"),
        ({"group_size": 48}, ValueError, "group_size=48; accepted: multiples of 32"),
        ({"zero_point": 1}, TypeError, "zero_point must be True or False, got 1"),
        ({"full_weight_grad": "no"}, TypeError, "full_weight_grad must be True or False"),
        ({"method": "AMXINT4"}, ValueError, "is for mode='inference'"),
        (
            {"method": "AMXINT4_KGroup_SFT"},
            ValueError,
            "hidden_size=64 is not divisible by the group size 128",
        ),
        (
            {"method": "AMXINT4_1_SFT", "moe_intermediate_size": 40},
            ValueError,
            "moe_intermediate_size=40 is not divisible by the group size 32",
        ),
        (
            {"method": "AMXINT4_1_SFT", "cpu_save": True, "weight_path": "/nowhere"},
            ValueError,
            "cpu_save=True: method AMXINT4_1_SFT .* has no packed form on disk",
        ),
    ],
)
def test_constructor_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        make_wrapper(**arguments)


def test_calls_before_loading_and_before_init():
    batch, wrapper = Batch(2), make_wrapper()
    for call in (
        lambda: wrapper.forward_sft(*batch.forward),
        lambda: wrapper.submit_forward_sft(*batch.forward),
        wrapper.update_lora_weights,
    ):
        with pytest.raises(RuntimeError, match="before loading; call load_weights or load"):
            call()
    with pytest.raises(RuntimeError, match="backward without a forward pass; call forward_sft"):
        wrapper.backward(batch.grad)
    with pytest.raises(RuntimeError, match="sync_forward_sft without submit_forward_sft"):
        wrapper.sync_forward_sft()
    with pytest.raises(RuntimeError, match="needs weight_path.*pass tensors to load_weig"):
        wrapper.load_weights(IDENTITY)
    wrapper.load_weights_from_tensors(*base_tensors(), IDENTITY)
    for call in (lambda: wrapper.forward_sft(*batch.forward), wrapper.update_lora_weights):
        with pytest.raises(RuntimeError, match="before init_lora_weights"):
            call()
    assert wrapper.gate_lora_a is None
    wrapper.init_lora_weights(**lora_tensors())
    assert wrapper.forward_sft(*batch.forward).shape == (2, H)


def test_inference_calls_name_the_right_one():
    wrapper = ready()
    for name, text in (
        ("forward", "call forward_sft"),
        ("submit_forward", "call submit_forward_sft"),
        ("sync_forward", "call sync_forward_sft"),
    ):
        with pytest.raises(RuntimeError, match=f"{name} belongs to mode='inference'.*{text}"):
            getattr(wrapper, name)()


@pytest.mark.parametrize("name", LORA_NAMES)
def test_lora_tensors_are_checked(name):
    wrapper, lora = make_wrapper(), lora_tensors()
    wrong = lora[name][:, :, :-1]
    with pytest.raises(ValueError, match=rf"layer 5: {name} must be \[6, .*\], got \[6, "):
        wrapper.init_lora_weights(**lora | {name: wrong})
    with pytest.raises(ValueError, match=rf"layer 5: {name} must be"):
        setattr(wrapper, name, wrong)
    with pytest.raises(ValueError, match=rf"{name} has dtype torch.int64; accepted: float dtypes"):
        wrapper.init_lora_weights(**lora | {name: lora[name].long()})
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
        wrapper.init_lora_weights(**lora | {name: []})
    assert getattr(wrapper, name) is None
    wrapper.load_weights_from_tensors(*base_tensors(), IDENTITY)
    wrapper.init_lora_weights(**lora)
    b, kept = Batch(2), getattr(wrapper, name)
    before = wrapper.forward_sft(*b.forward, save_for_backward=False)
    bad = lora[name].clone()
    bad[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="layer 5: .*finite"):
        wrapper.init_lora_weights(**lora | {name: bad})
    assert getattr(wrapper, name) is kept  # as it was
    assert torch.equal(wrapper.forward_sft(*b.forward, save_for_backward=False), before)


def test_batches_are_checked_before_anything_is_kept():
    wrapper, b = ready(chunked_prefill_size=8), Batch(4)
    for given, error, text in (
        ((b.x[:, :-1], b.ids, b.scores), ValueError, r"hidden_states must be \[..., 64\], got"),
        ((b.x.long(), b.ids, b.scores), ValueError, "hidden_states has dtype torch.int64"),
        ((b.x, b.ids[:, :-1], b.scores), ValueError, r"expert_ids must be \[4, 3\], got \[4, 2\]"),
        ((b.x, b.ids.float(), b.scores), ValueError, "expert_ids has dtype torch.float32"),
        ((b.x, b.ids, b.scores[1:]), ValueError, r"weights must be \[4, 3\], got \[3, 3\]"),
        ((b.x, b.ids, b.ids), ValueError, "weights has dtype torch.int64"),
        ((b.x, b.ids, None), TypeError, "weights must be a tensor, got NoneType"),
        (Batch(9).forward, ValueError, "9 tokens exceed chunked_prefill_size=8"),
    ):
        for call in (wrapper.forward_sft, wrapper.submit_forward_sft):
            with pytest.raises(error, match=text):
                call(*given)
    for call in (wrapper.forward_sft, wrapper.submit_forward_sft):
        for wrong in (1, None, "yes"):
            with pytest.raises(TypeError, match="layer 5: save_for_backward must be True or False"):
                call(*b.forward, save_for_backward=wrong)
    assert wrapper.pending == 0


def test_results_for_a_device_that_is_not_there():
    """They are refused before anything is computed or lost."""
    wrapper = ready()
    batch = Batch(4)
    with pytest.raises(RuntimeError, match="output_device='nowhere' cannot be used: Expected one"):
        wrapper.forward_sft(*batch.forward, output_device="nowhere")
    with pytest.raises(RuntimeError, match="output_device='cuda:99' cannot be used"):
        wrapper.forward_sft(*batch.forward, output_device="cuda:99")
    assert wrapper.pending == 0
    wrapper.submit_forward_sft(*batch.forward)
    with pytest.raises(RuntimeError, match="layer 5: output_device='cuda:99' cannot be used"):
        wrapper.sync_forward_sft("cuda:99")
    wrapper.sync_forward_sft()
    for call in (lambda **d: wrapper.backward(batch.grad, **d), wrapper.sync_forward_sft):
        with pytest.raises(TypeError, match="output_device must be a torch.device, a string or No"):
            call(output_device=3)
        with pytest.raises(RuntimeError, match="output_device='cuda:99' cannot be used"):
            call(output_device="cuda:99")
    assert wrapper.pending == 1
    assert wrapper.backward(batch.grad, output_device="cpu")[0].shape == (4, H)


def test_backward_errors_lose_nothing():
    wrapper, b = ready(), Batch(4)
    wrapper.forward_sft(*b.forward)
    wanted = ready()
    wanted.forward_sft(*b.forward)
    nan = b.grad.clone()
    nan[2, 3] = float("inf")
    for given, error, text in (
        ((b.grad[:3],), ValueError, r"grad_output must be \[4, 64\] for the newest.*got \[3, 64\]"),
        ((b.grad[:, :3],), ValueError, r"grad_output must be \[..., 64\]"),
        ((b.grad, {"gate_lora_a": None}), ValueError, "lora_params has the keys .*accepted: gate"),
        ((nan,), RuntimeError, "layer 5: grad_output has a NaN or infinite value in token 2"),
    ):
        with pytest.raises(error, match=text):
            wrapper.backward(*given)
        assert wrapper.pending == 1
    found = wrapper.backward(b.grad, lora_tensors())
    for a, c in zip(found[1].values(), wanted.backward(b.grad)[1].values(), strict=True):
        assert torch.equal(a, c)
    with pytest.raises(RuntimeError, match="backward without a forward pass"):
        wrapper.backward(b.grad)


def test_gradients_that_are_not_finite_are_named():
    wrapper, b = ready(), Batch(4)
    b.x[1, 0] = float("nan")
    wrapper.forward_sft(*b.forward)
    with pytest.raises(RuntimeError, match="layer 5: grad_.* has a NaN or infinite value in"):
        wrapper.backward(b.grad)
    assert wrapper.pending == 0


@pytest.mark.parametrize("call", ["forward_sft", "submit_forward_sft"])
def test_interrupted_calls_leave_the_passes_in_order(monkeypatch, call):
    """Python raises KeyboardInterrupt when the compiled core returns."""
    wrapper, wanted, b = ready(max_cache_depth=3), ready(), Batch(4)
    for each in (wrapper, wanted):
        each.forward_sft(*b.forward)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    for _ in range(4):  # more often than there is room
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(wrapper, "_keep", interrupt)
            getattr(wrapper, call)(*Batch(4, seed=2).forward)
    assert wrapper.pending == 1
    found = wrapper.backward(b.grad)
    for a, c in zip(found[1].values(), wanted.backward(b.grad)[1].values(), strict=True):
        assert torch.equal(a, c)


def test_depth_is_a_stack():
    wrapper, batches = ready(max_cache_depth=2), [Batch(3, seed=s) for s in (1, 2)]
    single = []
    for batch in batches:
        lone = ready()
        lone.forward_sft(*batch.forward)
        single.append(lone.backward(batch.grad))
    for batch in batches:
        wrapper.forward_sft(*batch.forward)
    for call in (wrapper.forward_sft, wrapper.submit_forward_sft):
        with pytest.raises(RuntimeError, match="2 forward passes wait .* max_cache_depth=2; call"):
            call(*batches[0].forward)
    wrapper.forward_sft(*batches[0].forward, save_for_backward=False)  # keeps nothing
    for batch, wanted in zip(reversed(batches), reversed(single), strict=True):
        found = wrapper.backward(batch.grad)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2])
        for name in GRAD_NAMES:
            assert torch.equal(found[1][name], wanted[1][name]), name
    wrapper.forward_sft(*batches[0].forward)
    wrapper.clear_pending()
    assert wrapper.pending == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("data", [False, True])
def test_optimizer_step_without_update_is_noticed(fused, data):
    """Fused optimizers do not count the versions of tensors, and ``.data`` has its own."""
    wrapper, b = make_wrapper(), Batch(4)
    parameters = {n: torch.nn.Parameter(t) for n, t in lora_tensors().items()}
    wrapper.load_weights_from_tensors(*base_tensors(), IDENTITY)
    wrapper.init_lora_weights(**{n: p.data if data else p for n, p in parameters.items()})
    before = wrapper.forward_sft(*b.forward)
    for name, gradient in wrapper.backward(b.grad)[1].items():
        parameters[name.removeprefix("grad_")].grad = gradient
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=1.0).step()  # of something else
    assert not wrapper.lora_changed
    torch.optim.AdamW(parameters.values(), lr=0.1, fused=fused).step()
    for call in (wrapper.forward_sft, wrapper.submit_forward_sft):
        with pytest.raises(RuntimeError, match="changed since they were last read; call updat"):
            call(*b.forward)
    wrapper.update_lora_weights()
    assert not torch.equal(wrapper.forward_sft(*b.forward), before)
    wrapper.update_lora_weights()
    with pytest.raises(RuntimeError, match="updated between a forward pass and its backward"):
        wrapper.backward(b.grad)


def test_lora_attributes_can_be_replaced():
    wrapper, b, other = ready(), Batch(4), lora_tensors(seed=8)
    for name in LORA_NAMES:
        setattr(wrapper, name, other[name])
        assert getattr(wrapper, name) is other[name]
    wrapper.update_lora_weights()
    fresh = make_wrapper()
    fresh.init_lora_weights(**other)  # before loading
    fresh.load_weights_from_tensors(*base_tensors(), IDENTITY)
    assert torch.equal(wrapper.forward_sft(*b.forward), fresh.forward_sft(*b.forward))


def test_submit_and_sync():
    wrapper, b = ready(max_cache_depth=2), Batch(5)
    wanted = wrapper.forward_sft(*b.forward, save_for_backward=False)
    x, ids, scores = (t.clone() for t in b.forward)
    wrapper.submit_forward_sft(x, ids, scores)
    for t in (x, ids, scores):
        t.zero_()  # they were copied
    for call in (
        lambda: wrapper.submit_forward_sft(*b.forward),
        lambda: wrapper.forward_sft(*b.forward),
        lambda: wrapper.backward(b.grad),
        wrapper.update_lora_weights,
        wrapper.clear_pending,
        lambda: wrapper.init_lora_weights(**lora_tensors(seed=9)),
        lambda: wrapper.update_base_weights(*base_tensors()),
        lambda: setattr(wrapper, "up_lora_b", lora_tensors(seed=9)["up_lora_b"]),
    ):
        with pytest.raises(RuntimeError, match="after submit_forward_sft; call sync_forward_sft"):
            call()
    assert torch.equal(wrapper.sync_forward_sft(), wanted)
    assert wrapper.backward(b.grad)[0].shape == (5, H)
    wrapper.submit_forward_sft(*b.forward, save_for_backward=False)
    assert torch.equal(wrapper.sync_forward_sft("cpu"), wanted) and wrapper.pending == 0


def test_no_tokens():
    wrapper, b = ready(), Batch(0)
    assert wrapper.forward_sft(*b.forward).shape == (0, H)
    x, lora, scores = wrapper.backward(b.grad)
    assert x.shape == (0, H) and scores.shape == (0, K)
    assert all(not gradient.any() for gradient in lora.values())
    wrapper.submit_forward_sft(*b.forward)
    assert wrapper.sync_forward_sft().shape == (0, H) and wrapper.pending == 1


def test_a_second_thread_is_refused():
    wrapper, b = ready(), Batch(4)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with wrapper._exclusive("forward_sft"):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(30)
    try:
        with pytest.raises(RuntimeError, match="forward_sft while another call .* another thread"):
            wrapper.forward_sft(*b.forward)
    finally:
        leave.set()
        thread.join()
    wrapper.forward_sft(*b.forward)


def test_buffers():
    shape = (H, INTER, E, K, R)
    buffer = KExpertsSFTBuffer.get_buffer(7, *shape)
    assert buffer is KExpertsSFTBuffer.get_buffer(7, *shape)
    for name in ("input_cpu", "output_cpu", "grad_output_cpu", "grad_input_cpu"):
        assert getattr(buffer, name).shape == (7, H)
        assert getattr(buffer, name).dtype == torch.bfloat16
    assert buffer.expert_ids_cpu.shape == (7, K) and buffer.expert_ids_cpu.dtype == torch.int64
    assert buffer.weights_cpu.shape == buffer.grad_weights.shape == (7, K)
    assert buffer.bsz_tensor.tolist() == [7]
    assert buffer.grad_down_lora_b.shape == (E, H, R)
    assert not hasattr(buffer, "grad_other")
    assert KExpertsSFTBuffer.get_buffer(8, *shape) is not buffer
    assert KTMoEWrapper.clear_sft_buffer_cache() > 0
    assert KTMoEWrapper.clear_sft_buffer_cache() == 0
    assert KExpertsSFTBuffer.get_buffer(7, *shape) is not buffer
    for name, value, error in (
        ("qlen", "7", TypeError),
        ("qlen", -1, ValueError),
        ("lora_rank", 0, ValueError),
        ("hidden_size", 2.5, TypeError),
        ("dtype", "bfloat16", TypeError),
        ("dtype", torch.int8, ValueError),
    ):
        names = "hidden_size moe_intermediate_size num_experts num_experts_per_tok lora_rank"
        given = dict(zip(names.split(), shape, strict=True)) | {"qlen": 7, name: value}
        with pytest.raises(error, match=f"^{name}( must be|=)"):
            KExpertsSFTBuffer.get_buffer(**given)
    taken = KExpertsSFTBuffer.take(7, *shape)
    taken.release()
    for given_back in (taken, buffer):  # it would be given to two callers
        with pytest.raises(RuntimeError, match="release of a buffer that is not taken"):
            given_back.release()


def test_memory_of_passes_is_shared_and_freed():
    wrappers = [ready() for _ in range(3)]
    KTMoEWrapper.clear_sft_buffer_cache()
    for wrapper in wrappers:
        wrapper.forward_sft(*Batch(8).forward)
        wrapper.backward(Batch(8).grad)
    one = KTMoEWrapper.clear_sft_buffer_cache()
    wrappers[0].forward_sft(*Batch(8).forward)
    wrappers[0].backward(Batch(8).grad)
    assert KTMoEWrapper.clear_sft_buffer_cache() == one > 0


def test_config(tmp_path):
    assert get_sft_weight_path(KTConfig(model_path=tmp_path, weight_path="w")) == tmp_path
    packed = KTConfig(model_path=tmp_path, weight_path="w", sft_method="AMXINT8_SFT")
    assert get_sft_weight_path(packed) == "w"
    for config, name in (
        (KTConfig(weight_path="w"), "model_path"),
        (KTConfig(model_path="m", weight_path="", sft_method="AMXINT4_SFT"), "weight_path"),
    ):
        with pytest.raises(RuntimeError, match=f"from {name}, which is not set; .*pass tensors to"):
            get_sft_weight_path(config)
    with pytest.raises(TypeError, match="cfg must be a KTConfig or have .* sft_method, got dict"):
        get_sft_weight_path({})
    with pytest.raises(ValueError, match="unknown method 'BF'"):
        get_sft_weight_path(KTConfig(model_path="m", sft_method="BF"))


@pytest.mark.parametrize(
    ("nodes", "ranks", "wanted"),
    [
        (1, 1, [{}]),
        (1, 2, [([0], 8), ([0], 8)]),
        (2, 2, [([0], 8), ([1], 8)]),
        (4, 2, [([0, 1], 8), ([2, 3], 8)]),
        (2, 4, [([0], 4), ([0], 4), ([1], 4), ([1], 4)]),
        (4, 32, [([0], 1)] * 8),
    ],
)
def test_processes_share_the_machine(monkeypatch, nodes, ranks, wanted):
    monkeypatch.setattr("kt_kernel.sft.config.usable_cores", lambda: 16)
    topology = SimpleNamespace(topology=lambda: [(node, [], []) for node in range(nodes)])
    monkeypatch.setattr("kt_kernel.sft.config.native", lambda: topology)
    for rank, part in enumerate(wanted):
        found = part_of_rank({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)})
        names = ("numa_nodes", "cpuinfer_threads")
        assert found == (part and dict(zip(names, part, strict=True)))
    assert part_of_rank({}) == part_of_rank({"LOCAL_RANK": "0"}) == {}
