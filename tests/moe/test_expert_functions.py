"""What experts may compute besides plain SwiGLU, through the wrapper: every activation, with and
without gate, router weights on the input, limit, alpha and biases, in every method."""

import itertools
import re

import pytest
import torch
from grid import grid
from moe_cases import ALL_METHODS, KERNEL_METHODS, Case, within
from test_act_order import OrderedCase
from test_deferral import agree, batches_of, build, definition, one_pass

from kt_kernel import _C, KTMoEWrapper
from kt_kernel.moe.activation import ACTIVATIONS
from kt_kernel.testing import moe_reference, quantise_weights, row_error
from kt_kernel.weights.methods import get_method

FUNCTIONS = {
    "gpt-oss": {"swiglu_limit": 0.7, "swiglu_alpha": 1.702},
    "limit": {"swiglu_limit": 0.5},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "gelu-ungated": {"activation": "gelu", "gated": False},
    "relu2": {"activation": "relu2"},
    "relu2-ungated": {"activation": "relu2", "gated": False},
    "silu-ungated": {"gated": False},
    "situ": {"activation": "situ", "situ_beta": 0.8, "situ_linear_beta": 1.1},
    "swiglustep": {"activation": "swiglustep", "swiglu_limit": 0.4},
    "silu-input": {"apply_router_weight_on_input": True},
    "relu2-ungated-input": {
        "activation": "relu2",
        "gated": False,
        "apply_router_weight_on_input": True,
    },
}
UNGATED = FUNCTIONS["relu2-ungated"]


def case_of(method="BF16", function="relu2-ungated", **settings):
    return Case(method=method, options=dict(FUNCTIONS[function]), **settings)


@grid(
    method=ALL_METHODS,
    function=list(FUNCTIONS),
    biases=[False, True],
    threads=[(1, 1), (2, 1), (2, 2)],
    one_by_one=[False, True],
    where=lambda c: c.method in KERNEL_METHODS or c.function in ("gpt-oss", "relu2-ungated"),
)
def test_against_the_oracle(method, function, biases, threads, one_by_one):
    """Decode, prefill and chunks, a hot expert, and weights that come whole or one by one."""
    case = case_of(
        method,
        function,
        hidden=128,
        inter=128,
        k=2,
        biases=biases,
        mapping=torch.tensor([5, 0, 2, 2, 1, 3]),
    )
    hot = torch.arange(6) == 3
    wrapper = case.wrapper(
        not one_by_one,
        gpu_experts_mask=hot,
        cpuinfer_threads=threads[0],
        threadpool_count=threads[1],
        chunked_prefill_size=16,
    )
    if one_by_one:
        for slot in (4, 0, 1, 2, 5):
            e = int(case.mapping[slot])
            matrices = [every if every is None else every[e] for every in case.sources]
            wrapper.load_expert(slot, *matrices, **{b: every[e] for b, every in case.bias.items()})
        wrapper.finish_loading()
    for tokens in (1, 3, 40):
        hidden, ids, weights = case.batch(tokens)
        batch = hidden, ids, weights - 0.3
        answer = case.reference_with_noise(*batch, gpu_experts_mask=hot)
        assert within(wrapper.forward(*batch), *answer), tokens


def test_the_functions_are_those_of_pytorch():
    """The oracle with top-1 and no rounding, against PyTorch's functions."""
    act = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: torch.relu(x) ** 2,
    }
    assert tuple(act) == ACTIVATIONS[:4]
    for name, gated, on_input in itertools.product(act, (True, False), (True, False)):
        options = {"activation": name, "gated": gated, "apply_router_weight_on_input": on_input}
        case = Case(options=options, k=1)
        hidden, _, weights = case.batch(5)
        x, w = hidden.double(), weights.double()
        up, down = case.up[2].double(), case.down[2].double()
        x = x * w if on_input else x
        h = act[name](x @ (case.gate[2].double() if gated else up).T)
        h = h * (x @ up.T) if gated else h
        wanted = h @ down.T if on_input else w * (h @ down.T)
        ids = torch.full((5, 1), 2)
        y = case.reference(hidden, ids, weights, rounded=False)
        assert torch.allclose(y, wanted, rtol=1e-12, atol=1e-14), options


