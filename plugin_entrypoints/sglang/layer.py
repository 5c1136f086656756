"""SGLang plugin: the MoE method with cold experts on the CPU. Imported only inside SGLang."""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.moe import kt_ep_wrapper
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKOutputChecker
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils.common import is_cpu

from kt_kernel.serving.draft import draft_options
from kt_kernel.serving.hot_delivery import HotDelivery
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.option_table import PACKED, OptionError
from kt_kernel.serving.report import watch
from kt_kernel.serving.streaming_start import EngineSide

from .. import failure
from ..common import MATRIX, loaded_parameters, own_parameters, parameter_name, slot_weights
from . import padding, requests, transformers_models
from .checks import checked_options_of
from .expert_contract import EXPERT_ARGUMENTS, EXPERT_CONFIG, EXPERT_WEIGHTS
from .graphs import largest_captured
from .hooks import Hook, verify
from .hot import PackedHotMethod, hold_dense, refuse_activation, refuse_on_cpu
from .options import options_of, resolved, text_config
from .products import interleaves, products
from .requested import refuse_layer, requested_activation

_logger = logging.getLogger("sglang.kt")
# The models being built, innermost last, with the sizes that SGLang padded. None while a layer is
# built that stays SGLang's own.
_building: list[tuple[HybridModel, Mapping[int, int]] | None] = []


@dataclass(frozen=True)
class LayerConfig:
    """What create_kt_config_from_server_args passes to KTEPWrapperMethod for one layer.

    unpadded: an expert's intermediate size in the layer -> its size in the checkpoint.
    """

    model: HybridModel
    unpadded: Mapping[int, int]
    layer_idx: int
    max_tokens: int
    experts_per_token: int | None  # for models that do not pass it to their layers, such as OLMoE


@dataclass(frozen=True)
class GivenMethod:
    """A method that a model passes to its layer, and that is a module, as Beam's is: SGLang's layer
    would register it, and could not replace it by a wrapper."""

    method: Any


class NotSeen:
    """What models find instead of KTEPWrapperMethod, see `KTEPWrapperMethod.settle_scaling`."""


