"""Records pending works of torch: operations of process groups that were started with `async_op=True`.

Such an operation may read and write tensors even after the call that started it. Operations that go through torch's
Python functions are recorded as long as the work object exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from colocate.features.process_groups import books

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# The methods of `ProcessGroup` that start operations, in several versions of torch.
METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "alltoall", "alltoall_base"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("_end_coalescing", "recv", "recv_anysource", "send"),
)


@attrs.frozen
class _StartedWork:
    """A started operation, with weak references to the work and the group."""

    work: weakref.ref[Work]
    group: weakref.ref[ProcessGroup]
    sends: bool


_started: dict[int, _StartedWork] = {}  # The key is the id of the work object.


def start_recording() -> None:
    """Start to record the operations that this process starts."""
    from torch.distributed import ProcessGroup

    for name in METHODS:
        begin = getattr(ProcessGroup, name, None)
        if begin is not None and not getattr(begin, "records_works", False):
            setattr(ProcessGroup, name, _record_begin(begin, name == "send"))


def list_pending() -> list[Work]:
    """Return operations that aren't finished according to torch, except gloo's sends, which write no tensors.

    Operations of removed groups are left out, because these write nothing any more.
    """
    groups = {id(group) for group in books.list_groups().values()} if _started else ()
    works = []
    for begun in list(_started.values()):
        work, group = begun.work(), begun.group()
        if work is None or group is None or id(group) not in groups or work.is_completed():
            continue
        if not begun.sends or is_collective(work):
            works.append(work)
    return works


def is_collective(work: Any) -> bool:
    """Return whether waiting for a `Work` may have a timeout. A timeout of gloo's sends and receives ends the group."""
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


def _record_begin(begin: Callable[..., Any], sends: bool) -> Callable[..., Any]:
    def recording(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = begin(group, *args, **kwargs)
        if work is not None:
            key = id(work)
            _started[key] = _StartedWork(
                weakref.ref(work, lambda _: _started.pop(key, None)), weakref.ref(group), sends
            )
        return work

    recording.records_works = True  # type: ignore[attr-defined]
    return recording
