"""What a layer does with the rows and routes of a batch; see vllm_hooks.py."""

from types import SimpleNamespace
from typing import Any

import torch

# First, because vLLM's modules import each other in a circle.
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: F401

# isort: split
from vllm.config import CacheConfig, HiSparseConfig, ParallelConfig, VllmConfig
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention, CrossAttention, MLAAttention
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.mamba.abstract import MambaBase

from kt_kernel.moe.placement import Placement
from kt_kernel.plugin_entrypoints.vllm import layer as hybrid
from kt_kernel.plugin_entrypoints.vllm import routes
from kt_kernel.plugin_entrypoints.vllm.padding import Padding

TOKENS = 4
X = SimpleNamespace(is_cuda=True, shape=torch.Size([TOKENS, 8]), device=torch.device("cpu"))
SLOTS = torch.tensor([5, 6, -1, -1])
NO_SLOTS = torch.full((TOKENS,), -1)
IS_PADDING = torch.tensor([False, False, True, True])


def layer(kind: type, attn_type: str | None = None) -> Any:
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    if attn_type is not None:
        made.attn_type = attn_type
    return made


class Mamba(torch.nn.Module, MambaBase):
    """A layer whose state belongs to a request, not to a token."""

    get_state_dtype = get_state_shape = mamba_type = None


LAYERS = {
    "experts": object(),
    "mamba": layer(Mamba),
    "cross": layer(CrossAttention, "encoder_decoder"),
    "encoder": layer(Attention, "encoder_only"),
    "mla": layer(MLAAttention),
    "attention": layer(Attention, "decoder"),
}


def config(fast_prefill: bool = False, ranks: int = 1) -> VllmConfig:
    parallel = ParallelConfig(tensor_parallel_size=ranks, decode_context_parallel_size=ranks)
    made = VllmConfig(parallel_config=parallel, cache_config=CacheConfig())
    made.cache_config.kv_sharing_fast_prefill = fast_prefill
    made.compilation_config.static_forward_context.update(LAYERS)
    return made


def found(padding: Any, slots: Any = None, is_padding: Any = None, x: Any = X) -> Any:
    made = create_forward_context(None, config(), slot_mapping=slots, is_padding=is_padding)
    with override_forward_context(made):
        return padding.of(x)


def check_slots() -> None:
    """The slots are those of decoder attention, of any kind and in any order."""
    for name in ("attention", "mla"):
        others = {other: NO_SLOTS for other in LAYERS if other not in ("attention", "mla")}
        for mappings in ({**others, name: SLOTS}, {name: SLOTS, **others}):
            padding = Padding(config())
            assert found(padding) is None  # profiling
            for _ in range(2):
                assert found(padding, mappings) is SLOTS
            assert found(padding, others) is None
            assert found(padding, mappings) is SLOTS
        assert found(Padding(config()), others) is None


def check_what_the_runner_marks() -> None:
    """It is ignored: one runner of 0.26 marks all rows as padding, wrongly."""
    for marks in (IS_PADDING, torch.ones(TOKENS, dtype=torch.bool)):
        assert found(Padding(config()), {"attention": SLOTS}, marks) is SLOTS
        assert found(Padding(config()), None, marks) is None


def check_what_is_not_taken() -> None:
    fits = {"attention": SLOTS}
    assert found(Padding(config()), fits) is SLOTS
    for mappings in (
        {"attention": torch.zeros(TOKENS + 1, dtype=torch.int64)},
        {"attention": torch.zeros(TOKENS - 1, dtype=torch.int64)},
        {"attention": torch.zeros(TOKENS, dtype=torch.int32)},
        {"attention": torch.zeros(2 * TOKENS, dtype=torch.int64)[::2]},
        {"attention": torch.zeros(TOKENS, dtype=torch.int64, device="meta")},
        {"attention": None},
        [fits, fits],
    ):
        assert found(Padding(config()), mappings) is None, mappings
    assert found(Padding(config(ranks=2)), fits) is None
    assert found(Padding(config(fast_prefill=True)), fits) is None
    on_host = config()
    on_host.attention_config.hisparse_config = HiSparseConfig()
    assert found(Padding(on_host), fits) is None
    assert found(Padding(config()), fits, x=torch.ones(TOKENS, 8)) is None
    for part, kept in (
        ("cache_config", SimpleNamespace()),
        ("parallel_config", SimpleNamespace()),
        ("attention_config", None),
    ):
        names = ("cache_config", "parallel_config", "attention_config")
        other = SimpleNamespace(**{name: getattr(config(), name) for name in names})
        assert found(Padding(other), fits) is SLOTS
        setattr(other, part, kept)
        assert found(Padding(other), fits) is None


class Skip(routes.SkipColdRoutes):
    """With 2 hot experts of 4. Batches of up to 3 tokens are not sorted."""

    def __init__(self) -> None:
        self._map, self._any_cold, self._unsorted = torch.tensor([0, 1, -1, -1]), 2, 3


def check_layers_pass_it_on() -> None:
    """Layers pass padding on to the CPU, and request cold routes in the form that vLLM's kernel
    takes."""
    for skip, tokens, slot, rows in (
        (None, TOKENS, -1, None),
        (Skip(), TOKENS, 2, [0, 1, -1, -1]),
        (Skip(), TOKENS - 1, -1, None),
    ):
        given: list[Any] = []

        def submit(
            x: Any, ids: Any, weights: Any, *, cold_slot: int, padding: Any, seen: list = given
        ) -> tuple[Any, Any]:
            seen += [cold_slot, padding]
            return ids, weights

        def apply(*, layer: Any, x: Any, seen: list = given, **more: Any) -> Any:
            seen.append(None if layer.expert_map is None else layer.expert_map.tolist())
            return x

        experts = layer(hybrid.HybridExperts)
        experts.kt_layer = SimpleNamespace(
            placement=Placement.first(4, 2), submit=submit, collect=lambda x, hot: x
        )
        experts.kt_skip, experts._expert_map = skip, None
        experts.kt_padding = SimpleNamespace(of=lambda x: SLOTS)
        experts.quant_method = SimpleNamespace(is_monolithic=False, apply=apply)
        ids = torch.zeros(tokens, 2, dtype=torch.int32)
        experts.forward_modular(torch.ones(tokens, 8), torch.zeros(tokens, 2), ids)
        assert given == [slot, SLOTS, rows], given


def check_which_batches_are_sorted() -> None:
    """vLLM's own function decides, whose compiled part is missing on the CPU."""
    sorting = RuntimeError("sorts")

    def align(*given: Any, **more: Any) -> Any:
        return [sorting]

    original, fused_moe.moe_align_block_size = fused_moe.moe_align_block_size, align
    try:
        for experts, top_k, largest in ((128, 8, 4), (64, 8, 2), (16, 8, 0), (8, 2, 1)):
            found = routes._largest_unsorted_batch(experts, top_k, torch.device("cpu"))
            assert found == largest, (experts, top_k, found)
    finally:
        fused_moe.moe_align_block_size = original


def check_kernels_that_compute_every_route() -> None:
    """A cold route takes part as a hot route of its token, with weight 0."""
    slots = torch.tensor([[-1, 2, -1], [1, 0, 2], [-1, -1, -1], [0, -1, 1]])
    real, some_hot = routes.repeat_hot_routes(slots)
    assert real.tolist() == [[2, 2, 2], [1, 0, 2], [0, 0, 0], [0, 0, 1]]
    assert some_hot.tolist() == [[True], [True], [False], [True]]
