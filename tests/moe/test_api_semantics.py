"""What right calls do: dtypes, shapes, index spaces, life times, submit and sync."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from moe_cases import KERNEL_METHODS, Case

import kt_kernel
from kt_kernel import BaseMoEWrapper, KTMoEWrapper
from kt_kernel.moe import buffers
from kt_kernel.testing import row_error

CASE = Case()


@pytest.fixture(scope="module")
def loaded():
    return CASE.wrapper()


def close(y, reference, most=5e-3):
    assert bool((row_error(y, reference) <= most).all())


def test_module_attributes():
    assert kt_kernel.__cpu_variant__ in ("amx", "avx512", "avx2")
    assert kt_kernel.__cpu_kernel__ in kt_kernel.runtime.variant.TABLES
    assert kt_kernel.cpu_features()["avx2"] is True
    assert isinstance(kt_kernel.__version__, str) and kt_kernel.__version__
    assert isinstance(CASE.wrapper(load=False), BaseMoEWrapper)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (1, 2, 2), (0,), (2, 0)])
def test_dtypes_and_leading_dimensions(loaded, dtype, lead):
    tokens = torch.Size(lead).numel()
    hidden, ids, weights = CASE.batch(tokens, dtype)
    y = loaded.forward(hidden.view(*lead, CASE.hidden), ids, weights, None)
    assert y.shape == (tokens, CASE.hidden) and y.dtype == dtype and y.device.type == "cpu"
    close(y, CASE.reference(hidden, ids, weights))
    again = loaded.forward(hidden, ids.view(*lead, CASE.k), weights.view(*lead, CASE.k), None)
    assert torch.equal(y, again)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64],
)
def test_ids_of_any_integer_dtype(loaded, dtype):
    hidden, ids, weights = CASE.batch(4)
    ids.clamp_(min=0)
    assert torch.equal(
        loaded.forward(hidden, ids.to(dtype), weights), loaded.forward(hidden, ids, weights)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_float_dtype(loaded, dtype):
    hidden, ids, weights = CASE.batch(4)
    weights = weights.bfloat16()
    assert torch.equal(
        loaded.forward(hidden, ids, weights.to(dtype)), loaded.forward(hidden, ids, weights)
    )


def test_tensors_that_are_not_contiguous(loaded):
    hidden, ids, weights = CASE.batch(4)
    wanted = loaded.forward(hidden, ids, weights)
    strided = [t.repeat_interleave(2, 0)[::2] for t in (hidden, ids, weights)]
    columns = [t.T.contiguous().T for t in (hidden, ids, weights)]
    for given in (strided, columns):
        assert not given[0].is_contiguous()
        assert torch.equal(loaded.forward(*given), wanted)
        loaded.submit_forward(*given)
        assert torch.equal(loaded.sync_forward(given[0]), wanted)
    one = hidden[:1].expand(4, -1)
    assert torch.equal(
        loaded.forward(one, ids, weights), loaded.forward(one.contiguous(), ids, weights)
    )


def test_skipped_ids_give_zeros_and_duplicates_count_twice(loaded):
    hidden, _, _ = CASE.batch(3)
    big = 2**62
    ids = torch.tensor([[-1, 6, big], [2, 2, -big], [2, -7, 99]])
    weights = torch.tensor([[1.0, 1.0, 1.0], [0.25, 0.5, 1.0], [0.75, float("nan"), 1.0]])
    y = loaded.forward(hidden[1:2].expand(3, -1), ids, weights)
    assert bool((y[0] == 0).all()) and not torch.signbit(y[0]).any()
    assert torch.allclose(y[1], y[2], rtol=1e-5)
    assert y[2].norm() > 0.01


@pytest.mark.parametrize("method", KERNEL_METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(method, bad):
    case = Case(method=method)
    wrapper = case.wrapper()
    hidden, _, weights = case.batch(5)
    ids = torch.tensor([[0, 1, 2]] * 5)
    good = wrapper.forward(hidden, ids, weights)
    hidden[2, 7] = bad
    y = wrapper.forward(hidden, ids, weights)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(y[others], good[others])
    if bad != bad or method != "BF16":
        assert y[2].isnan().all()


@pytest.mark.parametrize("method", KERNEL_METHODS)
def test_zero_rows(method):
    case = Case(method=method)
    hidden, ids, weights = case.batch(4)
    hidden[1] = 0
    y = case.wrapper().forward(hidden, ids, weights)
    assert bool((y[1] == 0).all())
    close(y, case.reference(hidden, ids, weights))


def test_experts_on_the_gpu_are_skipped():
    hidden, ids, weights = CASE.batch(6)
    mask = torch.tensor([True, False, False, True, True, False])
    y = CASE.wrapper(gpu_experts_mask=mask).forward(hidden, ids, weights)
    close(y, CASE.reference(hidden, ids, weights, gpu_experts_mask=mask))
    by_list = CASE.wrapper(gpu_experts_mask=mask.tolist()).forward(hidden, ids, weights)
    assert torch.equal(y, by_list)


@pytest.mark.parametrize("deferred", [0, 1])
def test_the_mask_changes_between_batches(deferred):
    batch = CASE.batch(6)
    masks = [torch.arange(6) < n for n in (0, 2, 6)] + [torch.arange(6) % 2 > 0]
    wrapper = CASE.wrapper(max_deferred_experts_per_token=deferred)
    for mask in masks * 2:
        wrapper.set_gpu_experts_mask(mask)
        assert torch.equal(wrapper.gpu_experts_mask, mask)
        assert wrapper.num_gpu_experts == int(mask.sum())
        assert f"{6 - wrapper.num_gpu_experts} of 6 experts on the CPU" in wrapper.describe()
        fresh = CASE.wrapper(gpu_experts_mask=mask, max_deferred_experts_per_token=deferred)
        assert torch.equal(wrapper.forward(*batch), fresh.forward(*batch))


def test_masks_that_cannot_be_set():
    mask = torch.arange(6) < 2
    wrapper = CASE.wrapper(gpu_experts_mask=mask)
    batch = CASE.batch(6)
    before = wrapper.forward(*batch)
    for wrong, error, text in (
        (torch.arange(6) < 1, ValueError, "layer 0: expert slot 1 is not loaded on the CPU"),
        (mask[:5], ValueError, r"gpu_experts_mask must be bool \[6\], got torch.bool \[5\]"),
        (mask.long(), ValueError, r"gpu_experts_mask must be bool \[E\], got torch.int64 \[6\]"),
        (object(), TypeError, "gpu_experts_mask must be a bool tensor"),
    ):
        with pytest.raises(error, match=text):
            wrapper.set_gpu_experts_mask(wrong)
        assert torch.equal(wrapper.gpu_experts_mask, mask)
        assert torch.equal(wrapper.forward(*batch), before)
    with pytest.raises(RuntimeError, match="layer 0: set_gpu_experts_mask before loading"):
        CASE.wrapper(load=False).set_gpu_experts_mask(mask)


def test_ways_of_saying_how_many_are_on_the_gpu():
    first_two = torch.arange(6) < 2
    made = [
        CASE.wrapper(num_gpu_experts=2),
        CASE.wrapper(gpu_experts_mask=2),
        CASE.wrapper(gpu_experts_mask=first_two),
        CASE.wrapper(gpu_experts_mask=first_two, num_gpu_experts=2),
        CASE.wrapper(gpu_experts_mask=2, num_gpu_experts=2),
    ]
    batch = CASE.batch(4)
    for wrapper in made:
        assert torch.equal(wrapper.gpu_experts_mask, first_two) and wrapper.num_gpu_experts == 2
        assert torch.equal(wrapper.forward(*batch), made[0].forward(*batch))
    positional = KTMoEWrapper(0, 6, 3, 64, 32, 2, 1, 1, None, -1, False, None, "BF16")
    assert positional.num_gpu_experts == 2 and positional.method == "BF16"


@pytest.mark.parametrize("on_gpu", [0, 6])
def test_none_or_all_on_the_gpu(on_gpu):
    wrapper = CASE.wrapper(num_gpu_experts=on_gpu)
    hidden, ids, weights = CASE.batch(4)
    y = wrapper.forward(hidden, ids, weights)
    assert bool((y == 0).all()) == (on_gpu == 6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_permuted_and_repeating_maps(dtype):
    for order in ([3, 1, 0, 5, 2, 4], [1, 1, 1, 1, 1, 5]):
        case = Case(mapping=torch.tensor(order, dtype=dtype))
        batch = case.batch(8)
        close(case.wrapper().forward(*batch), case.reference(*batch))


def test_maps_and_weights_may_be_strided_and_of_mixed_dtypes():
    case = Case(dtype=torch.float32, method="AMXINT8")
    batch = case.batch(5)
    wrapper = case.wrapper(load=False)
    wrapper.load_weights_from_tensors(
        case.gate.bfloat16().float().transpose(1, 2).contiguous().transpose(1, 2),
        case.up.half(),
        torch.stack([case.down, case.down])[1],
        torch.arange(12)[::2] // 2,
    )
    case.gate, case.up = case.gate.bfloat16().float(), case.up.half().float()
    close(wrapper.forward(*batch), case.reference(*batch))


def test_a_second_load_does_nothing(loaded):
    batch = CASE.batch(3)
    before = loaded.forward(*batch)
    loaded.load_weights_from_tensors(CASE.gate * 2, CASE.up, CASE.down, CASE.mapping)
    loaded.load_weights("not even looked at")
    assert torch.equal(loaded.forward(*batch), before)


def test_sources_may_go_after_loading():
    case = Case(method="AMXINT8")
    batch = case.batch(4)
    wanted = case.reference(*batch)
    wrapper = case.wrapper()
    for matrix in (case.gate, case.up, case.down):
        matrix.fill_(float("nan"))
    close(wrapper.forward(*batch), wanted)


@pytest.mark.parametrize("method", KERNEL_METHODS)
@pytest.mark.parametrize(("limit", "alpha"), [(0.0, 0.0), (0.8, 0.0), (0.0, 1.702), (0.9, 1.702)])
def test_biases_and_activation(method, limit, alpha):
    case = Case(method=method, biases=True, options={"swiglu_limit": limit, "swiglu_alpha": alpha})
    batch = case.batch(7)
    close(case.wrapper().forward(*batch), case.reference(*batch))


def test_load_weights_from_a_checkpoint(tmp_path):
    from safetensors.torch import save_file

    case = Case(mapping=torch.tensor([4, 0, 0, 2, 1, 5], dtype=torch.int32))
    base = "model.layers.7.mlp.experts"
    save_file(
        {
            f"{base}.{e}.{name}_proj.weight": matrix[e].contiguous()
            for e in range(case.experts)
            for name, matrix in (("gate", case.gate), ("up", case.up), ("down", case.down))
        },
        tmp_path / "model.safetensors",
    )
    options = {"layer_idx": 7, "num_gpu_experts": 2}
    wrapper = case.wrapper(load=False, weight_path=str(tmp_path), **options)
    wrapper.load_weights(case.mapping)
    batch = case.batch(5)
    assert torch.equal(wrapper.forward(*batch), case.wrapper(**options).forward(*batch))
    other = case.wrapper(load=False, weight_path=str(tmp_path), layer_idx=3)
    with pytest.raises(ValueError, match="layer 3"):
        other.load_weights(case.mapping)
    assert not other.loaded


def test_submit_copies_its_inputs_and_forward_leaves_them(loaded):
    hidden, ids, weights = CASE.batch(9)
    before = [t.clone() for t in (hidden, ids, weights)]
    wanted = loaded.forward(hidden, ids, weights)
    assert all(map(torch.equal, before, (hidden, ids, weights)))
    loaded.submit_forward(hidden, ids, weights, None)
    for tensor in (hidden, ids, weights):
        tensor.zero_()
    assert torch.equal(loaded.sync_forward(hidden, None), wanted)


def test_results_are_fresh_tensors(loaded):
    batch = CASE.batch(2)
    first = loaded.forward(*batch)
    kept = first.clone()
    loaded.forward(*CASE.batch(2))
    assert torch.equal(first, kept)


def test_several_submits_are_told_apart_by_their_tensor(loaded):
    batches = [CASE.batch(3) for _ in range(3)] + [CASE.batch(2)]
    wanted = [loaded.forward(*batch) for batch in batches]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        for batch in batches:
            loaded.submit_forward(*batch)
        for i in order:
            assert torch.equal(loaded.sync_forward(batches[i][0]), wanted[i])


def test_a_pass_that_was_given_up_disturbs_nothing(loaded):
    hidden, ids, weights = CASE.batch(3)
    for _ in range(10):
        loaded.submit_forward(hidden.clone(), ids, weights)  # never asked for
    loaded.submit_forward(hidden, ids, weights)
    y = loaded.sync_forward(hidden)
    assert torch.equal(y, loaded.forward(hidden, ids, weights))
    assert len(loaded._pending) < 10
    loaded.submit_forward(hidden * 2, ids, weights)
    loaded.submit_forward(hidden, ids, weights)
    assert torch.equal(loaded.sync_forward(), y)  # None: the latest


def test_many_chunks(monkeypatch):
    monkeypatch.setenv("KT_KERNEL_KIND", "vector")  # else the kind may depend on the chunk
    case = Case(options={"chunked_prefill_size": 4})
    batch = case.batch(4 * 5 + 3)
    y = case.wrapper().forward(*batch)
    close(y, case.reference(*batch))
    assert torch.equal(y, case.wrapper(chunked_prefill_size=64).forward(*batch))


@pytest.mark.parametrize("size", [None, -1, 1, 10**5, 10**12, 2**62, 2**63, 2**200])
def test_any_chunked_prefill_size(size):
    batch = CASE.batch(5 if size in (None, 1) else 1500)
    close(CASE.wrapper(chunked_prefill_size=size).forward(*batch), CASE.reference(*batch))


@pytest.mark.parametrize(("experts", "k"), [(65536, 2), (3, 65536), (65536, 65536)])
def test_as_many_experts_and_choices_as_are_accepted(experts, k):
    case = Case(experts=3, k=k, hidden=32, inter=32)
    mask = torch.arange(experts) > 2
    wrapper = KTMoEWrapper(
        0, experts, k, 32, 32, mask, 2, chunked_prefill_size=2**62, method="BF16"
    )
    for slot in range(3):
        wrapper.load_expert(slot, case.gate[slot], case.up[slot], case.down[slot])
    wrapper.finish_loading()
    hidden, ids, weights = case.batch(3)
    weights /= k
    close(wrapper.forward(hidden, ids, weights), case.reference(hidden, ids, weights))


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_tokens": 2**62},
        {"max_tokens": 2**55, "hidden_size": 65536},
        {"max_tokens": 2**40, "top_k": 2**23},
        {"max_tokens": 2**31, "top_k": 2**31, "hidden_size": 65536},
        {"top_k": 2**63 - 1},
        {"max_tokens": 10**12},
    ],
)
def test_the_core_refuses_sizes_that_no_memory_holds(sizes):
    core = {
        "num_experts": 1,
        "top_k": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "forms": [(0, 0, 0)] * 3,
        "cpu_slots": [False],
        "swiglu_limit": 0.0,
        "swiglu_alpha": 0.0,
        "max_tokens": 1,
        "table": "avx2",
        "kind": 0,
        **sizes,
    }
    with pytest.raises(ValueError, match="accepted"):
        kt_kernel._C.MoeLayer(kt_kernel._C.Team([1], [0]), **core)


def test_layers_of_a_team_share_their_buffers():
    def address_space():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    case = Case(experts=2, k=2)
    wrappers = [case.wrapper(cpuinfer_threads=2)]
    before = address_space()
    wrappers += [case.wrapper(cpuinfer_threads=2) for _ in range(30)]
    # A workspace for 1024 tokens takes megabytes, this layer's weights 24 kB.
    assert address_space() - before < 30 * 2**20
    batch = case.batch(40)
    for wrapper in wrappers[::10]:
        close(wrapper.forward(*batch), case.reference(*batch))


def test_grad_and_inference_mode(loaded):
    hidden, ids, weights = CASE.batch(3)
    wanted = loaded.forward(hidden, ids, weights)
    leaf = hidden.clone().requires_grad_()
    y = loaded.forward(leaf * 1.0, ids, weights.clone().requires_grad_())
    assert torch.equal(y, wanted) and not y.requires_grad
    buffers.clear_buffer_cache()
    with torch.inference_mode():
        inside = [t.clone() for t in (hidden, ids, weights)]
        loaded.submit_forward(*inside)
        assert torch.equal(loaded.sync_forward(inside[0]), wanted)
    loaded.submit_forward(hidden, ids, weights)  # with the buffers made in inference mode
    assert torch.equal(loaded.sync_forward(hidden), wanted)
    loaded.submit_forward(*inside)
    assert torch.equal(loaded.sync_forward(inside[0]), wanted)


def test_under_a_device_context():
    batch = CASE.batch(3)
    buffers.clear_buffer_cache()
    with torch.device("meta"):  # as engines do, though with "cuda"
        wrapper = CASE.wrapper(num_gpu_experts=1)
        y = wrapper.forward(*batch)
        wrapper.submit_forward(*batch)
        assert torch.equal(wrapper.sync_forward(batch[0]), y)
    assert torch.equal(CASE.wrapper(num_gpu_experts=1).forward(*batch), y)


def test_wrapper_may_go_while_its_job_runs():
    case = Case(experts=2, k=2, hidden=512, inter=256)
    for _ in range(5):
        wrapper = case.wrapper()
        wrapper.submit_forward(*case.batch(64))
        del wrapper
        gc.collect()
    assert case.wrapper().forward(*case.batch(1)).isfinite().all()


def test_finished_calls_are_let_go(loaded):
    batch = CASE.batch(3)
    for _ in range(5):
        loaded.forward(*batch)
        loaded.submit_forward(*batch)
        loaded.sync_forward(batch[0])
    buffers.reap()  # of calls that other tests gave up
    assert not [call for call in buffers._in_flight if call.finished()]
    kept = weakref.ref(loaded.forward(*batch))
    assert kept() is None


def test_an_error_in_submit_leaves_nothing_behind(monkeypatch):
    wrapper = CASE.wrapper()
    batch = CASE.batch(3)
    wanted = wrapper.forward(*batch)
    core = wrapper._core

    class Failing:
        def submit(self, *arguments):
            raise MemoryError("no memory")

    wrapper._core = Failing()
    for call in (wrapper.forward, wrapper.submit_forward):
        with pytest.raises(MemoryError):
            call(*batch)
    assert not wrapper._pending and not any(
        isinstance(call._keep[0], Failing) for call in buffers._in_flight
    )
    wrapper._core = core
    assert torch.equal(wrapper.forward(*batch), wanted)


def test_buffer_cache_is_bounded_and_can_be_cleared(loaded):
    KTMoEWrapper.clear_buffer_cache()
    KTMoEWrapper.set_capture_batch_sizes([1, 2])
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2]
    one_token = CASE.hidden * 4 + CASE.k * (8 + 4)
    for tokens in [1, 2, *range(3, 40)]:
        batch = CASE.batch(tokens)
        loaded.submit_forward(*batch)
        loaded.sync_forward(batch[0])
    assert KTMoEWrapper.clear_buffer_cache() == one_token * (1 + 2 + 39)
    assert KTMoEWrapper.clear_buffer_cache() == 0
    assert KTMoEWrapper.clear_sft_buffer_cache() == 0
    KTMoEWrapper.set_capture_batch_sizes([])
    batch = CASE.batch(5)
    loaded.submit_forward(*batch)
    KTMoEWrapper.clear_buffer_cache()
    close(loaded.sync_forward(batch[0]), CASE.reference(*batch))


@pytest.fixture
def results(monkeypatch):
    """device_result for a number of tokens, its buffers on the CPU."""
    monkeypatch.setattr(buffers, "_results", buffers._Kept())

    def result(tokens, name="model"):
        return buffers.device_result(
            (name, tokens), (tokens, 4), torch.float32, torch.device("cpu")
        )

    yield result
    KTMoEWrapper.set_capture_batch_sizes([])


def test_result_buffers_are_bounded(results):
    KTMoEWrapper.clear_buffer_cache()
    KTMoEWrapper.set_capture_batch_sizes([1, 2])
    for tokens in [1, 2, *range(3, 40)]:
        results(tokens)
    assert KTMoEWrapper.clear_buffer_cache() == 2 * 16 * (1 + 2 + 39)
    results(2)
    results(40)
    KTMoEWrapper.set_capture_batch_sizes([3])  # nobody will ask for 2 again
    assert KTMoEWrapper.clear_buffer_cache() == 2 * 16 * 40


def test_a_result_is_valid_until_the_next_but_one_of_its_key(results):
    KTMoEWrapper.set_capture_batch_sizes([2])
    kept = {}
    for step in range(6):
        for tokens in (2, 5, 7):  # 5 and 7 drive each other out
            result = results(tokens)
            result.fill_(step)
            previous, before = kept.get(tokens, (None, None))
            assert previous is None or bool((previous == step - 1).all())
            if tokens == 2 and before is not None:
                assert result.data_ptr() == before.data_ptr()  # captured graphs have it
            kept[tokens] = result, previous


def test_wrappers_in_threads():
    cases = [Case(seed=i) for i in range(3)]
    wrappers = [case.wrapper() for case in cases]
    batches = [case.batch(6) for case in cases]
    wanted = [wrapper.forward(*batch) for wrapper, batch in zip(wrappers, batches, strict=True)]
    failures = []

    def work(i):
        for _ in range(30):
            wrappers[i].submit_forward(*batches[i])
            if not torch.equal(wrappers[i].sync_forward(batches[i][0]), wanted[i]):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_stats_and_description(loaded):
    wrapper = CASE.wrapper(num_gpu_experts=2, load=False)
    assert wrapper.stats() == {} and wrapper.packed_bytes == 0
    wrapper.load_weights_from_tensors(CASE.gate, CASE.up, CASE.down, CASE.mapping)
    hidden, _, weights = CASE.batch(2)
    wrapper.forward(hidden, torch.tensor([[0, 2, 3], [3, 3, -1]]), weights)
    stats = wrapper.stats()
    assert (stats["forwards"], stats["tokens"], stats["expert_calls"]) == (1, 2, 4)
    assert stats["experts_touched"] == 2
    assert wrapper.packed_bytes >= 4 * 3 * 64 * 32 * 2
    assert wrapper.describe().startswith("layer 0: BF16, ")
    assert "4 of 6 experts on the CPU" in wrapper.describe()


FORK = """
import os, sys, torch
sys.path.insert(0, {folder!r})
from moe_cases import Case
case = Case()
wrapper = case.wrapper()
first, second = [case.wrapper(layer_idx=i, max_deferred_experts_per_token=2) for i in (1, 2)]
batch = case.batch(4)
wanted = wrapper.forward(*batch)
alone = second.forward(*batch)
wrapper.submit_forward(*batch)
first.forward(*batch)
child = os.fork()
if child == 0:
    good = True
    try:
        wrapper.sync_forward(batch[0])
        good = False
    except RuntimeError as error:
        good = "before the process forked" in str(error)
    good = good and torch.equal(second.forward(*batch), alone)  # the deferred job was lost
    good = good and torch.equal(wrapper.forward(*batch), wanted)
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(wrapper.sync_forward(batch[0]), wanted)
assert not torch.equal(second.forward(*batch), alone)  # not to the parent
wrapper.submit_forward(*batch)  # pending at exit
"""


def test_a_forked_process_computes_and_exit_with_pending_work_is_clean():
    code = FORK.format(folder=os.path.dirname(__file__))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_debug_output():
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from moe_cases import Case; Case().wrapper()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KT_KERNEL_DEBUG": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "kernel tables" in done.stderr and "layer 0: BF16" in done.stderr
