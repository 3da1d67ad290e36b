"""The audit: the ownership graph beside what the engine really runs and holds; what is in one of them only."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from colocate._api.slots import Slots
from colocate._crew.crew import Crew
from colocate._owned.lifecycle import State
from colocate._system.deadline import Deadline
from colocate._system.limits import AUDIT_SETTLES_S
from colocate._system.lines import at
from colocate.worker.birth.processes import OF_A_ROLE

if TYPE_CHECKING:
    from colocate._api.connection import Connection
    from colocate._crew.worker import Worker
    from colocate._owned.owned import Owned
    from colocate.executor import Running

_STEP_S = 0.05

_Key: TypeAlias = tuple[str, str]  # kind and id


@attrs.frozen
class Finding:
    """One difference between a graph and its engine.

    Attributes:
        kind: "worker", "reservation", or what else an engine keeps ("Ray actor", "folder").
        id: What tells it apart: of a worker "runtime/group/slot", of a reservation "runtime/pool".
        node: Name of the machine, where it lies on one.
        pid: Its process, where it has one.
        since: When it began, in seconds of time.time(), where that is known.
        what: What is wrong with it.
        todo: What to do.
    """

    kind: str
    id: str
    node: str
    pid: int | None
    since: float | None
    what: str
    todo: str

    def __str__(self) -> str:
        facts = [f"pid {self.pid}"] if self.pid is not None else []
        facts += [f"node {self.node}"] if self.node else []
        facts += [f"since {_clock(self.since)}"] if self.since is not None else []
        where = f" ({', '.join(facts)})" if facts else ""
        return f"{self.kind} {self.id}{where}: {self.what}. {self.todo}"


@attrs.frozen
class Audit:
    """What an audit has found; false when that is nothing. As text it has a line for each difference.

    Attributes:
        leaked: What the engine has under our name, and no graph owns.
        missing: What the graph claims, and the engine lacks or doesn't confirm.
    """

    leaked: tuple[Finding, ...] = ()
    missing: tuple[Finding, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leaked or self.missing)

    def __str__(self) -> str:
        if not self:
            return "clean: nothing is leaked, nothing is missing"
        return "\n".join([*(f"leaked: {each}" for each in self.leaked), *(f"missing: {each}" for each in self.missing)])

    def data(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "clean": not self,
            "leaked": [attrs.asdict(each) for each in self.leaked],
            "missing": [attrs.asdict(each) for each in self.missing],
        }

    def json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.data(), indent=2)


@attrs.frozen
class _Claim:
    """Something that the engine has to have, since the graph says so."""

    node: Owned | Worker
    label: str
    place: str = ""
    pid: int | None = None


def audit(connection: Connection) -> Audit:
    """Compare the graph of a runtime with its engine. Differences that go away by themselves aren't any."""
    return _settled(lambda: _look(connection))


def audit_strays(strays: Callable[[], Iterable[Running]]) -> Audit:
    """What is there under our name although its driver is gone, if it stays.

    Args:
        strays: Called for each look.
    """
    return _settled(lambda: Audit(leaked=_unique([_stray(each) for each in strays()])))


def _settled(look: Callable[[], Audit]) -> Audit:
    """Look until nothing is found, or for a while: what has been there at every look."""
    deadline = Deadline(AUDIT_SETTLES_S)
    pause = threading.Event()
    found = look()
    while found and not deadline.is_over:
        pause.wait(_STEP_S)
        again = look()
        found = Audit(_still(found.leaked, again.leaked), _still(found.missing, again.missing))
    return found


def _still(before: Iterable[Finding], after: Iterable[Finding]) -> tuple[Finding, ...]:
    known = {(each.kind, each.id, each.pid) for each in before}
    return tuple(each for each in after if (each.kind, each.id, each.pid) in known)


