"""A moment without threads, descriptors or memory is the error of what it hits, and of nothing else."""

from __future__ import annotations

import pytest

import colocate
from colocate.errors import ColocateError, RoleError, SerializationError, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.starved import Starved, without_descriptors, without_threads
from colocate.testing.waiting import PATIENCE_S

_LARGE = 2**22
_NO_THREAD = "can't start new thread"
_NO_DESCRIPTOR = "no file descriptor is free"


class Starving(ExecutorCase):
    """What comes after it works."""

    def test_a_spawn_without_a_thread(self, spawn: Spawn) -> None:
        """It says what was lacking, leaves nothing, and the next one starts."""
        with without_threads(), pytest.raises(ColocateError, match=_NO_THREAD):
            spawn({"echo": colocate.role(Echo)})
        assert spawn({"echo": colocate.role(Echo)}).role("echo", Echo).first(1) == 1

    @needs(OwnProcess)
    def test_a_restart_without_a_thread(self, spawn: Spawn) -> None:
        """The group has failed then: nobody waits for ever for a restart that didn't begin."""
        group = spawn({"faulty": colocate.role(Faulty)}, slots=1, on_failure="restart")
        with without_threads():
            error = group.role("faulty", Faulty).kill.submit().exception(PATIENCE_S)
            assert isinstance(error, WorkerDied)
            with pytest.raises(WorkerDied) as caught:
                group.wait_ready(PATIENCE_S)
        assert [_NO_THREAD in note for note in caught.value.__notes__] == [True]

    @needs(OwnProcess)
    def test_a_look_without_a_thread(self, spawn: Spawn) -> None:
        """`group.memory()` fails, the worker doesn't."""
        group = spawn({"starved": colocate.role(Starved)}, slots=1)
        starved = group.role("starved", Starved)
        starved.lack("threads")
        for _ in range(2):
            with pytest.raises(RoleError, match=f"could not be looked at: RuntimeError: {_NO_THREAD}"):
                group.memory()
        assert starved.length(b"123") == 3
        assert starved.text.keep(3).fetch() == bytes(3)
        starved.recover()
        assert len(group.memory().slots) == 1

    @needs(OwnProcess)
    @pytest.mark.parametrize("what", ["threads", "descriptors"])
    def test_a_part_for_another_worker(self, spawn: Spawn, what: str) -> None:
        """Who can't be reached by others for want of something is reached by the next who asks."""
        giving, taking = spawn({"starved": colocate.role(Starved)}), spawn({"echo": colocate.role(Echo)}, slots=1)
        starved, echo = giving.role("starved", Starved), taking.role("echo", Echo)
        kept = starved.text.keep(3)
        starved.lack(what)
        with pytest.raises(RoleError, match=f"can't be reached by others: .*({_NO_THREAD}|Too many open files)"):
            echo.first(kept)
        starved.recover()
        assert echo.first(kept) == bytes(3)

    @needs(OwnProcess)
    @pytest.mark.parametrize(
        ("what", "words"), [("descriptors", _NO_DESCRIPTOR), ("memory", "no memory is free for a message of")]
    )
    def test_a_large_argument(self, spawn: Spawn, what: str, words: str) -> None:
        """The call says why it couldn't begin; so do all that came in one message with it."""
        group = spawn({"starved": colocate.role(Starved)}, slots=1)
        starved = group.role("starved", Starved)
        starved.lack(what)
        with pytest.raises(RoleError, match=f"an argument can't be rebuilt there: OSError: .*{words}") as caught:
            starved.length(bytes(_LARGE))
        assert isinstance(caught.value.__cause__, OSError)
        with group.pipeline():
            calls = [starved.length.submit(bytes(_LARGE)), starved.length.submit(b"123")]
        assert [isinstance(call.exception(PATIENCE_S), RoleError) for call in calls] == [True, True]
        assert starved.length(b"123") == 3
        starved.recover()
        assert starved.length(bytes(_LARGE)) == _LARGE

    @needs(OwnProcess)
    def test_a_large_result(self, spawn: Spawn) -> None:
        """That it can't be sent for want of a descriptor isn't told as something that the method has raised."""
        starved = spawn({"starved": colocate.role(Starved)}, slots=1).role("starved", Starved)
        kept = starved.text.keep(_LARGE)
        starved.lack("descriptors")
        with pytest.raises(SerializationError) as fetched:
            kept.fetch()
        for error in (fetched.value, starved.text.submit(_LARGE).exception(PATIENCE_S)):
            assert isinstance(error, SerializationError)
            assert (error.argument, error.method, error.rank) == ("result", "text", 0)
            assert f"the result of starved.text can't be sent: {_NO_DESCRIPTOR}" in str(error)
        assert starved.text(3) == bytes(3)
        starved.recover()
        assert len(kept.fetch()) == _LARGE

    @needs(OwnProcess)
    def test_a_large_result_for_a_driver_without_descriptors(self, spawn: Spawn) -> None:
        """It is lost, and nothing else: the group goes on, and what was kept is fetched once there is one."""
        group = spawn({"starved": colocate.role(Starved)}, slots=1)
        starved = group.role("starved", Starved)
        kept = starved.text.keep(_LARGE)
        kept.wait()
        with without_descriptors():
            with pytest.raises(SerializationError, match=f"the result of starved.text .*{_NO_DESCRIPTOR}"):
                starved.text(_LARGE)
            with pytest.raises(SerializationError, match=f"the result of starved.text .*{_NO_DESCRIPTOR}"):
                kept.fetch()
            assert starved.length(b"123") == 3
        assert len(kept.fetch()) == _LARGE
        assert group.state == "ready"
