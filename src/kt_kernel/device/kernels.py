"""The two Triton kernels around a layer. Protocol and memory: kernels/stream/ of the compiled core.

Memory ordering. To the CPU: after a barrier, one thread of each program fences at system scope,
which covers the stores of all its threads, and increments a counter. The last program to arrive
knows that all are done. It fences once more and publishes the ring's entry with one 8-byte store.
From the CPU: the CPU stores ``done`` after its results (x86 keeps that order). One thread of each
program waits for it and fences; after a barrier, the others read the results, bypassing all caches.
Before `take_back`, the stream itself waits for the ``ready`` word next to ``done``, if streams can
wait: a kernel that spins would keep its share of the GPU from other processes while this process is
stopped.

Only one thread does this, because warps execute fences at system scope and reads of host memory one
after the other.

Numbers of entries are 32 bits and wrap; they are compared for equality, or by their difference.
"""

import triton
import triton.language as tl

ROOM_CHECK = 256  # entries between two checks of the CPU's progress


def routes_with(blocks: int, top_k: int) -> int:
    """How many routes a program copies with each of a row's ``blocks``, so that none is left."""
    return max(256, triton.next_power_of_2(-(-top_k // blocks)))


@triton.jit
def _clock(FENCE: tl.constexpr):
    """The GPU's clock in nanoseconds; 0 in Triton's interpreter."""
    now = tl.cast(0, tl.int64)
    if FENCE:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    return now


@triton.jit
def _system_fence(value, FENCE: tl.constexpr):
    """value, int32, once the CPU can see every store of the program before the last barrier."""
    if FENCE:  # Triton's interpreter has no assembler and needs no fence
        value = tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first fence.acq_rel.sys;
            mov.b32 $0, $1;
            }""",
            "=r,r",
            [value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return value


@triton.jit
def _wait_for(word, number, FENCE: tl.constexpr):
    """Waits until the CPU has written ``number`` to the word, and earlier stores are visible."""
    if FENCE:
        tl.inline_asm_elementwise(
            """{
            .reg .pred other, late;
            .reg .b32 thread, value;
            mov.u32 thread, %tid.x;
            setp.ne.u32 other, thread, 0;
            @other bra there;
            again:
            ld.relaxed.sys.global.b32 value, [$1];
            setp.ne.b32 late, value, $2;
            @late bra again;
            fence.acq_rel.sys;
            there:
            mov.b32 $0, $2;
            }""",
            "=r,l,r",
            [tl.cast(word, tl.int64), number],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        answered = tl.load(word, volatile=True)
        while answered != number:
            answered = tl.load(word, volatile=True)
    tl.debug_barrier()


# padding may begin at any row of a tensor; the other addresses are aligned.
@triton.jit(do_not_specialize=["tokens", "slot"], do_not_specialize_on_alignment=["padding"])
def hand_over(
    x,
    ids,
    weights,
    padding,
    slot_map,
    hot_ids,
    hot_weights,
    pinned_x,
    pinned_ids,
    pinned_weights,
    pinned_tokens,
    times,
    done,
    cell,
    counter,
    ring,
    head,
    tokens,
    slot,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    ONLY_COLD: tl.constexpr,
    COLD_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUTES: tl.constexpr,
    ROOM_CHECK: tl.constexpr,
    FENCE: tl.constexpr,
    TRACE: tl.constexpr,
):
    """Gives a batch to the CPU: copies it to pinned memory and adds an entry to the ring.

    x [tokens, HIDDEN], ids and weights [tokens, TOP_K] on the device, contiguous, any integer and
    float type; the pinned ones alike in x's type, int32 (-1 for ids that do not exist) and float32.
    With PADDED a row's routes are to no expert where padding [tokens] says so: an int64 below 0, a
    byte other than 0.
    With SPLIT it also writes the routes of the experts on the device, in the types of ids and
    weights: ``slot_map[id]`` (int32 [EXPERTS], -1 for experts on the CPU), or COLD_SLOT with weight
    0. With ONLY_COLD, the pinned id of a route to an expert on the device is -1, so that one read
    of slot_map decides who computes it. ROUTES: see `routes_with`. cell: int32 [2] of this side,
    see Side; counter: int32, entries so far. times: StreamTimes of kernels/stream/side.h, written
    with TRACE.
    """
    if TRACE:
        began = _clock(FENCE)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    number = tl.cast(0, tl.int32)
    if programs == 1:  # early, to overlap with the copies
        number = tl.atomic_add(counter, 1, sem="relaxed") + 1
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for piece in range(program, tokens * blocks, programs):
        # All loads come before all stores, so that the waits for memory overlap.
        row = tl.cast(piece // blocks, tl.int64) * HIDDEN
        column = (piece % blocks) * BLOCK + tl.arange(0, BLOCK)
        in_row = column < HIDDEN
        values = tl.load(x + row + column, mask=in_row)
        route = piece * ROUTES + tl.arange(0, ROUTES)
        inside = route < tokens * TOP_K
        given = tl.load(ids + route, mask=inside, other=0)
        weight = tl.load(weights + route, mask=inside, other=0)
        if PADDED:
            pads = tl.load(padding + route // TOP_K, mask=inside, other=0)
        # int64 first, since an unsigned type cannot hold -1.
        given = tl.cast(given, tl.int64)
        known = (given >= 0) & (given < EXPERTS)
        if PADDED:
            if padding.dtype.element_ty == tl.int64:
                known = known & (pads >= 0)
            else:
                known = known & (pads == 0)
        expert = tl.where(known, given, -1).to(tl.int32)
        if SPLIT:
            device_slot = tl.load(slot_map + expert, mask=inside & known, other=-1)
            if ONLY_COLD:
                expert = tl.where(device_slot >= 0, -1, expert)
        tl.store(pinned_x + row + column, values, mask=in_row)
        tl.store(pinned_ids + route, expert, mask=inside)
        tl.store(pinned_weights + route, weight.to(tl.float32), mask=inside)
        if SPLIT:
            hot = device_slot >= 0
            slots = tl.where(hot, device_slot, COLD_SLOT).to(hot_ids.dtype.element_ty)
            tl.store(hot_ids + route, slots, mask=inside)
            hot_weight = tl.where(hot, weight, 0).to(hot_weights.dtype.element_ty)
            tl.store(hot_weights + route, hot_weight, mask=inside)

    tl.debug_barrier()
    arrived = programs - 1
    if programs > 1:  # relaxed: between two fences
        arrived = tl.atomic_add(cell, _system_fence(tl.cast(1, tl.int32), FENCE), sem="relaxed")
    if arrived == programs - 1:
        if programs > 1:
            number = tl.atomic_add(counter, 1, sem="relaxed") + 1
            tl.store(cell, 0)
        tl.store(cell + 1, number)
        tl.store(pinned_tokens, tokens)
        tl.store(done + 1, 0)  # the side's ready word
        if number % ROOM_CHECK == 0:  # no caller gets this far ahead of the CPU except on purpose
            consumed = tl.load(head, volatile=True)
            while number - consumed > ENTRIES - ROOM_CHECK:
                consumed = tl.load(head, volatile=True)
        if TRACE:
            tl.store(times, began)
            tl.store(times + 1, _clock(FENCE))
        tl.debug_barrier()
        number = _system_fence(number, FENCE)
        entry = (tl.cast(slot, tl.int64) << 32) | (tl.cast(number, tl.int64) & 0xFFFFFFFF)
        tl.store(ring + (number & (ENTRIES - 1)), entry)


@triton.jit(do_not_specialize=["tokens"])
def take_back(
    pinned_out,
    times,
    done,
    cell,
    hot,
    out,
    tokens,
    HIDDEN: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    FENCE: tl.constexpr,
    TRACE: tl.constexpr,
):
    """Waits for the CPU's answer to the side's last entry and takes it to the device.

    out [tokens, HIDDEN] = SCALE * (pinned_out, plus hot with ADD), summed in float32, all of one
    type. out may be hot. times: as in `hand_over`; of the first program.
    """
    number = tl.load(cell + 1)
    if TRACE:
        began = _clock(FENCE)
    _wait_for(done, number, FENCE)
    if TRACE:
        ready = _clock(FENCE)
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for piece in range(tl.program_id(0), tokens * blocks, tl.num_programs(0)):
        row = tl.cast(piece // blocks, tl.int64) * HIDDEN
        column = (piece % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        total = tl.load(pinned_out + row + column, mask=inside, volatile=True).to(tl.float32)
        if ADD:
            total += tl.load(hot + row + column, mask=inside).to(tl.float32)
        tl.store(out + row + column, (total * SCALE).to(out.dtype.element_ty), mask=inside)
    if TRACE:  # noqa: SIM102 - known when the kernel is compiled
        if tl.program_id(0) == 0:
            tl.store(times + 2, tl.cast(number, tl.int64) & 0xFFFFFFFF)
            tl.store(times + 3, began)
            tl.store(times + 4, ready)
            tl.store(times + 5, _clock(FENCE))
