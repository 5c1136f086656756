"""Compares log-probabilities in vLLM while experts move with those of placements that stay.

    ENV/bin/python benchmarks/cache_exact.py --json FILE [--hot-format packed|fp8]

Run it in vLLM's environment, on a machine with a GPU. A small model with random experts decodes a
given text, some requests side by side, in CUDA graphs: with all experts cold, with all but one of
each layer hot, with fixed ones, and while random experts move in every layer at every look. As
controls, one hot expert of each layer is lost, or counted twice. Then experts move until --moves,
and the memory before and after is compared. Distances are means over the most probable tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from cache_control import FIXED, RESTLESS, Control, about_engine
from in_memory import VOCABULARY, weights_without_experts
from machine import anonymous_memory
from outputs import output_file, save_result
from prompts import ENGINES
from safetensors.torch import save_file
from shapes import Shape
from synthetic import SCALE, config

from kt_kernel.device.slots import DenseSlots, PackedSlots
from kt_kernel.testing import quantise
from kt_kernel.weights.formats import FP8_BLOCK, WeightForm

SHAPE, LAYERS, HOT = Shape("small", 32, 1024, 512, 4), 4, 12
STREAMS, MOST = 4, 8  # most probable tokens that are compared
# Of cold experts, by what hot ones are: 16 bits, 4 bits, or the engine's own FP8.
METHODS = {"engine": "BF16", "packed": "INT4_G32", "fp8": "FP8"}
_NOT_FP8 = (
    "self_attn.qkv_proj",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
)


def make(folder: Path, device: str, fp8: bool) -> None:
    """A checkpoint in which every expert has its own weights, in BF16 or FP8."""
    about_model = config(SHAPE, LAYERS, VOCABULARY)
    if fp8:
        about_model["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [
                "lm_head",
                *(
                    f"model.layers.{n}.{part}"
                    for n in range(LAYERS)
                    for part in (*_NOT_FP8, "mlp.gate")
                ),
            ],
        }
    (folder / "config.json").write_text(json.dumps(about_model))
    tensors, made = weights_without_experts(SHAPE, LAYERS), torch.Generator(device).manual_seed(2)
    sizes = {"gate_proj": (SHAPE.inter, SHAPE.hidden), "up_proj": (SHAPE.inter, SHAPE.hidden)}
    sizes["down_proj"] = SHAPE.hidden, SHAPE.inter
    for layer in range(LAYERS):
        for expert in range(SHAPE.experts):
            for name, size in sizes.items():
                values = torch.randn(size, generator=made, device=device) * SCALE
                place = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                if fp8:
                    quantised = quantise(values, WeightForm(FP8_BLOCK))
                    assert quantised.scale is not None
                    tensors[place] = quantised.codes.view(torch.float8_e4m3fn)
                    tensors[f"{place}_scale_inv"] = quantised.scale
                else:
                    tensors[place] = values.bfloat16().cpu()
    save_file(tensors, folder / "model.safetensors")


class Forced:
    """Makes a model continue a given text, and keeps the log-probabilities of its first rows.

    text: int64 [steps, rows], the tokens.
    """

    def __init__(self, model: Any, text: torch.Tensor) -> None:
        self._original, self.text = model.compute_logits, text
        self.kept: list[torch.Tensor] = []
        model.compute_logits = self

    def __call__(self, *given: Any) -> torch.Tensor:
        logits: torch.Tensor = self._original(*given)
        step, rows = len(self.kept), self.text.shape[1]
        self.kept.append(logits[:rows].float().log_softmax(-1))
        wanted = self.text[step % len(self.text)].to(logits.device)
        logits[:rows].scatter_(1, wanted[: len(logits), None], 1e4)
        return logits


class Engine:
    """vLLM with the small model."""

    def __init__(self, folder: Path, hot_format: str, steps: int, more: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        from kt_kernel.serving import cache as caches

        options: dict[str, Any] = {"method": METHODS[hot_format], "cpuinfer": 4}
        options["num_gpu_experts"] = SHAPE.experts - 1
        options |= {"enable_dynamic_expert_update": "on"}
        options["hot_format"] = "packed" if hot_format == "packed" else "engine"
        arguments: dict[str, Any] = ENGINES["vllm"] | more
        self._llm = LLM(
            str(folder),
            additional_config={"kt": options},
            max_model_len=256,
            kv_cache_memory_bytes=256 << 20,
            skip_tokenizer_init=True,
            seed=0,
            **arguments,
        )
        self.cache = caches._caches[-1]
        self.cache.rate = None
        self.control = Control(self.cache)
        made = torch.Generator().manual_seed(3)
        self._prompts = torch.randint(2, VOCABULARY, (STREAMS + 1, 16), generator=made).tolist()
        text = torch.randint(2, VOCABULARY, (steps, STREAMS), generator=made)
        [self._forced] = self._llm.apply_model(lambda model: Forced(model, text))
        self._params, self._number, self._steps = SamplingParams, 0, steps

    def _ask(self, prompt: list[int], steps: int) -> str:
        self._number += 1
        params = self._params(
            temperature=0, max_tokens=steps, min_tokens=steps, ignore_eos=True, detokenize=False
        )
        engine = self._llm.llm_engine
        engine.add_request(str(self._number), {"prompt_token_ids": prompt}, params)
        return str(self._number)

    def logprobs(self, cancelled: bool = False) -> torch.Tensor:
        """[steps, streams, vocabulary]. cancelled: other requests come and are cancelled."""
        self._forced.kept.clear()
        engine, other, count, steps = self._llm.llm_engine, "", 0, self._steps
        for prompt in self._prompts[:STREAMS]:
            self._ask(prompt, steps)
        while engine.has_unfinished_requests():
            engine.step()
            count += 1
            if cancelled and count % 8 == 4 and count < steps - 8:
                other = self._ask(self._prompts[-1], steps)
            elif other and count % 8 == 7:
                engine.abort_request([other])
                other = ""
        found = torch.stack(self._forced.kept[:steps]).cpu()
        assert found.shape == (steps, STREAMS, VOCABULARY), found.shape
        return found

    def short(self) -> None:
        """A batch or two."""
        self._forced.kept.clear()
        self._ask(self._prompts[0], 3)
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()

    def placed(self, hot: int) -> torch.Tensor:
        """The log-probabilities with the first experts hot."""
        self.control.reset(hot, self.short)
        return self.logprobs()

    def moving(self, cancelled: bool = False) -> torch.Tensor:
        self.control.mode = RESTLESS
        found = self.logprobs(cancelled)
        self.control.mode = FIXED
        return found

    def with_wrong_experts(self, factor: float) -> torch.Tensor:
        """The log-probabilities with one of the first experts of each layer multiplied."""
        self.control.reset(HOT, self.short)
        with torch.inference_mode():
            for layer in self.cache.layers:
                weights = layer.weights
                if isinstance(weights, PackedSlots):
                    weights._s2[0] *= factor
                else:
                    assert isinstance(weights, DenseSlots)
                    weights.w2[0] *= factor
        return self.logprobs()


def memory() -> dict[str, int]:
    """MB that this process holds on the host, and that are free on the GPU."""
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    return {"host_mb": anonymous_memory() >> 20, "gpu_free_mb": free >> 20}


def distance(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Of the log-probabilities of the tokens that ``other`` finds most probable."""
    best = other.topk(MOST, -1).indices
    apart = (one.gather(-1, best) - other.gather(-1, best)).abs()
    found = {"mean": apart.mean(), "median": apart.median(), "max": apart.max()}
    return {name: float(value) for name, value in found.items()}


