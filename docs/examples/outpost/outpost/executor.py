"""A process per slot, which ssh or srun starts on its machine, each with a keeper in it."""

import json
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import attrs

from colocate.errors import ConfigError, PlacementError
from colocate.executor import (
    Boot,
    Executor,
    Host,
    HostEvents,
    MultiNode,
    Node,
    OwnProcess,
    Place,
    Request,
    Reservation,
    Running,
    SharedSlots,
)
from colocate.gpus import names, visibility_variables
from colocate.keeper import Keepers, KeptSlot
from colocate.placement import Ledger

_LEAVES_WITHIN_S = 5.0


class Outposts(Executor, OwnProcess, MultiNode, SharedSlots):
    """Slots are kept by processes on some machines."""

    name = "outpost"

    def __init__(
        self,
        *,
        hosts: Sequence[str] = (),
        through: Sequence[str] = ("ssh", "-o", "BatchMode=yes"),
        python: str = sys.executable,
        cpus: float | None = None,
        gpus: int = 0,
    ) -> None:
        """Connect to some machines.

        Args:
            hosts: Names of the machines, as `through` and the network know them; this machine alone without.
            through: What runs a command on a machine whose name follows. In a job of Slurm's
                ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist"].
            python: The Python on these machines; it has colocate and this package.
            cpus: What each machine has to hand out; None doesn't count.
            gpus: How many GPUs each machine has to hand out.
        """
        if wrong := [host for host in hosts if host.startswith("-")]:  # ssh would take the name for an option
            raise ConfigError(f"outpost: hosts: {wrong[0]!r} isn't the name of a machine")
        self._addresses = {host: socket.gethostbyname(host) for host in hosts}
        self._through, self._python = through, python
        self._nodes = [Node(name, cpus, gpus) for name in hosts or [platform.node()]]
        self._ledger = Ledger(self._nodes, lambda devices: "cuda:0" if devices else "cpu")
        self._gpus = [str(i) for i in range(gpus)] if hosts else names(gpus)  # here those that this process sees
        self._keepers = Keepers("outpost")

    @classmethod
    def objection(cls, option: str, value: object) -> str | None:
        """None for numbers; the others say what is run, and where."""
        return None if option in ("cpus", "gpus") else "it has commands run"

    def nodes(self) -> Sequence[Node]:
        """The machines."""
        return self._nodes

    def reserve(self, request: Request) -> Reservation:
        """Take slots, and start a post for each."""
        reservation = self._ledger.reserve(request)
        posts: list[Post] = []
        try:
            for place in reservation.places:  # one at a time: where one can't be started, the others are ended
                posts.append(self.start_post(place, request))
            kept = zip(reservation.places, [post.connected() for post in posts], strict=True)
            # By `host` workers on other machines reach this one's.
            reached = [(place, self._addresses.get(place.node, place.host), slot) for place, slot in kept]
            places = [attrs.evolve(place, host=host, handle=slot) for place, host, slot in reached]
        except BaseException:
            for post in posts:
                post.end()
            self._ledger.release(reservation)
            raise
        return attrs.evolve(reservation, places=tuple(places), handle=(reservation, posts))

    def start_post(self, place: Place, request: Request) -> "Post":
        """Start a post for a slot, on the slot's machine."""
        command = [self._python, "-m", "outpost.post"]
        if place.node in self._addresses:
            command = [*self._through, place.node, *command]
        return Post(self._keepers, place, request, self._gpus, command, self._addresses.get(place.node))

    def set_cut_timeout(self, cut_s: float) -> None:
        """By its connections to keepers."""
        self._keepers.set_cut_limit(cut_s)

    def withdraw(self, request: Request) -> None:
        """Nobody waits for them any more."""
        self._ledger.withdraw(request)

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Start a worker."""
        kept: KeptSlot = place.handle
        return kept.launch(boot, events)

    def is_lost(self, place: Place) -> bool:
        """Whether the post of a slot is gone: a restart reserves others then."""
        kept: KeptSlot = place.handle
        return kept.is_lost

    def release(self, reservation: Reservation) -> None:
        """End the posts, and give the slots back."""
        inner, posts = reservation.handle
        for post in posts:
            post.let_go()
        for post in posts:
            post.end()
        self._ledger.release(inner)

    def running(self) -> Sequence[Running]:
        """What is held, and what runs."""
        return [*self._ledger.running(), *self._keepers.running()]

    def close(self) -> None:
        """End the threads."""
        self._keepers.close()


class Post:
    """A process that keeps one slot."""

    def __init__(
        self,
        keepers: Keepers,
        place: Place,
        request: Request,
        gpus: Sequence[str],
        command: Sequence[str],
        host: str | None,
    ) -> None:
        self._keepers, self._node = keepers, place.node
        self._kept: KeptSlot | None = None
        env = {**request.env, **visibility_variables(gpus, place.devices)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        where = {"host": host, "ports": request.ports, "cut_s": request.cut_s}
        told = {"key": keepers.key.hex(), "env": env, "name": request.id, "where": where}
        with suppress(BrokenPipeError):  # the process has ended: `connected` says so
            print(json.dumps(told), file=self._process.stdin, flush=True)
        self._watch = threading.Thread(target=self._wait, name="outpost-watch", daemon=True)

    def connected(self) -> KeptSlot:
        """The slot that it keeps, once it has said where."""
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        if not address:
            raise PlacementError(
                f"the post on {self._node} ended at once, with exit code {self._process.wait()}", nodes=()
            )
        self._kept = self._keepers.open_slot(address, on_stuck=self._process.kill)
        self._watch.start()
        return self._kept

    def _wait(self) -> None:
        code = self._process.wait()
        if self._kept is not None:
            self._kept.on_process_gone(f"its post ended with exit code {code}")

    def let_go(self) -> None:
        """It may go."""
        if self._kept is not None:
            self._kept.close()

    def end(self) -> None:
        """It goes, or is made to."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it still holds what nobody read
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVES_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if self._watch.ident is not None:
            self._watch.join()