def _look(connection: Connection) -> Audit:
    """One look. What the graph had only before the engine was asked, or only afterwards, is in no difference."""
    known = set(_known(connection))
    claimed = dict(_claims(connection))
    engine = list(connection.services.executor.running())
    known.update(_known(connection))
    after = dict(_claims(connection))
    firm = {key: claim for key, claim in claimed.items() if key in after and after[key].node is claim.node}
    doubts = {(each.kind, each.id): each.doubt for each in engine if each.doubt}
    there = {(each.kind, each.id) for each in engine if not each.doubt}
    leaked = [_leak(each) for each in engine if not _is_known(each, known)]
    leaked += [_stray(each) for each in connection.services.executor.strays()]
    return Audit(
        _unique(leaked),
        tuple(_missing(key, claim, doubts.get(key, "")) for key, claim in firm.items() if key not in there),
    )


def _is_known(each: Running, known: set[_Key]) -> bool:
    if each.kind in ("worker", "reservation"):
        return (each.kind, each.id) in known
    return ("reservation", each.owner) in known or ("runtime", each.owner) in known


def _known(connection: Connection) -> Iterator[_Key]:
    """All that the graph has, whatever it is doing."""
    yield "runtime", connection.services.id
    for pool in _pools(connection):
        yield "reservation", pool.request.id
        for group in _crews(pool):
            for worker in list(group.workforce.workers):
                yield "worker", worker.boot.worker


def _claims(connection: Connection) -> Iterator[tuple[_Key, _Claim]]:
    """What the engine has to have: what is neither starting nor ending, nor known to be gone."""
    for pool in _pools(connection):
        if pool.reservation is not None and pool.closed_by is None:
            yield ("reservation", pool.request.id), _Claim(pool, f"pool {pool.name!r} made at {_line(pool)}")
        for group in _crews(pool):
            if group.life.state is not State.READY:
                continue
            for worker in list(group.workforce.workers):
                if worker.hello is not None and worker.exit is None:
                    label = f"worker {worker.slot} of group {group.name!r} made at {_line(group)}"
                    yield ("worker", worker.boot.worker), _Claim(worker, label, worker.boot.node, worker.pid)


def _pools(connection: Connection) -> list[Slots]:
    return [child for child in list(connection.children.values()) if isinstance(child, Slots)]


def _crews(pool: Slots) -> list[Crew]:
    """Those that the graph has: what has taken its slots is more, while something ends."""
    return [child for child in list(pool.children.values()) if isinstance(child, Crew)]


def _unique(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple({(each.kind, each.id, each.pid): each for each in findings}.values())


_OF_WORKERS = "Nothing commands it any more: end its process, or close the runtime"
_OF_ROLES = "Nothing will end it any more: end it by hand"
_OF_RESERVATIONS = "Nobody can use or close it from here: it goes when this driver's runtime is closed"


def _leak(each: Running) -> Finding:
    what = "the engine has it, and nothing in the graph of this runtime owns it"
    return _finding(each, what, {"worker": _OF_WORKERS, OF_A_ROLE: _OF_ROLES}.get(each.kind, _OF_RESERVATIONS))


def _stray(each: Running) -> Finding:
    what = "it is still there although its driver is gone"
    return _finding(each, what, "Nobody will take it back: end or remove it by hand")


def _finding(each: Running, what: str, todo: str) -> Finding:
    told = f"{what} ({each.detail})" if each.detail else what
    return Finding(each.kind, each.id, each.node, each.pid, each.since, told, todo)


def _missing(key: _Key, claim: _Claim, doubt: str) -> Finding:
    kind, name = key
    why = f"the engine doesn't confirm it: {doubt}" if doubt else "the engine doesn't have it"
    todo = "Close the group and spawn it again" if kind == "worker" else "Close the pool and reserve again"
    what = f"the graph claims it ({claim.label}), and {why}"
    return Finding(kind, name, claim.place, claim.pid, None, what, todo)


def _line(node: Owned) -> str:
    return at(node.line)


def _clock(since: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
