"""Everything that can be wrong with the tensors of a checkpoint, for every kind of checkpoint: each
an error that names file and tensor. test_errors.py has what does not depend on the kind."""

import json

import pytest
import torch
from quantised_files import E, fails, save
from safetensors.torch import save_file
from samples import UNUSED, H, I, samples

from kt_kernel.checkpoint import read_experts
from kt_kernel.testing import values_of

SAMPLES = samples()


def write(folder, sample, tensors=None):
    tensors = sample.tensors if tensors is None else tensors
    return save(folder, tensors, sample.quantization, sample.model_type)


def refused(path, sample, *words):
    fails(path, sample.method, *words, hidden=H, inter=I)


def kinds(sample):
    """One tensor for each different end of a name: for single experts, of a middle one's up."""
    found = {}
    for name in sample.tensors:
        if name.endswith(UNUSED):
            continue
        single = ".1.up_proj." in name
        if single or not any(f".{e}." in name.split("layers.0")[1] for e in range(E)):
            found[name] = sample.tensors[name]
    return found


def per_expert(sample):
    return any(".1.up_proj." in name for name in sample.tensors)


@pytest.fixture(params=SAMPLES)
def sample(request):
    return SAMPLES[request.param]


def test_the_samples_are_read(tmp_path, sample):
    """And stand for what their own arithmetic says: what follows is wrong by one thing only."""
    check_values(write(tmp_path, sample), sample)


def check_values(path, sample):
    found = read_experts(path, 0, E, H, I, method=sample.method)
    wanted = sample.values(sample.tensors, sample.quantization or {})
    for field, values in wanted.items():
        for read, value in zip(getattr(found, field), values, strict=True):
            plain = read.double() if isinstance(read, torch.Tensor) else values_of(read)
            assert torch.equal(plain, value), field


def test_missing(tmp_path, sample):
    """g_idx and weight_shape may be missing everywhere, but not of one expert alone."""
    for number, name in enumerate(kinds(sample)):
        tensors = {n: t for n, t in sample.tensors.items() if n != name}
        path = write(tmp_path / str(number), sample, tensors)
        if name.endswith("_bias"):  # then the other one is what does not belong there
            refused(path, sample, path / "model.safetensors", "_bias")
        else:
            refused(path, sample, path / "model.safetensors", name, "missing")


def test_renamed(tmp_path, sample):
    for number, name in enumerate(kinds(sample)):
        for end in ("x", "_2", ".extra"):
            tensors = dict(sample.tensors)
            tensors[name + end] = tensors.pop(name)
            path = write(tmp_path / f"{number}{end}", sample, tensors)
            # Either the new name is unknown or the old one is missing.
            refused(path, sample, path / "model.safetensors", "tensor 'model.layers.0.")


def test_duplicated(tmp_path, sample):
    path = write(tmp_path, sample)
    for name, tensor in kinds(sample).items():
        save_file({name: tensor.contiguous()}, path / "more.safetensors")
        refused(path, sample, path / "model.safetensors", path / "more.safetensors", repr(name))


def test_misshapen(tmp_path, sample):
    """More, fewer and transposed elements. Where a shape makes another format of the tensor, or
    weights of several tensors are compared, it may be another tensor that is named."""
    for number, (name, tensor) in enumerate(kinds(sample).items()):
        flat = tensor.reshape(-1)
        shapes = [torch.cat([flat, flat[:1]]), tensor.reshape(1, 1, 1, *tensor.shape)]
        if tensor.dim() > 1 and tensor.shape[-1] != tensor.shape[-2]:
            shapes.append(tensor.transpose(-1, -2))
        if tensor.dim() and tensor.shape[0] > 1:
            shapes.append(tensor[1:])
        for variant, changed in enumerate(shapes):
            tensors = sample.tensors | {name: changed}
            path = write(tmp_path / f"{number}-{variant}", sample, tensors)
            refused(path, sample, path / "model.safetensors", "tensor 'model.layers.0.")


def test_of_another_dtype(tmp_path, sample):
    for number, (name, tensor) in enumerate(kinds(sample).items()):
        tensors = sample.tensors | {name: torch.zeros(tensor.shape, dtype=torch.float64)}
        path = write(tmp_path / str(number), sample, tensors)
        refused(path, sample, path / "model.safetensors", name, "F64")


