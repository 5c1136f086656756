"""Launches and questions through the driver, with a library of ours in its place."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
from fake_driver import state
from kernels.compiling import build_fake_driver

from kt_kernel import _C


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_fake_driver(tmp_path_factory.mktemp("cuda"))


def test_arguments_arrive(fake: str) -> None:
    kinds = "pippi"
    last, _ = state(fake, kinds)
    kernel = _C.KernelLaunch(0x1234, 128, 4096, kinds, library=fake)
    kernel.run(7, 2**48, 2**64 - 1, -(2**31), 2**63, 0, 2**31 - 1)
    assert (last.function, last.stream, last.shared, last.has_extra) == (0x1234, 2**48, 4096, 0)
    assert (list(last.grid), list(last.block)) == ([7, 1, 1], [128, 1, 1])
    assert list(last.values)[:5] == [2**64 - 1, 2**31, 2**63, 0, 2**31 - 1]


def test_bound_arguments_arrive(fake: str) -> None:
    """Beside those given at each run, wherever they stand; the kernel lives on with them."""
    last, _ = state(fake, "pippi")
    bound = _C.KernelLaunch(0x1234, 128, 4096, "pippi", library=fake).bind(
        7, 2**64 - 1, None, None, 2**63, 5
    )
    gc.collect()
    for number, address in ((-(2**31), 2**63), (6, 8)):
        bound.run(2**48, number, address)
        assert (last.function, last.stream, last.grid[0]) == (0x1234, 2**48, 7)
        assert list(last.values)[:5] == [2**64 - 1, number % 2**32, address, 2**63, 5]
    for given, error, match in (
        ((1,), ValueError, "1 arguments for 2 parameters"),
        ((1, 2, 3), ValueError, "3 arguments for 2 parameters"),
        ((2**31, 1), ValueError, "parameter 1 is 2147483648; accepted: an int32"),
        ((1, -1), ValueError, "parameter 2 is -1; accepted: an address, 0 to"),
        ((1, None), TypeError, "parameter 2 is None; accepted: an address"),
    ):
        with pytest.raises(error, match=match):
            bound.run(0, *given)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ((1, 1), ValueError, "1 arguments for 2 parameters"),
        ((1, None, 2**31), ValueError, "parameter 1 is 2147483648; accepted: an int32"),
        ((1, 1.5, None), TypeError, "parameter 0 is 1.5; accepted: an address"),
        ((0, 1, 1), ValueError, "a grid of 0 x 1 x 1 blocks; accepted: 1 to 2147483647 x"),
    ],
)
def test_bound_arguments_that_make_no_sense(fake: str, given: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        _C.KernelLaunch(1, 32, 0, "pi", library=fake).bind(*given)


@pytest.mark.parametrize("count", [0, 1, 32])
def test_any_number_of_parameters(fake: str, count: int) -> None:
    last, _ = state(fake, "p" * count)
    _C.KernelLaunch(1, 32, 0, "p" * count, library=fake).run(1, 0, *range(100, 100 + count))
    assert list(last.values) == [*range(100, 100 + count), *[0] * (32 - count)]


class Wait(ctypes.Structure):
    _fields_ = [
        ("stream", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint),
        ("flags", ctypes.c_uint),
    ]


def test_a_launch_waits_first(fake: str) -> None:
    """Only where an address is given; the wait is for equality, on the launch's stream."""
    last, result = state(fake, "i")
    waited = Wait.in_dll(ctypes.CDLL(fake), "waited")
    ctypes.memset(ctypes.addressof(waited), 0, ctypes.sizeof(waited))
    kernel = _C.KernelLaunch(1, 32, 0, "i", library=fake)
    kernel.bind(1, None).run(2**48, 5)
    assert waited.address == 0
    kernel.bind(1, None, wait_address=0x1004).run(2**48, 6)
    assert (waited.stream, waited.address, waited.value, waited.flags) == (2**48, 0x1004, 1, 1)
    assert last.values[0] == 6
    result.value = 801
    with pytest.raises(RuntimeError, match="^cuStreamWaitValue32 failed: CUDA_ERROR_FAKE"):
        kernel.bind(1, None, wait_address=0x1004).run(0, 7)
    assert last.values[0] == 6  # not launched
    result.value = 0
    _C.CudaContext(library=fake).wait(2**48, 0x2008, 3)
    assert (waited.address, waited.value) == (0x2008, 3)


def test_what_the_driver_says(fake: str) -> None:
    _, result = state(fake, "")
    kernel = _C.KernelLaunch(1, 32, 0, "", library=fake)
    result.value = 700
    expected = "^cuLaunchKernel failed: CUDA_ERROR_FAKE, something was made up$"
    with pytest.raises(RuntimeError, match=expected):
        kernel.run(1, 0)
    result.value = 999
    with pytest.raises(RuntimeError, match="^cuLaunchKernel failed: CUresult 999$"):
        kernel.run(1, 0)
    result.value = 0
    kernel.run(1, 0)


