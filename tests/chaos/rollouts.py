"""The model of rollouts: the weights of a target, the rows of a call, and killed children."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.chaos.machine import digest_after, mixed
from tests.chaos.programs import BACKGROUND
from tests.chaos.records import PlayedGroup, Sent, history, short


def complaints(group: PlayedGroup) -> Iterator[str]:
    for sent in group.sent:
        if sent.count is not None:
            yield from (f"{sent}: {words}" for words in _of_rows(sent, sent.count, group))
        elif sent.what == "peek" and sent.fine:
            yield from (f"{sent}: {words}" for words in _of_weights(sent, group))
        elif sent.fine and sent.role == "k" and (rank := _must_miss(sent, group)) is not None:
            yield f"{sent}: succeeded although rank {rank} has lost its child"


# -- weights


def _syncs(sent: Sent, group: PlayedGroup) -> tuple[list[Sent], list[Sent]]:
    """Return the generation's syncs before a call, and later syncs that a pause may have moved before the call."""
    syncs = [
        each
        for each in group.sent
        if each.what == "weights" and each.role == sent.role and each.generation == sent.generation
    ]
    before = [each for each in syncs if each.ident < sent.ident]
    return before, [each for each in syncs if each.ident > sent.ident] if sent.beside else []


def may_be_stale(sent: Sent, group: PlayedGroup) -> bool:
    """Return whether the last sync before a call has failed, or is missing since a restart."""
    before, passing = _syncs(sent, group)
    if any(not sync.fine for sync in passing):
        return True
    return sent.role in ("s", BACKGROUND) and (not before[-1].fine if before else sent.generation > 0)


def synced(sent: Sent, group: PlayedGroup) -> Callable[[Any], str | None]:
    """Return a check that a sync has used the expected ways for its ranks."""

    def look(found: Any) -> str | None:
        here = (0,) if sent.given == "b" and sent.giver is not None and len(sent.giver.second) == 1 else range(99)
        near = [slot for slot in range(group.slots) if sent.giver is group and slot in here]
        ways = ("reference",) * bool(near) + ("peers",) * (len(near) < group.slots)
        return None if found.by == ways else f"{found.by} instead of {ways}"

    return look


def _of_weights(sent: Sent, group: PlayedGroup) -> Iterator[str]:
    """Yield each rank whose weights aren't a whole state of the source, at the last sync or later."""
    syncs, passing = _syncs(sent, group)
    last = next((number for number in reversed(range(len(syncs))) if syncs[number].fine), None)
    since = [*(syncs if last is None else syncs[last:]), *passing]
    for _, rank, notes, (version, source, told, digest) in sent.value:
        if source < 0:
            if last is not None:
                yield f"rank {rank} has no weights after {syncs[last]}"
            elif digest != digest_after(sent.role, rank, ()):
                yield f"rank {rank} has weights, of version {version}, that are a part of some"
            continue
        whole = [each for each in since if digest == _digest(each, source, told)]
        if not since:
            yield f"rank {rank} has weights of version {version}, of before the restart"
        elif not whole:
            yield f"rank {rank} has weights, of version {version}, that are none of rank {source} after {told}"
        elif last is not None and version < syncs[last].value.version:
            yield f"rank {rank} has version {version} after {syncs[last]}, which has brought {syncs[last].value}"
        elif not any(set(_before(each, source)) <= set(told) for each in whole):
            yield f"rank {rank} has weights of rank {source} after {told}, which are older than {since[0]}"
        elif (
            sent.role == "s"
            and all(each.giver is group and each.given == "a" for each in whole)
            and told != notes[: len(told)]
        ):
            yield f"rank {rank} has weights of rank {source} after {told}, and its own calls were {notes}"


def _digest(sync: Sent, rank: int, told: tuple[int, ...]) -> int:
    assert sync.giver is not None
    writers = {each.ident for each in sync.giver.sent if each.role == sync.given and each.writes}
    return digest_after(sync.given, rank, [ident for ident in told if ident in writers])


def _before(sync: Sent, rank: int) -> list[int]:
    """Return the calls that a source had ended before its weights were synced."""
    giver = sync.giver
    assert giver is not None
    return [
        each.ident
        for each in history(giver, sync.giving)
        if each.fine and each.ident < sync.ident and each.noted == "a" and rank in each.ranks
    ]


# -- rows


def look_at_errors(sent: Sent) -> None:
    """Set the call's error to the first error that isn't a row's own."""
    errors = [value for _, value in sent.rows if isinstance(value, Exception) and not sent.is_told_by(value)]
    if errors and sent.error is None:
        sent.error = errors[0]


def _of_rows(sent: Sent, count: int, group: PlayedGroup) -> Iterator[str]:
    """Yield each row that is missing, repeated or wrong, or whose error is neither deliberate nor the call's."""
    indices = [index for index, _ in sent.rows]
    if len(set(indices)) < len(indices) or not set(indices) <= set(range(count)):
        yield f"of {count} rows these have come: {indices}"
    if sent.fine and not sent.closed and len(indices) < count:
        yield f"of {count} rows only these have come: {indices}"
    for index, value in sent.rows:
        if isinstance(value, Exception):
            told = index in sent.failing and value.row == index and sent.is_told_by(value)  # type: ignore[attr-defined]
            if not told and value != sent.error:
                yield f"row {index} ended with {short(value)}, and others with {short(sent.error)}"
        elif index in (*sent.failing, *sent.fails):
            yield f"row {index} should have raised, but gave {value!r}"
        elif value[:2] != (mixed(sent.ident, index, b"row"), sent.ident):
            yield f"row {index} gave {value!r} instead of {(mixed(sent.ident, index, b'row'), sent.ident)}"
    if sent.sticky and not (sent.fails or sent.failing or group.restarts):
        homes = {(key_of(index), value[2]) for index, value in sent.rows if isinstance(value, tuple)}
        if len(homes) > len({key for key, _ in homes}):
            yield f"rows with one key have run on several ranks: {sorted(homes)}"


def key_of(row: int) -> int:
    """Return the key by which rows stick to a rank."""
    return row % 3


# -- background


def versions_of(ranks: Sequence[int]) -> Callable[[Any], str | None]:
    """Return a check that the versions of weights never decrease on a rank."""

    def look(value: Any) -> str | None:
        told = [(rank, versions) for _, rank, _, versions in value]
        right = [rank for rank, _ in told] == list(ranks) and all(each == sorted(each) for _, each in told)
        return None if right else f"these versions were seen: {told}"

    return look


# -- children


def _orphaned(sent: Sent, group: PlayedGroup) -> list[Sent]:
    """Return the calls up to `sent` that have killed children since the last revival, the last one first."""
    found = []
    for each in reversed(group.sent):
        if each.ident <= sent.ident and each.generation == sent.generation and each.role == "k":
            if each.what == "revive" and each.fine and each is not sent:
                break
            found += [each] if each.bereaved else []
    return found


def is_bereaved(sent: Sent, rank: int | None, group: PlayedGroup) -> bool:
    """Return whether a call may fail because of the death of a rank's child."""
    return sent.role == "k" and sent.what != "revive" and any(rank in each.bereaved for each in _orphaned(sent, group))


def _must_miss(sent: Sent, group: PlayedGroup) -> int | None:
    """Return the rank on which the death of a child should have failed the call, if any."""
    orphaned = next(iter(_orphaned(sent, group)), None)
    if orphaned is None or sent.what == "revive":
        return None
    killed = orphaned is sent or type(orphaned.error).__name__ == "ChildDied"
    return orphaned.bereaved[0] if killed else None
