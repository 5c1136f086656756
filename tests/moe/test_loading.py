"""Weights that arrive one by one or from files: errors in between, memory, forks."""

import os
import re
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from moe_cases import Case
from safetensors.torch import save_file

from kt_kernel.weights import loading

CASE = Case(method="AMXINT8")
BIASED = Case(biases=True)


def expert(case, index):
    return [matrix[index] for matrix in (case.gate, case.up, case.down)]


def biases(case, index, given=True):
    return {name: bias[index] for name, bias in case.bias.items() if given}


def test_a_failed_delivery_counts_as_none():
    wrapper = CASE.wrapper(load=False)
    for slot in range(6):
        wrapper.load_expert(slot, *expert(CASE, slot))
    bad = CASE.down[4].clone()
    bad[1, 2] = float("nan")
    with pytest.raises(ValueError, match="slot 4, down row 1"):
        wrapper.load_expert(4, CASE.up[0], CASE.up[1], bad)
    with pytest.raises(ValueError, match=r"1 cold experts were not loaded: slots \[4\]"):
        wrapper.finish_loading()
    with pytest.raises(ValueError, match="gate_proj of slot 5"):  # refused before anything happens
        wrapper.load_expert(5, CASE.down[5], CASE.up[5], CASE.down[5])
    wrapper.load_expert(4, *expert(CASE, 4))
    wrapper.finish_loading()
    batch = CASE.batch(5)
    assert torch.equal(wrapper.forward(*batch), CASE.wrapper().forward(*batch))


@pytest.mark.parametrize("biased_deliveries", [(True, False), (False, True)])
def test_a_second_delivery_replaces_biases_too(biased_deliveries):
    wrapper = BIASED.wrapper(load=False)
    for biased in biased_deliveries:
        for slot in range(6):
            wrapper.load_expert(slot, *expert(BIASED, slot), **biases(BIASED, slot, biased))
    wrapper.finish_loading()
    batch = BIASED.batch(5)
    wanted = BIASED.wrapper(load=False)
    last = BIASED.bias if biased_deliveries[1] else {}
    wanted.load_weights_from_tensors(BIASED.gate, BIASED.up, BIASED.down, BIASED.mapping, **last)
    assert torch.equal(wrapper.forward(*batch), wanted.forward(*batch))


def test_an_expert_without_biases_among_ones_with():
    wrapper = BIASED.wrapper(load=False)
    for slot in range(6):
        wrapper.load_expert(slot, *expert(BIASED, slot), **biases(BIASED, slot, slot != 2))
    wrapper.finish_loading()
    zeroed = Case(biases=True)
    for bias in zeroed.bias.values():
        bias[2] = 0
    batch = BIASED.batch(5)
    assert torch.equal(wrapper.forward(*batch), zeroed.wrapper().forward(*batch))


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_slots_of_any_integer_type(kind):
    wrapper = CASE.wrapper(load=False)
    for slot in range(6):
        wrapper.load_expert(kind(slot), *expert(CASE, slot))
    wrapper.finish_loading()
    batch = CASE.batch(2)
    assert torch.equal(wrapper.forward(*batch), CASE.wrapper().forward(*batch))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_weights_without_data(which):
    wrapper = CASE.wrapper(load=False)
    for replaced, text in (
        (lambda t: t.to("meta"), "it is on meta"),
        (lambda t: t.to_sparse(), "it has layout"),
    ):
        given = expert(CASE, 1)
        given[which] = replaced(given[which])
        name = ("gate", "up", "down")[which]
        with pytest.raises(
            ValueError, match=f"layer 0: {name}_proj of slot 1 must be a dense.*{text}"
        ):
            wrapper.load_expert(1, *given)


def test_out_of_memory_says_what_for(monkeypatch):
    wrapper = CASE.wrapper(load=False)

    class Full:
        def MoeLayer(self, *arguments, **named):
            raise MemoryError

        def __getattr__(self, name):
            raise AssertionError(name)

    monkeypatch.setattr("kt_kernel.moe.wrapper.native", Full)
    with pytest.raises(MemoryError, match="layer 0: not enough memory for 6 experts of hidden_s"):
        wrapper.load_weights_from_tensors(CASE.gate, CASE.up, CASE.down, CASE.mapping)


