"""Random layers for the tests of this folder, and their oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kt_kernel import KTMoEWrapper
from kt_kernel.testing import moe_reference_with_noise, quantise
from kt_kernel.weights.formats import INT4_GROUP, INT4_ZERO, WeightForm, WeightFormat
from kt_kernel.weights.methods import get_method

# Forms of the weights, for methods whose source decides, by a name for each form.
_FORMS = {
    "RAWINT4": WeightForm(INT4_GROUP, 32, 1),
    "RAWINT4:128": WeightForm(INT4_GROUP, 128, 2),
    "RAWINT4:zero": WeightForm(INT4_ZERO, 32, 1),
    "GPTQ_INT4": WeightForm(INT4_GROUP, 64, 0),
    "GPTQ_INT4:zero": WeightForm(INT4_ZERO, 128, 0),
    "AWQ_INT4": WeightForm(INT4_ZERO, 32, 0),
    "LLAMAFILE:Q8_0": WeightForm(WeightFormat("Q8_0")),
    "LLAMAFILE:Q4_1": WeightForm(WeightFormat("Q4_1")),
    "LLAMAFILE:Q5_0": WeightForm(WeightFormat("Q5_0")),
}
_DENSE = ("BF16", "AMXINT8", "MOE_INT8", "AMXINT4", "MOE_INT4", "INT4_G32", "INT4_G128")
ALL_METHODS = (*_DENSE, "FP8", "FP8_PERCHANNEL", *_FORMS, "MXFP4", "NVFP4", "MXFP8")
KERNEL_METHODS = tuple(
    "BF16 AMXINT8 AMXINT4 INT4_G32 AWQ_INT4 FP8 FP8_PERCHANNEL MXFP4 NVFP4 MXFP8".split()
)


def form_of_case(method: str) -> WeightForm:
    """The form of a case's weights."""
    return _FORMS.get(method) or get_method(method).form


# The options of a case that the oracle takes. It sees from the weights whether there is a gate.
_OF_REFERENCE = (
    "swiglu_limit",
    "swiglu_alpha",
    "activation",
    "situ_beta",
    "situ_linear_beta",
    "apply_router_weight_on_input",
    "gpu_experts_mask",
    "rounded",
    "kind",
    "table",
)


@dataclass
class Case:
    """A layer's source weights, and settings of its wrapper. The method may be one of `_FORMS`."""

    experts: int = 6
    k: int = 3
    hidden: int = 64
    inter: int = 32
    method: str = "BF16"
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    biases: bool = False
    mapping: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.form = form_of_case(self.method)
        self.method = self.method.partition(":")[0]
        self.generator = torch.Generator().manual_seed(self.seed)
        e, h, i = self.experts, self.hidden, self.inter
        self.gate = self.normal(e, i, h, scale=h**-0.5)
        self.up = self.normal(e, i, h, scale=h**-0.5)
        self.down = self.normal(e, h, i, scale=i**-0.5)
        self.bias = {}
        if self.biases:
            self.bias = {
                "gate_bias": self.normal(e, i),
                "up_bias": self.normal(e, i),
                "down_bias": self.normal(e, h),
            }
        if not self.options.get("gated", True):
            self.gate = None
            self.bias.pop("gate_bias", None)
        if self.mapping is None:
            self.mapping = torch.arange(e)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.dtype)

    @property
    def sources(self) -> list[Any]:
        """gate, up and down as the method takes them: tensors, or lists of quantised matrices.
        Without a gate, the first is None."""
        matrices = [self.gate, self.up, self.down]
        if not get_method(self.method).quantised:
            return matrices
        return [
            every if every is None else [quantise(matrix, self.form) for matrix in every]
            for every in matrices
        ]

    def wrapper(self, load: bool = True, **options: Any) -> Any:
        options = {"cpuinfer_threads": 2, "method": self.method, **self.options, **options}
        made = KTMoEWrapper(
            options.pop("layer_idx", 0), self.experts, self.k, self.hidden, self.inter, **options
        )
        if load:
            made.load_weights_from_tensors(*self.sources, self.mapping, **self.bias)
        return made

    def batch(
        self, tokens: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden [T, H], ids [T, k] (some out of range, some repeated), router weights [T, k]."""
        hidden = torch.randn(tokens, self.hidden, generator=self.generator).to(dtype)
        ids = torch.randint(-1, self.experts + 1, (tokens, self.k), generator=self.generator)
        weights = torch.rand(tokens, self.k, generator=self.generator)
        return hidden, ids, weights

    def reference(self, *batch: torch.Tensor, **options: Any) -> torch.Tensor:
        """The oracle's result, float64 [T, H]."""
        return self.reference_with_noise(*batch, **options)[0]

    def reference_with_noise(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's result, and how far each row may be from it."""
        options = {
            name: value
            for name, value in {**self.options, **options}.items()
            if name in _OF_REFERENCE
        }
        return moe_reference_with_noise(
            hidden,
            ids,
            weights,
            *self.sources,
            method=self.method,
            physical_to_logical_map=self.mapping,
            **self.bias,
            **options,
        )


_ROUNDING = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def within(y: torch.Tensor, reference: torch.Tensor, noise: torch.Tensor) -> bool:
    """Whether each row of y is as close to the reference as its noise and y's dtype allow."""
    tiniest = 2**-24 if y.dtype == torch.float16 else 0.0
    allowed = (
        1.01 * noise
        + _ROUNDING[y.dtype] * reference.norm(dim=-1)
        + tiniest * reference.shape[1] ** 0.5
    )
    return bool(((y.double() - reference).norm(dim=-1) <= allowed).all())
