"""Everything a caller can get wrong: what is raised, what it says, and that nothing breaks."""

import re

import numpy as np
import pytest
import torch
from moe_cases import Case

from kt_kernel import KTMoEWrapper

E, K, H, I = 6, 3, 64, 32  # noqa: E741
CASE = Case()


def make(**options):
    defaults = {
        "layer_idx": 0,
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "moe_intermediate_size": I,
        "cpuinfer_threads": 2,
        "method": "BF16",
    }
    return KTMoEWrapper(**{**defaults, **options})


mask_of = torch.tensor


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"layer_idx": -1}, ValueError, "layer_idx=-1; accepted: 0 or more"),
        ({"num_experts": 0}, ValueError, "num_experts=0; accepted: 1 to 65536"),
        ({"num_experts_per_tok": 0}, ValueError, "num_experts_per_tok=0"),
        ({"hidden_size": 0}, ValueError, "hidden_size=0; accepted: 1 to 65536"),
        ({"hidden_size": 65537}, ValueError, "hidden_size=65537; accepted: 1 to 65536"),
        ({"moe_intermediate_size": 65537}, ValueError, "moe_intermediate_size=65537"),
        ({"moe_intermediate_size": 32.0}, TypeError, "moe_intermediate_size must be an integer"),
        ({"hidden_size": True}, TypeError, "hidden_size must be an integer, got True"),
        ({"method": "int8"}, ValueError, "unknown method 'int8'; supported: BF16"),
        ({"method": "AMXINT8_SFT"}, ValueError, "is for mode='sft'"),
        ({"method": 4}, TypeError, "method must be a string"),
        ({"mode": "sft", "method": "AMXINT8_SFT", "lora_rank": 0}, ValueError, "lora_rank=0"),
        (
            {"mode": "sft", "method": "AMXINT9_SFT"},
            ValueError,
            "unknown method 'AMXINT9_SFT'; supported: AMXBF16_SFT, AMXINT8_SFT, AMXINT4_SFT, "
            "AMXINT4_1_SFT, AMXINT4_KGroup_SFT, AMXINT4_1KGroup_SFT, AMXBF16_SFT_SkipLoRA, AMXINT8",
        ),
        ({"mode": "sft"}, ValueError, "method 'BF16' is for mode='inference'; mode='sft' supports"),
        ({"mode": "sft", "method": None}, TypeError, "method must be a string, got NoneType"),
        ({"mode": "training"}, ValueError, "unknown mode 'training'; accepted: 'inference', 'sft'"),
        ({"mode": None}, ValueError, "unknown mode None; accepted: 'inference', 'sft'"),
        ({"mode": [0]}, ValueError, "unknown mode [0]; accepted: 'inference', 'sft'"),
        (
            {"method": "INT4_G32", "hidden_size": 65},
            ValueError,
            "hidden_size=65 is not divisible by the group size 32 of INT4_G32; accepted: multiples",
        ),
        (
            {"method": "INT4_G128", "hidden_size": 128},
            ValueError,
            "moe_intermediate_size=32 is not divisible by the group size 128",
        ),
        (
            {"cpuinfer_threads": 1, "threadpool_count": 2},
            ValueError,
            "cpuinfer_threads=1 is less than threadpool_count=2",
        ),
        ({"cpuinfer_threads": 0}, ValueError, "cpuinfer_threads=0"),
        ({"threadpool_count": 0}, ValueError, "threadpool_count=0"),
        ({"numa_nodes": [12345]}, ValueError, "numa_nodes contains 12345; nodes in use here"),
        ({"numa_nodes": "0"}, TypeError, "numa_nodes"),
        ({"numa_nodes": 0}, TypeError, "numa_nodes must be a list of integers, got 0"),
        ({"chunked_prefill_size": 1.5}, TypeError, "chunked_prefill_size must be an integer"),
        ({"chunked_prefill_size": 0}, ValueError, "chunked_prefill_size=0; accepted: -1"),
        ({"chunked_prefill_size": -2}, ValueError, "chunked_prefill_size=-2"),
        ({"cpu_save": True}, ValueError, "cpu_save=True needs weight_path"),
        ({"cpu_save": True, "weight_path": ""}, ValueError, "cpu_save=True needs weight_path"),
        ({"cpu_save": "no"}, TypeError, "cpu_save must be True or False, got 'no'"),
        ({"max_deferred_experts_per_token": -1}, ValueError, "max_deferred_experts_per_token=-1"),
        ({"swiglu_limit": -1.0}, ValueError, "swiglu_limit=-1.0"),
        ({"swiglu_limit": float("nan")}, ValueError, "swiglu_limit=nan"),
        ({"swiglu_limit": 1e40}, ValueError, "swiglu_limit=1e+40; accepted: a finite float32"),
        ({"swiglu_limit": 1e-50}, ValueError, "swiglu_limit=1e-50; accepted: a finite float32"),
        ({"swiglu_limit": 10**400}, ValueError, "accepted: a finite float32 number of at least 0"),
        ({"swiglu_limit": True}, TypeError, "swiglu_limit must be a number, got True"),
        ({"swiglu_alpha": -1e40}, ValueError, "swiglu_alpha=-1e+40; accepted: a finite float32"),
        ({"swiglu_alpha": True}, TypeError, "swiglu_alpha must be a number, got True"),
        ({"swiglu_alpha": "1.5"}, TypeError, "swiglu_alpha must be a number, got '1.5'"),
        ({"swiglu_alpha": 1j}, TypeError, "swiglu_alpha must be a number, got complex"),
        ({"swiglu_alpha": torch.zeros(2)}, TypeError, "swiglu_alpha must be a number, got Tensor"),
        ({"weight_path": b"model"}, TypeError, "weight_path must be a str or a path of str, got b"),
        ({"weight_path": 5}, TypeError, "weight_path must be a str or a path of str, got int"),
        ({"weight_path": "a\0b"}, ValueError, "weight_path 'a\\x00b' contains a NUL"),
        ({"weight_path": "x" * 5000}, ValueError, "xxx…': File name too long"),
        ({"weight_path": "\udcff\ud800"}, ValueError, "weight_path '"),
        ({"num_gpu_experts": 7}, ValueError, "num_gpu_experts=7; accepted: 0 to 6"),
        ({"gpu_experts_mask": 7}, ValueError, "num_gpu_experts=7; accepted: 0 to 6"),
        ({"gpu_experts_mask": -1}, ValueError, "num_gpu_experts=-1; accepted: 0 to 6"),
        ({"gpu_experts_mask": 2, "num_gpu_experts": 3}, ValueError, "give only one of them"),
        (
            {"gpu_experts_mask": torch.zeros(5, dtype=torch.bool)},
            ValueError,
            r"must be bool [6], got torch.bool [5]",
        ),
        ({"gpu_experts_mask": torch.zeros(6)}, ValueError, "got torch.float32 [6]"),
        ({"gpu_experts_mask": torch.zeros(1, 6, dtype=torch.bool)}, ValueError, "[1, 6]"),
        (
            {"gpu_experts_mask": torch.zeros(6, dtype=torch.bool, device="meta")},
            ValueError,
            "gpu_experts_mask must be a dense tensor with data, but it is on meta",
        ),
        (
            {"gpu_experts_mask": torch.zeros(6, dtype=torch.bool).to_sparse()},
            ValueError,
            "gpu_experts_mask must be a dense tensor with data",
        ),
        ({"gpu_experts_mask": object()}, TypeError, "got object"),
        (
            {"gpu_experts_mask": torch.arange(6) >= 4, "num_gpu_experts": 2},
            ValueError,
            "means slots 0 to 1, but gpu_experts_mask has [4, 5]",
        ),
        (
            {"gpu_experts_mask": torch.arange(6) < 3, "num_gpu_experts": 2},
            ValueError,
            "has [0, 1, 2]",
        ),
    ],
)
def test_constructor(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make(**options)


def test_kind_is_checked_at_construction(monkeypatch):
    monkeypatch.setenv("KT_KERNEL_KIND", "scalar")
    with pytest.raises(ValueError, match="KT_KERNEL_KIND=scalar; accepted: vector, tile"):
        make()


def tensors(**changes):
    given = {"gate": CASE.gate, "up": CASE.up, "down": CASE.down, "map": CASE.mapping, **changes}
    return [given.pop(n) for n in ("gate", "up", "down", "map")], given


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"gate": CASE.gate[:5]}, ValueError, "gate_proj must be [6, 32, 64], got [5, 32, 64]"),
        ({"down": CASE.up}, ValueError, "down_proj must be [6, 64, 32], got [6, 32, 64]"),
        ({"up": CASE.up.double()}, ValueError, "up_proj has dtype torch.float64; accepted: bf"),
        ({"up": CASE.up.tolist()}, TypeError, "up_proj must be a tensor, got list"),
        ({"map": torch.arange(5)}, ValueError, "physical_to_logical_map_cpu must be [6], got [5]"),
        ({"map": torch.arange(6).view(1, 6)}, ValueError, "must be [6], got [1, 6]"),
        ({"map": torch.arange(6).float()}, ValueError, "has dtype torch.float32"),
        ({"map": torch.zeros(6, dtype=torch.bool)}, ValueError, "has dtype torch.bool"),
        ({"map": torch.tensor([0, 1, 2, 6, 4, 5])}, ValueError, "[3] = 6; accepted: 0 to 5"),
        ({"map": torch.tensor([0, 1, -1, 3, 4, 5])}, ValueError, "[2] = -1; accepted: 0 to 5"),
        ({"map": torch.tensor([2**63 + 1] * 6, dtype=torch.uint64)}, ValueError, "[0] = 9223"),
        ({"map": torch.arange(6, device="meta")}, ValueError, "must be on the CPU, but is on meta"),
        ({"map": torch.arange(6).to_sparse()}, ValueError, "must be a dense tensor with data"),
        (
            {"gate": torch.empty(6, 32, 64, device="meta")},
            ValueError,
            "gate_proj must be a dense tensor with data, but it is on meta",
        ),
        (
            {"up": CASE.up.to_sparse()},
            ValueError,
            "up_proj must be a dense tensor with data, but it h",
        ),
        (
            {"down": torch.nested.nested_tensor([CASE.down[0], CASE.down[1]])},
            ValueError,
            "down_proj must be a dense tensor with data, but it is nested",
        ),
        (
            {"up_bias": torch.zeros(6, 32, device="meta")},
            ValueError,
            "up_bias must be a dense tensor with data, but it is on meta",
        ),
        ({"map": list(range(6))}, TypeError, "must be a tensor, got list"),
        ({"map": None}, TypeError, "must be a tensor, got NoneType"),
        ({"gate_bias": torch.zeros(6, 64)}, ValueError, "gate_bias must be [6, 32], got [6, 64]"),
        ({"down_bias": torch.zeros(6, 64).long()}, ValueError, "down_bias has dtype torch.int64"),
        pytest.param({"map": "cuda"}, ValueError, "must be on the CPU", marks=GPU),
    ],
)
def test_loading(changes, error, text):
    if changes.get("map") == "cuda":
        changes["map"] = torch.arange(6, device="cuda")
    wrapper = make()
    positional, named = tensors(**changes)
    with pytest.raises(error, match=re.escape(text)) as caught:
        wrapper.load_weights_from_tensors(*positional, **named)
    assert "layer 0" in str(caught.value)
    usable_after_all(wrapper)


