"""Uploads on a machine without a GPU: Triton compiles for one, and both launchers are stand-ins.

    python upload_launches.py DRIVER

DRIVER: the stand-in of the CUDA driver. The first upload to a slot goes through Triton, whose
launcher keeps what it was given. Later ones go through the compiled core, and must arrive at the
driver as the same launches: by what the compiled code says of its parameters, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kt_kernel import _C, KTMoEWrapper
from kt_kernel.device import backend, uploads
from kt_kernel.device.slots import DenseSlots, PackedSlots, SlotWeights
from kt_kernel.device.streaming import prepared
from kt_kernel.weights.expert_tensors import MATRICES

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_driver import Last

E, H, INNER, SLOTS = 3, 256, 384, 2
FUNCTION, CPU = 0x1234, torch.device("cpu")
BYTES = {"u64": 8, "u32": 4}


class Launcher:
    """In the place of Triton's. launched: of each launch, the grid, the threads, and the values of
    the parameters that the compiled code has."""

    launched: list[Any] = []

    def __init__(self, src: Any, metadata: Any) -> None:
        self._threads = 32 * metadata.num_warps
        self._constants = [type_ == "constexpr" for type_ in src.signature.values()]

    def __call__(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        values = given[-len(self._constants) :]
        kept = [v for v, constant in zip(values, self._constants, strict=True) if not constant]
        numbers = [v if isinstance(v, int) else v.data_ptr() for v in kept]
        self.launched.append(([x, y, z], self._threads, numbers))


def sizes_in(ptx: str) -> list[int]:
    """Bytes of the parameters of a kernel."""
    head = ptx[ptx.index(".entry") :]
    return [BYTES[type_] for type_ in re.findall(r"\.param \.(\w+)", head[: head.index("{")])]


class Recorder:
    """Launches as the driver got them: the stand-in keeps the last one only, so each is made by
    itself."""

    def __init__(self, library: str) -> None:
        self._state = ctypes.CDLL(library)
        ctypes.c_int.in_dll(self._state, "copying").value = 1

    def run(self, launch: Any, sizes: list[int]) -> Any:
        found = (ctypes.c_int * 32).in_dll(self._state, "sizes")
        found[:] = sizes + [0] * (32 - len(sizes))
        launch.run(1)
        last = Last.in_dll(self._state, "last")
        assert last.function == FUNCTION
        return list(last.grid), last.block[0], list(last.values)[: len(sizes)]


def slots_of(method: str) -> SlotWeights:
    if method == "BF16":
        w13 = torch.zeros(SLOTS, 2 * INNER, H, dtype=torch.bfloat16)
        return DenseSlots(w13, torch.zeros(SLOTS, H, INNER, dtype=torch.bfloat16))
    w13 = torch.zeros(SLOTS, 2 * INNER, H, dtype=torch.int8)
    scales = torch.zeros(SLOTS, 2 * INNER), torch.zeros(SLOTS, H)
    return PackedSlots(w13, torch.zeros(SLOTS, H, INNER, dtype=torch.int8), *scales)


def check(method: str, recorder: Recorder, kernels: list[Any]) -> None:
    wrapper = KTMoEWrapper(0, E, 1, H, INNER, cpuinfer_threads=1, method=method)
    sizes = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
    every = [torch.randn(E, *sizes[which]) for which in MATRICES]
    wrapper.load_weights_from_tensors(*every, torch.arange(E))
    packed, slots = wrapper.packed_experts(), slots_of(method)
    found = uploads.CudaUploads(CPU, [packed])
    for slot in range(SLOTS):
        Launcher.launched.clear()
        found.start([uploads.Upload(packed, slots, slot, slot)])
        through_triton = list(Launcher.launched)
        launches = found.launches(slots, slot)
        assert launches is not None and len(launches) == len(through_triton) == 3
        sizes = sizes_in(kernels[-1].asm["ptx"])
        for launch, (grid, threads, numbers) in zip(launches, through_triton, strict=True):
            # Triton's two scratch pointers follow.
            assert len(sizes) == len(numbers) + 2, (sizes, numbers)
            assert recorder.run(launch, sizes) == (grid, threads, [*numbers, 0, 0])
        found.start([uploads.Upload(packed, slots, 2, slot)])
        assert len(Launcher.launched) == len(through_triton)  # not through Triton
        at = found._memory.numpy()
        want = packed.parts[0].memory[2].numpy()
        assert (at[: len(want)] == want).all()
    assert found.completed() == 2 * SLOTS


def main() -> None:
    library, kernels = sys.argv[1], []

    def load(name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, FUNCTION, 0, 0, 1024

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            launcher_cls=Launcher,
            utils=SimpleNamespace(
                load_binary=load, get_device_properties=lambda device: {"max_shared_mem": 1 << 18}
            ),
        )
    )
    torch.cuda.Stream = lambda device: SimpleNamespace(cuda_stream=1)  # type: ignore
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore
    prepared.handle_of = lambda device, stream: 1  # type: ignore
    uploads.cuda_context = lambda device: _C.CudaContext(library)
    make = backend.kernel_launch

    def kernel_launch(kernel: Any, types: Any) -> Any:
        kernels.append(kernel)
        return make(kernel, types)

    prepared.kernel_launch = kernel_launch
    core = SimpleNamespace(KernelLaunch=partial(_C.KernelLaunch, library=library))
    backend.native = lambda: core
    recorder = Recorder(library)
    for method in ("BF16", "MOE_INT8"):
        check(method, recorder, kernels)
    print("the same launches")


if __name__ == "__main__":
    main()
