"""The model of training: the number of updates, each step's losses, and the end of a group with torn weights."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.records import PlayedGroup, Sent, chain
from tests.chaos.trainer import RATE, batch, make_net

from colocate.errors import CallTimeout, RenewalError

TOLERANCE = 1e-6
"""The relative difference of losses in shards and in one piece; a missing update makes more than a percent."""


def complaints(group: PlayedGroup) -> Iterator[str]:
    """Yield each step whose weights don't have exactly the updates before the step, the same on all ranks."""
    for sent in group.sent:
        if sent.trains and sent.fine:
            before = reached(group, sent.generation, sent.ident)
            yield from (f"{sent}: {words}" for words in _of_step(sent, before))


def reached(group: PlayedGroup, generation: int, before: int) -> set[int]:
    """Return the possible numbers of updates when a call was made."""
    tag = group.restored.get(generation)
    found = {0} if tag is None else reached(group, group.saved[tag], tag)
    for sent in group.sent:
        if not sent.trains or sent.generation != generation or sent.ident >= before:
            continue
        if sent.fine:
            found = {number for number, _ in _told(sent)}
        elif isinstance(sent.error, CallTimeout):  # the ranks may have made the update: too late, or just now
            found = found | {number + 1 for number in found}
    return found


def _told(sent: Sent) -> list[tuple[int, float]]:
    return [own for _, _, _, own in sent.value]


def _of_step(sent: Sent, before: set[int]) -> Iterator[str]:
    told = _told(sent)
    found = {number for number, _ in told}
    if [rank for _, rank, _, _ in sent.value] != list(sent.ranks):
        yield f"{sent.value!r:.200} isn't what ranks {sent.ranks} have done"
    elif len(found) > 1:
        yield f"ranks have made different numbers of updates: {[number for number, _ in told]}"
    elif not found <= {number + 1 for number in before}:
        yield f"it made update {max(found)}, after {sorted(before)}"
    else:
        expected = _losses(max(found) - 1, len(sent.ranks))
        if any(abs(loss - due) > TOLERANCE * due for (_, loss), due in zip(told, expected, strict=True)):
            yield f"wrong losses in update {max(found)}: {[loss for _, loss in told]} instead of {expected}"


def tears(sent: Sent) -> bool:
    """Return whether a step has to tear the weights: some ranks raise when the others can make their update."""
    return sent.where == "after" and 0 < len(sent.fails) < len(sent.ranks)


def torn_by(sent: Sent, group: PlayedGroup) -> Sent | None:
    """Return the step before a call that has left the ranks without a common state, if any."""
    for each in group.sent:
        if each.ident < sent.ident and each.generation == sent.generation and tears(each) and each.raised:
            return each
    return None


def explains(error: RenewalError, sent: Sent, group: PlayedGroup) -> bool:
    """Return whether a step before the call may have caused the error: the step has torn the weights, or may have.

    A step that has timed out may: a rank is freed in its last collective, which the others have left already.
    """
    causes = chain(error)[1:]
    return any(
        each.trains and each.error in causes and (tears(each) or isinstance(each.error, CallTimeout))
        for each in group.sent
        if each.ident < sent.ident and each.generation == sent.generation
    )


def _train() -> Iterator[list[float]]:
    import torch

    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    number = 0
    while True:
        x, y = batch(number)
        rows = ((net(x) - y) ** 2).squeeze(1)
        yield rows.tolist()
        optimizer.zero_grad()
        rows.mean().backward()
        optimizer.step()
        number += 1


_rows: list[list[float]] = []  # the losses of an undisturbed run in one process, by update
_more = _train()


def _losses(number: int, ranks: int) -> list[float]:
    """Return each rank's loss on its share of the rows, after `number` updates."""
    while len(_rows) <= number:
        _rows.append(next(_more))
    shares = [_rows[number][rank::ranks] for rank in range(ranks)]
    return [sum(share) / len(share) for share in shares]
