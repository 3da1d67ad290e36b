"""Children of roles (`ctx.start`), the driver's half: nodes of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._protocol.message import Message
from colocate._worker_group.hooks import OfGroup
from colocate._worker_group.workforce import Worker
from colocate.features.children.messages import HasChildren


class ChildrenOfGroup(OfGroup):
    """Each worker's children, from the last report."""

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Record a worker's children."""
        assert isinstance(message, HasChildren)
        worker.parts["children"] = message.children

    def nodes(self, worker: Worker, role: str) -> Sequence[dict[str, Any]]:
        """Return the graph's nodes for the children of a role on a worker."""
        return [
            {"kind": "child", "name": child, "state": state, "pid": pid or None, "port": port, "children": []}
            for owner, child, pid, port, state in worker.parts.get("children", ())
            if owner == role
        ]
