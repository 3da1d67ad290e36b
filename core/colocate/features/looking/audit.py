"""The audit: a comparison of the ownership graph with the processes and reservations that the cluster has."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from colocate._api.slots import Slots
from colocate._owned.owned import State
from colocate._system.deadline import Deadline
from colocate._system.limits import AUDIT_SETTLES_S
from colocate._system.lines import format_line
from colocate._worker_group.worker_group import WorkerGroup
from colocate.worker.birth.processes import OF_A_ROLE

if TYPE_CHECKING:
    from colocate._api.connection import Connection
    from colocate._owned.owned import Owned
    from colocate._worker_group.workforce import Worker
    from colocate.executor import Running

_STEP_S = 0.05

_Key: TypeAlias = tuple[str, str]  # The kind and the id of a process, reservation or other object.


@attrs.frozen
class Finding:
    """One difference between the ownership graph and the cluster.

    Attributes:
        kind: "worker", "reservation", or another kind of object in the cluster ("Ray actor", "folder").
        id: "runtime/group/slot" of a worker, "runtime/pool" of a reservation, the cluster's own name otherwise.
        node: Name of the machine; empty if there is none.
        pid: The process id; None if there is no process.
        since: The start, in seconds of time.time(); None if unknown.
        what: The difference, in words.
        todo: The remedy, in words.
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
        facts += [] if self.since is None else [time.strftime("since %Y-%m-%d %H:%M:%S", time.localtime(self.since))]
        where = f" ({', '.join(facts)})" if facts else ""
        return f"{self.kind} {self.id}{where}: {self.what}. {self.todo}"


@attrs.frozen
class Audit:
    """The differences that an audit has found.

    The object is false if there are no differences. As text it has one line for each difference.

    Attributes:
        leaked: Objects of colocate that the cluster has, but no graph owns.
        missing: Objects that the graph claims, but the cluster lacks or doesn't confirm.
    """

    leaked: tuple[Finding, ...] = ()
    missing: tuple[Finding, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leaked or self.missing)

    def __str__(self) -> str:
        if not self:
            return "clean: nothing is leaked, nothing is missing"
        return "\n".join(
            [*(f"leaked: {finding}" for finding in self.leaked), *(f"missing: {finding}" for finding in self.missing)]
        )

    def data(self) -> dict[str, Any]:
        """Return the findings as plain data."""
        return {"clean": not self, **attrs.asdict(self)}

    def json(self) -> str:
        """Return the findings as JSON."""
        return json.dumps(self.data(), indent=2)


@attrs.frozen
class _Claim:
    node: Owned | Worker
    label: str
    place: str = ""
    pid: int | None = None


def audit(connection: Connection) -> Audit:
    """Compare the ownership graph of a runtime with the cluster.

    Differences that disappear within seconds are ignored.
    """
    return _repeat_audit(lambda: _audit_once(connection))


def audit_strays(strays: Callable[[], Iterable[Running]]) -> Audit:
    """Return processes and reservations of drivers that are gone, if repeated calls of `strays` all list them."""
    return _repeat_audit(lambda: Audit(leaked=_drop_duplicates(_stray_finding(process) for process in strays())))


def _repeat_audit(look: Callable[[], Audit]) -> Audit:
    """Repeat `look` until nothing is found or the time is up, and return the findings common to all repetitions."""

    def still(before: Iterable[Finding], after: Iterable[Finding]) -> tuple[Finding, ...]:
        keys = {(finding.kind, finding.id, finding.pid) for finding in before}
        return tuple(finding for finding in after if (finding.kind, finding.id, finding.pid) in keys)

    deadline = Deadline(AUDIT_SETTLES_S)
    pause = threading.Event()
    result = look()
    while result and not deadline.is_over:
        pause.wait(_STEP_S)
        again = look()
        result = Audit(still(result.leaked, again.leaked), still(result.missing, again.missing))
    return result


def _audit_once(connection: Connection) -> Audit:
    """Compare graph and cluster once. Objects that change during the comparison are ignored."""
    executor = connection.services.executor
    graph_keys, claimed = _read_graph(connection)
    engine = list(executor.running())
    more, after = _read_graph(connection)
    graph_keys |= more
    firm = {key: claim for key, claim in claimed.items() if key in after and after[key].node is claim.node}
    doubts = {(entry.kind, entry.id): entry.doubt for entry in engine if entry.doubt}
    present = {(entry.kind, entry.id) for entry in engine if not entry.doubt}
    leaked = []
    for entry in engine:
        owners = {("reservation", entry.owner), ("runtime", entry.owner)}
        if graph_keys.isdisjoint({(entry.kind, entry.id)} if entry.kind in ("worker", "reservation") else owners):
            todo = {"worker": _OF_WORKERS, OF_A_ROLE: _OF_ROLES}.get(entry.kind, _OF_RESERVATIONS)
            leaked.append(
                _make_finding(entry, "the cluster has it, and nothing in the graph of this runtime owns it", todo)
            )
    leaked += [_stray_finding(entry) for entry in executor.strays()]
    missing = []
    for key, claim in firm.items():
        if key not in present:
            doubt = doubts.get(key)
            why = f"the cluster doesn't confirm it: {doubt}" if doubt else "the cluster doesn't have it"
            todo = "Close the group and spawn it again" if key[0] == "worker" else "Close the pool and reserve again"
            if isinstance(claim.node, Slots) and claim.node.is_replacing:
                todo = "Others are being reserved in the place of its lost slots: wait for them"
            problem = f"the graph claims it ({claim.label}), and {why}"
            missing.append(Finding(*key, claim.place, claim.pid, None, problem, todo))
    return Audit(_drop_duplicates(leaked), tuple(missing))


def _read_graph(connection: Connection) -> tuple[set[_Key], dict[_Key, _Claim]]:
    """Return all keys of the graph, and a claim for each object that is up, neither starting nor ending."""
    keys, claims = {("runtime", connection.services.id)}, dict[_Key, _Claim]()
    for pool in [child for child in list(connection.children.values()) if isinstance(child, Slots)]:
        key = "reservation", pool.request.id
        keys.add(key)
        if pool.reservation is not None and pool.closed_by is None:
            claims[key] = _Claim(pool, f"pool {pool.name!r} made at {format_line(pool.line)}")
        # All children of the pool are read, because a closing group no longer uses slots but is still a child.
        for group in [child for child in list(pool.children.values()) if isinstance(child, WorkerGroup)]:
            for worker in list(group.workforce.workers):
                key = "worker", worker.boot.worker
                keys.add(key)
                if group.life.state is State.READY and worker.hello is not None and worker.exit is None:
                    label = f"worker {worker.slot} of group {group.name!r} made at {format_line(group.line)}"
                    claims[key] = _Claim(worker, label, worker.boot.node, worker.pid)
    return keys, claims


def _drop_duplicates(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple({(finding.kind, finding.id, finding.pid): finding for finding in findings}.values())


_OF_WORKERS = "Nothing commands it any more: end its process, or close the runtime"
_OF_ROLES = "Nothing will end it any more: end it by hand"
_OF_RESERVATIONS = "Nobody can use or close it from here: it goes when this driver's runtime is closed"


def _stray_finding(each: Running) -> Finding:
    problem = "it is still there although its driver is gone"
    return _make_finding(each, problem, "Nobody will take it back: end or remove it by hand")


def _make_finding(each: Running, what: str, todo: str) -> Finding:
    text = f"{what} ({each.detail})" if each.detail else what
    return Finding(each.kind, each.id, each.node, each.pid, each.since, text, todo)