# ---- from files -----------------------------------------------------------------------------


def save(folder, case, stacked=False):
    base = "model.layers.0.mlp.experts"
    if stacked:
        # Llama 4 stores what x is multiplied with from the right: all has to be transposed.
        (folder / "config.json").write_text('{"model_type": "llama4_text"}')
        base = "model.layers.0.feed_forward.experts"
        gate_up = torch.cat([case.gate, case.up], 1).transpose(1, 2).contiguous()
        tensors = {
            f"{base}.gate_up_proj": gate_up,
            f"{base}.down_proj": case.down.transpose(1, 2).contiguous(),
        }
    else:
        tensors = {
            f"{base}.{e}.{name}_proj.weight": matrix[e].contiguous()
            for e in range(case.experts)
            for name, matrix in (("gate", case.gate), ("up", case.up), ("down", case.down))
        }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("stacked", [False, True])
def test_few_experts_are_in_memory_at_a_time(tmp_path, monkeypatch, stacked):
    """Of a layout that has to be copied: one that is packed, one that waits and one being read."""
    from kt_kernel.checkpoint import ahead
    from kt_kernel.checkpoint.safetensors import bf16

    monkeypatch.setattr(ahead, "AHEAD_BYTES", 1)
    monkeypatch.setattr(loading, "BATCH_BYTES", 1)
    case = Case(mapping=torch.tensor([4, 0, 0, 2, 1, 5]))
    alive = weakref.WeakSet()
    packed = []
    most = 0
    name = "_read_stacked" if stacked else "_read_per_expert"
    original = getattr(bf16, name)

    def reading(*arguments):
        nonlocal most
        tensors = original(*arguments)
        alive.add(tensors["gate"])
        most = max(most, len(alive))
        return tensors

    monkeypatch.setattr(bf16, name, reading)
    wrapper = case.wrapper(load=False, weight_path=save(tmp_path, case, stacked))
    pack = wrapper._pack

    def packing(core, experts):
        time.sleep(0.02)  # the reader gets ahead as far as it may
        packed.extend(slot for slot, _ in experts)
        pack(core, experts)

    monkeypatch.setattr(wrapper, "_pack", packing)
    wrapper.load_weights(case.mapping)
    assert packed == [1, 2, 4, 3, 0, 5] and 2 <= most <= 3
    batch = case.batch(5)
    assert torch.equal(wrapper.forward(*batch), case.wrapper().forward(*batch))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"experts": 4}, "4 experts of hidden size 64 and intermediate size 32"),
        ({"hidden": 96}, "6 experts of hidden size 96 and intermediate size 32"),
        ({"inter": 64}, "6 experts of hidden size 64 and intermediate size 64"),
    ],
)
def test_weights_of_another_model(tmp_path, monkeypatch, other, found, stacked):
    wrapper = Case().wrapper(load=False, weight_path=save(tmp_path, Case(**other), stacked))
    monkeypatch.setattr(wrapper, "_make_core", None)  # nothing may be packed before
    expected = "expected 6 experts of hidden size 64 and intermediate size 32"
    with pytest.raises(ValueError, match=f"{found}; {expected}") as caught:
        wrapper.load_weights(torch.arange(6))
    assert f"layer 0: weight_path {tmp_path}: " in str(caught.value)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert not wrapper.loaded


@pytest.mark.parametrize("bad_expert", [0, 5])
def test_a_weight_that_is_not_finite_in_a_file(tmp_path, bad_expert):
    case = Case(method="AMXINT8")
    case.up[bad_expert, 3, 3] = float("inf")
    wrapper = case.wrapper(load=False, weight_path=save(tmp_path, case))
    text = f"^layer 0: weight_path {tmp_path}: expert slot {bad_expert}, up row 3: a weight is NaN"
    with pytest.raises(ValueError, match=text):
        wrapper.load_weights(torch.arange(6))
    assert not wrapper.loaded and wrapper.packed_bytes == 0


def test_a_path_through_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "model"
    wrapper = CASE.wrapper(load=False, weight_path=path)
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        wrapper.load_weights(CASE.mapping)


