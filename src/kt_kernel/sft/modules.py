"""`LoraExperts`: the experts of one MoE layer as a module that trains under `loss.backward()`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from .autograd import lora_experts
from .base import BaseSFTMoEWrapper
from .families import Fused
from .hot import HotExperts
from .hot_pass import HotPass
from .lora import LORA_NAMES, lora_shapes, need_float_dtype
from .optimizer_steps import state_of
from .peft_format import Layout


class LoraExperts(nn.Module):
    """Takes the place of a transformers module with all experts of a layer.

    The base weights are in the wrapper and not in ``state_dict()``. The trainable parameters are
    the six LoRA tensors of all experts, named as PEFT names an adapter's, so that checkpoints of a
    `PeftModel` around the model contain them: ``lora_gate_A.default`` [E, R, H] and so on. A is
    initialised as PEFT does it, uniformly with Kaiming's bound; B with zeros.

    With ``base`` the base weights are trained, too: they are parameters, by the names that they had
    in the module which this one replaces, and stay on the CPU. With a method ``_SkipLoRA``,
    ``state_dict()`` is that of the replaced module as long as B is zero.

    LoRA and base weights are read again before a forward pass when an optimizer has changed them.
    After a change through ``.data`` call `update_lora_weights`.

    Args:
        wrapper: a loaded layer, made by ``KTMoEWrapper(mode="sft")``.
        layout: how PEFT adapters of the module that it replaces are arranged.
        adapter_name: last part of the parameters' names.
        dtype, device: of the parameters.
        pinned: whether the parameters stay on that device when the module is moved.
        nonfinite: what backward does where the gradient of its output has a NaN or an infinity:
            "error" raises RuntimeError, "propagate" makes all of its gradients NaN, which a
            gradient scaler for fp16 takes as a reason to skip the step.
        base: the replaced module, whose parameters are to be trained; the wrapper was made with
            ``full_weight_grad``. None: the base weights are frozen.
        hot: the experts that are not on the CPU.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RuntimeError: a device that is not there.
    """

    def __init__(
        self,
        wrapper: BaseSFTMoEWrapper,
        *,
        layout: Layout | None = None,
        adapter_name: str = "default",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        nonfinite: str = "error",
        base: Fused | None = None,
        hot: HotExperts | None = None,
    ) -> None:
        if not isinstance(wrapper, BaseSFTMoEWrapper):
            raise TypeError(
                f"wrapper must come from KTMoEWrapper(mode='sft'), got {type(wrapper).__name__}"
            )
        check_adapter_name(adapter_name)
        need_float_dtype("dtype", dtype)
        check_nonfinite(nonfinite)
        super().__init__()
        self.wrapper = wrapper
        self.layout = layout or Layout()
        self.adapter_name = adapter_name
        self._pinned = pinned
        self._nonfinite = nonfinite
        trained = not wrapper._sft.method.skip_lora_grads
        shapes = lora_shapes(
            wrapper.num_experts,
            wrapper.lora_rank,
            wrapper.hidden_size,
            wrapper.moe_intermediate_size,
        )
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), trained)
            self.register_module(holder(name), nn.ParameterDict({adapter_name: parameter}))
        self.reset_lora_parameters()
        self.hot = hot
        self._base = base and self._adopt(base)
        self._zeros: tuple[torch.Tensor, ...] | None = None  # instead of an adapter that is off

    def reset_lora_parameters(self) -> None:
        """A uniform with Kaiming's bound for a = sqrt(5), that is 1 / sqrt(in); B zeros."""
        with torch.no_grad():
            for name, parameter in self.lora_parameters().items():
                if name.endswith("_b"):
                    parameter.zero_()
                else:
                    bound = 1 / math.sqrt(parameter.shape[-1])
                    parameter.uniform_(-bound, bound)

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """The six parameters by the wrapper's names, ``gate_lora_a`` to ``down_lora_b``."""
        return {name: getattr(self, holder(name))[self.adapter_name] for name in LORA_NAMES}

    def update_lora_weights(self) -> None:
        """Reads all parameters again, whether or not a change was seen."""
        self._bind()
        self.wrapper.update_lora_weights()
        if self._base is not None:
            self._pack_base()

    @property
    def trains_base_weights(self) -> bool:
        """Whether the base weights are parameters of this module."""
        return self._base is not None

    # torch.compile cannot look into it: the rest of the model is compiled around it.
    @torch.compiler.disable
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, H] (or with more leading dimensions), expert ids and router weights
        [T, k]; returns the weighted sum of the experts, shaped as ``hidden_states``."""
        self._need_whole_parameters()
        lora = self._bind()
        if self.wrapper.lora_changed:
            self.wrapper.update_lora_weights()
        base: tuple[torch.Tensor, ...] = ()
        if self._base is not None:
            base = self._base.projections()
            if self._packed != state_of(self._base_tensors()):
                self._pack_base()
        routes = top_k_index, top_k_weights
        hot = None
        if self.hot is not None:
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            checks = self._nonfinite == "error"
            hot = HotPass(self.wrapper, self.hot, rows, *routes, lora, checks)
        out = lora_experts(
            self.wrapper,
            hidden_states,
            *routes,
            lora,
            self.training,
            self._nonfinite,
            base=base,
            hot=hot,
        )
        return out.view(hidden_states.shape)

    def extra_repr(self) -> str:
        w = self.wrapper
        return (
            f"layer={w.layer_idx}, experts={w.num_experts} ({w.num_gpu_experts} hot), "
            f"method={w.method}, "
            f"rank={w.lora_rank}, alpha={w.lora_alpha}, dropout={w.lora_dropout}"
        )

    @property
    def adapter_is_on(self) -> bool:
        """Whether the LoRA terms are added."""
        return True

    @property
    def adds_nothing(self) -> bool:
        """Whether every B is zero."""
        lora = self.lora_parameters()
        return not any(bool(tensor.any()) for name, tensor in lora.items() if name.endswith("_b"))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def in_place(tensor: torch.Tensor) -> torch.Tensor:
            # Nothing travels to a device only to learn the dtype.
            return tensor.to(fn(tensor.new_empty(0)).dtype)

        # Parameters of this module itself are base weights, which stay on the CPU.
        for child in self.children() if recurse else ():
            child._apply(in_place if self._pinned and child is not self.hot else fn)
        return super()._apply(in_place, recurse=False)

    def _adopt(self, base: Fused) -> Fused:
        """Takes the parameters of the replaced module; returns where they are now."""
        for name, parameter in base.parameters.items():
            parameter.requires_grad_(not name.endswith("_bias"))
            self.register_parameter(name, parameter)
        base = dataclasses.replace(base, module=self)
        self._packed = state_of(self._base_tensors())
        if self.wrapper._sft.method.skip_lora_grads:
            self.register_state_dict_post_hook(_leave_out_lora)
            self.register_load_state_dict_post_hook(_miss_no_lora)
        return base

    def _base_tensors(self) -> list[torch.Tensor]:
        return [cast(torch.Tensor, tensor) for tensor in (self.gate_up_proj, self.down_proj)]

    def _pack_base(self) -> None:
        assert self._base is not None
        state = state_of(self._base_tensors())
        self.wrapper.update_base_weights(*(part.detach() for part in self._base.projections()))
        self._packed = state

    def _need_whole_parameters(self) -> None:
        """Raises RuntimeError under FSDP: its parameters lie here only during the pass, and change
        in a way that cannot be seen."""
        if getattr(self, "_is_fsdp_managed_module", False):  # so that Dynamo knows, too
            raise RuntimeError(
                f"layer {self.wrapper.layer_idx}: FSDP shards the parameters of experts on the "
                "CPU; accepted: one process, or DistributedDataParallel"
            )

    def _bind(self) -> tuple[torch.Tensor, ...]:
        """The LoRA tensors, which the wrapper has by reference."""
        lora: tuple[torch.Tensor, ...] = tuple(self.lora_parameters().values())
        if not self.adapter_is_on:
            if self._zeros is None:
                with torch.inference_mode(False):  # autograd may have to save them later
                    self._zeros = tuple(p.new_zeros(()).expand(p.shape) for p in lora)
            lora = self._zeros
        # `module.to()` may replace the parameters.
        if not self.wrapper.holds_lora(lora):
            self.wrapper.init_lora_weights(*lora)
        return lora

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"layer {self.wrapper.layer_idx}: experts on the CPU cannot be copied or pickled; save "
            "the adapter with kt_kernel.sft.save_adapter, or the parameters with state_dict()"
        )


def check_adapter_name(name: Any) -> None:
    """Raises TypeError or ValueError for what cannot be a part of a parameter's name."""
    if not isinstance(name, str):
        raise TypeError(f"adapter_name must be a string, got {name!r}")
    if "." in name or not name:
        raise ValueError(f"adapter_name={name!r}; accepted: a name without dots")


def check_nonfinite(value: Any) -> None:
    """Raises ValueError for anything but the two values of ``nonfinite``."""
    if value not in ("error", "propagate"):
        raise ValueError(f"nonfinite={value!r}; accepted: 'error', 'propagate'")


def _leave_out_lora(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Of a layer whose LoRA is not trained and adds nothing."""
    if module.adds_nothing:
        for name in LORA_NAMES:
            state.pop(f"{prefix}{holder(name)}.{module.adapter_name}", None)


def _miss_no_lora(module: Any, incompatible: Any) -> None:
    """A state without these parameters is complete."""
    ends = tuple(f"{holder(name)}.{module.adapter_name}" for name in LORA_NAMES)
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if not key.endswith(ends)]


def holder(name: str) -> str:
    """The name of the dictionary that has a LoRA tensor by adapters: gate_lora_a → lora_gate_A.
    PEFT takes parameters with "lora_" in their names for its own."""
    matrix, _, side = name.split("_")
    return f"lora_{matrix}_{side.upper()}"