class KTEPWrapperMethod(kt_ep_wrapper.KTEPWrapperMethod):
    """Wraps the method that computes a layer's hot experts; SGLang has a slot for such a class.

    The name and the base class are those of SGLang, whose layers test for both. The hot experts
    keep SGLang's kernels and weights; the weights of a cold expert go to a HybridLayer and never to
    the device. With all experts hot, every call is passed on; what SGLang loads is noted, and an
    adapter is merged into the weights.
    """

    def __init__(self, gpu_method: Any, config: LayerConfig) -> None:
        # Does not call the base class, which sets up SGLang's own use of kt_kernel.
        if isinstance(gpu_method, GivenMethod):
            gpu_method = gpu_method.method
        self.gpu_method = gpu_method
        self.config = config
        self.scaling = 1.0
        # All experts of a quantised draft model are hot.
        if not config.model.draft and not isinstance(
            gpu_method, (UnquantizedFusedMoEMethod, Fp8MoEMethod)
        ):
            raise ValueError(
                f"layer {config.layer_idx}: hot experts by {type(gpu_method).__name__} are not "
                "supported; accepted: --kt-hot-format bf16 or packed"
            )

    def __getattr__(self, name: str) -> Any:
        if name in ("gpu_method", "config", "hybrid"):  # not set yet, so nothing to delegate to
            raise AttributeError(name)
        return getattr(self.gpu_method, name)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Allocates the hot experts on the engine's device and the cold layer on the CPU."""
        runner = layer.moe_runner_config
        fused = layer.num_fused_shared_experts
        routed = num_experts - fused
        self.shared = range(routed, num_experts)  # numbers of the fused ones
        placement = self.config.model.placement_of(self.config.layer_idx, routed)
        place = f"layer {self.config.layer_idx}"
        EXPERT_CONFIG.check(vars(runner), place)
        EXPERT_WEIGHTS.check(extra, place)
        options = self.config.model.options
        converted = placement.num_slots > 0 and options.converts_hot
        separate = not placement.all_hot or converted  # our tensors have no place for shared ones
        refuse_layer(self.config.layer_idx, layer, fused > 0 and separate)
        experts_per_token = layer.top_k or self.config.experts_per_token
        if experts_per_token is None:
            raise ValueError(
                f"{place}: neither the model nor its configuration (num_experts_per_tok) has the "
                "number of experts per token"
            )
        size = intermediate_size_per_partition * layer.moe_tp_size
        activation = requested_activation(place, runner)
        self.hybrid: HybridLayer = self.config.model.add_layer(
            layer_idx=self.config.layer_idx,
            num_experts=routed,
            num_experts_per_tok=experts_per_token,
            hidden_size=hidden_size,
            moe_intermediate_size=self.config.unpadded.get(size, size),
            activation=activation,
            streams=interleaves(activation) is not None,
            has_bias=extra.get("with_bias", False),
            max_tokens=self.config.max_tokens,
            has_cpu_part=layer.moe_tp_rank == 0,
        )
        self.dtype = params_dtype
        self.delivery = HotDelivery(place, "SGLang", self.hybrid.activation.matrices)
        packed = converted and options.hot_format == PACKED
        if converted:
            refuse_activation(self.hybrid, runner, extra.get("with_bias", False), packed)
        if is_cpu() and placement.num_slots and not placement.all_hot:
            refuse_on_cpu(self.hybrid, runner)
        self.num_gpu_experts = -1  # read by SGLang's layer, whose loader then skips no expert
        if not placement.all_hot:
            self.num_gpu_experts = num_experts = placement.num_slots
        unchanged = placement.all_hot and not self.hybrid.adapted and not packed
        extra["weight_loader"] = self._make_loader(layer, extra["weight_loader"], unchanged)
        layer.weight_loader = extra["weight_loader"]  # which Zaya's loader calls
        if packed:
            self.gpu_method = PackedHotMethod(self.hybrid)
        self.gpu_method.create_weights(
            layer=layer,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size_per_partition,
            params_dtype=params_dtype,
            **extra,
        )

    def _make_loader(
        self, layer: Any, original: Callable[..., None], unchanged: bool
    ) -> Callable[..., None]:
        """The loader of a layer. original: SGLang's. unchanged: it loads everything, and what it
        gets is noted; otherwise there are cold experts or an adapter."""

        def load(
            param: Any,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int | None = None,
        ) -> None:
            hybrid, place = self.hybrid, f"layer {self.config.layer_idx}: {weight_name}"
            matrices = MATRIX[hybrid.activation.gated]
            if unchanged:
                original(param, loaded_weight, weight_name, shard_id, expert_id)
                # Some formats are loaded as whole tensors.
                experts = range(self.shared.stop) if expert_id is None else [expert_id]
                parts = [matrices[shard_id]] if shard_id in matrices else matrices.values()
                for which in parts:
                    self.delivery.add(parameter_name(layer, param), experts, which)
                return
            single = loaded_weight.dim() == 2 or not hybrid.takes_weights
            if expert_id is None or not single or shard_id not in matrices:
                raise ValueError(
                    f"{place}, {shard_id}: shape {list(loaded_weight.shape)}; expected one matrix "
                    f"of one expert, {', '.join(matrices)}"
                )
            hybrid.refuse_reload(place)
            all_hot, which = hybrid.placement.all_hot, matrices[shard_id]
            if expert_id in self.shared:
                original(param, loaded_weight, weight_name, shard_id, expert_id)
                self.delivery.add(parameter_name(layer, param), [expert_id], which)
                return
            slot = hybrid.slot_of(expert_id)
            if slot < 0:
                hybrid.add_weight(expert_id, which, loaded_weight)
                return
            given = hybrid.deliver_hot(expert_id, which, loaded_weight, param.dtype)
            if given is None:
                return
            self.delivery.add(parameter_name(layer, param), [expert_id], which)
            if all_hot:
                original(param, given, weight_name, shard_id, expert_id)
                return
            layer._weight_loader_impl(
                param=param,
                loaded_weight=given,
                weight_name=weight_name,
                shard_id=shard_id,
                expert_id=slot,
            )

        return load

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called by SGLang after loading the checkpoint; ValueError names missing weights."""
        options, placement = self.config.model.options, self.hybrid.placement
        slots = placement.num_slots
        if slots and options.reads_hot and self.hybrid.hot is None:
            hold_dense(layer, self.hybrid)
        if self.hybrid.hot is None:
            tensors = loaded_parameters(layer)
            self.delivery.check_complete(tensors, placement.hot_experts, self.shared)
        self.hybrid.finish_loading()
        if slots:  # SGLang cannot repack an empty weight
            self.gpu_method.process_weights_after_loading(layer)
            self.hybrid.slot_weights = slot_weights(layer)
        model = self.config.model
        if model.loaded:
            device = next(layer.parameters()).device
            side = engine_side(resolved(get_server_args()))
            for line in model.start(device, self.dtype, side):
                _logger.info(line)
            failure.confirm()
            watch(model, _logger)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Creates the runner of the hot experts, with the number of slots. It skips ids of -1."""
        self.moe_runner_config = moe_runner_config
        if not self.hybrid.placement.all_hot:
            moe_runner_config = replace(
                moe_runner_config,
                num_local_experts=self.hybrid.placement.num_slots,
                routed_scaling_factor=None,
                inplace=False,
            )
            if is_cpu():  # `_hot_on_cpu` multiplies
                moe_runner_config = replace(moe_runner_config, apply_router_weight_on_input=False)
        self.gpu_method.create_moe_runner(layer, moe_runner_config)

    def settle_scaling(self, caller: Any) -> None:
        """Ensures that routed_scaling_factor is applied once. caller: the module around the layer.

        On CUDA, SGLang leaves the factor to the expert kernel. Here that kernel sees only the hot
        experts, so `apply` multiplies instead. Models that find KTEPWrapperMethod multiply, too
        (GLM-4 MoE on only one of two code paths), so no model may find it. On the CPU, the factor
        is left to the model, as in stock SGLang, where some models lack it.
        """
        for part in type(caller).__mro__:
            module = sys.modules[part.__module__]
            if hasattr(module, KTEPWrapperMethod.__name__):
                setattr(module, KTEPWrapperMethod.__name__, NotSeen)
        if not is_cpu():
            self.scaling = self.moe_runner_config.routed_scaling_factor or 1.0

    def check_unchanged(self, layer: Any) -> None:
        """ValueError if the model has changed what the experts compute since the layer was built,
        as SGLang's own kernels would see, and the cold experts would not."""
        place, runner = f"layer {self.config.layer_idx}", layer.moe_runner_config
        EXPERT_CONFIG.check(vars(runner), place)
        if self.hybrid.placement.all_hot:
            return
        if requested_activation(place, runner) != self.hybrid.activation:
            raise ValueError(
                f"{place}: the model changes the experts' activation after the layer is built, "
                "which is not supported with kt options; accepted: all experts hot"
            )

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Computes hot experts on the device and cold ones on the CPU at once; returns the sum."""
        if TopKOutputChecker.format_is_packed(dispatch_output.topk_output):
            routes = _unpacked(dispatch_output.topk_output)
            dispatch_output = dispatch_output._replace(topk_output=routes)
        if self.hybrid.placement.all_hot:
            if self.hybrid.recorded:
                x = dispatch_output.hidden_states
                topk = self._routes(dispatch_output)
                self.hybrid.record(topk.topk_ids, topk.topk_weights, self._padding(x))
            return self.gpu_method.apply(layer=layer, dispatch_output=dispatch_output)
        if dispatch_output.hidden_states_scale is not None:
            raise RuntimeError(
                f"layer {self.config.layer_idx}: quantised activations are not supported; remove "
                "the flag that makes SGLang quantise them before dispatch"
            )
        topk = self._routes(dispatch_output)
        x = dispatch_output.hidden_states
        slots, weights = self.hybrid.submit(
            x, topk.topk_ids, topk.topk_weights, cold_slot=-1, padding=self._padding(x)
        )
        hot = None
        if self.hybrid.placement.num_slots:
            compute = self._hot_on_device if x.is_cuda else self._hot_on_cpu
            routes = topk._replace(topk_ids=slots, topk_weights=weights)
            hot = compute(layer, dispatch_output, routes)
        total = self.hybrid.collect(x, hot, scale=self.scaling).to(x.dtype)
        return StandardCombineInput(hidden_states=total)

    def _padding(self, x: torch.Tensor) -> torch.Tensor | None:
        """The mask of padding rows. None for a draft model: the masks belong to the served model's
        graphs."""
        return None if self.config.model.draft else padding.masks.of(x)

    def _routes(self, dispatch_output: Any) -> Any:
        """The router's choice, with ids and weights [T, k]."""
        topk = dispatch_output.topk_output
        if TopKOutputChecker.format_is_bypassed(topk):
            topk = topk.to_standard()
        if not TopKOutputChecker.format_is_standard(topk):
            raise RuntimeError(
                f"layer {self.config.layer_idx}: routing as {type(topk).__name__} is not "
                "supported; add --moe-runner-backend triton"
            )
        return topk

    def _hot_on_device(self, layer: Any, dispatch_output: Any, routes: Any) -> torch.Tensor:
        # Some models route in int64, but SGLang's kernels that skip routes need int32.
        routes = routes._replace(topk_ids=routes.topk_ids.to(torch.int32))
        return self.gpu_method.apply(
            layer=layer, dispatch_output=dispatch_output._replace(topk_output=routes)
        ).hidden_states

    def _hot_on_cpu(self, layer: Any, dispatch_output: Any, routes: Any) -> torch.Tensor:
        """The hot experts' weighted sum, float32.

        SGLang's CPU method cannot skip routes and needs distinct ids in a row, so it gets one row
        per hot route, with one expert at weight 1. Rows are weighted and summed here in float32, as
        SGLang does. Where a router weight multiplies the input, the row of its route has it.
        """
        x = dispatch_output.hidden_states
        on_input = self.hybrid.activation.router_weight_on_input
        slots, weights = routes.topk_ids, routes.topk_weights
        token, column = (slots >= 0).nonzero(as_tuple=True)
        out = torch.zeros(*slots.shape, x.shape[1], dtype=torch.float32, device=x.device)
        if token.numel():
            single = routes._replace(
                topk_ids=slots[token, column, None],
                topk_weights=torch.ones_like(weights[token, column, None]),
            )
            one = weights[token, column, None]
            rows = self.gpu_method.apply(
                layer=layer,
                dispatch_output=dispatch_output._replace(
                    hidden_states=x[token] * one.to(x.dtype) if on_input else x[token],
                    topk_output=single,
                ),
            ).hidden_states
            out[token, column] = rows.float() if on_input else rows.float() * one.float()
        return out.sum(dim=1)


