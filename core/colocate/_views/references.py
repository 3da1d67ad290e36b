"""What a call's arguments may hold: references in place of residents, and nothing else that lives on the driver."""

from __future__ import annotations

from typing import Any

from colocate._kept.handles import Consumer, Reference
from colocate._role.call import Resident, lives_on_driver
from colocate._system.by_type import by_type
from colocate._values.leaves import map_leaves
from colocate._values.nesting import has_attributes, has_fields, hides, kinds_inside, refuse_hidden
from colocate._values.plain import is_plain
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError

# A call's arguments may be millions of things, and on threads sending them costs nothing. What is so far inside them
# that this many others are nearer isn't refused there; a resident's reference still says what it is when it is used.
_LOOKS = 500


def with_references(
    arguments: dict[str, Any], worker_group: WorkerGroup, consumer: Consumer, label: str, uses: list[Reference]
) -> dict[str, Any]:
    """The arguments with references, bound to their consumer, in place of residents; `uses` gets them."""

    def look_inside(item: Any) -> None:
        if hides(item, lives_on_driver):
            refuse_hidden(arguments, label, lives_on_driver, _why_not_inside)

    def leaf(item: Any) -> Any:
        if not lives_on_driver(type(item)):
            look_inside(item)
            return item
        if isinstance(item, Resident):
            item = item.ref
        if not isinstance(item, Reference):
            raise TypeError(f"{label}: {item!r} lives on the driver and can't be an argument")
        residents = item._residents
        residents.use(item._kept, worker_group)
        if residents.link.services is not worker_group.services:
            raise ColocateError(
                f"resident of {item._kept.source.label} belongs to another runtime; fetch() it and pass the value"
            )
        bound = item.bound(consumer)
        uses.append(bound)
        return bound

    made, odd = {}, {}
    for name, value in arguments.items():
        if is_plain(value):
            made[name] = value
            continue
        if lives_on_driver(type(value)):
            made[name] = leaf(value)
            continue
        kinds = kinds_inside(value)
        matters = _matters if any(map(lives_on_driver, kinds)) else lives_on_driver
        made[name] = map_leaves(value, leaf, matters, look_inside)
        if any(map(has_attributes, kinds)):
            odd[name] = value
    if odd:
        refuse_hidden(odd, label, lives_on_driver, _why_not_inside, looks=_LOOKS)
    return made


def _why_not_inside(item: Any, holder: str) -> str:
    if isinstance(item, Resident | Reference):
        return (
            f"inside a {holder}, where nothing puts its value in its place. Residents are found in lists, tuples and "
            "the values of dicts: pass it so, or as an argument of its own"
        )
    return f"inside a {holder}, and lives on the driver. {item._instead}"


@by_type
def _matters(kind: type) -> bool:
    """Whether a value of this type is, or may hide, something that lives on the driver."""
    return lives_on_driver(kind) or has_fields(kind)