def usable_after_all(wrapper):
    """The wrapper is unloaded, says so, and can be loaded."""
    hidden, ids, weights = CASE.batch(3)
    assert not wrapper.loaded
    with pytest.raises(RuntimeError, match="layer 0: forward before loading; call load_weights"):
        wrapper.forward(hidden, ids, weights, None)
    wrapper.load_weights_from_tensors(*tensors()[0])
    assert wrapper.loaded and torch.equal(
        wrapper.forward(hidden, ids, weights, None), CASE.wrapper().forward(hidden, ids, weights)
    )


@pytest.mark.parametrize("method", ["AMXINT8", "AMXINT4", "INT4_G32"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_integer_methods_refuse_weights_that_are_not_finite(method, bad):
    wrapper = make(method=method)
    down = CASE.down.clone()
    down[4, 1, 2] = bad
    with pytest.raises(ValueError, match=r"layer 0: expert slot 4, down row 1.*NaN or infinite"):
        wrapper.load_weights_from_tensors(CASE.gate, CASE.up, down, CASE.mapping)
    assert not wrapper.loaded
    wrapper.load_weights_from_tensors(*tensors()[0])
    assert wrapper.loaded


def test_scales_beyond_fp16_are_refused():
    wrapper = make(method="INT4_G32")
    with pytest.raises(ValueError, match="65504"):
        wrapper.load_weights_from_tensors(CASE.gate.float() * 1e7, CASE.up, CASE.down, CASE.mapping)
    wrapper.load_weights_from_tensors(*tensors()[0])


def test_load_weights_needs_a_path_that_exists(tmp_path):
    for given in ({}, {"weight_path": None}, {"weight_path": ""}):
        with pytest.raises(RuntimeError, match="load_weights needs weight_path.*not given; pass"):
            make(**given).load_weights(CASE.mapping)
    wrapper = make(weight_path=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        wrapper.load_weights(CASE.mapping)
    with pytest.raises(ValueError, match=r"must be \[6\], got \[2\]"):
        wrapper.load_weights(torch.arange(2))
    usable_after_all(wrapper)


def test_loading_one_by_one():
    wrapper = make(num_gpu_experts=1)
    expert = CASE.gate[0], CASE.up[0], CASE.down[0]
    with pytest.raises(ValueError, match=r"slot 0 is on the GPU; on the CPU: \[1, 2, 3, 4, 5\]"):
        wrapper.load_expert(0, *expert)
    with pytest.raises(ValueError, match="slot=6; accepted: 0 to 5"):
        wrapper.load_expert(6, *expert)
    with pytest.raises(TypeError, match="slot must be an integer, got float"):
        wrapper.load_expert(1.0, *expert)
    with pytest.raises(TypeError, match="slot must be an integer, got True"):
        wrapper.load_expert(True, *expert)
    with pytest.raises(ValueError, match=r"down_proj of slot 1 must be \[64, 32\], got \[32, 64\]"):
        wrapper.load_expert(1, CASE.gate[1], CASE.up[1], CASE.gate[1])
    with pytest.raises(
        ValueError, match=r"5 cold experts were not loaded: slots \[1, 2, 3, 4, 5\]"
    ):
        wrapper.finish_loading()
    for slot in range(1, 5):
        wrapper.load_expert(slot, CASE.gate[slot], CASE.up[slot], CASE.down[slot])
    with pytest.raises(ValueError, match=r"1 cold experts were not loaded: slots \[5\]"):
        wrapper.finish_loading()
    wrapper.load_expert(5, CASE.gate[5], CASE.up[5], CASE.down[5])
    wrapper.finish_loading()
    wrapper.finish_loading()
    with pytest.raises(RuntimeError, match="load_expert after loading was finished"):
        wrapper.load_expert(5, *expert)
    batch = CASE.batch(4)
    assert torch.equal(wrapper.forward(*batch), CASE.wrapper(num_gpu_experts=1).forward(*batch))


@pytest.fixture(scope="module")
def loaded():
    return CASE.wrapper()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"hidden": torch.zeros(4, 63)}, ValueError, "hidden_states must be [..., 64], got [4, 6"),
        ({"hidden": torch.tensor(1.0)}, ValueError, "hidden_states must be [..., 64], got []"),
        ({"hidden": torch.zeros(4, H).double()}, ValueError, "hidden_states has dtype torch.float"),
        ({"hidden": torch.zeros(4, H).int()}, ValueError, "accepted: bfloat16, float16, float32"),
        ({"hidden": torch.zeros(4, H).to_sparse()}, ValueError, "dense"),
        ({"hidden": torch.zeros(4, H, device="meta")}, ValueError, "with data"),
        ({"ids": torch.zeros(4, 3).long().to_sparse()}, ValueError, "topk_ids must be a dense"),
        (
            {"weights": torch.nested.nested_tensor([torch.zeros(3)])},
            ValueError,
            "topk_weights must be a dense tensor with data, but it is nested",
        ),
        ({"hidden": [0.0] * H}, TypeError, "hidden_states must be a tensor, got list"),
        ({"hidden": torch.zeros(5, H)}, ValueError, "topk_ids must be [5, 3], got [4, 3]"),
        ({"ids": torch.zeros(4, 2).long()}, ValueError, "topk_ids must be [4, 3], got [4, 2]"),
        ({"ids": torch.zeros(4, 4).long()}, ValueError, "topk_ids must be [4, 3], got [4, 4]"),
        ({"ids": torch.zeros(3, 4).long()}, ValueError, "topk_ids must be [4, 3], got [3, 4]"),
        ({"ids": torch.zeros(4, 3)}, ValueError, "topk_ids has dtype torch.float32"),
        ({"ids": torch.zeros(4, 3).bool()}, ValueError, "topk_ids has dtype torch.bool"),
        ({"ids": None}, TypeError, "topk_ids must be a tensor, got NoneType"),
        ({"weights": torch.zeros(4, 2)}, ValueError, "topk_weights must be [4, 3], got [4, 2]"),
        ({"weights": torch.zeros(12)}, ValueError, "topk_weights must be [4, 3], got [12]"),
        ({"weights": torch.zeros(4, 3).long()}, ValueError, "accepted: float dtypes"),
        ({"weights": torch.zeros(4, 3, device="meta")}, ValueError, "topk_weights must be a dense"),
    ],
)
@pytest.mark.parametrize("call", ["forward", "submit_forward"])
def test_inputs(loaded, call, changes, error, text):
    hidden, ids, weights = CASE.batch(4)
    arguments = {"hidden": hidden, "ids": ids, "weights": weights, **changes}
    with pytest.raises(error, match=re.escape(text)):
        getattr(loaded, call)(*arguments.values(), None)
    with pytest.raises(RuntimeError, match="sync_forward without submit_forward"):
        loaded.sync_forward(hidden, None)
    error = (loaded.forward(hidden, ids, weights) - CASE.reference(hidden, ids, weights)).norm()
    assert error < 0.05


