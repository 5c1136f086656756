"""What is measured once per machine: the choice, where it is kept, and layers made with it."""

import json

import pytest
import torch
from moe_cases import Case

from kt_kernel.moe import tuning
from kt_kernel.moe import wrapper as base
from kt_kernel.moe.tuning import NEVER, TRIED_BLOCKS, TRIED_ROWS, Tuning
from kt_kernel.runtime import machine_cache, pools
from kt_kernel.runtime.variant import kernel_table
from kt_kernel.weights import formats
from kt_kernel.weights.formats import INT4_GROUP, WeightForm
from kt_kernel.weights.methods import METHODS, get_method

BF16 = WeightForm(formats.BF16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, forget):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_MACHINES", tmp_path / "machines")
    monkeypatch.setattr(machine_cache, "disturbance", lambda *times: None)
    monkeypatch.setattr(pools, "default_thread_count", lambda limit: limit)
    return tmp_path / "kt-moe" / "tuning.json"


@pytest.fixture
def measured(monkeypatch):
    """Stands for the measurement; counts its calls."""
    calls = []

    def measure(form, table):
        calls.append((form, table))
        return Tuning(7, 128), None

    monkeypatch.setattr(tuning, "measure", measure)
    return calls


@pytest.fixture
def again(forget):
    """Asks as a new process does."""

    def ask(form=BF16):
        forget()
        return tuning.tuning_for(form, kernel_table())

    return ask


@pytest.mark.parametrize("place", ["none/file", "folder", "link"])
def test_a_file_that_cannot_be_saved(place, tmp_path, measured, monkeypatch, capsys):
    """Before minutes of measuring."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("none/file")
    monkeypatch.setattr("sys.argv", ["tuning", "--save", str(tmp_path / place)])
    with pytest.raises(SystemExit):
        tuning.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: --save " in last and str(tmp_path) in last and not measured


def test_a_link_to_the_saved_file(tmp_path, measured, monkeypatch):
    (tmp_path / "link").symlink_to("file")
    monkeypatch.setattr("sys.argv", ["tuning", "--save", str(tmp_path / "link")])
    tuning.main()
    assert (tmp_path / "link").is_symlink() and measured
    assert len(json.loads((tmp_path / "file").read_text())) == len(measured)


def test_first_row_count():
    n = len(TRIED_ROWS)
    assert tuning.first_row_count([2.0] * n, [1.0] * n) == TRIED_ROWS[0]
    assert tuning.first_row_count([1.0] * n, [2.0] * n) == NEVER
    gemm = [2.0] * 4 + [1.0] * (n - 4)
    assert tuning.first_row_count([1.5] * n, gemm) == TRIED_ROWS[4]
    gemm[-2] = 9.0  # slower once more: only what comes after counts
    assert tuning.first_row_count([1.5] * n, gemm) == TRIED_ROWS[-1]


def test_measured_once_and_kept_in_a_file(own_cache, measured, again):
    assert again() == again() == Tuning(7, 128)
    assert len(measured) == 1
    (entry,) = json.loads(own_cache.read_text()).values()
    assert entry == {"gemm_min_rows": 7, "row_block": 128}
    again(WeightForm(INT4_GROUP, 32))
    assert len(measured) == 2 and len(json.loads(own_cache.read_text())) == 2


def test_other_cpus_are_another_machine(measured, again, monkeypatch):
    again()
    monkeypatch.setattr(tuning, "machine_key", lambda: "the same, with fewer CPUs")
    again()
    assert len(measured) == 2


N = len(TRIED_ROWS)


def times_of(first):
    """Of GEMV, then GEMM, which pays from so many of TRIED_ROWS on."""
    return [1.0] * N + [2.0] * first + [0.5] * (N - first)


QUIET = times_of(4)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (QUIET, None),
        ([1.1 * t for t in QUIET], None),
        ([1.2 * t for t in QUIET], "1.20 times"),
        ([1.2 * t for t in QUIET[:4]] + QUIET[4:], None),  # a moment of something else
        (times_of(6), None),
        (times_of(7), f"{TRIED_ROWS[4]} rows and another in {TRIED_ROWS[7]}"),
        (times_of(N), f"{TRIED_ROWS[4]} rows and another in {NEVER}"),
    ],
)
def test_passes_that_disagree(other, words):
    for pair in ((QUIET, other), (other, QUIET)):
        found = tuning._disagreement(*pair)
        assert found is None if words is None else "pass" in found
    assert words is None or words in tuning._disagreement(QUIET, other)


def test_a_measurement_that_disagrees_with_itself_is_not_kept(own_cache, again, monkeypatch):
    """The kernels' times: those of the second pass are half as long again."""
    monkeypatch.setattr(tuning, "_random_expert", lambda form: [])
    calls = []

    class Layer:
        def __init__(self, form, table, weights, rows, kind, block):
            self.kind, self.block, self.runs = kind, block, {}

        def run(self, rows):
            calls.append(rows)
            self.runs[rows] = self.runs.get(rows, 0) + 1
            slow = 1.5 if self.runs[rows] > tuning._ROUNDS and self.kind == 1 else 1.0
            return slow * (rows if self.kind == 1 else 5 + rows / 10) + abs(self.block - 128)

    monkeypatch.setattr(tuning, "_Layer", Layer)
    found, doubt = tuning.measure(BF16, kernel_table())
    assert found == Tuning(6, 128) and "pass" in doubt
    for _ in range(2):
        calls.clear()
        assert again() == found and calls
        calls.clear()
        assert tuning.tuning_for(BF16, kernel_table()) == found and not calls
    assert not own_cache.exists()


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        {},
        {"gemm_min_rows": 0, "row_block": 128},
        {"gemm_min_rows": 5, "row_block": 100},
        {"gemm_min_rows": True, "row_block": 128},
        {"gemm_min_rows": "5", "row_block": 128},
    ],
)
def test_entries_that_are_none_are_measured_again(own_cache, measured, again, entry):
    again()
    own_cache.write_text(json.dumps(dict.fromkeys(json.loads(own_cache.read_text()), entry)))
    assert again() == Tuning(7, 128) and len(measured) == 2


