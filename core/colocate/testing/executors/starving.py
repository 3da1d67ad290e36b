"""A moment without threads, descriptors or memory is the error of what it hits, and of nothing else."""

from __future__ import annotations

import pytest

import colocate
from colocate.errors import ColocateError, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.starved import Starved, without_threads
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
