"""`LoraExperts` as a layer of PEFT, and what of PEFT goes together with it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from ..adapter.files import check_config
from .base import BaseSFTMoEWrapper
from .lora import LORA_NAMES
from .modules import LoraExperts, holder

_ONE = "the experts have one adapter, with one scaling for all sequences"


def module_class() -> type[LoraExperts]:
    """`LoraExperts`; where PEFT is installed, one that PEFT takes for a LoRA layer of its own: it
    then saves and loads the parameters, counts them as trainable, and switches adapters.
    """
    try:
        from peft.tuners.lora import LoraLayer
    except ImportError:
        return LoraExperts
    return _peft_class(LoraLayer)


@functools.cache
def _peft_class(layer: type) -> type[LoraExperts]:
    class PeftLoraExperts(LoraExperts, layer):
        adapter_layer_names = tuple(map(holder, LORA_NAMES))
        # What PEFT asks every LoRA layer for: this one has no modules A and B, nor a bias.
        other_param_names = ()
        lora_A: dict[str, nn.Module] = {}  # noqa: N815, RUF012 - PEFT's name
        lora_embedding_A: dict[str, nn.Parameter] = {}  # noqa: N815, RUF012
        bias = None

        def __init__(self, wrapper: BaseSFTMoEWrapper, **arguments: Any) -> None:
            super().__init__(wrapper, **arguments)
            self._active_adapter = [self.adapter_name]
            self._disable_adapters = False
            self._others: set[tuple[str, ...]] = set()

        @property
        def adapter_is_on(self) -> bool:
            active = cast(list[str], self.active_adapters)
            return not self.disable_adapters and self.adapter_name in active

        def set_adapter(self, adapter_names: str | Sequence[str], *args: Any, **named: Any) -> None:
            """As PEFT's. Where the experts have no LoRA of these adapters, they are computed
            without LoRA; a warning says so if theirs was not zero at that time."""
            super().set_adapter(adapter_names, *args, **named)
            if self.wrapper._sft.method.skip_lora_grads:
                self._freeze()
            names = tuple(cast(list[str], self.active_adapters))
            if self.adapter_name in names or names in self._others:
                return
            self._others.add(names)
            if not self.adds_nothing:
                warnings.warn(  # the same text for all layers, so that it is shown once
                    f"adapter {', '.join(names)} has no LoRA of the experts: with it they are "
                    f"computed without that of {self.adapter_name!r}, which is not zero. As a "
                    "reference (DPO, GRPO) of an adapter that was trained before, merge that one "
                    "into the model first: kt_kernel.sft.merge_adapter",
                    RuntimeWarning,
                    stacklevel=2,
                )

        @property
        def scaling(self) -> NoReturn:
            """PEFT's, by adapter."""
            raise NotImplementedError(f"scaling: {_ONE}")

        def forward(
            self,
            *arguments: torch.Tensor,
            adapter_names: Sequence[str] | None = None,
            **named: torch.Tensor,
        ) -> torch.Tensor:
            """As `LoraExperts.forward`. adapter_names: PEFT's, of each sequence."""
            if adapter_names is not None:
                raise NotImplementedError(f"adapter_names: {_ONE}")
            return super().forward(*arguments, **named)

        def delete_adapter(self, adapter_name: str) -> None:
            """The parameters stay, as those of an adapter that adds nothing and is not active."""
            if adapter_name != self.adapter_name:
                return
            self.reset_lora_parameters()
            self._freeze()
            active = cast(list[str], self.active_adapters)
            # PEFT asks its first layer which adapter is active afterwards. The experts have no
            # other, so they name only those that were active beside it.
            self._active_adapter = [name for name in active if name != adapter_name]

        def _freeze(self) -> None:
            for parameter in self.lora_parameters().values():
                parameter.requires_grad_(False)

        def merge(self, *_: Any, **__: Any) -> NoReturn:
            _refuse("merge_adapter")

        def unmerge(self) -> None:
            """Nothing was merged."""

        def unload_and_optionally_merge_module(self, *_: Any, **__: Any) -> NoReturn:
            _refuse("unload")

    return PeftLoraExperts


def check_peft_model(model: nn.Module, adapter_name: str, paths: Iterable[str]) -> None:
    """Raises ValueError for adapters of PEFT beside which the experts cannot have theirs.

    paths: names of the modules of experts.
    """
    for path in paths:
        if path.endswith(".base_layer"):
            raise ValueError(
                f"{path}: PEFT adapts these experts already; accepted: target_modules that leaves "
                "them out, which neither 'all-linear' nor names such as 'down_proj' do, and no "
                "experts in target_parameters"
            )
    configs: Any = getattr(model, "peft_config", None)
    if configs is None:
        return
    need_adapter(configs, adapter_name)
    check_config(f"adapter {adapter_name!r} of the PeftModel", configs[adapter_name].to_dict())


def need_adapter(configs: Any, name: str) -> None:
    """Raises ValueError if a PeftModel has no such adapter."""
    if name not in configs:
        raise ValueError(
            f"the experts use adapter {name!r}, but the PeftModel has {sorted(configs)}; pass the "
            "adapter's name to wrap_experts as adapter_name"
        )


def refuse_merging(model: nn.Module) -> None:
    """Replaces the methods with which a PeftModel merges or removes adapters. They would begin with
    other layers, which would be merged, or gone, when they come to the experts."""
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.tuners_utils import BaseTuner

    tuner: Any = getattr(model, "base_model", None)
    if isinstance(tuner, BaseTuner):
        for name in ("merge_adapter", "merge_and_unload", "unload"):
            setattr(tuner, name, functools.partial(_refuse, name))


def _refuse(call: str, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{call}: the base weights of the experts are packed on the CPU and cannot be changed or "
        "given back; call kt_kernel.sft.save_adapter, then kt_kernel.sft.merge_adapter with the "
        "model's path"
    )