@pytest.mark.parametrize("method", ["BF16", "AMXINT8"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_both_oracles_agree(method, function):
    case = case_of(method, function, biases=True)
    hidden, ids, weights = case.batch(9)
    options = {name: value for name, value in case.options.items() if name != "gated"}
    if "apply_router_weight_on_input" in options:
        options["weight_on_input"] = options.pop("apply_router_weight_on_input")
    matrices = [m if m is None else quantise_weights(method, m).numpy() for m in case.sources]
    compiled = _C.reference_forward(
        hidden.double().numpy(),
        ids.numpy(),
        weights.double().numpy(),
        *matrices,
        activation_format=int(get_method(method).int8_activations),
        skip=[False] * case.experts,
        **{name: bias.double().numpy() for name, bias in case.bias.items()},
        **options,
    )
    ours = case.reference(hidden, ids, weights)
    assert row_error(torch.from_numpy(compiled), ours).max() < 1e-12


@pytest.mark.parametrize("function", ["relu2-ungated", "silu-input"])
def test_deferral(function):
    cases = [case_of(function=function, seed=i) for i in range(4)]
    layers = build(2, cases)
    batches = batches_of(5, cases=cases)
    assert agree(one_pass(layers, batches), definition(batches, 2, cases))


def test_column_orders_without_gate():
    """GPTQ's desc_act."""
    for named in ((), ("up",), ("down",)):
        case = OrderedCase(*named, method="GPTQ_INT4", hidden=128, inter=64, biases=True)
        case.options, case._sources[0] = dict(UNGATED), None
        case.bias.pop("gate_bias")
        wrapper = case.wrapper(threadpool_count=2)
        for tokens in (1, 50):
            batch = case.batch(tokens)
            assert within(wrapper.forward(*batch), *case.reference_with_noise(*batch))


def test_an_expert_without_gate_takes_two_thirds():
    ungated, gated = (
        case_of(function=f, hidden=64, inter=64).wrapper() for f in ("relu2-ungated", "relu2")
    )
    assert 3 * ungated.packed_bytes == 2 * gated.packed_bytes
    assert (ungated.activation, ungated.gated) == ("relu2", False)
    assert gated.gated and not gated.apply_router_weight_on_input
    situ = case_of(function="situ").wrapper(load=False)
    assert (situ.activation, situ.situ_beta, situ.situ_linear_beta) == ("situ", 0.8, 1.1)
    assert Case(options={"activation": "situ"}).wrapper(load=False).situ_beta == 1


def test_weights_may_change_on_their_way():
    """change_weights is called for the matrices that there are."""
    case, seen = case_of(), []
    wrapper = case.wrapper(load=False)

    def change(slot, name, matrix):
        seen.append((slot, name))
        return matrix * 2

    wrapper.change_weights(change)
    wrapper.load_weights_from_tensors(*case.sources, case.mapping)
    assert seen == [(slot, name) for slot in range(6) for name in ("up", "down")]
    batch = case.batch(3)
    case.up, case.down = case.up * 2, case.down * 2
    assert within(wrapper.forward(*batch), *case.reference_with_noise(*batch))


@pytest.mark.parametrize(
    "options,error,text",
    [
        ({"activation": "swish"}, ValueError, "activation='swish'; accepted: 'silu', 'gelu', "),
        ({"activation": None}, TypeError, "activation must be a string, got NoneType"),
        ({"gated": 0}, TypeError, "gated must be True or False, got 0"),
        (
            {"apply_router_weight_on_input": "yes"},
            TypeError,
            "apply_router_weight_on_input must be True or False, got 'yes'",
        ),
        (
            {"activation": "gelu", "swiglu_limit": 7.0},
            ValueError,
            "swiglu_limit=7 with activation='gelu', gated=True; accepted: 0, or activation='silu' "
            "or activation='swiglustep' with gated=True",
        ),
        (
            {"gated": False, "swiglu_alpha": 1.702},
            ValueError,
            "swiglu_alpha=1.702 with activation='silu', gated=False; accepted: 0, or",
        ),
        (
            {"situ_beta": 4.0},
            ValueError,
            "situ_beta=4 with activation='silu', gated=True; accepted",
        ),
        (
            {"activation": "situ", "situ_beta": -1.0},
            ValueError,
            "situ_beta=-1.0; accepted: a finite",
        ),
        (
            {"activation": "situ", "gated": False},
            ValueError,
            "gated=False with activation='situ'; accepted: True",
        ),
        (
            {"gated": False, "cpu_save": True, "weight_path": "/nowhere"},
            ValueError,
            "cpu_save=True with gated=False: packed directories hold experts with a gate only",
        ),
        (
            {"mode": "sft", "method": "AMXBF16_SFT", "activation": "gelu"},
            ValueError,
            "mode='sft' with activation='gelu'; accepted: activation='silu' with gated=True",
        ),
        (
            {"mode": "sft", "method": "AMXBF16_SFT", "apply_router_weight_on_input": True},
            ValueError,
            "mode='sft' with activation='silu', apply_router_weight_on_input=True; accepted",
        ),
    ],
)
def test_settings_that_do_not_fit(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        KTMoEWrapper(0, 4, 2, 64, 64, **options)


def test_a_gate_that_should_not_be_there():
    case, whole = case_of(biases=True), Case(biases=True)
    wrapper = case.wrapper(load=False)
    gate, up, down = whole.sources
    text = "layer 0: gate_proj was given, but gated=False: the experts have no gate; accepted: None"
    with pytest.raises(ValueError, match=text):
        wrapper.load_weights_from_tensors(gate, up, down, case.mapping)
    with pytest.raises(ValueError, match="layer 0: gate_bias was given, but gated=False"):
        wrapper.load_weights_from_tensors(None, up, down, case.mapping, **whole.bias)
    with pytest.raises(ValueError, match="layer 0: gate_proj of slot 1 was given, but gated=False"):
        wrapper.load_expert(1, gate[1], up[1], down[1])
    with pytest.raises(TypeError, match="layer 0: gate_proj must be a tensor, got NoneType"):
        whole.wrapper(load=False).load_weights_from_tensors(None, up, down, case.mapping)


def test_a_checkpoint_with_a_gate_is_refused(tmp_path):
    from safetensors.torch import save_file

    shapes = {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}
    names = {
        f"model.layers.0.mlp.experts.{e}.{m}_proj.weight": torch.zeros(shapes[m])
        for e in range(2)
        for m in shapes
    }
    save_file(names, tmp_path / "model.safetensors")
    wrapper = KTMoEWrapper(0, 2, 1, 32, 64, method="BF16", weight_path=tmp_path, **UNGATED)
    with pytest.raises(ValueError, match="experts of the checkpoint have a gate, but gated=False"):
        wrapper.load_weights(torch.arange(2))


def test_only_swiglu_is_streamed_to_a_gpu():
    for function in ("relu2-ungated", "gelu", "silu-input"):
        with pytest.raises(
            ValueError, match="layer 0: experts with activation=.* cannot be stream"
        ):
            case_of(function=function).wrapper().packed_experts()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_top_1_router_weight_on_input_is_a_weighted_row(dtype):
    """expert(w * x) for one expert per token, as Llama-4 has it, in every dtype of the hidden
    states; relu2 without gate turns w into its square."""
    case = case_of(function="relu2-ungated-input", k=1)
    wrapper = case.wrapper()
    hidden, ids, weights = case.batch(30, dtype)
    weights = weights.pow(2)
    y = wrapper.forward(hidden, ids, weights)
    assert within(y, *case.reference_with_noise(hidden, ids, weights))
    plain = moe_reference(hidden, ids, torch.ones_like(weights), *case.sources, activation="relu2")
    error = (y.double() - weights.double() ** 2 * plain).norm() / plain.norm()
    assert error < 1e-2
