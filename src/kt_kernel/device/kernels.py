"""The two Triton kernels around a layer. Protocol and memory: kernels/stream/ of the compiled core.

Memory ordering. Every program fences its stores at system scope before it counts itself in; the
last one to arrive therefore knows all of them done, fences once more and publishes the ring's entry
with one 8-byte store. The other way the CPU stores ``done`` after its results (x86 keeps that
order), and the kernel reads results only after a fence that follows the ``done`` it waited for,
past all caches.

Numbers of entries are 32 bits and wrap; they are compared for equality, or by their difference.
"""

import triton
import triton.language as tl

ROUTES = 256  # routes that a program takes at a time
ROOM_CHECK = 256  # entries from one look at the CPU's progress to the next


@triton.jit
def _system_fence(value, FENCE: tl.constexpr):
    """value, int32, once the CPU can see every store before it, and no later load is early."""
    if FENCE:  # Triton's interpreter has no assembler, and needs none
        value = tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    return value


@triton.jit(do_not_specialize=["tokens", "slot"])
def hand_over(
    x, ids, weights, slot_map, hot_ids, hot_weights,
    pinned_x, pinned_ids, pinned_weights, pinned_tokens, cell, counter, ring, head,
    tokens, slot,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, ENTRIES: tl.constexpr,
    SPLIT: tl.constexpr, COLD_SLOT: tl.constexpr,
    BLOCK: tl.constexpr, ROUTES: tl.constexpr, ROOM_CHECK: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    """Gives a batch to the CPU: copies it to pinned memory and adds an entry to the ring.

    x [tokens, HIDDEN], ids and weights [tokens, TOP_K] on the device, contiguous, any integer and
    float type; the pinned ones alike in x's type, int32 (-1 for ids that do not exist) and float32.
    With SPLIT it also writes the routes of the experts on the device, in the types of ids and
    weights: ``slot_map[id]`` (int32 [EXPERTS], -1 for experts on the CPU), or COLD_SLOT with weight
    0. cell: int32 [2] of this side, see Side; counter: int32, entries so far.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    number = tl.cast(0, tl.int32)
    if programs == 1:  # early, while the copies are under way
        number = tl.atomic_add(counter, 1, sem="relaxed") + 1
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for piece in range(program, tokens * blocks, programs):
        row = tl.cast(piece // blocks, tl.int64) * HIDDEN
        column = (piece % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        tl.store(pinned_x + row + column, tl.load(x + row + column, mask=inside), mask=inside)
    for first in range(program * ROUTES, tokens * TOP_K, programs * ROUTES):
        route = first + tl.arange(0, ROUTES)
        inside = route < tokens * TOP_K
        given = tl.load(ids + route, mask=inside, other=0)
        weight = tl.load(weights + route, mask=inside, other=0)
        # int64 first, since an unsigned type cannot hold -1.
        given = tl.cast(given, tl.int64)
        known = (given >= 0) & (given < EXPERTS)
        expert = tl.where(known, given, -1).to(tl.int32)
        if SPLIT:
            device_slot = tl.load(slot_map + expert, mask=inside & known, other=-1)
            hot = device_slot >= 0
            slots = tl.where(hot, device_slot, COLD_SLOT).to(hot_ids.dtype.element_ty)
            tl.store(hot_ids + route, slots, mask=inside)
            hot_weight = tl.where(hot, weight, 0).to(hot_weights.dtype.element_ty)
            tl.store(hot_weights + route, hot_weight, mask=inside)
        tl.store(pinned_ids + route, expert, mask=inside)
        tl.store(pinned_weights + route, weight.to(tl.float32), mask=inside)

    tl.debug_barrier()  # the fence of one thread is then one of all threads' stores
    arrived = programs - 1
    if programs > 1:
        arrived = tl.atomic_add(cell, _system_fence(tl.cast(1, tl.int32), FENCE), sem="acq_rel")
    if arrived == programs - 1:
        if programs > 1:
            number = tl.atomic_add(counter, 1, sem="relaxed") + 1
            tl.store(cell, 0)
        tl.store(cell + 1, number)
        tl.store(pinned_tokens, tokens)
        if number % ROOM_CHECK == 0:  # nobody can be so far ahead of the CPU, unless on purpose
            consumed = tl.load(head, volatile=True)
            while number - consumed > ENTRIES - ROOM_CHECK:
                consumed = tl.load(head, volatile=True)
        tl.debug_barrier()
        number = _system_fence(number, FENCE)
        entry = (tl.cast(slot, tl.int64) << 32) | (tl.cast(number, tl.int64) & 0xFFFFFFFF)
        tl.store(ring + (number & (ENTRIES - 1)), entry)


@triton.jit(do_not_specialize=["tokens"])
def take_back(
    pinned_out, done, cell, hot, out, tokens,
    HIDDEN: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    """Waits for the CPU's answer to the side's last entry and takes it to the device.

    out [tokens, HIDDEN] = SCALE * (pinned_out, plus hot with ADD), summed in float32, all of one
    type. out may be hot.
    """
    number = tl.load(cell + 1)
    answered = tl.load(done, volatile=True)
    while answered != number:
        answered = tl.load(done, volatile=True)
    tl.debug_barrier()
    late = _system_fence(answered * 0, FENCE)  # 0, but not before the answer
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for piece in range(tl.program_id(0) + late, tokens * blocks, tl.num_programs(0)):
        row = tl.cast(piece // blocks, tl.int64) * HIDDEN
        column = (piece % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        total = tl.load(pinned_out + row + column, mask=inside, volatile=True).to(tl.float32)
        if ADD:
            total += tl.load(hot + row + column, mask=inside).to(tl.float32)
        tl.store(out + row + column, (total * SCALE).to(out.dtype.element_ty), mask=inside)
