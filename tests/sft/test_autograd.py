"""`LoraExperts` under plain autograd: gradients, checkpointing, whatever order backward runs in."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kt_kernel.sft.lora import LORA_NAMES
from kt_kernel.sft.modules import LoraExperts

from .layers import Batch, E, H, K, base_tensors, error, expected, lora_tensors, make_wrapper

MOST = 1e-2


def make_module(pinned: bool = False, nonfinite: str = "error", **arguments) -> LoraExperts:
    wrapper = make_wrapper(**arguments)
    wrapper.load_weights_from_tensors(*base_tensors(), torch.arange(E))
    module = LoraExperts(wrapper, pinned=pinned, nonfinite=nonfinite)
    fill(module)
    return module


def fill(module: LoraExperts, seed: int = 7) -> None:
    with torch.no_grad():
        for name, tensor in lora_tensors(seed=seed).items():
            module.lora_parameters()[name].copy_(tensor)


def leaves(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.x.clone().requires_grad_(), batch.ids, batch.scores.clone().requires_grad_()


def grads_of(module: LoraExperts, *inputs: torch.Tensor) -> list[torch.Tensor]:
    found = [t.grad.clone() for t in (*inputs, *module.lora_parameters().values())]
    module.zero_grad()
    return found


def plain_step(module: LoraExperts, batch: Batch) -> list[torch.Tensor]:
    x, ids, scores = leaves(batch)
    module(x, ids, scores).backward(batch.grad)
    return grads_of(module, x, scores)


def assert_same(found, wanted) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_gradients():
    module, batch = make_module(), Batch(9)
    wanted = expected(module.wrapper, batch, lora_tensors())
    x, ids, scores = leaves(batch)
    y = module(x, ids, scores)
    assert y.dtype == x.dtype and error(y.detach(), wanted.y) < MOST
    y.backward(batch.grad)
    assert error(x.grad, wanted.x) < MOST and error(scores.grad, wanted.scores) < MOST
    for name, gradient in zip(LORA_NAMES, wanted.lora, strict=True):
        assert error(module.lora_parameters()[name].grad, gradient) < MOST, name
    assert module.wrapper.pending == 0


def test_names_shapes_and_initial_values():
    module = LoraExperts(make_wrapper(), adapter_name="mine", dtype=torch.bfloat16)
    named = dict(module.named_parameters())
    assert sorted(named) == sorted(
        f"lora_{m}_{s}.mine" for m in ("gate", "up", "down") for s in "AB"
    )
    assert named["lora_gate_A.mine"].abs().max() <= H**-0.5
    assert named["lora_gate_A.mine"].float().std() > 0.5 * H**-0.5
    assert not named["lora_down_B.mine"].any()
    assert all(p.requires_grad and p.dtype == torch.bfloat16 for p in named.values())
    skipped = LoraExperts(make_wrapper("AMXBF16_SFT_SkipLoRA"))
    assert not any(p.requires_grad for p in skipped.parameters())
    for wrong, text in (
        ({"adapter_name": "a.b"}, "without dots"),
        ({"dtype": torch.int8}, "float"),
        ({"adapter_name": 1}, "adapter_name must be a string, got 1"),
        ({"nonfinite": True}, "nonfinite=True; accepted: 'error', 'propagate'"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype, got 'float32'"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            LoraExperts(make_wrapper(), **wrong)
    with pytest.raises(TypeError, match="wrapper must come from KTMoEWrapper"):
        LoraExperts(torch.nn.Linear(2, 2))


def test_only_what_needs_gradients_gets_them():
    module, batch = make_module(), Batch(4)
    with torch.no_grad():
        y = module(*batch.forward)
    assert not y.requires_grad and module.wrapper.pending == 0
    wanted = plain_step(module, batch)
    module(*batch.forward).backward(batch.grad)  # no input needs a gradient
    assert_same(grads_of(module), wanted[2:])
    module.requires_grad_(False)
    assert not module(*batch.forward).requires_grad and module.wrapper.pending == 0
    x, ids, scores = leaves(batch)
    module(x, ids, scores).backward(batch.grad)  # as in a layer below others that train
    assert_same((x.grad, scores.grad), wanted[:2])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_leaves_nothing_behind(reentrant, dropout):
    module, batch = make_module(lora_dropout=dropout), Batch(16)
    torch.manual_seed(3)
    wanted = plain_step(module, batch)
    torch.manual_seed(3)
    x, ids, scores = leaves(batch)
    y = checkpoint(module, x, ids, scores, use_reentrant=reentrant)
    assert module.wrapper.pending == 0  # the first pass was dropped
    torch.manual_seed(99)
    y.backward(batch.grad)
    assert_same(grads_of(module, x, scores), wanted)
    assert module.wrapper.pending == 0
    torch.manual_seed(3)
    assert torch.equal(y, module(*batch.forward))


def test_more_passes_than_room_in_any_order():
    """What was not kept, or is not the newest, is computed again."""
    module, batches = make_module(lora_dropout=0.5), [Batch(4, seed=s) for s in range(3)]
    wanted = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        wanted.append(plain_step(module, batch))
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        inputs, outputs = [leaves(batch) for batch in batches], []
        for number, given in enumerate(inputs):
            torch.manual_seed(number)
            outputs.append(module(*given))
        for number in order:
            outputs[number].backward(batches[number].grad)
            x, _, scores = inputs[number]
            assert_same(grads_of(module, x, scores), wanted[number])
        del outputs
        gc.collect()
        assert module.wrapper.pending == 0


def test_graphs_that_are_dropped_or_kept():
    module, batch = make_module(), Batch(4)
    wanted = plain_step(module, batch)
    for _ in range(3):
        module(*leaves(batch))  # no backward
    gc.collect()
    assert module.wrapper.pending == 0
    x, ids, scores = leaves(batch)
    y = module(x, ids, scores)
    y.backward(batch.grad, retain_graph=True)
    y.backward(batch.grad)
    assert_same(grads_of(module, x, scores), [2 * g for g in wanted])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        x, ids, scores = leaves(batch)
        module(x, ids, scores).backward(batch.grad)  # even the ticket is a copy
    assert_same(grads_of(module, x, scores), wanted)


@pytest.mark.parametrize("fused", [False, True])
def test_accumulation_and_optimizers(fused):
    """Changed parameters are read again by themselves, gradients are summed by autograd."""
    module, batches = make_module(), [Batch(4, seed=s) for s in (1, 2)]
    single = [plain_step(module, batch)[2:] for batch in batches]
    for batch in batches:
        module(*batch.forward).backward(batch.grad)
    parameters = list(module.parameters())
    for p, a, b in zip(module.lora_parameters().values(), *single, strict=True):
        assert error(p.grad, (a + b)) < 1e-6
    before = module(*batches[0].forward).detach()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.optim.AdamW(parameters, lr=0.1, fused=fused).step()
    module.zero_grad()
    after = module(*batches[0].forward)
    assert not torch.equal(after, before)
    fresh = make_module()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(*batches[0].forward), after)
    for p in parameters:  # as no optimizer of torch does it: not seen, so it has to be said
        p.data.zero_()
    assert torch.equal(module(*batches[0].forward), after)
    module.update_lora_weights()
    assert not torch.equal(module(*batches[0].forward), after)


def test_step_between_forward_and_backward():
    module, batch = make_module(), Batch(4)
    x, ids, scores = leaves(batch)
    y = module(x, ids, scores)
    with torch.no_grad():
        module.lora_parameters()["gate_lora_a"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(batch.grad)


def test_gradients_that_are_not_finite():
    module, batch = make_module(), Batch(4)
    x, ids, scores = leaves(batch)
    bad = batch.grad.clone()
    bad[1] = float("nan")
    with pytest.raises(RuntimeError, match="layer 5: grad_output has a NaN or infinite value"):
        module(x, ids, scores).backward(bad)
    gc.collect()
    assert_same(plain_step(module, batch)[2:], plain_step(make_module(), batch)[2:])


def test_a_gradient_scaler_skips_steps_and_goes_on():
    """fp16: the scale is too large at first. The step that is taken is that of the same gradients
    without a scale."""
    module, batch = make_module(nonfinite="propagate"), Batch(4)
    module.train()
    wanted = plain_step(make_module(), batch)[2:]
    before = [p.detach().clone() for p in module.lora_parameters().values()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    skipped = 0
    while all(map(torch.equal, module.lora_parameters().values(), before)):
        optimizer.zero_grad()
        x = batch.x.half().requires_grad_()
        y = module(x, batch.ids, batch.scores)
        scaler.scale((y * batch.grad.half()).sum(dtype=torch.float32)).backward()
        assert module.wrapper.pending == 0
        skipped += not all(bool(p.grad.isfinite().all()) for p in module.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert skipped < 24
    assert skipped > 4 and scaler.get_scale() == 2.0 ** (24 - skipped)
    for p, old, gradient in zip(module.lora_parameters().values(), before, wanted, strict=True):
        assert error(old - p.detach(), gradient) < 1e-2


def test_a_submitted_pass_between_forward_and_backward():
    module, batch = make_module(max_cache_depth=2), Batch(4)
    wanted = plain_step(module, batch)
    x, ids, scores = leaves(batch)
    y = module(x, ids, scores)
    module.wrapper.submit_forward_sft(*batch.forward)
    with pytest.raises(RuntimeError, match="backward after submit_forward_sft; call sync_forward"):
        y.backward(batch.grad, retain_graph=True)
    module.wrapper.sync_forward_sft()
    y.backward(batch.grad)
    assert_same(grads_of(module, x, scores), wanted)


def test_evaluation_mode_has_no_dropout():
    module, plain, batch = make_module(lora_dropout=0.5).eval(), make_module(), Batch(8)
    x, ids, scores = leaves(batch)
    y = module(x, ids, scores)
    others = leaves(batch)
    wanted = plain(*others)
    assert torch.equal(y, wanted)
    y.backward(batch.grad)
    wanted.backward(batch.grad)
    for mine, other in zip((x, scores), (others[0], others[2]), strict=True):
        assert torch.equal(mine.grad, other.grad)
    pairs = zip(module.lora_parameters().values(), plain.lora_parameters().values(), strict=True)
    assert all(torch.equal(mine.grad, other.grad) for mine, other in pairs)


def test_autocast_and_dtypes():
    module, batch = make_module(), Batch(4)
    wanted = plain_step(module, batch)
    with torch.autocast("cpu", torch.bfloat16):
        x, ids, scores = leaves(batch)
        x32 = batch.x.float().requires_grad_()
        y = module(x32, ids, scores)
        assert y.dtype == torch.float32 and y.shape == x.shape
    y.backward(batch.grad.float())
    assert x32.grad.dtype == torch.float32
    assert_same([x32.grad.bfloat16(), *grads_of(module)], [wanted[0], *wanted[2:]])
    module.to(torch.bfloat16)
    module(*batch.forward).backward(batch.grad)
    for parameter, gradient in zip(module.lora_parameters().values(), wanted[2:], strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        assert torch.equal(parameter.grad, gradient.bfloat16())


def test_compiled_models():
    """torch.compile leaves the experts as they are, and compiles what is around them."""
    module, batch = make_module(), Batch(5)
    wanted = plain_step(module, batch)

    def twice(*given: torch.Tensor) -> torch.Tensor:
        return module(*given) * 2

    x, ids, scores = leaves(batch)
    torch.compile(twice, backend="eager")(x, ids, scores).backward(batch.grad / 2)
    assert_same(grads_of(module, x, scores), wanted)


def test_leading_dimensions_and_no_tokens():
    module, batch = make_module(), Batch(6)
    x = batch.x.view(2, 3, H)
    assert torch.equal(module(x, batch.ids, batch.scores).view(6, H), module(*batch.forward))
    x = torch.zeros(0, H, requires_grad=True)
    ids, scores = torch.zeros(0, K, dtype=torch.long), torch.zeros(0, K)
    module(x, ids, scores).sum().backward()
    assert x.grad.shape == (0, H)
    assert all(not p.grad.any() for p in module.parameters())


def test_copies_are_refused_and_pinned_parameters_stay():
    module = make_module(pinned=True)
    with pytest.raises(TypeError, match="layer 5: experts on the CPU cannot be copied or pickled"):
        copy.deepcopy(module)
    module.double()
    parameters = module.lora_parameters().values()
    assert all(p.dtype == torch.float64 and p.device.type == "cpu" for p in parameters)
    assert "method=AMXBF16_SFT, rank=4" in repr(module)