@pytest.mark.parametrize("what", ["shorter", "touched", "gone"])
def test_a_file_that_changes_while_it_is_loaded(tmp_path, monkeypatch, what):
    """Refused before the next expert is read; one that is only gone from its folder stays there."""
    from kt_kernel.checkpoint import ahead
    from kt_kernel.checkpoint.safetensors import bf16

    monkeypatch.setattr(ahead, "AHEAD_BYTES", 1)
    monkeypatch.setattr(loading, "BATCH_BYTES", 1)
    case = Case()
    path = save(tmp_path, case) / "model.safetensors"
    original = bf16._read_per_expert
    reads = 0

    def reading(*arguments):
        nonlocal reads
        reads += 1
        if reads == 4:
            if what == "gone":
                path.unlink()
            elif what == "touched":
                os.utime(path)
            else:
                os.truncate(path, path.stat().st_size - 10)
        return original(*arguments)

    monkeypatch.setattr(bf16, "_read_per_expert", reading)
    wrapper = case.wrapper(load=False, weight_path=tmp_path)
    if what == "gone":
        wrapper.load_weights(case.mapping)
        batch = case.batch(5)
        assert torch.equal(wrapper.forward(*batch), case.wrapper().forward(*batch))
        return
    with pytest.raises(ValueError, match=f"{path}: changed since the checkpoint was opened"):
        wrapper.load_weights(case.mapping)
    assert not wrapper.loaded and reads == 4
    assert not any(thread.name == "kt-read" for thread in threading.enumerate())


@pytest.mark.parametrize("quantised", [False, True])
def test_what_loading_took(tmp_path, quantised):
    method = "FP8" if quantised else "BF16"
    case = Case(method=method, hidden=128, inter=128) if quantised else Case()
    wrapper = case.wrapper()
    record = wrapper.load_record
    sources = 6 * 3 * 128 * 128 if quantised else 6 * 3 * 64 * 32 * 2
    assert record.packed_bytes == wrapper.packed_bytes > 0 < record.seconds
    assert record.source_bytes == pytest.approx(sources, rel=0.01)
    arrived = case.wrapper(load=False)
    for slot in range(6):
        arrived.load_expert(slot, *[matrices[slot] for matrices in case.sources])
    arrived.finish_loading()
    assert arrived.load_record.source_bytes == record.source_bytes
    sizes = r"[\d.]+MB packed from [\d.]+MB"
    text = (record + record).describe(" of packing")
    assert re.fullmatch(sizes + r" in \S+ s of packing \([\d.]+[MG]B/s\)", text)


def test_of_files_what_is_stored_counts(tmp_path):
    """Not what it becomes: a method that quantises takes FP8 weights as float32."""
    codes = torch.randint(0, 120, (6, 3, 128, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {}
    for e in range(6):
        for m, name in enumerate(("gate", "up", "down")):
            base = f"model.layers.0.mlp.experts.{e}.{name}_proj"
            tensors[f"{base}.weight"] = codes[e, m].clone()
            tensors[f"{base}.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    case = Case(method="AMXINT8", hidden=128, inter=128)
    wrapper = case.wrapper(load=False, weight_path=tmp_path)
    wrapper.load_weights(case.mapping)
    assert wrapper.load_record.source_bytes == 6 * 3 * (128 * 128 + 4)


# ---- forks ----------------------------------------------------------------------------------

FORK = """
import os, sys, threading
sys.path.insert(0, {folder!r})
from moe_cases import Case
from kt_kernel.checkpoint import checkpoint
case = Case()
wrapper = case.wrapper(load=False)
for slot in range(5):
    wrapper.load_expert(slot, case.gate[slot], case.up[slot], case.down[slot])
held, go_on = threading.Event(), threading.Event()

def loading():
    with wrapper._load_lock, checkpoint._lock:
        held.set()
        go_on.wait()

thread = threading.Thread(target=loading)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    try:
        wrapper.finish_loading()
    except ValueError as error:
        assert "slots [5]" in str(error)
    wrapper.load_expert(5, case.gate[5], case.up[5], case.down[5])
    wrapper.finish_loading()
    try:
        checkpoint.open_checkpoint("nowhere")
    except FileNotFoundError:
        os._exit(0)
    os._exit(1)
_, status = os.waitpid(child, 0)
go_on.set()
thread.join()
sys.exit(status != 0)
"""


def test_a_fork_while_another_thread_loads():
    code = FORK.format(folder=os.path.dirname(__file__))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
