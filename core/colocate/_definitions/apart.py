"""Parameters that would be two where they arrive: one among a call's arguments, one in the code that the call runs.

What travels together keeps its parameters one. Globals, closures of definitions and attributes of classes travel with
the script's code, once, and arguments with each call.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from colocate._definitions.codec import TensorPickler
from colocate._definitions.explain import deepest
from colocate._definitions.known import Global, Need
from colocate._definitions.lots import Lot, Receiver
from colocate._definitions.reached import followed
from colocate.errors import SerializationError

if TYPE_CHECKING:
    import torch

_OF_A_MODULE = re.compile(r"\._(?:parameters|modules)\['([^']*)'\]")


def refuse_apart(arguments: Mapping[str, Any], code: Iterable[Need], what: str) -> None:
    """Refuse arguments that have a parameter which the code that they are for has, too.

    Args:
        arguments: By name; there are tensors among them of which gradients are computed.
        code: What they and the code need.
        what: What they are for, as errors say it.

    Raises:
        SerializationError: Names the parameter, and where it is on both sides.
    """
    lot = Lot(Receiver("another"))
    looking = _Looking(lot)
    users: dict[int, tuple[torch.Tensor, Need]] = {}
    for need in followed(code, looking, lot):
        users.update({id(tensor): (tensor, need) for tensor in looking.take()})
    if not users:
        return
    for name, value in arguments.items():
        for tensor in _trained(value):
            if id(tensor) in users:
                raise _error(what, _path(value, name, tensor), name, *users[id(tensor)])


class _Looking(TensorPickler):
    """Notes the tensors that it meets of which gradients are computed; their memory is left alone."""

    def __init__(self, lot: Lot | None = None) -> None:
        super().__init__(io.BytesIO(), lambda buffer: None, lot)
        self._met: list[torch.Tensor] = []

    def take(self) -> list[torch.Tensor]:
        """Those that were met since this was asked last."""
        met, self._met = self._met, []
        return met

    def reducer_override(self, obj: Any) -> Any:
        """As the codec's, but for tensors."""
        if not isinstance(obj, sys.modules["torch"].Tensor):
            return super().reducer_override(obj)
        if obj.requires_grad and obj.is_leaf:
            self._met.append(obj)
        return dict, ()


def _trained(value: Any, lot: Lot | None = None) -> list[torch.Tensor]:
    looking = _Looking(lot)
    looking.dump(value)
    return looking.take()


def _path(value: Any, name: str, tensor: torch.Tensor, *, with_code: bool = False) -> str:
    """How a tensor in a value is reached, as a user would write it."""

    def look(part: Any) -> None:
        if any(each is tensor for each in _trained(part, Lot(Receiver("another")) if with_code else None)):
            raise LookupError

    path, _, _ = deepest(value, name, LookupError(), look)
    return _OF_A_MODULE.sub(r".\1", path)


def _error(what: str, path: str, name: str, tensor: torch.Tensor, need: Need) -> SerializationError:
    if isinstance(need, Global):
        where, value, user = need.name, need.value, f"the global {need.name!r}, which {need.user} names"
    else:
        value = need.object
        where = value.__qualname__
        user = f"{where} of {value.__module__}"
    there = _path(value, where, tensor, with_code=True)
    return SerializationError(
        f"{what}: {path}, an argument's, is the same parameter as {there}, of {user}. That travels with the script's "
        "code, apart from arguments, so the workers would have two in place of one, and an optimizer of one would "
        "never train the other. Give both as arguments, or neither; where its values are enough, give a state_dict()",
        argument=name,
        path=path,
    )
