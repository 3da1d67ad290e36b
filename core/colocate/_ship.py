"""How a role's class gets to the workers: by name where an installed distribution has it, by value otherwise."""

from __future__ import annotations

import functools
import importlib.metadata
import site
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from colocate.errors import SerializationError
from colocate.worker.build import Shipped


def ship(cls: Any, *, in_process: bool, distribution: str | None = None, version: str | None = None) -> Shipped:
    """The class, or function, as it travels.

    Args:
        cls: The class or function.
        in_process: The workers are threads of this process: nothing travels.
        distribution: Where a plugin's entry point has it from.
        version: That distribution's version.

    Raises:
        SerializationError: It has to go by value and can't.
    """
    name = f"{cls.__module__}:{cls.__qualname__}"
    if in_process:
        return Shipped(name, cls=cls)
    module = sys.modules.get(cls.__module__)
    # What an entry point has found belongs to a distribution, wherever that lies.
    by_name = module is not None and (distribution is not None or is_installed(module))
    if by_name and "<locals>" not in cls.__qualname__:
        if distribution is None:
            distribution, version = _distribution(cls.__module__.partition(".")[0])
        return Shipped(name, distribution=distribution, version=version)
    return ship_by_value(cls, name)


def ship_by_value(cls: Any, name: str) -> Shipped:
    """It and what it refers to, from modules that a worker can't import.

    Raises:
        SerializationError: It can't.
    """
    return Shipped(name, data=_by_value(cls, name))


def is_installed(module: ModuleType) -> bool:
    """Whether a module lies where distributions are installed, so that a worker has it too."""
    if module.__name__ in ("__main__", "__mp_main__"):
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ in sys.builtin_module_names or _is_namespace(module)
    return _is_installed_file(file)


@functools.cache
def _is_installed_file(file: str) -> bool:
    return str(Path(file).resolve()).startswith(installed_roots())


def _is_namespace(module: ModuleType) -> bool:
    return all(str(entry).startswith(installed_roots()) for entry in getattr(module, "__path__", [""]))


@functools.cache
def installed_roots() -> tuple[str, ...]:
    """Folders of the standard library and of installed distributions, editable ones included."""
    paths = sysconfig.get_paths()
    roots = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    sites = {*site.getsitepackages(), paths["purelib"]}
    if site.ENABLE_USER_SITE:
        sites.add(site.getusersitepackages())
    for folder in map(Path, sites):
        if folder.is_dir():
            roots.add(str(folder))
            for link in folder.glob("*.pth"):
                roots.update(line for line in link.read_text().splitlines() if line.startswith("/"))
    # Nor are the script's own folder and the current one, even if such a link names them.
    script = str(Path(sys.path[0]).resolve()) if sys.path and sys.path[0] else None
    return tuple(str(Path(root).resolve()) + "/" for root in roots if str(Path(root).resolve()) != script)


@functools.cache
def _distribution(package: str) -> tuple[str | None, str | None]:
    """The distribution that an import package belongs to, and its version."""
    try:
        return package, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    names = importlib.metadata.packages_distributions().get(package)
    if not names:
        return None, None
    return names[0], importlib.metadata.version(names[0])


def _by_value(cls: Any, name: str) -> bytes:
    local = [module for module in list(sys.modules.values()) if _travels(module)]
    registered: list[Any] = []
    try:
        for module in local:
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
        data: bytes = cloudpickle.dumps(cls, protocol=5)
    except Exception as error:
        raise SerializationError(
            f"{name} goes to the workers by value, because its module isn't part of an installed distribution, and "
            f"can't be pickled: {type(error).__name__}: {error}. Install the module, or keep what can't be pickled "
            "out of its globals",
            argument=name,
        ) from error
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    return data


def _travels(module: Any) -> bool:
    """Whether what this module defines goes by value: it lies beside the script, in a notebook's folder, ..."""
    if not isinstance(module, ModuleType) or module.__name__ in ("__main__", "__mp_main__"):
        return False  # cloudpickle sends __main__ by value anyway
    if getattr(module, "__file__", None) is None or module.__name__ not in sys.modules:
        return False
    return not is_installed(module)
