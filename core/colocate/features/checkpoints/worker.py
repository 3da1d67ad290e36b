"""The worker's half of checkpoints: roles save states to files, and restore states from files."""

from __future__ import annotations

from functools import partial
from typing import Any

from colocate._protocol.message import Message
from colocate._role.method import method
from colocate.features.checkpoints import share
from colocate.features.checkpoints.messages import CHECKPOINT, RESTORE, AskState
from colocate.features.checkpoints.saver import Saver
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature
from colocate.worker.serving.role_instance import RoleInstance


class CheckpointsOfWorker(WorkerFeature, calls={CHECKPOINT: "save", RESTORE: "restore"}):
    """The worker's half of checkpoints: saves and restores the worker's roles."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        boot, device, codec = worker_context.boot, worker_context.device, worker_context.codec
        self._saver = Saver(boot.worker, device, codec, worker_context.definitions, worker_context.send_message)

    def on_message(self, message: Message, body: Any) -> None:
        """Pass a request of the driver to the saving thread, while calls continue to run."""
        assert isinstance(message, AskState)
        self._saver.on_request(message)

    def on_roles_ready(self, role: RoleInstance, plain: tuple[str, str]) -> None:
        """Restore a newly constructed role from a checkpoint, with the folder and identity in `plain`."""
        self._restore_role(role, *plain)

    def close(self) -> None:
        """Close the saving thread without waiting for work in progress."""
        self._saver.close()

    @method
    def save(self, directory: str, wait: bool) -> bool:
        """Take the states of all roles, and return whether work remains. With `wait`, begin to write files.

        The driver requests the remaining work later, by `AskState`.
        """
        context = self._worker_context
        self._saver.set_pending(())  # This frees the memory of an abandoned checkpoint.
        awake = partial(context.keep_awake, why="to be saved")
        halves = share.save_roles(self._list_roles(), directory, awake, wait, context.parts)
        if halves:
            # Wait until the device has finished the copies, because another thread writes them to files.
            context.device.finish_call("the checkpoint")
        self._saver.set_pending(halves)
        return bool(halves)

    @method
    def restore(self, directory: str, identity: str) -> None:
        """Restore all roles of this worker from a checkpoint."""
        for role in self._list_roles():
            self._restore_role(role, directory, identity)

    def _list_roles(self) -> list[RoleInstance]:
        return [role for role in self._worker_context.roles.values() if role.name is not None]

    def _restore_role(self, role: RoleInstance, directory: str, identity: str) -> None:
        context = self._worker_context
        with context.keep_awake(role, "to be restored"):
            share.restore_role(context, role, directory, identity)
            context.device.finish_call(f"{role.name}.restore")
        context.check_result(role.name, f"restoring role {role.name!r}")
