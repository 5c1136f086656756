"""A small checkpoint of every kind that the readers know, and the values of its tensors.

`values` computes these from the tensors, so that they are also right after a change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import test_awq
import test_fp8
import test_gptq
import test_int4
import test_int8
import test_mxfp8
import test_nvfp4
import test_stacks
import test_w4afp8
import torch
from quantised_files import MOE, PROJECTIONS, E, Tensors, make_experts, parts_of

from kt_kernel.testing.quantised import E2M1, UE8M0

H, I = 96, 64  # noqa: E741  H is neither I nor 2I, so a wrong orientation is noticed

UNUSED = ("input_scale", "input_global_scale", "activation_scale")
Values = dict[str, list[torch.Tensor]]


@dataclass(frozen=True)
class Sample:
    """A checkpoint. values: computes, from its tensors and quantization_config, the values by field
    of ExpertTensors."""

    tensors: Tensors
    method: str
    values: Callable[[Tensors, dict[str, Any]], Values]
    quantization: dict[str, Any] | None = None
    model_type: str = "qwen3_moe"


def _per_expert(
    make: Callable[[int, int], Tensors],
    method: str,
    quantization: dict[str, Any] | None,
    reference: Callable[..., torch.Tensor],
    with_config: bool = False,
) -> Sample:
    def values(tensors: Tensors, config: dict[str, Any]) -> Values:
        more = (config,) if with_config else ()
        used = {n: t for n, t in tensors.items() if not n.endswith(UNUSED)}
        return {
            matrix: [reference(parts_of(used, e, matrix), *more).double() for e in range(E)]
            for matrix in PROJECTIONS
        }

    return Sample(make_experts(make, H, I), method, values, quantization)


def _scaled(codes: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    """Values of codes [E, rows, columns]. A scale is for equal parts of each dimension."""
    result = codes.double() if codes.dtype == torch.float8_e4m3fn else test_stacks.e2m1(codes)
    for scale in scales:
        byte = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
        number = UE8M0[scale.view(torch.uint8).long()] if byte else scale.double()
        if number.numel() == 1:
            number = number.reshape(1)
        number = number.reshape(*number.shape, *[1] * (3 - number.dim()))
        for dim in (1, 2):
            count = -(-result.shape[dim] // number.shape[dim])
            number = number.repeat_interleave(count, dim).narrow(dim, 0, result.shape[dim])
        result = result * number
    return result


def _stack(case: str) -> Sample:
    model_type, names, transposed, method, _, _ = test_stacks.CASES[case]
    start = test_stacks.where(model_type)

    def values(tensors: Tensors, config: dict[str, Any]) -> Values:
        found = []
        for name, both in zip(names, (2, 1), strict=True):
            stem = start + name
            parts = {n: t for n, t in tensors.items() if n.startswith(stem)}
            parts = {
                n: t.transpose(1, 2) if transposed and t.dim() == 3 else t
                for n, t in parts.items()
                if not n.endswith(UNUSED)
            }
            weight = parts.pop(stem if stem in parts else f"{stem}.weight")
            found += _scaled(weight, *parts.values()).chunk(both, 1)
        return {m: list(v) for m, v in zip(("gate", "up", "down"), found, strict=True)}

    return Sample(test_stacks.make_stacks(case, H, I)[0], method, values, None, model_type)


def _fp8(parts: Tensors) -> torch.Tensor:
    scale = parts["weight_scale_inv"]
    if scale.numel() == 1:  # of the whole matrix, whatever its shape; here of one block
        return parts["weight"].double() * scale.double().reshape(())
    return test_fp8.block_reference(parts)


def _gptq(parts: Tensors, config: dict[str, Any]) -> torch.Tensor:
    if config.get("sym") is True:  # whatever the zeros are
        return test_gptq.reference(0)(test_gptq.with_zeros(parts, 8))
    return test_gptq.reference(config.get("checkpoint_format") != "gptq_v2")(parts)


def _nvfp4(parts: Tensors) -> torch.Tensor:
    if "weight" in parts:
        return test_nvfp4.modelopt_values(parts)
    whole = 1 / float(parts["weight_global_scale"])
    return test_nvfp4.values(parts["weight_packed"], parts["weight_scale"], whole)


def _mxfp4(rows: int, columns: int) -> Tensors:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return {"weight_packed": codes, "weight_scale": test_stacks.powers(rows, columns // 32)}


def _mxfp8(rows: int, columns: int) -> Tensors:
    scale = test_stacks.powers(rows, columns // 32)
    return {"weight": test_stacks.e4m3(rows, columns), "weight_scale": scale}


def _gpt_oss() -> Sample:
    torch.manual_seed(0)
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        stem = f"{MOE}.{name}"
        blocks = torch.randint(0, 256, (E, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{stem}_blocks"] = blocks
        tensors[f"{stem}_scales"] = test_stacks.powers(E, rows, columns // 32)
        tensors[f"{stem}_bias"] = torch.randn(E, rows).bfloat16()

    def values(tensors: Tensors, config: dict[str, Any]) -> Values:
        result: Values = {}
        for name in ("gate_up_proj", "down_proj"):
            stem = f"{MOE}.{name}"
            matrix = E2M1[
                torch.stack([tensors[f"{stem}_blocks"] & 15, tensors[f"{stem}_blocks"] >> 4], -1)
                .flatten(2)
                .long()
            ]
            power = UE8M0[tensors[f"{stem}_scales"].view(torch.uint8).long()]
            result |= _rows(name, matrix * power.repeat_interleave(32, 2), tensors[f"{stem}_bias"])
        return result

    return Sample(tensors, "MXFP4", values, {"quant_method": "mxfp4"}, "gpt_oss")


def _rows(name: str, matrix: torch.Tensor, bias: torch.Tensor) -> Values:
    """gpt-oss has gate in the even rows and up in the odd rows."""
    bias = bias.double()
    if name == "down_proj":
        return {"down": list(matrix), "down_bias": list(bias)}
    return {
        "gate": list(matrix[:, 0::2]),
        "up": list(matrix[:, 1::2]),
        "gate_bias": list(bias[:, 0::2]),
        "up_bias": list(bias[:, 1::2]),
    }


def _dense_gpt_oss() -> Sample:
    torch.manual_seed(0)
    tensors = {
        f"{MOE}.gate_up_proj": torch.randn(E, H, 2 * I).bfloat16(),
        f"{MOE}.gate_up_proj_bias": torch.randn(E, 2 * I).bfloat16(),
        f"{MOE}.down_proj": torch.randn(E, I, H).bfloat16(),
        f"{MOE}.down_proj_bias": torch.randn(E, H).bfloat16(),
    }

    def values(tensors: Tensors, config: dict[str, Any]) -> Values:
        result: Values = {}
        for name in ("gate_up_proj", "down_proj"):
            matrix = tensors[f"{MOE}.{name}"].double().transpose(1, 2)
            result |= _rows(name, matrix, tensors[f"{MOE}.{name}_bias"])
        return result

    return Sample(tensors, "BF16", values, None, "gpt_oss")


def _dense(rows: int, columns: int) -> Tensors:
    return {"weight": torch.randn(rows, columns).bfloat16()}


def _dense_stack() -> Sample:
    torch.manual_seed(0)
    tensors = {
        f"{MOE}.gate_up_proj": torch.randn(E, 2 * I, H),
        f"{MOE}.down_proj": torch.randn(E, H, I),
    }

    def values(tensors: Tensors, config: dict[str, Any]) -> Values:
        gate, up = tensors[f"{MOE}.gate_up_proj"].double().chunk(2, 1)
        down = tensors[f"{MOE}.down_proj"].double()
        return {"gate": list(gate), "up": list(up), "down": list(down)}

    return Sample(tensors, "BF16", values)


@cache
def samples() -> dict[str, Sample]:
    """The samples by name, for test ids."""
    gptq, int4 = test_gptq.config, test_int4.config
    return {
        "dense": _per_expert(_dense, "BF16", None, lambda parts: parts["weight"]),
        "dense stack": _dense_stack(),
        "dense gpt-oss": _dense_gpt_oss(),
        "gpt-oss": _gpt_oss(),
        "FP8": _per_expert(
            test_fp8.block("weight_scale_inv"),
            "FP8",
            test_fp8.DEEPSEEK,
            _fp8,
        ),
        "FP8 rows": _per_expert(
            test_fp8.per_row((1,)),
            "FP8_PERCHANNEL",
            {"quant_method": "compressed-tensors"},
            lambda parts: parts["weight"].double() * parts["weight_scale"].double().reshape(-1, 1),
        ),
        "RAWINT4": _per_expert(test_int4.make_with(), "RAWINT4", int4(), test_int4.reference),
        "RAWINT4 with all": _per_expert(
            test_int4.make_with(zero=True, order=test_int4.ORDERS["shuffled"]),
            "RAWINT4",
            int4(symmetric=False),
            test_int4.reference,
        ),
        "GPTQ": _per_expert(
            test_gptq.make_with(zero=7), "GPTQ_INT4", gptq(), _gptq, with_config=True
        ),
        "GPTQ with desc_act": _per_expert(
            test_gptq.make_with(order=test_gptq.shuffled),
            "GPTQ_INT4",
            gptq(sym=False, desc_act=True),
            _gptq,
            with_config=True,
        ),
        "AWQ": _per_expert(test_awq.make_with(), "AWQ_INT4", test_awq.config(), test_awq.reference),
        "MXFP4": _per_expert(
            _mxfp4,
            "MXFP4",
            {"quant_method": "compressed-tensors"},
            lambda parts: _scaled(parts["weight_packed"][None], parts["weight_scale"][None])[0],
        ),
        "MXFP8": _per_expert(_mxfp8, "MXFP8", {"quant_method": "mxfp8"}, test_mxfp8.reference),
        "NVFP4 of ModelOpt": _per_expert(
            test_nvfp4.MODELOPT, "NVFP4", {"quant_method": "modelopt"}, _nvfp4
        ),
        "NVFP4": _per_expert(
            test_nvfp4.COMPRESSED, "NVFP4", {"quant_method": "compressed-tensors"}, _nvfp4
        ),
        "int8 rows": _per_expert(
            test_int8.w8a8(),
            "AMXINT8",
            {"quant_method": "compressed-tensors"},
            test_int8.scaled,
        ),
        "int8 groups": _per_expert(
            test_int8.int8_groups(torch.float16),
            "MIXED",
            {"quant_method": "compressed-tensors"},
            test_int8.scaled,
        ),
        "W4AFP8": _per_expert(
            test_w4afp8.make_with(32), "RAWINT4", test_w4afp8.SETTINGS, test_w4afp8.reference
        ),
        "GPTQ of 8 bits": _per_expert(
            test_int8.gptq8, "MIXED", gptq(bits=8), test_int8.gptq8_values
        ),
        **{f"stack of {case}": _stack(case) for case in test_stacks.CASES},
    }
