"""The modules that the workers of a group have got, and whether the driver's still say the same."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

from colocate._definitions.sources import Source, digest, in_the_way, look_up, other_content
from colocate.errors import ColocateError


class Given:
    """What the workers of one group have got of the driver's modules.

    The driver may import such a module later, or once more: either makes it news, which calls look at once.

    Attributes:
        contents: File and digest of each, by name.
        news: What the driver has begun to import since anybody looked: its own and others.
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
        self._seen: dict[str, Any] = {}  # the specs
        self.news: set[str] = set()
        _all[id(self)] = self
        if sys.meta_path[0] is not _IMPORTS:
            sys.meta_path[:] = [_IMPORTS, *(each for each in sys.meta_path if each is not _IMPORTS)]
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
        for name in list(self.news):  # several threads may look at once
            self.news.discard(name)
            is_new = name in self.contents and _spec(name) is not self._seen[name]
            if is_new and (file := self._other_file(name)) is not None:
                self._warn(name, file, line)

    def refuse_late(self) -> None:
        """Look for modules that this driver has imported late, and the workers have from a driver before it.

        Raises:
            ColocateError: One has other content there.
        """
        for name in self.news & self._others:
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


class _Imports:
    """Stands first among what finds modules, finds none, and tells all who have given some what is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Note a name."""
        for reference in _all.valuerefs():
            if (given := reference()) is not None:
                given.news.add(name)


_all: weakref.WeakValueDictionary[int, Given] = weakref.WeakValueDictionary()
_IMPORTS: Any = _Imports()


def _spec(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)
