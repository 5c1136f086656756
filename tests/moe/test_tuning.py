"""What is measured once per machine: the choice, where it is kept, and layers made with it."""

import json
import threading

import pytest
import torch
from moe_cases import Case

from kt_kernel import base, machine_cache, tuning
from kt_kernel.methods import GROUPED, INT4_GROUP, METHODS, WeightForm, get_method
from kt_kernel.tuning import NEVER, TRIED_BLOCKS, TRIED_ROWS, Tuning
from kt_kernel.variant import kernel_table

BF16 = WeightForm(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_MACHINES", tmp_path / "machines")
    for cached in (tuning._tuning, tuning._saved):
        cached.cache_clear()
    yield tmp_path / "kt-moe" / "tuning.json"
    for cached in (tuning._tuning, tuning._saved):
        cached.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """Stands for the measurement; counts its calls."""
    calls = []

    def measure(form, table):
        calls.append((form, table))
        return Tuning(7, 128)

    monkeypatch.setattr(tuning, "measure", measure)
    return calls


def again(form=BF16):
    tuning._tuning.cache_clear()
    return tuning.tuning_for(form, kernel_table())


def test_first_row_count():
    n = len(TRIED_ROWS)
    assert tuning.first_row_count([2.0] * n, [1.0] * n) == TRIED_ROWS[0]
    assert tuning.first_row_count([1.0] * n, [2.0] * n) == NEVER
    gemm = [2.0] * 4 + [1.0] * (n - 4)
    assert tuning.first_row_count([1.5] * n, gemm) == TRIED_ROWS[4]
    gemm[-2] = 9.0  # slower once more: only what comes after counts
    assert tuning.first_row_count([1.5] * n, gemm) == TRIED_ROWS[-1]


def test_measured_once_and_kept_in_a_file(own_cache, measured):
    assert again() == again() == Tuning(7, 128)
    assert len(measured) == 1
    (entry,) = json.loads(own_cache.read_text()).values()
    assert entry == {"gemm_min_rows": 7, "row_block": 128}
    again(WeightForm(INT4_GROUP, 32))
    assert len(measured) == 2 and len(json.loads(own_cache.read_text())) == 2


def test_processes_measure_one_at_a_time(own_cache, monkeypatch):
    """One that waits for another's measurement takes its result."""
    measured = []
    monkeypatch.setattr(tuning, "measure", lambda form, table: measured.append(form))
    with machine_cache.only_process(own_cache):
        waiting = threading.Thread(target=again)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not measured
        entry = {tuning._key(BF16, kernel_table()): {"gemm_min_rows": 9, "row_block": 64}}
        own_cache.write_text(json.dumps(entry))
    waiting.join(30)
    assert not waiting.is_alive() and not measured
    assert again() == Tuning(9, 64)


@pytest.mark.parametrize(
    "entry",
    [None, 7, {}, {"gemm_min_rows": 0, "row_block": 128}, {"gemm_min_rows": 5, "row_block": 100},
     {"gemm_min_rows": True, "row_block": 128}, {"gemm_min_rows": "5", "row_block": 128}],
)  # fmt: skip
def test_entries_that_are_none_are_measured_again(own_cache, measured, entry):
    again()
    own_cache.write_text(json.dumps(dict.fromkeys(json.loads(own_cache.read_text()), entry)))
    assert again() == Tuning(7, 128) and len(measured) == 2


def test_machine_files_come_first(own_cache, measured, tmp_path):
    again()
    (tmp_path / "machines").mkdir()
    known = {
        key: {"gemm_min_rows": 3, "row_block": 64} for key in json.loads(own_cache.read_text())
    }
    (tmp_path / "machines" / "this.json").write_text(json.dumps(known))
    tuning._saved.cache_clear()
    assert again() == Tuning(3, 64) and len(measured) == 1


@pytest.mark.parametrize("method", [m for m in METHODS if not m.startswith("MOE")])
def test_every_method_can_be_measured(method, monkeypatch):
    monkeypatch.setattr(tuning, "TRIED_ROWS", (2, 5))
    monkeypatch.setattr(tuning, "_EXPERTS", 2)
    monkeypatch.setattr(tuning, "_HIDDEN", 256)
    monkeypatch.setattr(tuning, "_INTER", 128)
    chosen = get_method(method)
    groups = (96, 128, 768)  # some divide neither size
    forms = [WeightForm(f, g) for f in chosen.formats for g in (groups if f in GROUPED else [0])]
    for form in [chosen.form] if chosen.form else forms:
        found = tuning.measure(form, kernel_table())
        assert found.gemm_min_rows in (2, 5, NEVER) and found.row_block in TRIED_BLOCKS


@pytest.mark.parametrize(("min_rows", "tiles"), [(2, 6), (NEVER, 0)])
def test_large_layers_are_made_with_it(min_rows, tiles, monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda form, table: Tuning(min_rows, 64))
    case = Case(method="AMXINT8", k=1)
    hidden = torch.randn(case.experts * 4, case.hidden, dtype=torch.bfloat16)
    ids = torch.arange(len(hidden)).remainder(case.experts)[:, None]
    for worth, expected in ((0, tiles), (1 << 40, None)):
        monkeypatch.setattr(base, "WORTH_BYTES", worth)
        wrapper = case.wrapper()
        wrapper.forward(hidden, ids, torch.ones(len(hidden), 1))
        if expected is not None:
            assert wrapper.stats()["tile_calls"] == expected