def _create_kt_config(server_args: Any, layer_id: int) -> Any:
    """Replaces SGLang's function: the layer's LayerConfig, or None if SGLang runs unchanged."""
    if options_of(server_args) is None:
        return None
    if not _building:
        raise RuntimeError(f"layer {layer_id}: built outside SGLang's _initialize_model")
    if (built := _building[-1]) is None:
        return None
    model, unpadded = built
    return LayerConfig(
        model=model,
        unpadded=unpadded,
        layer_idx=layer_id,
        max_tokens=resolved(server_args).chunked_prefill_size or -1,
        experts_per_token=getattr(text_config(server_args), "num_experts_per_tok", None),
    )


def _around_initialize_model(
    original: Callable[..., Any], model_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around the construction of a model: its layers, in order, form one HybridModel."""
    options = checked_options_of(get_server_args())
    if options is None:
        return original(model_config, *args, **kwargs)
    verify_hooks()
    config = model_config.hf_text_config
    if model_config.is_draft_model:
        hybrid = HybridModel(draft_options(options, model_config.quantization), draft=True)
    else:
        hybrid = HybridModel(options, config)
    _building.append((hybrid, unpadded_sizes(config)))
    try:
        model = original(model_config, *args, **kwargs)
        if not hybrid.layers and not hybrid.draft:
            raise OptionError(
                f"model class {type(model).__name__} has no FusedMoE layer of SGLang; add "
                "--model-impl transformers, which works if transformers knows the class, or remove "
                "the kt options"
            )
    finally:
        _building.pop()
    for caller in model.modules():
        for child in caller.children():
            method = getattr(child, "quant_method", None)
            if isinstance(method, KTEPWrapperMethod):
                method.settle_scaling(caller)
                method.check_unchanged(child)
    return model


def engine_side(arguments: Any) -> EngineSide:
    """What streaming needs of SGLang. arguments: the resolved ones."""

    def memory_left(device: torch.device) -> int:
        # SGLang's fraction is of what was free before the weights were loaded.
        free, _ = torch.cuda.mem_get_info(device)
        ours = torch.cuda.memory_reserved(device)
        return int((free + ours) * arguments.mem_fraction_static) - ours

    of_flags = {
        "--cuda-graph-max-bs-prefill N or --disable-prefill-cuda-graph": "prefill",
        "--cuda-graph-max-bs-decode N": "decode",
    }
    sizes = {flag: largest_captured(arguments, phase) for flag, phase in of_flags.items()}
    captured = max(sizes.values())
    chunk = arguments.chunked_prefill_size or 0  # not above 0: prompts are computed whole
    return EngineSide(
        products,
        interleaves,
        memory_left,
        captured,
        chunk if chunk > 0 else None,
        ", together with ".join(flag for flag, size in sizes.items() if size == captured),
    )


def unpadded_sizes(config: Any) -> dict[int, int]:
    """Intermediate sizes of experts -> their sizes in the checkpoint.

    For its CPU kernels, SGLang pads the sizes in the model's configuration and keeps the original
    ones.
    """
    names = ("intermediate_size", "moe_intermediate_size")  # the second one if there are both
    return {
        getattr(config, name): getattr(config, f"original_{name}", getattr(config, name))
        for name in names
        if isinstance(getattr(config, name, None), int)
    }


def _around_fused_moe(original: Callable[..., Any], layer: Any, *args: Any, **given: Any) -> Any:
    """Around the construction of one expert layer. SGLang keeps layers that hold shared experts
    only, which all tokens use."""
    if layer.is_shared_fused_moe:
        _building.append(None)
        try:
            return original(layer, *args, **given)
        finally:
            _building.pop()
    if options_of(get_server_args()) is not None:
        arguments = inspect.signature(original).bind(layer, *args, **given).arguments
        del arguments["self"]
        place = f"layer {arguments['layer_id']}"
        hybrid = _building[-1][0] if _building and _building[-1] else None
        if hybrid is not None and _reads_all(
            hybrid, arguments["layer_id"], arguments["num_experts"]
        ):
            # SGLang would select a kernel of the checkpoint's format, which may not exist on this
            # device, and would hold all weights in one tensor for stacked checkpoints.
            arguments |= {"quant_config": None, "use_weight_loader_fused": False}
        EXPERT_ARGUMENTS.check(arguments, place)
        if isinstance(given_method := arguments.get("quant_method"), torch.nn.Module):
            arguments["quant_method"] = GivenMethod(given_method)
        return original(layer, **arguments)
    return original(layer, *args, **given)


def _unpacked(topk: Any) -> Any:
    """The routes of kernels that store an expert's number and the bits of its weight, in bfloat16,
    in one int32 [T, k]."""
    packed = topk.packed_topk_ids
    return StandardTopKOutput((packed << 16).view(torch.float32), packed >> 16, topk.router_logits)


def _reads_all(model: HybridModel, layer_idx: int, num_experts: int) -> bool:
    """Whether kt-moe reads all experts of a layer, and SGLang none."""
    if model.options.weight_path is None:
        return False
    return model.options.reads_hot or model.placement_of(layer_idx, num_experts).num_slots == 0


def _around_get_all_weights(
    original: Callable[..., Any], loader: Any, model_config: Any, model: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Around the reading of a checkpoint: the model does not get the weights of experts that kt-moe
    reads itself. Meanwhile it does not see the parameters for them either, because some models end
    the start if a parameter gets no weight."""
    weights = original(loader, model_config, model)
    methods = [
        (module, module.quant_method)
        for module in model.modules()
        if isinstance(getattr(module, "quant_method", None), KTEPWrapperMethod)
    ]
    if not methods:
        return weights
    hybrid: HybridModel = methods[0][1].config.model
    hidden = [
        (layer, own_parameters(layer))
        for layer, method in methods
        if _reads_all(hybrid, method.config.layer_idx, len(method.hybrid.placement.slots))
    ]
    for layer, parameters in hidden:
        for name in parameters:
            delattr(layer, name)
    return _then_register(hybrid.names_read_here.without(weights), hidden)


def _then_register(
    weights: Iterator[tuple[str, torch.Tensor]], hidden: list[tuple[Any, dict[str, Any]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights; then the layers have their parameters again."""
    try:
        yield from weights
    finally:
        for layer, parameters in hidden:
            for name, parameter in parameters.items():
                layer.register_parameter(name, parameter)


HOOKS = (
    Hook("sglang.srt.model_loader.loader:_initialize_model", "AROUND", _around_initialize_model),
    Hook(
        "sglang.srt.model_loader.loader:DefaultModelLoader._get_all_weights",
        "AROUND",
        _around_get_all_weights,
    ),
    Hook(
        "sglang.srt.layers.moe.kt_ep_wrapper:create_kt_config_from_server_args",
        "REPLACE",
        _create_kt_config,
    ),
    Hook("sglang.srt.layers.moe.kt_ep_wrapper:KTEPWrapperMethod", "REPLACE", KTEPWrapperMethod),
    Hook(
        "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE.__init__",
        "AROUND",
        _around_fused_moe,
    ),
)


def worker_hooks() -> tuple[Hook, ...]:
    """The hooks that a process with a model needs."""
    others = (*padding.HOOKS, *transformers_models.HOOKS, *requests.handler_hooks())
    return (*HOOKS, *others)


def verify_hooks() -> None:
    """OptionError if a hook that is needed is not in effect, see `hooks.verify`."""
    verify(worker_hooks())
    for name in ("create_kt_config_from_server_args", "KTEPWrapperMethod"):
        if getattr(fused_moe, name) is not getattr(kt_ep_wrapper, name):
            raise OptionError(
                f"the hook on {kt_ep_wrapper.__name__}.{name} has no effect in {fused_moe.__name__}"
            )
