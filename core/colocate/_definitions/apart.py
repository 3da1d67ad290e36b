"""Parameters that would be two where they arrive: one among a call's arguments, one in the code that the call runs.

What travels together keeps its parameters one. Globals, closures of definitions and attributes of classes travel with
the script's code, once, and arguments with each call.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from colocate._definitions.bundles import Alone, Bundle, Table
from colocate._definitions.codec import TensorPickler
from colocate._definitions.explain import deepest
from colocate._definitions.ids import Definition, Need
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
    bundle = Bundle(Table("is given it"))
    looking = _Looking(bundle)
    for need in code:
        with contextlib.suppress(Exception):  # who sends it says so
            looking.dump(need.thing if isinstance(need, Definition) else bundle.names_for((need.name,), need.user))
    there = {id(tensor) for tensor in looking.met}
    if not there:
        return
    for name, value in arguments.items():
        for tensor in _trained(value):
            if id(tensor) in there:
                users = (each for each in bundle.met if any(its is tensor for its in _trained(each[2], Alone())))
                where, its_name, its_value = next(users)
                path, other = _path(value, name, tensor), _path(its_value, its_name, tensor, Alone)
                raise SerializationError(
                    f"{what}: {path}, an argument's, is the same parameter as {other}, of {where.rstrip(',')}. That "
                    "travels with the script's code, apart from arguments, so the workers would have two in place of "
                    "one, and an optimizer of one would never train the other. Give both as arguments, or neither; "
                    "where its values are enough, give a state_dict()",
                    argument=name,
                    path=path,
                )


class _Looking(TensorPickler):
    """Notes the tensors that it meets of which gradients are computed; their memory is left alone."""

    def __init__(self, bundle: Bundle | None = None) -> None:
        super().__init__(io.BytesIO(), lambda buffer: None, bundle)
        self.met: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        """As the codec's, but for tensors."""
        if not isinstance(obj, sys.modules["torch"].Tensor):
            return super().reducer_override(obj)
        if obj.requires_grad and obj.is_leaf:
            self.met.append(obj)
        return dict, ()


def _trained(value: Any, bundle: Bundle | None = None) -> list[torch.Tensor]:
    looking = _Looking(bundle)
    looking.dump(value)
    return looking.met


def _path(value: Any, name: str, tensor: torch.Tensor, bundle: Callable[[], Bundle | None] = lambda: None) -> str:
    """How a tensor in a value is reached, as a user would write it."""

    def look(part: Any) -> None:
        if any(each is tensor for each in _trained(part, bundle())):
            raise LookupError

    path, _, _ = deepest(value, name, LookupError(), look)
    return _OF_A_MODULE.sub(r".\1", path)
