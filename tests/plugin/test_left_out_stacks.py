"""Stacks of experts that SGLang's loader of a class leaves out are delivered matrix by matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kt_kernel.plugin_entrypoints.sglang.stacks import with_stacks

E, H, INTER = 3, 4, 2


class Llama4ForCausalLM(torch.nn.Module):
    """Of the name of SGLang's class, with one layer's parameters. They note what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.got: dict[tuple[str, str, int], torch.Tensor] = {}
        experts = torch.nn.Module()
        for name, shape in (("w13_weight", (E, 2 * INTER, H)), ("w2_weight", (E, H, INTER))):
            experts.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
            experts.get_parameter(name).weight_loader = self._note(name)  # type: ignore[attr-defined]
        self.experts = experts

    def _note(self, to: str) -> Any:
        def load(
            parameter: Any, matrix: torch.Tensor, name: str, shard_id: str, expert_id: int
        ) -> None:
            assert parameter is self.experts.get_parameter(to) and name.startswith("experts.")
            self.got[to, shard_id, expert_id] = matrix

        return load


class Another(Llama4ForCausalLM):
    pass


def _weights() -> list[tuple[str, torch.Tensor]]:
    return [
        ("router.weight", torch.randn(E, H)),
        ("experts.gate_up_proj", torch.randn(E, H, 2 * INTER)),
        ("experts.down_proj", torch.randn(E, INTER, H)),
        ("shared_expert.down_proj.weight", torch.randn(H, INTER)),
    ]


def test_every_matrix_is_delivered() -> None:
    """x @ stack is what published Llama-4 computes; a layer's matrices are the transposes."""
    model, weights = Llama4ForCausalLM(), _weights()
    left = [name for name, _ in with_stacks(model, weights)]
    assert left == ["router.weight", "shared_expert.down_proj.weight"]
    assert len(model.got) == 3 * E
    gate_up, down = weights[1][1], weights[2][1]
    x, inner = torch.randn(H), torch.randn(INTER)
    for expert in range(E):
        both = x @ gate_up[expert]
        for shard, want in (("w1", both[:INTER]), ("w3", both[INTER:])):
            torch.testing.assert_close(model.got["w13_weight", shard, expert] @ x, want)
        found = model.got["w2_weight", "w2", expert] @ inner
        torch.testing.assert_close(found, inner @ down[expert])


def test_other_classes_get_their_stacks() -> None:
    weights, model = _weights(), Another()
    assert list(with_stacks(model, weights)) == weights and not model.got


def test_quantised_stacks_are_refused() -> None:
    weights = [("experts.down_proj", torch.zeros(E, INTER, H, dtype=torch.float8_e4m3fn))]
    with pytest.raises(ValueError, match=r"experts\.down_proj: .*accepted: --kt-hot-format"):
        list(with_stacks(Llama4ForCausalLM(), weights))