def compare(engine: Engine, moves: int, say: Callable[[str, Any], None]) -> None:
    """Passes each result on as it comes."""
    cold = engine.placed(0)
    say("all cold, again", distance(engine.placed(0), cold))
    say("all but one hot", distance(engine.placed(SHAPE.experts - 1), cold))
    say("fixed", distance(engine.placed(HOT), cold))
    before = engine.control.counters()
    for number in range(4):
        found = distance(engine.moving(cancelled=number == 3), cold)
        say(f"moving {number}" + ", others cancelled" * (number == 3), found)
    after = engine.control.counters()
    say("moved", {name: after[name] - before[name] for name in after})
    for name, factor in (("one lost", 0), ("one doubled", 2)):
        say(name, distance(engine.with_wrong_experts(factor), cold))
    engine.control.reset(HOT, engine.short)
    engine.moving()
    say("memory before", memory())
    began, begin = engine.cache.counters.cache_uploads, time.perf_counter()
    while (made := engine.cache.counters.cache_uploads - began) < moves:
        engine.moving()
    say("more moves", {"uploads": made, "seconds": time.perf_counter() - begin})
    say("memory after", memory())
    say("moving, after them", distance(engine.moving(), cold))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--hot-format", choices=[*METHODS], default="engine")
    parser.add_argument("--steps", type=int, default=48, help="tokens that are compared")
    parser.add_argument("--moves", type=int, default=10_000)
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments, JSON")
    parser.add_argument("--json", type=output_file, required=True)
    args = parser.parse_args()
    more = {"max_num_batched_tokens": 512, "gpu_memory_utilization": 0.1}
    more["compilation_config"] = ENGINES["vllm"]["compilation_config"] | {
        "cudagraph_capture_sizes": [1, 4, 8]
    }
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), "cuda" if torch.cuda.is_available() else "cpu", args.hot_format == "fp8")
        engine = Engine(Path(folder), args.hot_format, args.steps, more | args.engine)
    result = about_engine() | {"shape": SHAPE._asdict(), "layers": LAYERS, "hot": HOT}
    result |= {"hot_format": args.hot_format, "method": METHODS[args.hot_format]}

    def say(name: str, found: Any) -> None:
        result[name] = found
        print(name, json.dumps(found), flush=True)
        save_result(args.json, result)

    compare(engine, args.moves, say)
    sys.stdout.flush()
    os._exit(0)  # engines take long to end, and everything is saved


if __name__ == "__main__":
    main()
