"""Modules beside the script, as their source: what the driver answers when a worker imports something."""

from __future__ import annotations

import dis
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import attrs

from colocate._definitions.names import MAINS, is_installed_file

LIMIT_BYTES = 32 << 20


@attrs.frozen
class Source:
    """A module that lies beside the script, or in a folder of the project.

    Attributes:
        text: What it says; empty for a package that only has a folder.
        file: Where it lies on the driver's machine; None for such a package.
        package: Whether it has modules of its own.
    """

    text: bytes
    file: str | None
    package: bool


@attrs.frozen
class Refused:
    """A module that the driver has and that can't travel. `why` says so to whoever imports it."""

    why: str


def is_shipped_with_python(name: str) -> bool:
    """Whether every worker has a module of its own by that name: the standard library's, and colocate's."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top == "colocate" or top in MAINS


def shadowing() -> dict[str, tuple[str, str]]:
    """The modules that this process has imported in place of the standard library's: a `profile.py` of the script's.

    Returns:
        By name: the file, and the digest of its content.
    """
    names = [name for name in sys.stdlib_module_names if name not in MAINS and _shadows(name)]
    return contents({name: found for name in names if (found := look_up(name)) is not None})


def _shadows(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and not is_installed_file(file)


def answer(name: str) -> Mapping[str, Source | Refused]:
    """What a worker gets that imports a module: its source, and that of all it will import in turn.

    Returns:
        By name; empty when it isn't the driver's to give: it is installed, or isn't there.
    """
    found: dict[str, Source | Refused] = {}
    todo, seen, size = [name], set[str](), 0
    while todo:
        each = todo.pop(0)
        if each in seen or (is_shipped_with_python(each) and not _shadows(each.partition(".")[0])):
            continue
        seen.add(each)
        source = look_up(each)
        if source is None:
            continue
        if isinstance(source, Source):
            size += len(source.text)
            if size > LIMIT_BYTES:
                source = Refused(f"it and what it imports have more than {LIMIT_BYTES >> 20} MiB of source")
            else:
                todo += imported_by(each, source)
        found[each] = source
    return found if name in found else {}


def look_up(name: str) -> Source | Refused | None:
    """A module of the driver's that isn't installed; None where there is none."""
    module = sys.modules.get(name)
    spec = _spec_of(name, module)
    file: str | None = getattr(module, "__file__", None) or (
        spec.origin if spec is not None and spec.has_location else None
    )
    if file is None:
        return _package_without_file(name, module, spec)
    if is_installed_file(file):
        return None
    package = hasattr(module, "__path__") or bool(spec is not None and spec.submodule_search_locations is not None)
    text = _text(name, file, spec) if module is None or spec is None else _text_of_import(name, file, spec)
    if text is not None:
        return Source(text, file, package)
    if file.endswith(".py"):
        return Refused(f"the driver has imported it from {file}, which can't be read any more: put the file back")
    return Refused(
        f"the driver has it from {file}, which isn't Python source, and only source travels to the workers: install "
        "it where they run"
    )


def _spec_of(name: str, module: ModuleType | None) -> ModuleSpec | None:
    if module is not None:
        return getattr(module, "__spec__", None)
    parent = name.rpartition(".")[0]
    path: Any = None
    if parent:
        above = sys.modules.get(parent)
        found = _spec_of(parent, None) if above is None else None
        path = getattr(above, "__path__", None) if above is not None else found and found.submodule_search_locations
        if path is None:
            return None
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        try:
            spec: ModuleSpec | None = find(name, path, None) if find is not None else None
        except KeyError:  # a folder without an __init__.py is found only where what is above it is imported
            continue
        if spec is not None:
            return spec
    return None


def _package_without_file(name: str, module: ModuleType | None, spec: ModuleSpec | None) -> Source | None:
    """A folder without an __init__.py, or a module that only stands above others."""
    if spec is not None and spec.origin in ("built-in", "frozen"):
        return None
    places = getattr(module, "__path__", None) or (spec.submodule_search_locations if spec is not None else None)
    if places is None:
        above_others = module is not None and any(other.startswith(f"{name}.") for other in list(sys.modules))
        return Source(b"", None, True) if above_others else None
    return None if all(is_installed_file(f"{place}/") for place in places) else Source(b"", None, True)


_texts: dict[str, tuple[ModuleSpec, bytes]] = {}
"""What each imported module said when it was first asked for, by name, and the import that it belongs to."""


def _text_of_import(name: str, file: str, spec: ModuleSpec) -> bytes | None:
    """The source that the workers have of a module that the driver has imported.

    It is read once for each import: whatever was edited since, the workers of a restart get what the others have got,
    as the driver goes on with what it has. A reload is another import, with a spec of its own.
    """
    known = _texts.get(name)
    if known is not None and known[0] is spec:
        return known[1]
    text = _text(name, file, spec)
    if text is not None:
        _texts[name] = spec, text
    return text


def _text(name: str, file: str, spec: ModuleSpec | None) -> bytes | None:
    if file.endswith(".py"):
        try:
            return Path(file).read_bytes()
        except OSError:
            pass  # in an archive, say
    read = getattr(spec.loader if spec is not None else None, "get_source", None)
    try:
        text: str | None = read(name) if read is not None else None
    except ImportError:
        return None
    return None if text is None else text.encode()


def imported_by(name: str, source: Source) -> list[str]:
    """The modules that a source names in its imports, wherever they stand in it."""
    try:
        # Not by `ast`: on Python 3.11 it fails when several threads use it at once, whichever of them.
        code = compile(source.text, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # the import will say
        return []
    package = name if source.package else name.rpartition(".")[0]
    return list(dict.fromkeys(above for found in imports(code, package) for above in _with_parents(found)))


def imports(code: CodeType, package: str) -> Iterator[str]:
    """The modules that code names in its imports; those that are names in a module, too."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname != "IMPORT_NAME":
            continue
        try:
            base = importlib.util.resolve_name("." * level.argval + step.argval, package or None)
        except ImportError:  # it goes above its package
            continue
        yield base
        yield from (f"{base}.{each}" for each in names.argval or () if each != "*")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from imports(inner, package)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def digest(text: bytes) -> str:
    """What tells contents apart."""
    return hashlib.sha256(text).hexdigest()


def contents(found: Mapping[str, Source | Refused]) -> dict[str, tuple[str, str]]:
    """File and digest of each module that travels, by name."""
    return {
        name: (each.file, digest(each.text))
        for name, each in found.items()
        if isinstance(each, Source) and each.file is not None
    }


def other_content(there: Mapping[str, tuple[str, str]]) -> str | None:
    """What is wrong with modules that a worker has imported already, if the driver has others of their names.

    Args:
        there: By name: the file in the worker, and the digest of its content.
    """
    for name, (file, content) in there.items():
        if name not in sys.modules:
            continue
        here = look_up(name)
        if isinstance(here, Source) and here.file is not None and digest(here.text) != content:
            return in_the_way(name, here.file, file)
    return None


def in_the_way(name: str, here: str, there: str) -> str:
    """What is said of the driver's file and the one that the worker has imported in its place."""
    return (
        f"module {name!r} of the driver ({here}) has other content than the one that the worker has imported already "
        f"({there}): rename one of them"
    )
