"""What an import finds in another process, and what it doesn't: the one rule for which code travels by name."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
import typing
from pathlib import Path
from types import ModuleType
from typing import Any, Final

MAINS = ("__main__", "__mp_main__")

ALIASES: tuple[type, ...] = tuple(filter(None, [getattr(typing, "TypeAliasType", None)]))
"""What `type X = ...` makes, in a Python that has such statements (3.12)."""


class _Missing:
    """Stands where there is no value."""

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


def is_main(name: Any) -> bool:
    """Return whether a module's name is the script's or the notebook's."""
    return name in MAINS


def main_module() -> ModuleType | None:
    """Return the script or notebook."""
    return sys.modules.get("__main__")


def script_names() -> dict[str, Any]:
    """Return the globals of the script or notebook."""
    main = main_module()
    return {} if main is None else main.__dict__


def path_of(thing: Any) -> tuple[str, str] | None:
    """Return module and qualified name of a class or function, where they lead to it in any process that imports it.

    They don't for what the script or a notebook defines, for what is inside a function, and for what another object
    has taken the name of.
    """
    name = getattr(thing, "__module__", None)
    path = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)  # type variables have no other
    if not isinstance(name, str) or not isinstance(path, str) or name in MAINS:
        return None
    module = sys.modules.get(name)
    if module is None or not can_be_imported(name):
        return None
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, MISSING)
    return (name, path) if found is thing else None


def place_of(module: ModuleType) -> tuple[str, str] | None:
    """Return what another process imports to have a module, of whatever class, and the path from there.

    A module may stand under another name than its own (`six.moves`), or only be an attribute (`torch.ops.aten`).
    """
    name = object.__getattribute__(module, "__dict__").get(
        "__name__"
    )  # so that one that loads itself later doesn't now
    if not isinstance(name, str):
        return None
    for each in (name, *(other for other, found in list(sys.modules.items()) if found is module)):
        if sys.modules.get(each) is module and (is_main(each) or can_be_imported(each)):
            return each, ""
    home, _, path = name.rpartition(".")
    while home:
        if home in sys.modules and can_be_imported(home):
            found: Any = sys.modules[home]
            for part in path.split("."):
                found = getattr(found, part, MISSING)
            if found is module:
                return home, path
        home, _, last = home.rpartition(".")
        path = f"{last}.{path}"
    return None


def can_be_imported(name: str) -> bool:
    """Return whether another process can import a module: it was imported here, not made by code."""
    # That of torch._C.something, which has no origin of its own, is made by torch.
    modules = [sys.modules.get(each) for each in (name, name.partition(".")[0])]
    return name not in MAINS and any(
        getattr(module, attribute, None) is not None for module in modules for attribute in ("__file__", "__spec__")
    )


def is_installed(module: ModuleType) -> bool:
    """Return whether a module lies where distributions are installed, so that a worker has it too."""
    if module.__name__ in MAINS:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        places = getattr(module, "__path__", [""])
        return module.__name__ in sys.builtin_module_names or all(
            str(entry).startswith(installed_roots()) for entry in places
        )
    return is_installed_file(file)


@functools.cache
def is_installed_file(file: str) -> bool:
    """Return whether a file lies where distributions are installed, or is linked to from there (out of a cache)."""
    return any(str(path).startswith(installed_roots()) for path in (Path(file).absolute(), Path(file).resolve()))


@functools.cache
def installed_roots() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed distributions, editable ones included."""
    paths = sysconfig.get_paths()
    roots = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    # Distributions may be in PYTHONPATH, or of an environment below: workers have what is on the driver's path. The
    # metadata of an editable one, in its project, are no `.dist-info`.
    more = [entry for entry in sys.path if entry and any(Path(entry).glob("*.dist-info"))]
    sites = {*site.getsitepackages(), paths["purelib"], *more}
    if site.ENABLE_USER_SITE:
        sites.add(site.getusersitepackages())
    for folder in map(Path, sites):
        if folder.is_dir():
            roots.add(str(folder))
            for link in folder.glob("*.pth"):
                lines = (line for line in link.read_text().splitlines() if line.strip())
                roots.update(str(folder / line) for line in lines if not line.startswith(("#", "import ", "import\t")))
    # Nor are the script's own folder and the current one, even if such a link names them.
    script = Path(sys.path[0]).resolve() if sys.path and sys.path[0] else None
    found = [Path(root) for root in roots if Path(root).resolve() != script]
    return tuple({f"{each}/" for root in found for each in (root.absolute(), root.resolve())})
