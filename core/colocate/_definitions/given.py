"""The modules that the workers of a group have got, and whether the driver's still say the same."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from colocate._definitions.sources import Source, digest, in_the_way, look_up, other_content
from colocate.errors import ColocateError


class Given:
    """What the workers of one group have got of the driver's modules.

    The driver may import such a module later, or once more: either shows in the module's spec, which the import system
    makes anew. So to look for that costs little, and only what shows is read and compared.

    Attributes:
        contents: File and digest of each, by name.
    """

    def __init__(self, group: str, of_another: Mapping[str, tuple[str, str]] | None = None) -> None:
        """Make it.

        Args:
            group: The group.
            of_another: What the workers have got from a driver before this one.

        Raises:
            ColocateError: One of these is another one here.
        """
        self._group = group
        self._others = frozenset(of_another or ())
        self.contents: dict[str, tuple[str, str]] = {}
        self._seen: dict[str, Any] = {}  # the specs; no lock: each is set at once, and all are copied at once
        if of_another:
            if (why := other_content(of_another)) is not None:
                raise ColocateError(f"group {group!r} can't be taken up here: {why}")
            self.add(of_another)

    def add(self, found: Mapping[str, tuple[str, str]]) -> None:
        """The workers get some; of what they have already they keep what that says."""
        for name, content in found.items():
            if self.contents.setdefault(name, content) is content:
                self._seen[name] = _spec(name)

    def compare(self, line: tuple[str, int]) -> None:
        """Look for modules that the driver has imported, or imported anew, since the workers have got them.

        Args:
            line: The user's, where a warning of what this driver itself has changed belongs.

        Raises:
            ColocateError: As `refuse_late`.
        """
        self.refuse_late()
        module = sys.modules.get  # as `_spec`, for there may be hundreds
        seen = list(self._seen.items())
        for name in [name for name, spec in seen if getattr(module(name), "__spec__", None) is not spec]:
            if (file := self._other_file(name)) is not None:
                self._warn(name, file, line)

    def refuse_late(self) -> None:
        """Look for modules that this driver has imported late, and the workers have from a driver before it.

        Raises:
            ColocateError: One has other content there.
        """
        for name in self._others:
            if self._seen[name] is None and _spec(name) is not None and (file := self._other_file(name)) is not None:
                why = in_the_way(name, file, self.contents[name][0])
                raise ColocateError(f"group {self._group!r} can't be used here: {why}")

    def _other_file(self, name: str) -> str | None:
        """The driver's file of a module, if it says something else than what the workers have; else it is seen."""
        spec = _spec(name)
        here = look_up(name) if spec is not None else None
        if isinstance(here, Source) and here.file is not None and digest(here.text) != self.contents[name][1]:
            return here.file
        self._seen[name] = spec
        return None

    def _warn(self, name: str, file: str, line: tuple[str, int]) -> None:
        self._seen[name] = _spec(name)  # it is told once
        text = (
            f"the driver has imported module {name!r} anew ({file}), with other content than the workers of group "
            f"{self._group!r} have of it. They keep theirs: spawn the group anew"
        )
        warnings.warn_explicit(text, RuntimeWarning, *line)


def _spec(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)