def test_bad_scales(tmp_path, sample):
    """NaN, infinite and negative ones, in the last place of a middle expert or of the stack. Scales
    of integer groups may be negative."""
    signed = sample.method in ("RAWINT4", "GPTQ_INT4", "AWQ_INT4", "AMXINT8", "MIXED")
    for name, tensor in kinds(sample).items():
        if "scale" not in name:
            continue
        for value in (float("nan"), float("inf"), float("-inf") if signed else -1.0):
            changed = tensor.contiguous().clone()
            if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
                changed.view(torch.uint8).view(-1)[-1] = 255  # all that ue8m0 has of these
            elif tensor.dtype == torch.float8_e4m3fn:
                bits = 0x7F if value != -1.0 else 0xB8  # no infinities
                changed.view(torch.uint8).view(-1)[-1] = bits
            else:
                changed.view(-1)[-1] = value
            path = write(
                tmp_path / f"{name[-12:]}{value}", sample, sample.tensors | {name: changed}
            )
            refused(path, sample, path / "model.safetensors", name, "accepted")


def test_misnumbered(tmp_path, sample):
    """A gap, a number too many, one written twice; of stacks, one expert more or fewer."""
    if not per_expert(sample):
        for number, extra in enumerate((-1, 1)):
            tensors = {
                n: t if t.dim() == 0 or t.shape[0] != E else torch.cat([t, t])[: E + extra]
                for n, t in sample.tensors.items()
            }
            path = write(tmp_path / str(number), sample, tensors)
            refused(path, sample, path / "model.safetensors", f"[{E + extra}, ", f"[{E}, ")
        return
    for old, new, word in (
        (1, 7, ".1."),
        (E - 1, E, f".{E - 1}."),
        (E - 1, 10**8, f".{E - 1}."),
        (1, "01", ".01."),
    ):
        tensors = {
            n.replace(f"experts.{old}.", f"experts.{new}."): t for n, t in sample.tensors.items()
        }
        path = write(tmp_path / str(new), sample, tensors)
        refused(path, sample, path, word)


# What is in a header does not depend on the kind: one of single experts, one of stacks.
SOME = pytest.mark.parametrize("sample", ["GPTQ", "gpt-oss"], indirect=True)


@SOME
def test_truncated_and_longer(tmp_path, sample):
    path = write(tmp_path, sample)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], whole[:100], whole + b"\0"):
        file.write_bytes(data)
        refused(path, sample, file)


def edit_header(file, change):
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@SOME
@pytest.mark.parametrize(
    "change",
    [
        lambda begin, end: [begin, end + 2**40],
        lambda begin, end: [begin + 2**62, end + 2**62],
        lambda begin, end: [begin + 1, end + 1],
        lambda begin, end: [begin - 1, end - 1] if begin else [1, end + 1],
        lambda begin, end: [end, begin],
        lambda begin, end: [begin, end, end],
        lambda begin, end: [-1, end],
    ],
)
def test_offsets(tmp_path, sample, change):
    """Huge, overlapping, with a hole, reversed."""
    for number, name in enumerate(kinds(sample)):
        path = write(tmp_path / str(number), sample)
        file = path / "model.safetensors"

        def edit(header, name=name):
            header[name]["data_offsets"] = change(*header[name]["data_offsets"])

        edit_header(file, edit)
        refused(path, sample, file, "tensor '")


def test_index_and_files_that_disagree(tmp_path, sample):
    """The index says that a tensor is there, or in another file, or does not know it: the files
    count. Only a file that is missing is an error."""
    names = list(sample.tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: sample.tensors[n].contiguous() for n in part}, tmp_path / file)
    good = {name: file for file, part in parts.items() for name in part}
    name = next(iter(kinds(sample)))
    file = good[name]
    (other,) = parts.keys() - {file}
    config = {"model_type": sample.model_type, "quantization_config": sample.quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = tmp_path / "model.safetensors.index.json"

    def write_index(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))

    write_index(good)
    check_values(tmp_path, sample)
    others = [good | {name + "2": file}]
    if len(parts[file]) > 1:  # or the index would not know the file
        others += [good | {name: other}, {n: f for n, f in good.items() if n != name}]
    for weight_map in others:
        write_index(weight_map)
        check_values(tmp_path, sample)
    write_index(good | {name: "c.safetensors"})
    refused(tmp_path, sample, index, "c.safetensors", repr(name))


def test_two_models_in_one_folder(tmp_path, sample):
    """The same layer under two prefixes that a model may have, or in two formats."""
    other = {
        n.replace("model.", "model.language_model.", 1): t.clone()
        for n, t in sample.tensors.items()
    }
    path = write(tmp_path / "a", sample, sample.tensors | other)
    places = ("model.layers.0.", "model.language_model.layers.0.", "several places")
    refused(path, sample, path, *places)
    if per_expert(sample):
        stack = {
            "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(E, 2 * I, H),
            "model.layers.0.mlp.experts.down_proj": torch.zeros(E, H, I),
        }
        path = write(tmp_path / "b", sample, sample.tensors | stack)
        refused(path, sample, path, "several places", "model.layers.0.mlp.experts")