def test_order_of_calls(loaded):
    hidden, ids, weights = CASE.batch(4)
    with pytest.raises(RuntimeError, match="sync_forward without submit_forward"):
        loaded.sync_forward(hidden, None)
    loaded.submit_forward(hidden, ids, weights, None)
    with pytest.raises(
        ValueError, match=r"pending result is \[4, 64\].*hidden_states is \[3, 64\]"
    ):
        loaded.sync_forward(hidden[:3], None)
    with pytest.raises(
        ValueError, match="torch.float32 on cpu; hidden_states is .* torch.bfloat16"
    ):
        loaded.sync_forward(hidden.bfloat16(), None)
    loaded.sync_forward(hidden, None)
    with pytest.raises(RuntimeError):
        loaded.sync_forward(hidden, None)


def test_a_dropped_result_is_not_another_ones():
    wrapper = CASE.wrapper()
    batches = [CASE.batch(3) for _ in range(6)]
    wanted = [wrapper.forward(*batch) for batch in batches]
    for batch in batches:
        wrapper.submit_forward(*batch)
    text = "hidden_states is not one of the 4 tensors whose results wait .* after 4 more submits"
    for dropped in (0, 1):
        with pytest.raises(ValueError, match=text):
            wrapper.sync_forward(batches[dropped][0])
    for waiting in (2, 3, 4, 5):  # the error took nothing away
        assert torch.equal(wrapper.sync_forward(batches[waiting][0]), wanted[waiting])
    with pytest.raises(RuntimeError, match="sync_forward without submit_forward"):
        wrapper.sync_forward(batches[0][0])
    wrapper.submit_forward(*batches[1])
    with pytest.raises(ValueError, match="not one of the 1 tensors"):
        wrapper.sync_forward(batches[0][0])
    assert torch.equal(wrapper.sync_forward(None), wanted[1])


