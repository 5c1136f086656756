"""Experts on the GPU in fine-tuning: computed with torch where the model is, the others on the CPU.
Here the model is on the CPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kt_kernel import generate_gpu_experts_masks
from kt_kernel.sft import hot as hot_module
from kt_kernel.sft import load_adapter, save_adapter, wrap_experts
from kt_kernel.sft.families import open_fused
from kt_kernel.sft.hot import HotExperts
from kt_kernel.sft.hot_pass import HotPass, _Copy

from .models import fill_lora, tiny, tokens
from .trainers import losses, trainer_of

SETTINGS = dict(lora_rank=4, lora_alpha=6.0, cpuinfer_threads=2, threadpool_count=1)
MASK = torch.tensor([[True, False, True, False]])


def wrapped(family="qwen3_moe", dtype=torch.float32, layers=1, **settings):
    extra = {"first_k_dense_replace": 0} if family.startswith(("deepseek", "glm")) else {}
    model = tiny(family, dtype, num_hidden_layers=layers, **extra)
    modules = wrap_experts(model, **SETTINGS | settings)
    fill_lora(modules)
    model.get_input_embeddings().weight.requires_grad_(True)
    return model, modules


def gradients(model, seed=5):
    model.zero_grad()
    output = model(tokens(seed=seed), labels=tokens(seed=seed))
    output.loss.backward()
    named = model.named_parameters()
    return output.logits.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("hot", [1, 4])
def test_the_same_as_on_the_cpu(family, hot):
    """Outputs and all gradients, up to the rounding of activations in the CPU's kernels."""
    wanted_logits, wanted = gradients(wrapped(family)[0])
    model, modules = wrapped(family, num_gpu_experts=hot)
    assert [m.wrapper.num_gpu_experts for m in modules.values()] == [hot]
    logits, found = gradients(model)
    assert (logits - wanted_logits).norm() < 0.02 * wanted_logits.norm()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_masks_and_ids_outside():
    masks = generate_gpu_experts_masks(torch.tensor([[5.0, 1, 4, 2], [1, 2, 3, 9]]), 3)
    model, modules = wrapped(layers=2, gpu_experts_masks=masks)
    assert [m.wrapper.gpu_experts_mask.tolist() for m in modules.values()] == masks.tolist()
    plain, others = wrapped(layers=2)
    x = torch.randn(5, 32)
    ids = torch.tensor([[0, 3], [-1, 2], [4, 9], [3, 3], [1, 0]])
    scores = torch.rand(5, 2)
    for module, other in zip(modules.values(), others.values(), strict=True):
        with torch.no_grad():
            found, wanted = module(x, ids, scores), other(x, ids, scores)
        assert (found - wanted).norm() < 0.02 * wanted.norm()
        assert not found[2].any()
        assert module(x[:0], ids[:0], scores[:0]).shape == (0, 32)


@pytest.mark.parametrize("spare", [0, 1024])
@pytest.mark.parametrize("counts", [[1, 1, 40, 0, 3], [0, 0, 0], [0, 7, 7, 7], [64, 0, 0, 0, 1]])
def test_runs(monkeypatch, counts, spare):
    """Every expert with rows is in one run, and runs are not much larger than their rows."""
    monkeypatch.setattr(hot_module, "_SPARE_ROWS", spare)
    runs = hot_module._runs(counts)
    held = [e for run in runs for e in range(len(counts))[run.experts]]
    assert held == sorted(set(held)) and {e for e, n in enumerate(counts) if n} <= set(held)
    for run in runs:
        assert run.counts == counts[run.experts]
        assert run.begin == sum(counts[: run.experts.start])
        assert run.end == sum(counts[: run.experts.stop])
        assert len(run.counts) * run.most <= 2 * sum(run.counts) + spare
        places = run.places("cpu").split(run.counts)
        for n, place in enumerate(places):
            assert place.tolist() == list(range(n * run.most, n * run.most + run.counts[n]))