def test_a_missing_driver(fake: str) -> None:
    missing = "libkt-no-such-driver.so.1"
    with pytest.raises(
        RuntimeError, match=f"^the CUDA driver {missing} cannot be loaded: .*{missing}"
    ):
        _C.KernelLaunch(1, 32, 0, "", library=missing)
    with pytest.raises(RuntimeError, match=r"^the CUDA driver libc.so.6 has no cuLaunchKernel: "):
        _C.KernelLaunch(1, 32, 0, "", library="libc.so.6")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((0, 32, 0, ""), "function 0"),
        ((1, 0, 0, ""), "threads 0; accepted: 1 to 1024"),
        ((1, 1025, 0, ""), "threads 1025; accepted: 1 to 1024"),
        ((1, 32, -1, ""), "shared_bytes -1; accepted: 0 to"),
        ((1, 32, 0, "pf"), 'kinds "pf"; accepted: p, i and l'),
        ((1, 32, 0, "p" * 33), "33 parameters; at most 32"),
    ],
)
def test_kernels_that_make_no_sense(fake: str, given: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _C.KernelLaunch(*given, library=fake)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ((1, 0, 1), ValueError, "1 arguments for 2 parameters"),
        ((1, 0, 1, 2, 3), ValueError, "3 arguments for 2 parameters"),
        ((0, 0, 1, 2), ValueError, "a grid of 0 x 1 x 1 blocks"),
        ((2**31, 0, 1, 2), ValueError, "a grid of 2147483648 x 1 x 1 blocks"),
        ((1, 0, 1, 2**31), ValueError, "parameter 1 is 2147483648; accepted: an int32"),
        ((1, 0, 1, 2**63), ValueError, f"parameter 1 is {2**63}; accepted: an int32"),
        ((1, 0, -1, 2), ValueError, "parameter 0 is -1; accepted: an address, 0 to"),
        ((1, 0, 2**64, 2), ValueError, f"parameter 0 is {2**64}; accepted: an address"),
        ((1, 0, 1.5, 2), TypeError, "parameter 0 is 1.5; accepted: an address"),
        ((1, 0, 1, None), TypeError, "parameter 1 is None; accepted: an int32"),
    ],
)
def test_launches_that_make_no_sense(fake: str, given: Any, error: Any, match: str) -> None:
    kernel = _C.KernelLaunch(1, 32, 0, "pi", library=fake)
    with pytest.raises(error, match=match):
        kernel.run(*given)


def variables(fake: str, *names: str) -> list[Any]:
    kinds = {"pushes": ctypes.c_int, "capture_status": ctypes.c_int}
    library = ctypes.CDLL(fake)
    return [kinds.get(name, ctypes.c_uint64).in_dll(library, name) for name in names]


def test_a_kernel_runs_in_its_own_context(fake: str) -> None:
    """Whatever is current in the thread that launches it, and that stays so."""
    state(fake, "")
    current, launched, pushes = variables(fake, "context", "launched_in", "pushes")
    current.value = 0x77
    kernel = _C.KernelLaunch(1, 32, 0, "", library=fake)
    kernel.run(1, 0)
    assert (launched.value, pushes.value) == (0x77, 0)
    current.value = 0x99
    kernel.run(1, 0)
    assert (launched.value, pushes.value, current.value) == (0x77, 0, 0x99)
    current.value = 0
    with pytest.raises(RuntimeError, match="^no CUDA context is current$"):
        _C.KernelLaunch(1, 32, 0, "", library=fake)
    current.value = 0x77


def test_copies_to_the_device(fake: str) -> None:
    _, result = state(fake, "")
    library = ctypes.CDLL(fake)
    copied = (ctypes.c_uint64 * 4 * 4).in_dll(library, "copied")
    count, ran_in = variables(fake, "copies", "launched_in")
    context = _C.CudaContext(library=fake)
    count.value = 0
    context.copy(2**48, [])
    assert count.value == 0
    context.copy(2**48, [(2**47, 64, 2**40), (8, 2**46, 5)])
    found = [list(copied[i]) for i in range(2)]
    assert found == [[2**47, 64, 2**40, 2**48], [8, 2**46, 5, 2**48]]
    assert (count.value, ran_in.value) == (2, 0x77)
    result.value = 700
    with pytest.raises(RuntimeError, match="^cuMemcpyHtoDAsync failed: CUDA_ERROR_FAKE"):
        context.copy(0, [(1, 2, 3)])
    result.value = 0


@pytest.mark.parametrize(("status", "captured"), [(0, False), (1, True), (2, True)])
def test_whether_a_stream_is_captured(fake: str, status: int, captured: bool) -> None:
    """2: it was until an error."""
    state(fake, "")
    given, asked = variables(fake, "capture_status", "asked")
    given.value = status
    context = _C.CudaContext(library=fake)
    for stream in (2**48, 0):
        assert context.capturing(stream) is captured
        assert asked.value == stream
    given.value = 0


def test_a_stream_is_asked_in_its_own_context(fake: str) -> None:
    """The handles 0 to 2 mean another stream in each."""
    _, result = state(fake, "")
    current, asked_in, pushes = variables(fake, "context", "launched_in", "pushes")
    context = _C.CudaContext(library=fake)
    current.value = 0x99
    context.capturing(0)
    assert (asked_in.value, pushes.value, current.value) == (0x77, 0, 0x99)
    result.value = 906
    expected = "^cuStreamIsCapturing failed: CUDA_ERROR_FAKE, something was made up$"
    with pytest.raises(RuntimeError, match=expected):
        context.capturing(0)
    assert (pushes.value, current.value) == (0, 0x99)
    current.value = 0
    with pytest.raises(RuntimeError, match="^no CUDA context is current$"):
        _C.CudaContext(library=fake)
    current.value = 0x77


def test_streams_that_make_no_sense(fake: str) -> None:
    state(fake, "")
    context = _C.CudaContext(library=fake)
    for stream in (-1, 2**64, None, 1.5):
        with pytest.raises(TypeError):
            context.capturing(stream)
