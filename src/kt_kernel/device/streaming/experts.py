"""The packed experts of a layer in host memory, as the copies to a GPU see them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...weights.formats import LayerForm
from .unpack import PackedMatrix

#: float32 [n, 2 I], in the order of the rows of gate and up, and [n, H].
Biases = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PackedPart:
    """What one thread pool holds: of each expert the rows of gate and up, and the columns of down,
    that belong to a part of the intermediate size.

    Attributes:
        memory: uint8 [experts held, bytes of an expert], the pool's memory itself.
        begin, size: the part of the intermediate size.
        gate, up, down: where the matrices lie in an expert.
    """

    memory: torch.Tensor
    begin: int
    size: int
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix

    @property
    def matrices(self) -> tuple[PackedMatrix, PackedMatrix, PackedMatrix]:
        return self.gate, self.up, self.down

    @property
    def expert_bytes(self) -> int:
        return self.memory.shape[1]

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


@dataclass(frozen=True)
class Run:
    """Experts that lie side by side: [at, at + count) of a part's memory, to become [to, to +
    count) of a group."""

    at: int
    to: int
    count: int


@dataclass(frozen=True)
class SlotGroup:
    """Experts that are copied together.

    Attributes:
        slots: in the order in which they lie in memory.
        biases: theirs on the device, if they have some: see `PackedExperts.load_biases`.
    """

    slots: list[int]
    runs: list[Run]
    biases: Biases | None = None


class PackedExperts:
    """The packed experts of one layer on the CPU.

    core: the compiled MoeLayer, which this object keeps alive; its weights are loaded and do not
    change any more. Raises ValueError for weights that cannot be unpacked on a GPU: those whose
    columns are stored in another order.

    Attributes:
        interleaved: whether rows of gate and up alternate on the device, from gate on.
    """

    interleaved = False

    def __init__(self, core: Any, form: LayerForm, hidden: int, inter: int) -> None:
        if core.has_column_orders:
            raise ValueError(
                "these experts cannot be copied to a GPU: their columns are stored in another "
                "order (act-order)"
            )
        self._core = core
        self._positions: list[int] = core.positions
        self._registered: Any = None
        self._grouped: tuple[list[int], int, list[SlotGroup]] | None = None
        self._biases: Biases | None = None
        self.hidden, self.inter = hidden, inter
        self.parts = tuple(_part(part, form, hidden) for part in core.packed_parts())

    def register(self, backend: Any) -> None:
        """Gives a device direct access to the memory, until this object ends or `release`.

        backend: a `backend.CudaBackend`. RuntimeError if the driver or a limit does not allow it;
        nothing is registered then. A second call does nothing.
        """
        if self._registered is not None:
            return
        done: list[PackedPart] = []
        try:
            for part in self.parts:
                backend.pin(part)
                done.append(part)
        except BaseException:
            _unpin(backend, done)
            raise
        # The compiled layer owns the memory, so it ends after this.
        self._registered = weakref.finalize(self, _unpin, backend, done, self._core)
        self._registered.atexit = False

    def release(self) -> None:
        """Takes the device's access back. No copy may be under way."""
        if self._registered is not None:
            self._registered()
            self._registered = None

    @property
    def biased(self) -> bool:
        """Whether some expert has a bias."""
        return bool(self._core.has_biases)

    def load_biases(self, device: torch.device) -> int:
        """Copies the experts' biases, if they have some, to a device, where they stay. Returns
        their bytes.

        Set `interleaved` before.
        """
        if not self.biased:
            return 0
        gate, up, down = (
            np.empty((len(self.held), rows), np.float32)
            for rows in (self.inter, self.inter, self.hidden)
        )
        for matrix, values in enumerate((gate, up, down)):
            self._core.biases(matrix, values)
        both = np.stack((gate, up), 2 if self.interleaved else 1).reshape(len(gate), -1)
        self._biases = torch.from_numpy(both).to(device), torch.from_numpy(down).to(device)
        self._grouped = None
        return int(both.nbytes + down.nbytes)

    def _biases_of(self, slots: Sequence[int]) -> Biases | None:
        """Those of a group."""
        if self._biases is None:
            return None
        device = self._biases[0].device
        # From pinned memory, or the host would wait for the device.
        places = torch.tensor(
            [self._positions[slot] for slot in slots],
            device="cpu",
            pin_memory=device.type == "cuda",
        ).to(device, non_blocking=True)
        both, down = (values.index_select(0, places) for values in self._biases)
        return both, down

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of an expert."""
        return sum(part.expert_bytes for part in self.parts)

    @property
    def expert_values(self) -> int:
        """Weights of an expert."""
        return 3 * self.hidden * self.inter

    @property
    def held(self) -> list[int]:
        """The slots whose weights are here, in the order in which they lie in memory."""
        return [slot for slot, at in enumerate(self._positions) if at >= 0]

    def sorted(self, slots: Sequence[int]) -> list[int]:
        """Slots in the order in which they lie in memory. ValueError for one that is not here."""
        missing = [slot for slot in slots if self._positions[slot] < 0]
        if missing:
            raise ValueError(f"the weights of expert {missing[0]} are not on the CPU")
        return sorted(slots, key=self._positions.__getitem__)

    def runs(self, slots: Sequence[int]) -> Iterator[Run]:
        """How a group of slots is copied, slot i of it to place i."""
        begin = 0
        for i in range(1, len(slots) + 1):
            at = self._positions[slots[begin]]
            if i == len(slots) or self._positions[slots[i]] != at + i - begin:
                yield Run(at, begin, i - begin)
                begin = i

    def grouped(self, slots: Sequence[int], room: int) -> list[SlotGroup]:
        """Groups of at most ``room`` slots, in the order of memory. The last answer is kept: long
        batches stream all cold experts again and again."""
        asked = list(slots)
        if self._grouped is None or self._grouped[:2] != (asked, room):
            slots = self.sorted(asked)
            parts = [slots[i : i + room] for i in range(0, len(slots), room)]
            groups = [
                SlotGroup(part, list(self.runs(part)), self._biases_of(part)) for part in parts
            ]
            self._grouped = asked, room, groups
        return self._grouped[2]

    def unpack(self, staged: Sequence[torch.Tensor], w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Starts unpacking a group of n experts on the current stream.

        staged: for each part, its bytes of the experts, uint8 [n or more, expert_bytes] on the
        device. w13 [n, 2 I, H] receives gate's rows, then up's, or both in turn if they are
        `interleaved`; w2 [n, H, I] down's.
        """
        for number, out in enumerate(self.places(w13, w2)):
            part, which = divmod(number, 3)
            self.parts[part].matrices[which].unpack(staged[part], out)

    def places(self, w13: torch.Tensor, w2: torch.Tensor) -> list[torch.Tensor]:
        """Where `unpack` puts gate, up and down of each part."""
        found: list[torch.Tensor] = []
        gate, up = w13[:, : self.inter], w13[:, self.inter :]
        if self.interleaved:
            gate, up = w13[:, 0::2], w13[:, 1::2]
        for part in self.parts:
            begin, end = part.begin, part.begin + part.size
            found += gate[:, begin:end], up[:, begin:end], w2[:, :, begin:end]
        return found


def _unpin(backend: Any, parts: Sequence[PackedPart], *keep: Any) -> None:
    for part in parts:
        backend.unpin(part)


def _part(part: dict[str, Any], form: LayerForm, hidden: int) -> PackedPart:
    size = part["size"]
    shapes = (size, hidden), (size, hidden), (hidden, size)
    matrices = [
        PackedMatrix(of_matrix, *shape, *place)
        for of_matrix, shape, place in zip(form, shapes, part["matrices"], strict=True)
    ]
    memory = (ctypes.c_uint8 * part["bytes"]).from_address(part["address"])
    experts = torch.frombuffer(memory, dtype=torch.uint8).view(-1, part["expert_bytes"])
    return PackedPart(experts, part["begin"], size, *matrices)
