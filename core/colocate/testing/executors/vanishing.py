"""Slots whose machine vanishes, or what keeps them there, or that answer nothing any more."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import colocate
from colocate import RoleSpec, Runtime
from colocate.errors import GroupRestarted, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, needs, of_executor, smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, Processes, wait_until

ROLES: dict[str, RoleSpec[Any]] = {"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}


class Vanishing(ExecutorCase):
    """`Executor.lost`, and what an executor does with keepers: `KeptSlot.lost` and `on_stuck`.

    Each test has a runtime of its own: what keeps one slot may keep all of a driver on that machine.
    """

    @needs(OwnProcess)
    @smoke
    def test_others_take_the_place_of_a_slot_that_has_vanished(self, runtime: Runtime) -> None:
        """The executor says that it is lost, so a restart reserves anew; with the old slots none could succeed."""
        with self.connect() as own, own.reserve(2, cpus=0) as pool, Gate() as gate:
            group = pool.spawn(ROLES, on_failure="restart", restarts=2)
            before = self.places_of(group)
            executor = own._node.services.executor
            assert not any(map(executor.lost, before))
            call = group.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for(2)
            self.vanish(before[1])
            assert isinstance(call.exception(PATIENCE_S), GroupRestarted)
            group.wait_ready(PATIENCE_S)
            assert group.role("echo", Echo).noop() == [None, None]
            after = self.places_of(group)
            assert not any(map(executor.lost, after))
            assert not {id(place) for place in before} & {id(place) for place in after}

    @needs(OwnProcess)
    @of_executor
    def test_the_slots_of_what_has_vanished_are_given_back(self, runtime: Runtime) -> None:
        """Without a restart: the group fails, closing goes as ever, and the next pool has slots that work."""
        with self.connect() as own:
            with own.reserve(2, cpus=0) as pool:
                group = pool.spawn(ROLES)
                (_, place) = self.places_of(group)
                self.vanish(place)
                wait_until(lambda: group.state == "failed", "the group has failed")
                wait_until(lambda: own._node.services.executor.lost(place), "the slot is lost")
                with contextlib.suppress(BaseExceptionGroup):  # that it has failed is told once more
                    group.close()
            with own.reserve(2, cpus=0) as pool:
                assert pool.spawn(ROLES).role("echo", Echo).noop() == [None, None]
            assert not own.audit()

    @needs(OwnProcess)
    @of_executor
    def test_the_engine_tells_why_a_slot_has_vanished(self, runtime: Runtime) -> None:
        """The error that the user reads has the engine's words, not only that a connection has ended."""
        if not self.last_words:
            pytest.skip(f"what executor {self.executor!r} says of a slot that vanishes isn't given: set last_words")
        with self.connect() as own, own.reserve(1, cpus=0) as pool, Gate() as gate:
            group = pool.spawn(ROLES)
            (place,) = self.places_of(group)
            call = group.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for()
            self.vanish(place)
            error = call.exception(PATIENCE_S)
            assert isinstance(error, WorkerDied)
            assert self.last_words in str(error)

    @needs(OwnProcess)
    @of_executor
    def test_what_answers_nothing_is_ended(self, runtime: Runtime) -> None:
        """A keeper that can't confirm a kill is ended by the engine (`on_stuck`), and with it what it has started."""
        with self.connect() as own:
            pool = own.reserve(1, cpus=0)
            group = pool.spawn(ROLES)
            pids = [pid for pid, *_ in group.role("echo", Echo).place()]
            (place,) = self.places_of(group)
            with Gate() as gate:
                group.role("faulty", Faulty).wait.submit(gate.address)
                gate.wait_for()
                self.freeze(place)
                workers = Processes(pids)
                with contextlib.suppress(BaseExceptionGroup):  # that a rank hung is another test's business
                    pool.close(grace=0)
            workers.wait()
            workers.close()
            with own.reserve(1, cpus=0) as pool:
                assert pool.spawn(ROLES).role("echo", Echo).noop() == [None]
