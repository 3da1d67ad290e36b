"""The driver's record of the child processes of roles, for the ownership graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._protocol.message import Message
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.workforce import Worker
from colocate.features.children.messages import ChildrenReport


class ChildrenOfGroup(GroupFeature):
    """The driver's record of a group's child processes, from the last report of each worker."""

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Store a worker's report of child processes."""
        assert isinstance(message, ChildrenReport)
        worker.parts["children"] = message.children

    def role_children(self, worker: Worker, role: str) -> Sequence[dict[str, Any]]:
        """Return nodes of the ownership graph for the child processes of a role on a worker."""
        return [
            {"kind": "child", "name": child, "state": state, "pid": pid or None, "port": port, "children": []}
            for owner, child, pid, port, state in worker.parts.get("children", ())
            if owner == role
        ]
