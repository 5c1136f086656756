"""A tiny random Qwen3-MoE checkpoint, and the greedy text of Hugging Face transformers.

A random model is chaotic: one wrong expert changes the next token. If the two best tokens nearly
tie, rounding decides, so the reference alone selects prompts with clear texts. Weights are BF16
values; the reference and the engines compute in float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from kt_kernel.testing import moe_reference

LAYERS = 4
EXPERTS = 8
TOP_K = 2
HIDDEN = 128
INTERMEDIATE = 96
VOCABULARY = 256
STEPS = 16
GAP = 1e-2  # a smaller distance between the two best logits is a tie, and ends the comparison


def make(
    path: Path,
    seed: int = 0,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    head_dim: int = 32,
) -> Path:
    """Writes checkpoint and tokenizer to folder ``path``. From 3 on, token i is the word "t{i}"."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=256,
        moe_intermediate_size=intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.15,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    names = ["<unk>", "<s>", "</s>"] + [f"t{i}" for i in range(3, VOCABULARY)]
    words = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0])
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=names[0], bos_token=names[1], eos_token=names[2]
    ).save_pretrained(path)
    return path


@dataclass
class Greedy:
    """tokens[i] follow prompt i. gaps[i] are the distances of the two best logits in these
    steps."""

    tokens: list[list[int]]
    gaps: list[list[float]]