def test_machine_files_come_first(measured, again, tmp_path):
    again()
    (tmp_path / "machines").mkdir()
    known = {tuning._key(BF16, kernel_table()): {"gemm_min_rows": 3, "row_block": 64}}
    (tmp_path / "machines" / "this.json").write_text(json.dumps(known))
    assert again() == Tuning(3, 64) and len(measured) == 1


@pytest.mark.parametrize("method", [m for m in METHODS if not m.startswith("MOE")])
def test_every_method_can_be_measured(method, monkeypatch):
    monkeypatch.setattr(tuning, "TRIED_ROWS", (2, 5))
    monkeypatch.setattr(tuning, "_EXPERTS", 2)
    monkeypatch.setattr(tuning, "_HIDDEN", 256)
    monkeypatch.setattr(tuning, "_INTER", 128)
    chosen = get_method(method)
    groups = (96, 128, 768)  # some divide neither size
    forms = [WeightForm(f, g) for f in chosen.formats for g in (groups if f.grouped else [0])]
    for form in [chosen.form] if chosen.form else forms:
        found, _ = tuning.measure(form, kernel_table())
        assert found.gemm_min_rows in (2, 5, NEVER) and found.row_block in TRIED_BLOCKS


@pytest.mark.parametrize("method", ["FP8", "FP8_PERCHANNEL"])
def test_measured_while_an_engine_loads(method, monkeypatch):
    """With another default type of tensors: the core reads float32."""
    monkeypatch.setattr(tuning, "TRIED_ROWS", (2,))
    monkeypatch.setattr(tuning, "_EXPERTS", 2)
    [form] = [WeightForm(f, 0) for f in get_method(method).formats]
    torch.set_default_dtype(torch.bfloat16)
    try:
        weights = tuning._random_expert(form)
        layer = tuning._Layer(form, kernel_table(), weights, 2, 1, TRIED_BLOCKS[0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert {matrix.scale.dtype for matrix in weights} == {torch.float32}
    assert layer._router.dtype == torch.float32


@pytest.mark.parametrize(("min_rows", "tiles"), [(2, 6), (NEVER, 0)])
def test_large_layers_are_made_with_it(min_rows, tiles, monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda form, table: (Tuning(min_rows, 64), None))
    case = Case(method="AMXINT8", k=1)
    hidden = torch.randn(case.experts * 4, case.hidden, dtype=torch.bfloat16)
    ids = torch.arange(len(hidden)).remainder(case.experts)[:, None]
    for worth, expected in ((0, tiles), (1 << 40, None)):
        monkeypatch.setattr(base, "WORTH_BYTES", worth)
        wrapper = case.wrapper()
        wrapper.forward(hidden, ids, torch.ones(len(hidden), 1))
        if expected is not None:
            assert wrapper.stats()["tile_calls"] == expected
