"""The published interface: every signature by position and by keyword, and the attributes."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from moe_cases import Case
from safetensors.torch import save_file

import kt_kernel
from kt_kernel import (
    AMXMoEWrapper,
    BaseMoEWrapper,
    InferenceMoEWrapper,
    KExpertsCPUBuffer,
    KTMoEWrapper,
    cpu_features,
    experts,
    generate_gpu_experts_masks,
)
from kt_kernel.moe.settings import SFT_DEFAULTS
from kt_kernel.utils.loader import BF16SafeTensorLoader, SafeTensorLoader

CASE = Case()
HOT = torch.tensor([True, False, False, False, True, False])

_LOADER = {
    "__init__": "(self, file_path)",
    "load_tensor": "(self, key, device='cpu')",
    "has_tensor": "(self, key)",
    "load_experts": "(self, base_key, device='cpu')",
    "close_all_handles": "(self)",
}
_STATIC = {
    "set_capture_batch_sizes": "(capture_bs)",
    "get_capture_batch_sizes": "()",
    "clear_buffer_cache": "()",
    "clear_sft_buffer_cache": "()",
    "select_deferred_experts": "(expert_ids, expert_scores, protected_k)",
}
SIGNATURES = {
    kt_kernel: {
        "KTMoEWrapper": "(layer_idx, num_experts, num_experts_per_tok, hidden_size, "
        "moe_intermediate_size, gpu_experts_mask=None, cpuinfer_threads=None, "
        "threadpool_count=None, weight_path=None, chunked_prefill_size=-1, cpu_save=False, "
        "max_deferred_experts_per_token=None, method='AMXINT4', mode='inference', "
        "num_gpu_experts=None, lora_rank=16, lora_alpha=32.0, max_cache_depth=1, group_size=128, "
        "zero_point=True, *, numa_nodes=None, lora_dropout=0.0, full_weight_grad=False, "
        "swiglu_limit=0.0, swiglu_alpha=0.0, "
        "activation='silu', gated=True, apply_router_weight_on_input=False, "
        "situ_beta=None, situ_linear_beta=None)",
        "generate_gpu_experts_masks": "(activation_freq, num_gpu_experts)",
        "cpu_features": "()",
    },
    KTMoEWrapper: _STATIC,
    InferenceMoEWrapper: _STATIC
    | {
        "load_weights_from_tensors": "(self, gate_proj, up_proj, down_proj, "
        "physical_to_logical_map_cpu, *, gate_bias=None, up_bias=None, down_bias=None)",
        "load_weights": "(self, physical_to_logical_map_cpu)",
        "submit_forward": "(self, hidden_states, topk_ids, topk_weights, cuda_stream=None)",
        "sync_forward": "(self, hidden_states=None, cuda_stream=None)",
        "forward": "(self, hidden_states, topk_ids, topk_weights, cuda_stream=None)",
        # Ours, in the same order and by the same names.
        "load_expert": "(self, slot, gate_proj, up_proj, down_proj, *, gate_bias=None, "
        "up_bias=None, down_bias=None)",
        "submit_and_split": "(self, hidden_states, topk_ids, topk_weights, cuda_stream=None, *, "
        "slot_map, cold_slot, padding=None, defer=True)",
        "packed_experts": "(self)",
        "sync_and_add": "(self, hidden_states, cuda_stream=None, *, hot=None, scale=1.0)",
    },
    KExpertsCPUBuffer: {"get_buffer": "(hidden_states, num_experts_per_tok)"},
    SafeTensorLoader: _LOADER,
    BF16SafeTensorLoader: _LOADER,
}


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in SIGNATURES.items() for name in names]
)
def test_signature(owner, name):
    found = inspect.signature(getattr(owner, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[owner][name]


def both_ways(function, *values, **keyword_only):
    """What two calls return, one by position, one by keyword."""
    named = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind is not p.KEYWORD_ONLY
    ]
    named = dict(zip(named, values, strict=True))
    return function(*values, **keyword_only), function(**named, **keyword_only)


def arguments(**changes):
    """All of the constructor's, by name, in their order. None has its default's value, except
    those of other activations than SwiGLU."""
    given = {
        "layer_idx": 3,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "gpu_experts_mask": HOT,
        "cpuinfer_threads": 2,
        "threadpool_count": 1,
        "weight_path": "somewhere",
        "chunked_prefill_size": 64,
        "cpu_save": True,
        "max_deferred_experts_per_token": 1,
        "method": "BF16",
        "mode": "inference",
        "num_gpu_experts": None,
        "lora_rank": 8,
        "lora_alpha": 4.0,
        "max_cache_depth": 2,
        "group_size": 32,
        "zero_point": False,
        "numa_nodes": [0],
        "lora_dropout": 0.5,
        "full_weight_grad": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.7,
        "activation": "silu",
        "gated": True,
        "apply_router_weight_on_input": False,
        "situ_beta": 0.0,
        "situ_linear_beta": 0.0,
    }
    assert list(given) == list(inspect.signature(KTMoEWrapper).parameters)
    return given | changes


def by_position(**changes):
    """The same as positional ones and those that are keyword-only."""
    given = list(arguments(**changes).items())
    return [value for _, value in given[:20]], dict(given[20:])


def check_attributes(wrapper, expected):
    for name, value in expected.items():
        found = getattr(wrapper, name)
        assert torch.equal(found, value) if name == "gpu_experts_mask" else found == value, name
        with pytest.raises(AttributeError):
            setattr(wrapper, name, value)


def test_the_constructor_and_its_arguments_as_attributes():
    positional, named = by_position()
    for wrapper in (KTMoEWrapper(*positional, **named), KTMoEWrapper(**arguments())):
        assert isinstance(wrapper, BaseMoEWrapper)
        check_attributes(wrapper, arguments() | {"num_gpu_experts": 2})


def test_attributes_have_what_was_chosen_where_nothing_was_given():
    wrapper = KTMoEWrapper(0, 6, 3, 64, 32, num_gpu_experts=2, chunked_prefill_size=None)
    chosen = {
        "gpu_experts_mask": torch.arange(6) < 2,
        "weight_path": None,
        "chunked_prefill_size": -1,
        "cpu_save": False,
        "max_deferred_experts_per_token": 0,
        "method": "AMXINT4",
        "mode": "inference",
        "swiglu_limit": 0.0,
        "swiglu_alpha": 0.0,
        "activation": "silu",
        "gated": True,
        "apply_router_weight_on_input": False,
        "situ_beta": 0.0,
        "situ_linear_beta": 0.0,
        **SFT_DEFAULTS,
    }
    check_attributes(wrapper, chosen)
    assert wrapper.threadpool_count == len(wrapper.numa_nodes) >= 1
    assert wrapper.cpuinfer_threads >= wrapper.threadpool_count
    assert KTMoEWrapper(0, 6, 3, 64, 32, weight_path="").weight_path is None
    assert KTMoEWrapper(0, 6, 3, 64, 32, 6, 2).num_gpu_experts == 6


@pytest.mark.parametrize("nodes", [None, [0], (0,), torch.tensor([0])])
def test_numa_nodes_in_the_place_of_mode(nodes):
    """Then all that follows is in that order, too."""
    first = by_position()[0][:13]
    rest = ["inference", None, 8, 4.0, 0.5, 2, 32, False, True, 7.0, 1.7]
    names = [
        "mode",
        "num_gpu_experts",
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "max_cache_depth",
        "group_size",
        "zero_point",
        "full_weight_grad",
        "swiglu_limit",
        "swiglu_alpha",
    ]
    expected = arguments(num_gpu_experts=2)
    for count in range(len(rest) + 1):
        named = dict(zip(names[count:], rest[count:], strict=True))
        check_attributes(KTMoEWrapper(*first, nodes, *rest[:count], **named), expected)
    with pytest.raises(TypeError, match="multiple values for argument 'numa_nodes'"):
        KTMoEWrapper(*first, nodes, numa_nodes=[0])
    with pytest.raises(TypeError, match="at most 25 positional arguments .* got 26"):
        KTMoEWrapper(*first, nodes, *rest, 0)
    assert KTMoEWrapper(*first[:12], "AMXBF16_SFT", nodes, "sft").mode == "sft"


def test_what_is_for_fine_tuning_is_ignored():
    """Whatever it is."""
    odd = {
        "lora_rank": "x",
        "lora_alpha": None,
        "lora_dropout": 2,
        "max_cache_depth": -1,
        "group_size": 48,
        "zero_point": "no",
        "full_weight_grad": object(),
    }
    assert odd.keys() == SFT_DEFAULTS.keys()
    batch = CASE.batch(4)
    for method in ("BF16", "AMXINT4", "INT4_G32", "RAWINT4"):
        case = Case(method=method)
        wrapper = case.wrapper(**odd)
        assert torch.equal(wrapper.forward(*batch), case.wrapper().forward(*batch))
        check_attributes(wrapper, odd)


def test_calls_by_position_and_by_keyword():
    """Each gives the same both ways, and what the oracle says."""
    case = Case(biases=True)
    batch = case.batch(5)
    expected = case.reference(*batch)

    def right(y):
        return (y - expected).norm() < 5e-3 * expected.norm()

    wrappers = [case.wrapper(load=False) for _ in range(2)]
    given = case.gate, case.up, case.down, case.mapping
    wrappers[0].load_weights_from_tensors(*given, **case.bias)
    names = ("gate_proj", "up_proj", "down_proj", "physical_to_logical_map_cpu")
    wrappers[1].load_weights_from_tensors(**dict(zip(names, given, strict=True)), **case.bias)
    wrapper = wrappers[0]
    assert right(wrapper.forward(*batch, None))
    for other in wrappers:
        y, same = both_ways(other.forward, *batch, None)
        assert right(y) and torch.equal(y, same)

    hidden = batch[0]
    assert both_ways(wrapper.submit_forward, *batch, None) == (None, None)
    first = wrapper.sync_forward(hidden, None)
    wrapper.submit_forward(*batch, None)
    assert torch.equal(first, y)
    assert torch.equal(wrapper.sync_forward(hidden_states=hidden, cuda_stream=None), y)

    split = {"slot_map": torch.arange(6, dtype=torch.int32), "cold_slot": 0}
    routes = both_ways(wrapper.submit_and_split, *batch, None, **split)
    assert all(map(torch.equal, *routes))
    total = wrapper.sync_and_add(hidden, None, hot=hidden, scale=2.0)
    wrapper.submit_forward(*batch)
    named = {"hidden_states": hidden, "cuda_stream": None, "hot": hidden, "scale": 2.0}
    assert torch.equal(wrapper.sync_and_add(**named), total)

    one_by_one = [case.wrapper(load=False) for _ in range(2)]
    for slot in range(6):
        expert = case.gate[slot], case.up[slot], case.down[slot]
        biases = {name: bias[slot] for name, bias in case.bias.items()}
        one_by_one[0].load_expert(slot, *expert, **biases)
        named = dict(zip(("slot", *names), (slot, *expert), strict=False))
        one_by_one[1].load_expert(**named, **biases)
    for made in one_by_one:
        made.finish_loading()
        assert torch.equal(made.forward(*batch), y)

    for owner in (wrapper, KTMoEWrapper):
        ids, scores = batch[1:]
        for routes, same in zip(
            *both_ways(owner.select_deferred_experts, ids, scores, 2), strict=True
        ):
            assert torch.equal(routes, same)
        assert both_ways(owner.set_capture_batch_sizes, [1, 2]) == (None, None)
        assert owner.get_capture_batch_sizes() == [1, 2]
        wrapper.submit_forward(*batch)
        wrapper.sync_forward(hidden)
        assert owner.clear_buffer_cache() > 0 and owner.clear_buffer_cache() == 0
        owner.clear_sft_buffer_cache()  # what tests of fine-tuning left in this process
        assert owner.clear_sft_buffer_cache() == 0
    KTMoEWrapper.set_capture_batch_sizes([])
    masks = both_ways(generate_gpu_experts_masks, torch.tensor([[1.0, 3.0], [2.0, 0.0]]), 2)
    assert all(mask.tolist() == [[False, True], [True, False]] for mask in masks)
    assert cpu_features()["avx2"]


def checkpoint(folder, case=CASE, layer=0):
    base = f"model.layers.{layer}.mlp.experts"
    save_file(
        {
            f"{base}.{e}.{name}_proj.weight": matrix[e].contiguous()
            for e in range(case.experts)
            for name, matrix in (("gate", case.gate), ("up", case.up), ("down", case.down))
        },
        folder / "model.safetensors",
    )
    return folder


def test_loading_and_readers_by_position_and_by_keyword(tmp_path):
    batch = CASE.batch(3)
    path = checkpoint(tmp_path)
    for load in (
        lambda w: w.load_weights(CASE.mapping),
        lambda w: w.load_weights(physical_to_logical_map_cpu=CASE.mapping),
    ):
        wrapper = CASE.wrapper(load=False, weight_path=str(path))
        load(wrapper)
        assert torch.equal(wrapper.forward(*batch), CASE.wrapper().forward(*batch))
    key = "model.layers.0.mlp.experts.4.up_proj.weight"
    for kind in (SafeTensorLoader, BF16SafeTensorLoader):
        for loader in both_ways(kind, str(path)):
            assert both_ways(loader.has_tensor, key) == (True, True)
            assert not loader.has_tensor("up")
            for tensor in both_ways(loader.load_tensor, key, "cpu"):
                assert torch.equal(tensor, CASE.up[4])
            for layer in both_ways(loader.load_experts, "model.layers.0", "cpu"):
                assert all(map(torch.equal, layer["down"], CASE.down))
                assert [layer[f"{name}_scale"] for name in ("gate", "up", "down")] == [None] * 3
            with pytest.raises(KeyError):
                loader.load_tensor("up")
            with pytest.raises(ValueError, match="layer 7 has no experts"):
                loader.load_experts("model.layers.7")
            assert loader.close_all_handles() is None
    with pytest.raises(FileNotFoundError):
        SafeTensorLoader(str(tmp_path / "nowhere"))


def test_as_sglang_calls_it(tmp_path):
    """The calls of its class KTEPWrapperMethod, with what it knows of a layer."""
    case = Case(method="AMXINT8", mapping=torch.tensor([[4, 0, 0, 2, 1, 5]] * 8)[7])
    path = checkpoint(tmp_path, case, layer=7)
    config = SimpleNamespace(
        layer_idx=7,
        num_gpu_experts=2,
        cpuinfer_threads=2,
        threadpool_count=1,
        weight_path=str(path),
        chunked_prefill_size=8192,
        method="AMXINT8",
    )
    KTMoEWrapper.set_capture_batch_sizes([1, 2, 4])
    wrapper = KTMoEWrapper(
        layer_idx=config.layer_idx,
        num_experts=case.experts,
        num_experts_per_tok=case.k,
        hidden_size=case.hidden,
        moe_intermediate_size=case.inter,
        num_gpu_experts=config.num_gpu_experts,
        cpuinfer_threads=config.cpuinfer_threads,
        threadpool_count=config.threadpool_count,
        weight_path=config.weight_path,
        chunked_prefill_size=config.chunked_prefill_size,
        method=config.method,
        max_deferred_experts_per_token=0,
    )
    wrapper.load_weights(case.mapping.contiguous())
    x, topk_ids, topk_weights = case.batch(4, torch.bfloat16)
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
    wrapper.submit_forward(x, topk_ids, topk_weights, stream)
    y = wrapper.sync_forward(x, stream)
    mask = torch.arange(case.experts) < 2
    reference = case.reference(x, topk_ids, topk_weights, gpu_experts_mask=mask)
    assert y.dtype == x.dtype and (y.double() - reference).norm() < 0.01 * reference.norm()
    wrapper.submit_forward(
        hidden_states=x, topk_ids=topk_ids, topk_weights=topk_weights, cuda_stream=stream
    )
    assert torch.equal(wrapper.sync_forward(hidden_states=x, cuda_stream=stream), y)
    KTMoEWrapper.set_capture_batch_sizes([])


def test_names_of_the_module_experts():
    for name in ("INFERENCE_METHODS", "SFT_METHODS"):
        assert getattr(experts, name) is getattr(kt_kernel, name)
        assert isinstance(getattr(experts, name), frozenset)
    for name in ("KTMoEWrapper", "BaseMoEWrapper", "AMXMoEWrapper", "KExpertsCPUBuffer"):
        assert getattr(experts, name) is getattr(kt_kernel, name)
    positional = [*by_position()[0][:12], "AMXINT8", [0]]
    assert isinstance(AMXMoEWrapper(*positional), BaseMoEWrapper)


def test_cpu_buffers():
    KTMoEWrapper.clear_buffer_cache()
    KExpertsCPUBuffer.capture_bs = [4]
    assert KTMoEWrapper.get_capture_batch_sizes() == KExpertsCPUBuffer.capture_bs == [4]
    x = torch.zeros(4, 64, dtype=torch.float16)
    made, same = both_ways(KExpertsCPUBuffer.get_buffer, x, 3)
    assert made is same
    shapes = [
        (torch.bfloat16, (4, 64)),
        (torch.int64, (4, 3)),
        (torch.int64, (4, 3)),
        (torch.float32, (4, 3)),
        (torch.bfloat16, (4, 64)),
        (torch.int32, (1,)),
        (torch.float16, (4, 64)),
    ]
    assert [(t.dtype, t.shape) for tensors in made for t in tensors[:1]] == shapes
    assert all(len(tensors) == KExpertsCPUBuffer.buffer_depth == 2 for tensors in made)
    assert made[2][0].unique().tolist() == [-1] and made[5][1].tolist() == [4]
    others = [KExpertsCPUBuffer.get_buffer(x[:3], 3) for _ in range(2)]
    assert others[0] is others[1] and KExpertsCPUBuffer.temp_bs == 3
    for other in (x[:3].float(), x[:3, :32]):  # the latest is kept
        assert KExpertsCPUBuffer.get_buffer(other, 3)[6][0].dtype == other.dtype
    assert KExpertsCPUBuffer.get_buffer(x[:3], 3) is not others[0]
    assert KExpertsCPUBuffer.get_buffer(x, 3) is made  # an announced size is
    size = 2 * (2 * 64 * 2 + 3 * (8 + 8 + 4) + 64 * 2)  # of a token
    assert KTMoEWrapper.clear_buffer_cache() == 7 * size + 2 * 2 * 4
    assert KExpertsCPUBuffer.get_buffer(x, 3) is not made
    for wrong, error in ((x[0], ValueError), ([0.0], TypeError), (x.to("meta"), ValueError)):
        with pytest.raises(error, match="hidden_states must be"):
            KExpertsCPUBuffer.get_buffer(wrong, 3)
    KTMoEWrapper.clear_buffer_cache()
    KTMoEWrapper.set_capture_batch_sizes([])