class Reference:
    """transformers in float32."""

    def __init__(self, path: Path) -> None:
        self.model = Qwen3MoeForCausalLM.from_pretrained(
            path, dtype=torch.float32, experts_implementation="eager"
        ).eval()

    def experts(self, layer: int) -> torch.nn.Module:
        """The module with gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
        return self.model.model.layers[layer].mlp.experts

    @torch.no_grad()
    def greedy(self, prompts: list[list[int]], steps: int = STEPS) -> Greedy:
        """Prompts of the same length form a batch. No cache and no padding, to keep it simple."""
        found = Greedy([[] for _ in prompts], [[] for _ in prompts])
        for length in sorted({len(prompt) for prompt in prompts}):
            rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[i] for i in rows])
            for _ in range(steps):
                top = self.model(ids, use_cache=False).logits[:, -1].topk(2)
                ids = torch.cat((ids, top.indices[:, :1]), 1)
                for i, values, best in zip(rows, top.values, top.indices, strict=True):
                    found.tokens[i].append(int(best[0]))
                    found.gaps[i].append(float(values[0] - values[1]))
        return found

    def stacks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """gate_up [E, 2I, H] and down [E, H, I] of each MoE layer."""
        modules = [self.experts(layer) for layer in range(LAYERS)]
        return [(module.gate_up_proj.data, module.down_proj.data) for module in modules]

    @contextmanager
    def changed(
        self, change: Callable[[int, int, torch.Tensor, torch.Tensor], None], experts: range
    ) -> Iterator[None]:
        """Inside, ``change(layer, expert, gate_up, down)`` has edited these experts in place."""
        saved = [(gate_up.clone(), down.clone()) for gate_up, down in self.stacks()]
        try:
            for layer, (gate_up, down) in enumerate(self.stacks()):
                for expert in experts:
                    change(layer, expert, gate_up[expert], down[expert])
            yield
        finally:
            for now, before in zip(self.stacks(), saved, strict=True):
                for weight, old in zip(now, before, strict=True):
                    weight.copy_(old)

    @contextmanager
    def replacing(
        self, replacement: Callable[[int, torch.nn.Module], Callable[..., torch.Tensor]]
    ) -> Iterator[None]:
        """Inside, the result of replacement(layer, module) computes each layer's experts."""
        modules = [self.experts(layer) for layer in range(LAYERS)]
        for layer, module in enumerate(modules):
            module.forward = replacement(layer, module)
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    @contextmanager
    def computing(self, method: str, cold: range) -> Iterator[None]:
        """Inside, cold experts have the method's weights and activation roundings, in float64."""
        mask = torch.tensor([expert not in cold for expert in range(EXPERTS)])

        def replacement(layer: int, experts: torch.nn.Module) -> Callable[..., torch.Tensor]:
            gate, up = experts.gate_up_proj.data.chunk(2, 1)
            weights = (gate, up, experts.down_proj.data)

            def forward(x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
                routes = (x, ids, router, *weights)
                y = moe_reference(*routes, method=method, gpu_experts_mask=mask)
                y += moe_reference(*routes, gpu_experts_mask=~mask, rounded=False)
                return y.to(x.dtype)

            return forward

        with self.replacing(replacement):
            yield

    @torch.no_grad()
    def logprobs(self, prompts: list[list[int]], tokens: list[list[int]]) -> torch.Tensor:
        """Log-probabilities of given continuations, in one row."""
        found = []
        for prompt, row in zip(prompts, tokens, strict=True):
            logits = self.model(torch.tensor([prompt + row]), use_cache=False).logits
            scores = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            found.append(scores.gather(-1, torch.tensor(row)[:, None])[:, 0])
        return torch.cat(found)

    @contextmanager
    def watching_routes(self) -> Iterator[list[torch.Tensor]]:
        """Inside, each pass of a layer appends [T]: the smallest margin, relative to the router's
        probability, between successive experts of a token, including the best one that was not
        chosen. If it is small, rounding decides which expert is chosen or deferred."""
        gaps: list[torch.Tensor] = []

        def look(gate: torch.nn.Module, x: object, out: tuple[torch.Tensor, ...]) -> None:
            best = out[0].float().softmax(-1).topk(TOP_K + 1).values
            gaps.append((1 - best[:, 1:] / best[:, :-1]).amin(1))

        hooks = [layer.mlp.gate.register_forward_hook(look) for layer in self.model.model.layers]
        try:
            yield gaps
        finally:
            for hook in hooks:
                hook.remove()


def spread_prompts(
    count: int, vocabulary: int = VOCABULARY, step: int = 5, growth: int = 7
) -> list[list[int]]:
    """Prompts of 4 + ``growth``, 4 + 2 ``growth`` … words from the whole vocabulary."""
    return [
        [3 + (step * i * j + i) % (vocabulary - 3) for j in range(4 + growth * i)]
        for i in range(1, count + 1)
    ]


def computed_tokens(prompts: list[list[int]], steps: int | list[int]) -> int:
    """The number of tokens that an engine runs through its layers to generate ``steps`` more for
    each prompt (or this many for each). The last ones are not run."""
    counts = steps if isinstance(steps, list) else [steps] * len(prompts)
    return sum(len(prompt) + count - 1 for prompt, count in zip(prompts, counts, strict=True))


def clear_prompts(
    reference: Reference, count: int = 6, tries: int = 384, seed: int = 1
) -> list[list[int]]:
    """Of ``tries`` random prompts of 5 to 11 tokens, ``count`` that are far from ties.

    Of the prompts with the largest smallest gap, these are the ones whose text stays the same four
    times when all expert weights change randomly by 2^-8, which is more than rounding to BF16.
    """
    generator = torch.Generator().manual_seed(seed)

    def shake(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        for weight in (gate_up, down):
            weight.mul_(1 + 2**-8 * torch.randn(weight.shape, generator=generator))

    lengths = [5 + 3 * (i % 3) for i in range(tries)]
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    plain = reference.greedy(prompts)
    clear = sorted(range(tries), key=lambda i: -min(plain.gaps[i]))[: 5 * count]
    for _ in range(4):
        with reference.changed(shake, range(EXPERTS)):
            shaken = reference.greedy([prompts[i] for i in clear]).tokens
        clear = [i for i, tokens in zip(clear, shaken, strict=True) if tokens == plain.tokens[i]]
    assert len(clear) >= count, f"only {len(clear)} clear prompts"
    return [prompts[i] for i in clear[:count]]


def agreement(expected: Greedy, tokens: list[list[int]], gap: float = GAP) -> tuple[int, int, int]:
    """Compares step by step up to each row's first tie. Returns (equal, checked, total) steps.

    A row is checked up to its first difference, because the text differs afterwards.
    """
    equal = checked = total = 0
    for want, gaps, got in zip(expected.tokens, expected.gaps, tokens, strict=True):
        assert len(got) == len(want), (got, want)
        total += len(want)
        for a, distance, b in zip(want, gaps, got, strict=True):
            if distance < gap:
                break
            checked += 1
            if a != b:
                break
            equal += 1
    return equal, checked, total
