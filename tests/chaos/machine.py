"""The role of all programs: a deterministic state machine that notes every call in order."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import os
import random
import secrets
import signal
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np

from colocate import Concat, Gather, Role, Scatter, Weights, method

if TYPE_CHECKING:
    import torch

Seen: TypeAlias = tuple[str, int, tuple[int, ...], Any]
"""A rank's answer: its nonce, its rank, the calls that its worker has begun so far, and the call's own value."""

Row: TypeAlias = tuple[int, int, int]
"""A row's value, the last call that its worker had begun then, and its rank."""

FOR_EVER_S = 3600
_HOLDS = "holds the gil"


SIZES = {"c": 1 << 20, "d": 1 << 19}
_SIZE = 1 << 18
_APART = (1 << 16) + 1
CHANGED = "memory that isn't what it was"
_PARTS = 4  # the number of weights that a role's memory is yielded in
_NOTED = 512  # calls that a role notes, at most
STOPS = 0.5  # the share of calls in which a stopping rank stops
PLACES = 2  # rows that run at once on a rank
CHILD = ("sleep", "86399")


def size_of(role: str) -> int:
    return SIZES.get(role, _SIZE)


class Ballast:
    """Memory that sleeps and wakes, with a check of its contents.

    The memory is an array, which stays awake, or a module's tensor, one of the role's weights, which sleeps.
    """

    def __init__(self, role: str, rank: int, tensor: bool = False) -> None:
        if tensor:
            import torch

            self._module: Any = torch.nn.Module()
            self._module.register_buffer("memory", torch.empty(size_of(role), dtype=torch.uint8))
        else:
            self._array = np.empty(size_of(role), dtype=np.uint8)
        self.array[:] = np.frombuffer(_first(role, rank), dtype=np.uint8)
        self.sum = self.digest()

    @property
    def memory(self) -> torch.Tensor:
        found: torch.Tensor = self._module.memory
        return found

    @property
    def array(self) -> np.ndarray:
        """The memory at its current address, by a new array: a stored array would keep the tensor awake."""
        if hasattr(self, "_array"):
            return self._array
        place = (ctypes.c_ubyte * self.memory.nbytes).from_address(self.memory.data_ptr())
        found: np.ndarray = np.frombuffer(place, dtype=np.uint8)  # type: ignore[call-overload]
        return found

    def use(self, ident: int) -> None:
        self.look(ident)
        self.write(ident)
        self.sum = self.digest()

    def look(self, ident: int) -> int:
        found = self.digest()
        if found != self.sum:
            raise AssertionError(f"call {ident} finds {CHANGED}")
        return found

    def write(self, ident: int) -> None:
        view = self.array[1000:]
        view[ident * 4099 % len(view) :: _APART] = ident % 251

    def digest(self) -> int:
        return zlib.crc32(self.array.data)

    def save(self, path: Path) -> None:
        path.write_bytes(self.array.data)

    def restore(self, path: Path) -> None:
        self.array[:] = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        self.sum = self.digest()


def digest_after(role: str, rank: int, idents: Iterable[int]) -> int:
    """Return the expected digest after these calls, in order."""
    ballast = Ballast(role, rank)
    for ident in idents:
        ballast.write(ident)
    return ballast.digest()


@functools.lru_cache
def _first(role: str, rank: int) -> bytes:
    """Return the initial memory, in which all pages of all ranks differ."""
    return random.Random(f"{role} {rank}").randbytes(size_of(role))


class Deliberate(Exception):
    def __init__(self, ident: int, rank: int) -> None:
        super().__init__(ident, rank)
        self.ident = ident
        self.rank = rank


