"""Looking at detached pools, whoever commands them: nothing of them changes by it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from colocate import wire
from colocate._protocol.commands import Look, LookInside, Seen, SeenInside
from colocate._protocol.message import Head, Message, read
from colocate._protocol.requests import Requests
from colocate._system.deadline import Deadline
from colocate._system.limits import ADOPTED_WITHIN_S
from colocate.errors import ClosedError, EngineError
from colocate.keeper.adoption import Registration
from colocate.keeper.greeting import NEWCOMER
from colocate.keeper.slots import Keepers

_AT_ONCE = 16


def listed(keepers: Keepers, registrations: Collection[Registration]) -> list[Mapping[str, Any]]:
    """What the leads of detached pools say of them, all asked at once, without those that are gone by now."""
    if not registrations:
        return []
    with ThreadPoolExecutor(min(len(registrations), _AT_ONCE), "colocate-listing") as pool:
        return [each for each in pool.map(partial(_listed, keepers), registrations) if each is not None]


def look_inside(keepers: Keepers, registration: Registration) -> dict[str, Any]:
    """What the workers of a detached pool do, and who has it, by all its keepers, asked at once.

    Returns:
        What listings show; and as "workers" what each of them says of itself, as "silent" those that say nothing, and
        as "lost" how many keepers don't answer.

    Raises:
        EngineError: It is gone.
    """
    addresses: Sequence[str] = getattr(registration, "keepers", ())  # what earlier versions have entered lacks them
    facts = _listed(keepers, registration)
    if facts is None:
        raise EngineError(f"pool {registration.name!r} is gone")
    with ThreadPoolExecutor(min(len(addresses), _AT_ONCE) or 1, "colocate-looking") as pool:
        answers = list(pool.map(partial(_inside, keepers, registration), addresses))
    found = [each for each in answers if each is not None]
    return {
        **facts,
        "workers": [json.loads(worker) for each in found for worker in each.workers],
        "silent": [name for each in found for name in each.silent],
        "lost": len(addresses) - len(found),
    }


def _listed(keepers: Keepers, registration: Registration) -> Mapping[str, Any] | None:
    try:
        seen = _asked(keepers, registration.lead, registration, Look())
    except TimeoutError:  # a machine that is overloaded, or cut off; a process that is stopped
        return registration.unseen()
    except (OSError, ClosedError, EngineError):  # it has ended
        return None
    assert isinstance(seen, Seen)
    return seen.facts


def _inside(keepers: Keepers, registration: Registration, address: str) -> SeenInside | None:
    try:
        seen = _asked(keepers, address, registration, LookInside())
    except (OSError, ClosedError, EngineError):  # TimeoutError is an OSError
        return None
    assert isinstance(seen, SeenInside)
    return seen


def _asked(keepers: Keepers, address: str, registration: Registration, question: Message) -> Message:
    """A keeper's answer.

    Raises:
        TimeoutError: It doesn't come.
        OSError: The keeper can't be reached.
        EngineError: It has ended.
    """
    answers: Requests[None, Message] = Requests()
    asked = answers.open([None])

    def told(head: Head, body: Any) -> None:
        answers.answered(asked.token, None, read(head))

    def closed(reason: str) -> None:
        answers.fail_all(EngineError(reason))

    lane: wire.SocketLane = keepers.dial(address, NEWCOMER, told, closed, registration.key)
    lane.send(question.head())
    try:
        (answer,) = asked.result(Deadline(ADOPTED_WITHIN_S))
    finally:
        lane.close()
    return answer