def test_experts_in_several_runs(monkeypatch):
    """The same outputs and gradients as in one run, with experts of very different loads."""
    ids = torch.tensor([[0, 3]] * 11 + [[1, 3]] * 2 + [[3, 9]])
    x, scores = torch.randn(len(ids), 32), torch.rand(len(ids), 2)
    found = []
    for spare in (0, 1024):
        monkeypatch.setattr(hot_module, "_SPARE_ROWS", spare)
        assert len(hot_module._runs([11, 2, 0, 14])) == (2 if spare == 0 else 1)
        _, modules = wrapped(num_gpu_experts=4)
        (module,) = modules.values()
        out = module(x.requires_grad_(), ids, scores)
        given = [x, *module.lora_parameters().values()]
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for one, other in zip(*found, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_dropout(reentrant):
    """The same loss and gradients as without, bit for bit."""
    model, modules = wrapped(gpu_experts_masks=MASK, lora_dropout=0.3)
    (module,) = modules.values()
    module.train()
    x = torch.randn(6, 32)
    ids, scores = torch.randint(4, (6, 2)), torch.rand(6, 2)
    found = []
    for checkpointing in (False, True):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        if checkpointing:
            out = checkpoint(module, leaf, ids, scores, use_reentrant=reentrant)
        else:
            out = module(leaf, ids, scores)
        out.square().sum().backward()
        grads = [p.grad for p in module.parameters() if p.requires_grad]
        found.append([out.detach(), leaf.grad, *grads])
        assert module.wrapper.pending == 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(module(x, ids, scores), module(x, ids, scores))


@pytest.mark.parametrize("hot", [0, 2])
def test_checkpointing_frees_the_hidden_states(hot):
    (module,) = wrapped(num_gpu_experts=hot)[1].values()
    ids, scores = torch.randint(4, (6, 2)), torch.rand(6, 2)
    seen = []

    def block(x):
        inside = x * 2
        seen.append(weakref.ref(inside))
        return module(inside, ids, scores)

    leaf = torch.randn(6, 32, requires_grad=True)
    out = checkpoint(block, leaf, use_reentrant=False)
    gc.collect()
    assert seen[0]() is None
    out.sum().backward()
    assert leaf.grad.any()


def test_skip_lora():
    """Backward leaves the LoRA terms out, of hot experts as well."""
    wanted = gradients(wrapped(sft_method="AMXBF16_SFT_SkipLoRA")[0])[1]
    found = gradients(wrapped(sft_method="AMXBF16_SFT_SkipLoRA", gpu_experts_masks=MASK)[0])[1]
    assert found.keys() == wanted.keys() == {"model.embed_tokens.weight"}
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() < 0.03 * gradient.norm()


def test_trains(tmp_path):
    """With Trainer, to about the same losses. Adapters are the same, wherever experts are."""
    found = []
    for hot in (0, 2):
        torch.manual_seed(0)
        model = tiny("qwen3_moe", torch.float32)
        torch.manual_seed(0)
        wrap_experts(model, **SETTINGS, num_gpu_experts=hot)
        trainer = trainer_of(
            model,
            tmp_path / str(hot),
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            save_strategy="no",
        )
        trainer.train()
        found.append(torch.tensor(losses(trainer)))
    assert found[1][-1] < found[1][0]
    assert ((found[1] - found[0]).abs() < 0.01 * found[0]).all(), found
    save_adapter(model, tmp_path / "adapter")
    cold = tiny("qwen3_moe", torch.float32)
    wrap_experts(cold, **SETTINGS)
    load_adapter(cold, tmp_path / "adapter")
    with torch.no_grad():
        logits, wanted = cold(tokens()).logits, model(tokens()).logits
    assert (logits - wanted).norm() < 0.02 * wanted.norm()


def test_they_move_with_the_model_and_are_not_saved():
    model, modules = wrapped(gpu_experts_masks=MASK, lora_device="cpu")
    (module,) = modules.values()
    assert not any(".hot." in name for name in model.state_dict())
    assert "4 (2 hot)" in repr(module).replace("experts=", "")
    model.to("meta")
    assert module.hot.gate_proj.is_meta and module.hot.gate_proj.shape == (2, 32, 32)
    assert module.lora_parameters()["up_lora_a"].device.type == "cpu"


@pytest.mark.parametrize("copied", [False, True])
def test_backward_begins_with_the_copy_and_the_hot_experts(monkeypatch, copied):
    """So that the CPU, which comes last, need not wait for the GPU's kernels. Here the copy to the
    host is made of tensors on the CPU."""
    wanted = gradients(wrapped(gpu_experts_masks=MASK)[0])
    model, modules = wrapped(gpu_experts_masks=MASK)
    (module,) = modules.values()
    order: list[str] = []
    start, keep = HotPass.start_copy, HotPass.keep_lora_gradients
    compute = module.wrapper.compute_gradients

    def start_copy(self, gradient):
        order.append("copy")
        if copied:
            self._copy = _Copy(self._wrapper, gradient)
        else:
            start(self, gradient)

    passes: list[HotPass] = []

    def keep_lora_gradients(self, given):
        order.append("hot")
        passes.append(self)
        keep(self, given)

    def compute_gradients(grad_output, tokens, nonfinite, staged):
        assert (staged is not None) == copied
        order.append("cpu")
        return compute(grad_output, tokens, nonfinite, staged)

    monkeypatch.setattr(HotPass, "start_copy", start_copy)
    monkeypatch.setattr(HotPass, "keep_lora_gradients", keep_lora_gradients)
    monkeypatch.setattr(module.wrapper, "compute_gradients", compute_gradients)
    logits, found = gradients(model)
    assert order == ["copy", "hot", "cpu"]
    with pytest.raises(RuntimeError, match="the experts on the GPU after those on the CPU"):
        keep(passes[0], ())
    assert torch.equal(logits, wanted[0])
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted[1].items())


