"""The processes that roles have started (`ctx.start`), as a driver knows them: the graph shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._protocol.message import Message
from colocate._worker_group.hooks import OfGroup
from colocate._worker_group.workforce import Worker
from colocate.features.children.messages import HasChildren


class ChildrenOfGroup(OfGroup):
    """Which children there are, as each worker has told it last."""

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Note a worker's children."""
        assert isinstance(message, HasChildren)
        worker.parts["children"] = message.children

    def nodes(self, worker: Worker, role: str) -> Sequence[dict[str, Any]]:
        """Return the children of a role of a worker."""
        return [
            {"kind": "child", "name": child, "state": state, "pid": pid or None, "port": port, "children": []}
            for owner, child, pid, port, state in worker.parts.get("children", ())
            if owner == role
        ]
