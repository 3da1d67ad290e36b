"""Checkpoints, a worker's half: its roles take their states and write them, and go on from what was written."""

from __future__ import annotations

from functools import partial
from typing import Any

from colocate._protocol.message import Message
from colocate._role.method import method
from colocate.features.checkpoints import share
from colocate.features.checkpoints.messages import CHECKPOINT, RESTORE, AskSaved
from colocate.features.checkpoints.saver import Saver
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import OfWorker
from colocate.worker.serving.role_instance import RoleInstance


class CheckpointsOfWorker(OfWorker, calls={CHECKPOINT: "save", RESTORE: "restore"}):
    """The checkpoints of a worker's roles."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        boot, device, codec = worker_context.boot, worker_context.device, worker_context.codec
        self._saver = Saver(boot.worker, device, codec, worker_context.definitions, worker_context.say)

    def heard(self, message: Message, body: Any) -> None:
        """Do what the driver asks for beside the calls."""
        assert isinstance(message, AskSaved)
        self._saver.asked(message)

    def starts(self, role: RoleInstance, plain: tuple[str, str]) -> None:
        """Have a role that was constructed go on from a checkpoint: its folder and identity."""
        self._restore(role, *plain)

    def close(self) -> None:
        """End, without waiting for what is under way."""
        self._saver.close()

    @method
    def save(self, directory: str, wait: bool) -> bool:
        """Have the roles take their states, and write them if that is waited for; return whether there is more to do.

        That is left to be asked for.
        """
        context = self._worker_context
        self._saver.leave(())  # what is left of an earlier one, which came to nothing, takes memory
        awake = partial(context.awake, why="to be saved")
        left = share.save(self._roles(), directory, awake, wait, context.parts)
        if left:
            context.device.end("the checkpoint")  # copies on the device are read on another thread then
        self._saver.leave(left)
        return bool(left)

    @method
    def restore(self, directory: str, identity: str) -> None:
        """Have the roles go on from a checkpoint."""
        for role in self._roles():
            self._restore(role, directory, identity)

    def _roles(self) -> list[RoleInstance]:
        return [role for role in self._worker_context.roles.values() if role.name is not None]

    def _restore(self, role: RoleInstance, directory: str, identity: str) -> None:
        """Have a role go on from a checkpoint, within the memory that it may have."""
        context = self._worker_context
        with context.awake(role, "to be restored"):
            share.restore(context, role, directory, identity)
            context.device.end(f"{role.name}.restore")
        context.ran(role.name, f"restoring role {role.name!r}")
