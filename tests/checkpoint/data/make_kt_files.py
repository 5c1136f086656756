"""Makes the files of kt-kernel's converted weights in this folder, with kt-kernel's wheel.

    pip download --no-deps --python-version 3.12 --only-binary :all: kt-kernel==0.7.2
    unzip kt_kernel-0.7.2-cp312-*.whl -d FOLDER
    python3.12 make_kt_files.py FOLDER         needs numpy, safetensors and a CPU with AMX

Nothing of kt-kernel is installed. Its compiled classes quantise the weights of `kt_cases.source`
and save them as .kt files. These are merged under the names that its converter
(scripts/convert_cpu_weights.py) uses; the bytes of a file are those of a tensor. Whole layers go to
{case}/model.safetensors. One layer goes to kt_folder, as the folder of .kt files that the converter
merges. Larger layers are kept as SHA-256 in kt_digests.json.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from kt_cases import FOLDER, LARGE, MATRICES, SMALL, Case, source  # noqa: E402


def load_extension(folder: str) -> Any:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = Path(folder) / "kt_kernel" / f"_kt_kernel_ext_amx{suffix}"
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quantise(ext: Any, case: Case, folder: str) -> Any:
    """Saves the layer's .kt files below `folder`; returns kt-kernel's layer and its queue."""
    pools = ext.WorkerPoolConfig()
    pools.subpool_count = case.parts
    pools.subpool_numa_map = [0] * case.parts
    pools.subpool_thread_count = [1] * case.parts
    cpu = ext.CPUInfer(pools)
    config = ext.moe.MOEConfig(case.experts, 1, case.hidden, case.inter, 0)
    config.layer_idx, config.pool, config.max_len = case.layer, cpu.backend_, 32
    config.save, config.load, config.path = True, False, folder
    keep = []
    for matrix in MATRICES:
        weights = np.stack([source(case, expert, matrix) for expert in range(case.experts)])
        keep.append((weights.view(np.uint32) >> 16).astype(np.uint16))
        setattr(config, f"{matrix}_proj", keep[-1].ctypes.data)
    layer = (ext.moe.AMXInt8_MOE if case.bits == 8 else ext.moe.AMXInt4_MOE)(config)
    slots = np.arange(case.experts, dtype=np.int64)
    cpu.submit(layer.load_weights_task(slots.ctypes.data))
    cpu.sync()
    return layer, cpu


def merge(case: Case, folder: str) -> dict[str, np.ndarray]:
    tensors = {}
    for part in range(case.parts):
        place = Path(folder) / f"_layer_{case.layer}" / f"_numa_{part}"
        for expert in range(case.experts):
            for matrix in MATRICES:
                name = f"blk.{case.layer}.ffn_{matrix}_exps.{expert}.numa.{part}"
                start = f"INT{case.bits}_{matrix}_{expert}_*Byte_"
                for kind, end, dtype in (("quant", "weight", np.int8), ("scale", "scale", "<f4")):
                    (file,) = place.glob(f"{start}{kind}_.kt")
                    tensors[f"{name}.{end}"] = np.fromfile(file, dtype)
    return tensors


def main() -> None:
    ext = load_extension(sys.argv[1])
    digests = {}
    for case in (*SMALL, FOLDER, *LARGE):
        with tempfile.TemporaryDirectory() as folder:
            quantise(ext, case, folder)
            tensors = merge(case, folder)
            if case == FOLDER:
                shutil.rmtree(HERE / "kt_folder", ignore_errors=True)
                shutil.copytree(folder, HERE / "kt_folder")
        if case in SMALL:
            (HERE / case.name).mkdir(exist_ok=True)
            save_file(tensors, HERE / case.name / "model.safetensors")
        elif case in LARGE:
            digests[case.name] = {
                name: hashlib.sha256(tensor.tobytes()).hexdigest()
                for name, tensor in sorted(tensors.items())
            }
    (HERE / "kt_digests.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
