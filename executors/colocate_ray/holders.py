"""The holders of a driver or owner. A holder is the Ray actor that holds all keepers on one machine."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from colocate.errors import ColocateError
from colocate_ray.holder import Holder, end_process
from colocate_ray.listing import KEEPERS, PREFIX
from colocate_ray.nodes import Nodes

_ENDED_WITHIN_S = 10.0


@attrs.define(eq=False)
class HolderActor:
    """This process's record of a holder, which is a Ray actor that holds keepers."""

    node: str  # Ray's id of the node.
    actor: Any
    watch: Any  # Ray's reference to a call that ends only when the actor ends.
    process: tuple[int, float] | None = None  # Process id and creation time; None until the holder has reported both.
    users: set[int] = attrs.field(factory=set)  # Numbers of the reservations that need this holder.

    @property
    def has_ended(self) -> bool:
        """Whether the actor has ended."""
        return bool(ray.wait([self.watch], timeout=0)[0])

    def kill_process(self) -> None:
        """Kill the unresponsive process of the holder, and wait until the process has ended."""
        kill_actor(self.actor, self.node, self.process)


def kill_actor(actor: Any, node: str, process: tuple[int, float | None] | None) -> None:
    """Kill an unresponsive actor by a task on the actor's machine, and wait until the process has ended."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(end_process)
    try:
        if process is not None:
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
            ray.get(task.options(**options).remote(*process), timeout=_ENDED_WITHIN_S)
            return
    except RayError:  # The node is gone or stuck, so Ray's own kill is the last resort.
        pass
    ray.kill(actor, no_restart=True)


class Holders:
    """All holders that this process has started. Thread-safe."""

    def __init__(self, lost: Callable[[HolderActor, str], None]) -> None:
        self._lost = lost
        self._at: dict[str, HolderActor] = {}
        self._is_stopped = False
        self._lock = threading.Lock()

    def get_or_create(self, node: str, owner: str, user: int) -> HolderActor:
        """Return the holder on a node, for use by a reservation. Start a holder if there is none.

        Raises:
            ColocateError: The driver is ending, so no holder is started any more.
        """
        with self._lock:
            present = self._at.get(node)
            if present is not None and not present.has_ended:
                present.users.add(user)
                return present
            if self._is_stopped:
                raise ColocateError("its driver has let go")
            self._at[node] = keepers = _create_holder(node, f"{PREFIX}{owner}{KEEPERS}{secrets.token_hex(4)}")
            keepers.users.add(user)
        keepers.watch.future().add_done_callback(partial(self._on_ended, keepers))
        return keepers

    def release_user(self, user: int, end: bool) -> None:
        """Record that a reservation no longer needs any holder.

        Args:
            user: The reservation's number.
            end: Whether to end holders without reservations, because an autoscaler never ends a node with a holder.
        """
        with self._lock:
            for holder in self._at.values():
                holder.users.discard(user)
            idle = [node for node, holder in self._at.items() if end and not holder.users]
            ended = [self._at.pop(node) for node in idle]
        for holder in ended:
            ray.kill(holder.actor, no_restart=True)

    def stop_creating(self) -> None:
        """Refuse new holders, and wait until a start in progress has ended."""
        with self._lock:
            self._is_stopped = True

    def end_all(self) -> None:
        """End all holders that this process has started."""
        self.stop_creating()
        for holder in self._at.values():
            ray.kill(holder.actor, no_restart=True)

    def _on_ended(self, holder: HolderActor, future: Any) -> None:
        self._lost(holder, _shorten_message(str(future.exception())))


def _create_holder(node: str, name: str) -> HolderActor:
    remote: Any = ray.remote  # The type is Any, because Ray's type stubs lack concurrency groups.
    actor_class = remote(concurrency_groups={"watch": 1, "ends": 8})(Holder)
    actor = actor_class.options(
        name=name,
        max_restarts=0,
        max_task_retries=0,
        **Nodes.pin_to_node(node),
    ).remote()
    return HolderActor(node, actor, actor.watch.remote())


def _shorten_message(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(lines)