class Machine(Role):
    """A role whose whole state is the list of its calls, and the memory that these calls have written."""

    stops = False

    def __init__(
        self,
        takes_s: float = 0.0,
        hangs: int | None = None,
        main: str = "",
        child: bool = False,
        stops: bool = False,
    ) -> None:
        """Take `takes_s` seconds; keep the GIL on the rank `hangs`; add to the notes of the role `main`.

        With a `child` another process does a part of the work; if `stops`, ranks stop in some calls.
        """
        from tests.chaos import mutants  # a global import would be pickled with the class

        mutants.apply_from_environment()
        if self.ctx.rank == hangs:
            keep_the_gil()
        self.stops = stops
        self.child = self.ctx.start(mixes, name="mixer") if child else None
        time.sleep(takes_s)
        self.main = not main
        self.nonce = secrets.token_hex(4)
        assert self.ctx.role is not None
        self.ballast = Ballast(self.ctx.role, self.ctx.rank, tensor=True)
        self.notes: list[int] = self.ctx.sibling(main, Machine).notes if main else []
        self.rows = 0  # running rows

    def save(self, directory: str) -> None:
        self.ballast.save(Path(directory, f"{self.ctx.rank}.memory"))
        if self.main:
            Path(directory, str(self.ctx.rank)).write_text(json.dumps(self.notes))

    def restore(self, directory: str) -> None:
        """Restore the memory and the notes; roles that add to another role's notes share the list."""
        self.ballast.restore(Path(directory, f"{self.ctx.rank}.memory"))
        if self.main:
            self.notes[:] = json.loads(Path(directory, str(self.ctx.rank)).read_text())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole state: the memory in parts, and then the calls that have written it."""
        import torch

        for number, part in enumerate(self.ballast.memory.chunk(_PARTS)):
            yield f"part {number}", part
        told = [self.ctx.rank, len(self.notes), *self.notes]
        yield "notes", torch.tensor(told + [0] * (2 + _NOTED - len(told)))

    def _note(self, ident: int, work_s: float = 0.0) -> None:
        if self.rows:
            raise AssertionError(f"call {ident} begins while rows of another one run")
        self.ballast.use(ident)
        self.notes.append(ident)
        if self.stops and random.Random(ident * 31 + self.ctx.rank).random() < STOPS:
            breakpoint()
        if work_s:
            time.sleep(work_s)

    def _seen(self, value: Any) -> Seen:
        return self.nonce, self.ctx.rank, tuple(self.notes), value

    @method(collect=Gather())
    def step(self, ident: int, work_s: float, payload: bytes) -> Seen:
        self._note(ident, work_s)
        asked = ident, self.ctx.rank, payload
        if self.child is None or self.child.connection is None:
            return self._seen(mixed(*asked))
        self.child.connection.send(asked)
        return self._seen(self.child.connection.recv())

    @method(collect=Gather())
    def look(self, ident: int) -> Seen:
        """Return the digest of the memory, without a write."""
        found = self.ballast.look(ident)
        self.notes.append(ident)
        return self._seen(found)

    @method(collect=Concat())
    def make(self, ident: int, work_s: float, rows: int, size: int) -> list[bytes]:
        self._note(ident, work_s)
        return [row(ident, self.ctx.rank, index, size) for index in range(rows)]

    @method(collect=Gather())
    def take(self, ident: int, rows: Sequence[bytes]) -> Seen:
        """Return the checksums of all rows."""
        self._note(ident)
        return self._seen([zlib.crc32(each) for each in rows])

    @method(collect=Gather())
    def fail(self, ident: int, work_s: float, ranks: Sequence[int]) -> Seen:
        self._note(ident, work_s)
        if self.ctx.rank in ranks:
            raise Deliberate(ident, self.ctx.rank)
        return self._seen(None)

    @method(rows="index", concurrency=PLACES)
    async def play(self, index: int, ident: int, work_s: float, failing: Sequence[int]) -> Row:
        """Run one row; a call's first row on a rank notes the call."""
        if self.notes[-1:] != [ident]:
            self._note(ident)
        self.rows += 1
        try:
            await asyncio.sleep(work_s)
            if index in failing:
                raise Deliberate(ident, index)
            return self._row(ident, index)
        finally:
            self.rows -= 1

    @method(dispatch=Scatter("indices"))
    def each(self, indices: Sequence[int], ident: int, work_s: float) -> Iterator[tuple[int, Row]]:
        """Yield rows, the last one first."""
        self._note(ident)
        for place, index in reversed([*enumerate(indices)]):
            time.sleep(work_s)
            yield place, self._row(ident, index)

    def _row(self, ident: int, index: int) -> Row:
        return mixed(ident, index, b"row"), self.notes[-1], self.ctx.rank

    @method(collect=Gather())
    def add(self, ident: int, failing: Sequence[int]) -> Seen:
        """Return the sum of all ranks' inputs, unless this rank has to raise before."""
        import torch
        import torch.distributed as dist

        self._note(ident)
        group = self.ctx.process_group()
        if self.ctx.rank in failing:
            raise Deliberate(ident, self.ctx.rank)
        put = torch.tensor([put_in(ident, self.ctx.rank)], dtype=torch.int64)
        dist.all_reduce(put, group=group)
        return self._seen(int(put.item()))

    @method
    def hold(self, ident: int) -> None:
        """Keep the GIL for ever, in C, and tell so by the process's name."""
        self._note(ident)
        with open("/proc/self/comm", "w") as file:
            file.write(_HOLDS)
        keep_the_gil()