def test_the_same_bits_each_time():
    """Of sizes that torch shares among threads."""
    made = tiny("qwen3_moe", torch.float32, num_hidden_layers=1, hidden_size=256)
    modules = wrap_experts(made, **SETTINGS, num_gpu_experts=4)
    fill_lora(modules)
    (module,) = modules.values()
    x, ids, scores = torch.randn(600, 256), torch.randint(4, (600, 8)), torch.rand(600, 8)
    found = []
    for _ in range(4):
        leaf = x.clone().requires_grad_()
        lora = module.hot.of_hot(tuple(module.lora_parameters().values()))
        hot = module.hot(leaf, ids, scores, lora)
        hot.square().sum().backward()
        found.append((hot.detach(), leaf.grad))
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


def test_sums_in_float32():
    """In bf16 weights, and k routes of one token to the same expert."""
    model = tiny("qwen3_moe")
    fused = open_fused("experts", model.get_submodule("model.layers.0.mlp.experts"))
    hot = HotExperts(fused, [1], scaling=1.0, dropout=0.0, skip_lora_grads=False)
    x = torch.randn(2, 32)
    lora = hot.of_hot([torch.zeros(4, 1, 32), torch.zeros(4, 32, 1)] * 3)
    once = hot(x, torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1), lora)
    many = hot(x, torch.ones(2, 300, dtype=torch.long), torch.full((2, 300), 1 / 300), lora)
    assert (many - once).abs().max() < 1e-4 * once.abs().max()


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"gpu_experts_masks": [True]}, TypeError, "gpu_experts_masks must be a tensor or None"),
        ({"gpu_experts_masks": MASK[0]}, ValueError, r"must be \[1, E\], a row for each MoE layer"),
        ({"gpu_experts_masks": MASK[:, :3]}, ValueError, r"gpu_experts_mask must be bool \[4\]"),
        ({"gpu_experts_masks": MASK.int()}, (TypeError, ValueError), "gpu_experts_mask"),
        ({"gpu_experts_masks": MASK, "num_gpu_experts": 1}, ValueError, "give only one of them"),
        ({"num_gpu_experts": 5}, ValueError, "num_gpu_experts=5; accepted: 0 to 4"),
    ],
)
def test_refused(settings, error, text):
    model = tiny("qwen3_moe", num_hidden_layers=1)
    with pytest.raises(error, match=text):
        wrap_experts(model, **SETTINGS, **settings)
    assert not any(isinstance(m, HotExperts) for m in model.modules())


def test_weights_that_are_not_there(tmp_path):
    model = tiny("qwen3_moe", num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(ValueError, match="1 experts on the GPU, whose weights .* meta device"):
        wrap_experts(
            empty, **SETTINGS, num_gpu_experts=1, from_checkpoint=True, model_path=tmp_path
        )
