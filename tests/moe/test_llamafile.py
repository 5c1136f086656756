"""Method LLAMAFILE: layers from GGUF files, against the oracle with the weights that the gguf
package says they have."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from moe_cases import within

from kt_kernel import KTMoEWrapper
from kt_kernel.checkpoint import read_experts
from kt_kernel.runtime.variant import kernel_table
from kt_kernel.testing import moe_reference_with_noise, row_error

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from gguf_models import MATRICES, SUPPORTED, Model  # noqa: E402

K = 2
MIXED = [
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q2_K", "IQ4_XS", "Q3_K"),
    ("BF16", "Q8_0", "F16"),
    ("Q4_0", "MXFP4", "Q5_1"),
    ("F32", "F16", "BF16"),
    ("Q8_0", "Q5_K", "F32"),
    ("IQ4_NL", "Q4_1", "Q5_0"),
]


def layer(model, path, load=True, **options):
    options = {"cpuinfer_threads": 2, "method": "LLAMAFILE", "weight_path": path} | options
    made = KTMoEWrapper(model.layers[0], model.experts, K, model.hidden, model.inter, **options)
    if load:
        made.load_weights(torch.arange(model.experts))
    return made


def batch(model, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, model.hidden, generator=generator)
    ids = torch.randint(-1, model.experts + 1, (tokens, K), generator=generator)
    return hidden, ids, torch.rand(tokens, K, generator=generator)


def given(model, path):
    found = read_experts(path, model.layers[0], model.experts, model.hidden, model.inter)
    return found.gate, found.up, found.down


def biases(model):
    if not model.biases:
        return {}
    return {f"{m}_bias": torch.from_numpy(model.bias[model.layers[0], m]) for m in MATRICES}


def check(made, model, path, kind="auto", **options):
    """Forward passes of few and many tokens are as near to the oracle as its noise demands."""
    hidden, ids, weights = batch(model, 40)
    y, noise = moe_reference_with_noise(
        hidden,
        ids,
        weights,
        *given(model, path),
        method="LLAMAFILE",
        kind=kind,
        table=kernel_table(),
        **biases(model),
        **options,
    )
    for tokens in (1, 3, 40):
        out = made.forward(hidden[:tokens], ids[:tokens], weights[:tokens])
        assert within(out, y[:tokens], noise[:tokens]), row_error(out, y[:tokens]).max()
    assert y.norm() > 0 and (noise < 0.1 * y.norm(dim=-1)).double().mean() > 0.5


@pytest.mark.parametrize("kinds", [(k,) * 3 for k in SUPPORTED] + MIXED, ids="-".join)
def test_forward(tmp_path, kinds, monkeypatch):
    model = Model(kinds)
    path = model.save(tmp_path / "m.gguf")
    for kind in ("vector", "tile"):
        monkeypatch.setenv("KT_KERNEL_KIND", kind)
        check(layer(model, path), model, path, kind)


@pytest.mark.parametrize("kinds", [(k,) * 3 for k in SUPPORTED] + MIXED[:1], ids="-".join)
def test_what_is_held_are_the_weights_of_the_file(tmp_path, kinds):
    """As float32, rounded once where a block has a minimum."""
    model = Model(kinds, experts=2, hidden=256, inter=512)
    made = layer(model, model.save(tmp_path / "m.gguf"), threadpool_count=2)
    for number, matrix in enumerate(MATRICES):
        wanted = torch.from_numpy(model.values(0, matrix))
        if model.kind[matrix] in ("F32", "F16"):
            wanted = wanted.bfloat16().float()
        for slot in range(model.experts):
            held = torch.empty(wanted.shape[1:])
            made._core.unpack(slot, number, held.numpy())
            assert torch.allclose(held, wanted[slot], rtol=0, atol=2**-23 * wanted.abs().max())
            if model.kind[matrix] not in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"):
                assert torch.equal(held, wanted[slot])


@pytest.mark.parametrize("naming", ["stacked", "fused", "each"])
def test_names_biases_and_pools(tmp_path, naming):
    model = Model(("Q4_K", "Q4_K", "Q8_0"), inter=512, naming=naming, biases=True, layers=(3,))
    path = model.save(tmp_path / "m.gguf")
    check(layer(model, path, threadpool_count=2), model, path)


def test_gpt_oss(tmp_path):
    """Its activation, clamped, with biases; the same bits as with its own method."""
    model = Model(("MXFP4",) * 3, biases=True, arch="gpt-oss")
    path = model.save(tmp_path / "m.gguf")
    swiglu = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    made = layer(model, path, **swiglu)
    check(made, model, path, **swiglu)
    own = layer(model, path, method="MXFP4", **swiglu)
    assert torch.equal(own.forward(*batch(model, 9)), made.forward(*batch(model, 9)))


def test_map_and_mask(tmp_path):
    model = Model(experts=5)
    path = model.save(tmp_path / "m.gguf")
    mapping, mask = torch.tensor([4, 4, 0, 1, 2]), torch.arange(5) == 2
    made = layer(model, path, load=False, gpu_experts_mask=mask)
    made.load_weights(mapping)
    check(made, model, path, physical_to_logical_map=mapping, gpu_experts_mask=mask)


def test_the_same_from_tensors_and_one_by_one(tmp_path):
    model = Model(MIXED[2])
    path = model.save(tmp_path / "m.gguf")
    matrices = given(model, path)
    from_tensors, one_by_one = (layer(model, path, load=False) for _ in range(2))
    from_tensors.load_weights_from_tensors(*matrices, torch.arange(model.experts))
    for slot in range(model.experts):
        one_by_one.load_expert(slot, *(every[slot] for every in matrices))
    one_by_one.finish_loading()
    y = layer(model, path).forward(*batch(model, 7))
    assert torch.equal(from_tensors.forward(*batch(model, 7)), y)
    assert torch.equal(one_by_one.forward(*batch(model, 7)), y)


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "INT4_G32"])
def test_dense_files_quantised_by_other_methods(tmp_path, method):
    model = Model(("F32", "F16", "BF16"))
    path = model.save(tmp_path / "m.gguf")
    made = layer(model, path, method=method)
    tensors = [torch.from_numpy(model.values(0, matrix)) for matrix in MATRICES]
    other = layer(model, None, load=False, method=method)
    other.load_weights_from_tensors(*tensors, torch.arange(model.experts))
    assert torch.equal(made.forward(*batch(model, 6)), other.forward(*batch(model, 6)))


def test_a_bad_file_loads_nothing(tmp_path):
    model = Model()
    model.rows[0, "down"][1, 7, 208:210] = 0xFF
    path = model.save(tmp_path / "m.gguf")
    made = layer(model, path, load=False)
    with pytest.raises(ValueError, match=f"layer 0: weight_path {path}: .*ffn_down_exps.*expert 1"):
        made.load_weights(torch.arange(3))
    assert not made.loaded and made.packed_bytes == 0


def test_matrices_of_another_form(tmp_path):
    model = Model()
    path = model.save(tmp_path / "m.gguf")
    gate, up, down = given(model, path)
    made = layer(model, path, load=False)
    made.load_expert(0, gate[0], up[0], down[0])
    other = dataclasses.replace(Model(("Q5_K",) * 3))
    matrices = given(other, other.save(tmp_path / "o.gguf"))
    with pytest.raises(ValueError, match="slot 1 is gate Q5_K.*before are gate Q4_K, up Q4_K"):
        made.load_expert(1, matrices[0][1], up[1], down[1])
