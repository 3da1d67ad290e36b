"""Decide which objects other processes can import, and so can receive by name."""

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
"""The type of `type X = ...` statements, which Python has since 3.12."""


class _Missing:
    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


def is_main(name: Any) -> bool:
    return name in MAINS


def get_main_module() -> ModuleType | None:
    return sys.modules.get("__main__")


def get_script_names() -> dict[str, Any]:
    main = get_main_module()
    return {} if main is None else main.__dict__


def find_import_path(thing: Any) -> tuple[str, str] | None:
    """Return module and qualified name of a class or function that other processes can import; None otherwise.

    Other processes can't import definitions of the script or a notebook, definitions inside of a function, and
    definitions whose name now belongs to another object.
    """
    name = getattr(thing, "__module__", None)
    # Type variables only have a `__name__`.
    path = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    if not isinstance(name, str) or not isinstance(path, str) or name in MAINS:
        return None
    module = sys.modules.get(name)
    if module is None or not can_be_imported(name):
        return None
    target: Any = module
    for part in path.split("."):
        target = getattr(target, part, MISSING)
    return (name, path) if target is thing else None


def find_module_path(module: ModuleType) -> tuple[str, str] | None:
    """Return an importable module and an attribute path that lead to a module object; None if nothing leads there.

    A module may be registered under another name (`six.moves`), or only be an attribute (`torch.ops.aten`).
    """
    name = object.__getattribute__(module, "__dict__").get("__name__")  # `getattr` would load a lazy module.
    if not isinstance(name, str):
        return None
    for candidate in (name, *(other for other, target in list(sys.modules.items()) if target is module)):
        if sys.modules.get(candidate) is module and (is_main(candidate) or can_be_imported(candidate)):
            return candidate, ""
    home, _, path = name.rpartition(".")
    while home:
        if home in sys.modules and can_be_imported(home):
            target: Any = sys.modules[home]
            for part in path.split("."):
                target = getattr(target, part, MISSING)
            if target is module:
                return home, path
        home, _, last = home.rpartition(".")
        path = f"{last}.{path}"
    return None


def can_be_imported(name: str) -> bool:
    """Return whether other processes can import a module. A module that code has created can't be imported."""
    # The top-level module counts, too, because torch creates submodules without an origin, such as torch._C.x.
    modules = [sys.modules.get(module_name) for module_name in (name, name.partition(".")[0])]
    return name not in MAINS and any(
        getattr(module, attribute, None) is not None for module in modules for attribute in ("__file__", "__spec__")
    )


def is_installed(module: ModuleType) -> bool:
    """Return whether a module belongs to an installed distribution, and so exists on workers, too."""
    if module.__name__ in MAINS:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        places = getattr(module, "__path__", [""])
        return module.__name__ in sys.builtin_module_names or all(
            str(entry).startswith(list_installed_roots()) for entry in places
        )
    return is_installed_file(file)


@functools.cache
def is_installed_file(file: str) -> bool:
    """Return whether a file's absolute or resolved path is in a folder of installed distributions."""
    return any(str(path).startswith(list_installed_roots()) for path in (Path(file).absolute(), Path(file).resolve()))


@functools.cache
def list_installed_roots() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed distributions, including editable distributions."""
    paths = sysconfig.get_paths()
    roots = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    # Distributions on PYTHONPATH or in a parent environment count, too, because workers get the driver's path.
    # The metadata of an editable distribution has another name than `.dist-info`, so project folders don't count.
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
    # The script's folder (or the current folder) never counts, even if a `.pth` file names this folder.
    script = Path(sys.path[0]).resolve() if sys.path and sys.path[0] else None
    root_paths = [Path(root) for root in roots if Path(root).resolve() != script]
    return tuple({f"{path}/" for root in root_paths for path in (root.absolute(), root.resolve())})