class Target(Machine):
    """A role whose memory comes from another role by syncs of weights, all of the same calls."""

    def __init__(self, main: str) -> None:
        super().__init__(main=main)
        self.source, self.log = -1, tuple[int, ...]()  # the source's rank and calls

    def load_weights(self, weights: Weights, version: int) -> None:
        """Load the weights; a weight's name may tell a rank to raise."""
        parts = iter(self.ballast.memory.chunk(_PARTS))
        for name, tensor in weights:
            if name == "notes":
                self.source, count, *told = tensor.tolist()
                self.log = tuple(told[:count])
                continue
            if (failing := Failing.of(name)) is not None and self.ctx.rank in failing.ranks:
                raise Deliberate(failing.ident, self.ctx.rank)
            next(parts).copy_(tensor)
        self.ballast.sum = self.ballast.digest()

    @method(collect=Gather())
    def peek(self, ident: int) -> Seen:
        """Return the version of the weights, the source's rank and calls, and the digest of the memory."""
        found = self.ballast.digest()
        self.notes.append(ident)
        return self._seen((self.ctx.weights_version, self.source, self.log, found))


class Generator(Target):
    """A background role with notes of its own, whose memory comes from syncs."""

    def __init__(self) -> None:
        super().__init__(main="")

    def _note(self, ident: int, work_s: float = 0.0) -> None:
        if self.rows:
            raise AssertionError(f"call {ident} begins while rows of another one run")
        self.notes.append(ident)
        time.sleep(work_s)

    @method(collect=Gather())
    def talk(self, ident: int, steps: int, work_s: float) -> Seen:
        """Return the versions of the weights in each step, with a pause point between steps."""
        self._note(ident)
        versions: list[int] = []
        while len(versions) < steps and not self.ctx.cancelled:
            time.sleep(work_s)
            self.ctx.pause_point()
            versions.append(self.ctx.weights_version)
        return self._seen(versions)

    @method(collect=Gather(), concurrency=PLACES)
    async def talk_async(self, ident: int, steps: int, work_s: float) -> Seen:
        """Do as `talk`, but rest in each step."""
        self._note(ident)
        _, _, begun, _ = self._seen(None)
        versions: list[int] = []
        for _ in range(steps):
            async with self.ctx.resting():
                await asyncio.sleep(work_s)
            versions.append(self.ctx.weights_version)
        return self.nonce, self.ctx.rank, begun, versions


@attrs.frozen
class Failing:
    """The ranks of a target on which a sync has to fail, encoded in the name of a weight."""

    ident: int  # of the sync
    ranks: tuple[int, ...]

    def names(self) -> dict[str, str]:
        return {"part 2": f"failing {self.ident} {' '.join(map(str, self.ranks))}"}

    @classmethod
    def of(cls, name: str) -> Failing | None:
        word, *numbers = name.split()
        return cls(int(numbers[0]), tuple(map(int, numbers[1:]))) if word == "failing" else None


class Parent(Machine):
    """A role with a child on each rank."""

    def __init__(self, main: str) -> None:
        super().__init__(main=main)
        self._begin()

    def _begin(self) -> None:
        self.own = self.ctx.start(CHILD, name="child")

    @method(collect=Gather())
    def orphan(self, ident: int, ranks: Sequence[int]) -> Seen:
        """Kill the child on some ranks, and sleep for ever there."""
        self._note(ident)
        if self.ctx.rank in ranks:
            assert self.own.pid is not None
            os.kill(self.own.pid, signal.SIGKILL)
            time.sleep(FOR_EVER_S)
        return self._seen(None)

    @method(collect=Gather(), revives=True)
    def revive(self, ident: int) -> Seen:
        """Start another child if the child has died."""
        self._note(ident)
        if not self.own.alive:
            self._begin()
        return self._seen(self.own.alive)


def holds_the_gil(pid: int) -> bool:
    """Return whether a worker holds the GIL, by the process's name, which needs no driver."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().rstrip("\n") == _HOLDS
    except (FileNotFoundError, ProcessLookupError):
        return False


def keep_the_gil() -> None:
    """Sleep in C without releasing the GIL: no thread of this process runs any more."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def mixed(ident: int, rank: int, payload: bytes) -> int:
    return zlib.crc32(payload, ident * 31 + rank)


def mixes(connection: Any) -> None:
    """Answer requests in a role's child."""
    while True:
        connection.send(mixed(*connection.recv()))


def row(ident: int, rank: int, index: int, size: int) -> bytes:
    return bytes([ident % 251, rank, index % 251, 7]) * max(1, size // 4)


def put_in(ident: int, rank: int) -> int:
    return ident * 1000 + (1, 10, 100, 1000)[rank]