def test_a_copy_will_do_where_nothing_else_can_be_meant():
    wrapper = CASE.wrapper()
    first, second = CASE.batch(3), CASE.batch(3)
    wanted = wrapper.forward(*first)
    wrapper.submit_forward(*first)
    assert torch.equal(wrapper.sync_forward(first[0].clone()), wanted)
    wrapper.submit_forward(*first)
    wrapper.submit_forward(*second)
    with pytest.raises(ValueError, match="not one of the 2 tensors whose results wait"):
        wrapper.sync_forward(first[0].clone())
    assert torch.equal(wrapper.sync_forward(first[0]), wanted)


def test_fine_tuning_calls_name_the_right_one(loaded):
    for name, text in (
        ("forward_sft", "call forward"),
        ("submit_forward_sft", "call submit_forward"),
        ("sync_forward_sft", "call sync_forward"),
        ("backward", "has no backward"),
        ("init_lora_weights", "no LoRA"),
        ("update_lora_weights", "no LoRA"),
    ):
        with pytest.raises(RuntimeError, match=f"{name} belongs to mode='sft'.*{text}"):
            getattr(loaded, name)(1, save_for_backward=True)


@pytest.mark.parametrize("sizes", [[0], [1, -3], [2.0], [True], ["4"]])
def test_capture_batch_sizes(sizes):
    KTMoEWrapper.set_capture_batch_sizes([1, 2])
    with pytest.raises(ValueError, match="must be positive integers"):
        KTMoEWrapper.set_capture_batch_sizes(sizes)
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2]
    KTMoEWrapper.set_capture_batch_sizes([])


def test_capture_batch_sizes_may_be_of_any_integer_type():
    KTMoEWrapper.set_capture_batch_sizes(np.array([4, 8]))
    assert KTMoEWrapper.get_capture_batch_sizes() == [4, 8]
    KTMoEWrapper.set_capture_batch_sizes([])
