"""Made-up records of a GPU and a CPU."""

from kt_kernel.trace.records import Record


def record(**known):
    """A record. Times that are not given are unknown."""
    return Record(**{name: known.get(name, 0) for name in Record._fields})


def where(slot):
    return f"layer {slot}"


def batch(
    start,
    clock=lambda t: t,
    *,
    hand=4000,
    seen=1000,
    cpu=50_000,
    late=0,
    hot=30_000,
    answer=2000,
    back=3000,
    **known,
):
    """A batch's record and its end, computed from how long each part took, in nanoseconds of true
    time.

    start: true time. The CPU's clock shows true time, the GPU's shows clock(time).
    """
    handed = start + hand
    taken = handed + seen
    rung = taken + cpu
    waits = handed + hot
    ready = max(waits, rung + answer)
    made = record(
        hand_start=clock(start),
        hand_end=clock(handed),
        seen=taken,
        rung=rung,
        begun=taken if cpu else 0,
        ended=rung if cpu else 0,
        late_begun=rung if late else 0,
        late_ended=rung + late if late else 0,
        back_start=clock(waits),
        back_ready=clock(ready),
        back_end=clock(ready + back),
        **known,
    )
    return made, ready + back
