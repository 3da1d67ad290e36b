"""Compare the weights of two roles bit by bit, by means of digests (`compare_weights`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import attrs

from colocate._calls.sending import for_all, refuse_here, send_blocking
from colocate._calls.view import viewed
from colocate._display import columns, page, reason, table
from colocate._role.role import RoleInfo
from colocate._signals.in_framework import check_may_wait
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import parse_limit
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ConfigError
from colocate.features.weights.driver import check_method
from colocate.features.weights.messages import DIGESTS, Digest, DigestRequest
from colocate.features.weights.weights import needed_tags
from colocate.features.weights.worker import WeightsOfWorker

_MOST_SHOWN = 32
"""The number of weights in a table's text."""
_HINT = "What it yields is what is compared; for modules colocate.torch.named_weights(module) does it"
RankDigests = Sequence[Mapping[str, Digest]]
"""Digests by name, for each rank."""


@attrs.frozen
class _Weight:
    name: str
    a: str
    b: str
    differs: str


@attrs.frozen
class WeightsTable:
    """The weights of two roles, side by side: the result of `compare_weights`.

    A table has no truth value: use `same`.

    Attributes:
        a: The first role, with the group.
        b: The second role, with the group.
        rows: For each weight of either, under b's name: `name`, `a` and `b` ("[8, 8] float32", "" if missing), and
            `differs` (the difference in words, "" for none).
    """

    a: str
    b: str
    rows: Sequence[Mapping[str, str]]

    @property
    def same(self) -> bool:
        """Whether all ranks of both roles have the same weights."""
        return not self.differing

    @property
    def differing(self) -> Sequence[Mapping[str, str]]:
        """The rows of differing weights."""
        return [row for row in self.rows if row["differs"]]

    def __bool__(self) -> NoReturn:
        raise TypeError("a table of weights is neither true nor false: ask for .same, or .differing")

    def __str__(self) -> str:
        differing = self.differing
        if not differing:
            return self._summary()
        lines = [list(differing[0]), *([*row.values()] for row in differing[:_MOST_SHOWN])]
        more = [f"... and {len(differing) - _MOST_SHOWN} more"] if len(differing) > _MOST_SHOWN else []
        return "\n".join([self._summary(), *columns(lines, [False] * len(lines[0])), *more])

    def _repr_html_(self) -> str:
        differing = self.differing
        return page(reason(self._summary(), "bad" if differing else ""), table(differing))

    def _summary(self) -> str:
        of = f"of {len(self.rows)} weights of {self.a} and {self.b}"
        return f"{len(self.differing)} {of} differ" if self.differing else f"0 {of} differ: all bits are the same"


def compare_weights(
    a: Any, b: Any, *, names: Mapping[str, str | None] | None = None, timeout: float | None = None
) -> WeightsTable:
    """Compare the weights of two roles bit by bit, as given by the roles' `named_weights`, and wait for the result.

    Each rank of both roles computes digests of its tensors on their device, and all digests are compared with the
    digests of a's first rank. The result therefore also shows differences between ranks; `compare_weights(a, a)`
    compares a's ranks alone. If floating-point dtypes differ, a's weights are compared as a sync to b would have
    converted them. The roles may be of any groups and runtimes. The comparison makes a call of each role, in the order
    of the group's calls, first of b and then of a.

    Args:
        a: The view of a role with `named_weights`, such as an actor; sharded weights are gathered.
        b: The view of another role with `named_weights`, such as a role with an engine.
        names: b's names by a's names; None for a weight that isn't compared.
        timeout: Seconds until a call is given up; None for never.

    Raises:
        ConfigError: A role has no `named_weights`, or one that yields no whole tensors.
        SleepingError: A weight sleeps, and is only woken by `group.wake`.
        RoleError: `named_weights` has raised.
    """
    limited = parse_limit(timeout, "compare_weights(timeout)", positive=True)
    check_may_wait("compare_weights")
    (one, first), (other, second) = viewed(a, "compare_weights(a"), viewed(b, "compare_weights(b")
    for role in (first, second):
        check_method("compare_weights", role, "named_weights", f". {_HINT}")
    alone = one is other and first.name == second.name
    have = _fetch_digests(other, second, {}, limited)
    called = dict(names or {})
    dtypes = {_source_name(name, called): digest.dtype for ranks in have for name, digest in ranks.items()}
    source_ranks = have if alone else _fetch_digests(one, first, dtypes, limited)
    if unknown := [name for name in called if name not in source_ranks[0]]:
        near = did_you_mean(unknown[0], source_ranks[0])
        raise ConfigError(f"compare_weights(names=...): {first.name} has no weight {unknown[0]!r}{near}")
    source_digests = [
        {to: digest for name, digest in rank.items() if (to := called.get(name, name)) is not None}
        for rank in source_ranks
    ]
    a_name, b_name = (f"{group.name}.{role.name}" for group, role in ((one, first), (other, second)))
    return WeightsTable(
        a_name,
        b_name,
        [attrs.asdict(weight) for weight in _compare_rows(source_digests, source_digests[:1] if alone else have)],
    )


def _source_name(name: str, names: Mapping[str, str | None]) -> str:
    return next((source_name for source_name, called in names.items() if called == name), name)


def _fetch_digests(
    worker_group: WorkerGroup, role: RoleInfo, dtypes: Mapping[str, str], timeout: float | None
) -> RankDigests:
    label = f"the comparing of {role.name}'s weights"
    refuse_here(worker_group, label)
    request = DigestRequest(role.name, f"{worker_group.name}.{role.name}", dtypes)
    draft = for_all(worker_group, label, DIGESTS, WeightsOfWorker.calls[DIGESTS], {"wanted": request}, timeout)
    draft.wakes = {role.name: needed_tags(role.cls, "named_weights")}
    results = send_blocking(draft).result()
    return [results[slot] for slot in role.slots]


def _compare_rows(a: RankDigests, b: RankDigests) -> Iterator[_Weight]:
    first = a[0]
    for name in dict.fromkeys(name for rank in (*a, *b) for name in rank):
        ours, theirs = [rank.get(name) for rank in a], [rank.get(name) for rank in b]
        first_digest, other = next(filter(None, ours), None), next(filter(None, theirs), None)
        if other is None:
            how = "only in a"
        elif first_digest is None:
            if other.tied in first:  # The tensor has two names, and role a has one of the names.
                continue
            how = "only in b"
        else:
            content = _digest_content(first.get(name))
            apart = [(ours, "a"), (theirs, "b")]
            texts = [
                _ranks_text([_digest_content(digest) != content for digest in ranks], role_name)
                for ranks, role_name in apart
            ]
            how = " and ".join(filter(None, texts))
        yield _Weight(name, str(first_digest or ""), str(other or ""), how)


def _digest_content(digest: Digest | None) -> object:
    return None if digest is None else digest.content


def _ranks_text(differ: Sequence[bool], whose: str) -> str:
    ranks = [rank for rank, is_different in enumerate(differ) if is_different]
    if not ranks:
        return ""
    if len(ranks) == len(differ):
        return f"on all ranks of {whose}" if len(differ) > 1 else f"in {whose}"
    return f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {whose}"
