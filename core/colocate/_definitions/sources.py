"""Send modules that aren't installed to workers as source text, and detect differences between driver and workers."""

from __future__ import annotations

import ast
import dis
import hashlib
import importlib.util
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import attrs

from colocate._definitions.names import MAINS, MISSING, get_main_module, is_installed, is_installed_file, is_main
from colocate.errors import ColocateError

LIMIT_BYTES = 32 << 20
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@attrs.frozen
class Source:
    """The source of a module that isn't installed, such as a file in the script's folder.

    Attributes:
        text: The source; empty for a namespace package.
        file: The path on the driver's machine; None for a namespace package.
        package: Whether the module is a package.
    """

    text: bytes
    file: str | None
    package: bool


@attrs.frozen
class RefusedModule:
    """A module of the driver that can't be sent to workers. `reason` is the reason in the import error."""

    reason: str


def is_shipped_with_python(name: str) -> bool:
    """Return whether a module belongs to the standard library or to colocate, which every worker has."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top == "colocate" or top in MAINS


def list_shadowing() -> dict[str, tuple[str, str]]:
    """Return the file and digest of each imported module that shadows the standard library, such as a `profile.py`."""
    names = [name for name in sys.stdlib_module_names if name not in MAINS and _is_shadowing(name)]
    return list_digests({name: source for name in names if (source := find_source(name)) is not None})


def _is_shadowing(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and not is_installed_file(file)


def collect_sources(name: str) -> Mapping[str, Source | RefusedModule]:
    """Return the source of a module for a worker, and of all modules that this module imports, even indirectly.

    Returns:
        The sources by module name; empty if the module is installed or doesn't exist.
    """
    sources: dict[str, Source | RefusedModule] = {}
    todo, visited, size = [name], set[str](), 0
    while todo:
        module_name = todo.pop(0)
        if module_name in visited or (
            is_shipped_with_python(module_name) and not _is_shadowing(module_name.partition(".")[0])
        ):
            continue
        visited.add(module_name)
        source = find_source(module_name)
        if source is None:
            continue
        if isinstance(source, Source):
            size += len(source.text)
            if size > LIMIT_BYTES:
                source = RefusedModule(f"it and what it imports have more than {LIMIT_BYTES >> 20} MiB of source")
            else:
                todo += _list_imports(module_name, source)
        sources[module_name] = source
    return sources if name in sources else {}


def find_source(name: str) -> Source | RefusedModule | None:
    """Return the source of a module of the driver; None for an installed or unknown module."""
    module = sys.modules.get(name)
    spec = _find_spec(name, module)
    file: str | None = getattr(module, "__file__", None) or (
        spec.origin if spec is not None and spec.has_location else None
    )
    places = getattr(module, "__path__", None) or (spec.submodule_search_locations if spec is not None else None)
    if file is None:  # The module is a namespace package or only a parent.
        if spec is not None and spec.origin in ("built-in", "frozen"):
            return None
        if places is None:
            stands_above = module is not None and any(other.startswith(f"{name}.") for other in list(sys.modules))
        else:
            stands_above = not all(is_installed_file(f"{place}/") for place in places)
        return Source(b"", None, True) if stands_above else None
    if is_installed_file(file):
        return None
    cached = _texts.get(name) if module is not None else None
    text = cached[1] if cached is not None and cached[0] is spec else _read_text(name, file, spec)
    if text is None:
        if file.endswith(".py"):
            return RefusedModule(
                f"the driver has imported it from {file}, which can't be read any more: put the file back"
            )
        return RefusedModule(
            f"the driver has it from {file}, which isn't Python source, and only source travels to the workers: "
            "install it where they run"
        )
    if module is not None and spec is not None:
        _texts[name] = spec, text
    return Source(text, file, places is not None)


_texts: dict[str, tuple[ModuleSpec, bytes]] = {}
"""The source of each imported module at the first request, by name, with the spec of the import.

After an edit, restarted workers get the same source as the driver and the other workers. A reload is a new import with
a new spec.
"""


def _find_spec(name: str, module: ModuleType | None) -> ModuleSpec | None:
    if module is not None:
        return getattr(module, "__spec__", None)
    parent = name.rpartition(".")[0]
    path: Any = None
    if parent:
        above = sys.modules.get(parent)
        parent_spec = _find_spec(parent, None) if above is None else None
        path = (
            getattr(above, "__path__", None)
            if above is not None
            else parent_spec and parent_spec.submodule_search_locations
        )
        if path is None:
            return None
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        # The search for a namespace package raises KeyError if the parent package isn't imported.
        with suppress(KeyError):
            spec: ModuleSpec | None = find(name, path, None) if find is not None else None
            if spec is not None:
                return spec
    return None


def _read_text(name: str, file: str, spec: ModuleSpec | None) -> bytes | None:
    if file.endswith(".py"):
        with suppress(OSError):  # The file may be inside an archive.
            return Path(file).read_bytes()
    read = getattr(spec.loader if spec is not None else None, "get_source", None)
    try:
        text: str | None = read(name) if read is not None else None
    except ImportError:
        return None
    return None if text is None else text.encode()


def _list_imports(name: str, source: Source) -> list[str]:
    """Return the names of all modules that a source imports, each preceded by the parent packages."""
    try:
        # The source is compiled, not parsed by `ast`, because `ast` isn't thread-safe on Python 3.11.
        code = compile(source.text, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # The import itself will raise this error.
        return []
    package = name if source.package else name.rpartition(".")[0]
    names: dict[str, None] = {}
    for module_name in _iter_imports(code, package):
        parts = module_name.split(".")
        names |= dict.fromkeys(".".join(parts[: end + 1]) for end in range(len(parts)))
    return list(names)


def _iter_imports(code: CodeType, package: str) -> Iterator[str]:
    """Yield the names of modules that code may import, including each name in a `from package import name`."""
    for inner in _iter_code(code):
        steps = [step for step in dis.get_instructions(inner) if step.opname != "EXTENDED_ARG"]
        for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                with suppress(ImportError):  # A relative import may lead beyond the top-level package.
                    base = importlib.util.resolve_name("." * level.argval + step.argval, package or None)
                    yield base
                    yield from (f"{base}.{name}" for name in names.argval or () if name != "*")


def _iter_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _iter_code(const)


# -- whether two sides have the same


def hash_text(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def list_digests(found: Mapping[str, Source | RefusedModule]) -> dict[str, tuple[str, str]]:
    """Return the file and digest of each module that has a source file, by module name."""
    return {
        name: (source.file, hash_text(source.text))
        for name, source in found.items()
        if isinstance(source, Source) and source.file is not None
    }


def find_other_content(there: Mapping[str, tuple[str, str]]) -> str | None:
    """Compare the modules imported here with another process's digests; return an error text, or None if all agree."""
    for name, (file, content) in there.items():
        if name in sys.modules and (driver_file := _find_other_file(name, content)) is not None:
            return describe_conflict(name, driver_file, file)
    return None


def _find_other_file(name: str, content: str) -> str | None:
    """Return the file of a module in this process if the digest differs from `content`; None otherwise."""
    source = find_source(name)
    return (
        source.file
        if isinstance(source, Source) and source.file is not None and hash_text(source.text) != content
        else None
    )


def describe_conflict(name: str, here: str, there: str) -> str:
    """Return the error text for two different files of one module, on the driver and on a worker."""
    return (
        f"module {name!r} of the driver ({here}) has other content than the one that the worker has imported already "
        f"({there}): rename one of them"
    )


class ShippedModules:
    """The modules of the driver that the workers of one group have received.

    If the driver imports such a module later or again, the next call compares the contents.

    Attributes:
        contents: File and digest by module name.
        news: Names of all modules that the driver has begun to import since the last comparison.
    """

    def __init__(self, group: str, of_another: Mapping[str, tuple[str, str]] | None = None) -> None:
        self._group = group
        self._former_modules = frozenset(of_another or ())
        self.contents: dict[str, tuple[str, str]] = {}
        self._specs: dict[str, Any] = {}  # Maps module names to import specs.
        self.news: set[str] = set()
        _shipped[id(self)] = self
        if sys.meta_path[0] is not _IMPORTS:
            sys.meta_path[:] = [_IMPORTS, *(finder for finder in sys.meta_path if finder is not _IMPORTS)]
        if of_another:
            if (why := find_other_content(of_another)) is not None:
                raise ColocateError(f"group {group!r} can't be taken up here: {why}")
            self.add_modules(of_another)

    def add_modules(self, found: Mapping[str, tuple[str, str]]) -> None:
        """Record modules that the workers receive; known modules keep their recorded contents."""
        for name, content in found.items():
            if self.contents.setdefault(name, content) is content:
                self._specs[name] = _get_spec(name)

    def warn_of_changes(self, line: tuple[str, int]) -> None:
        """Warn of modules that the driver has imported again with other contents than the workers have."""
        self.check_late_imports()
        for name in list(self.news):  # Copied, because several threads may compare at once.
            self.news.discard(name)
            spec = _get_spec(name)
            if name not in self.contents or spec is self._specs[name]:
                continue
            self._specs[name] = spec  # Recording the spec prevents a second warning.
            if spec is not None and (file := _find_other_file(name, self.contents[name][1])) is not None:
                text = (
                    f"the driver has imported module {name!r} again ({file}); its source has changed since the workers "
                    f"of group {self._group!r} imported it. The workers keep the old version: spawn the group again"
                )
                warnings.warn_explicit(text, RuntimeWarning, *line)

    def check_late_imports(self) -> None:
        """Raise if this driver has imported a module with other contents than an earlier driver sent to the workers."""
        for name in self.news & self._former_modules:
            if self._specs[name] is None and (spec := _get_spec(name)) is not None:
                if (file := _find_other_file(name, self.contents[name][1])) is not None:
                    why = describe_conflict(name, file, self.contents[name][0])
                    raise ColocateError(f"group {self._group!r} can't be used here: {why}")
                self._specs[name] = spec


class _ImportObserver:
    """An import finder that never finds a module, but records each imported name in all `ShippedModules`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        for reference in _shipped.valuerefs():
            if (modules := reference()) is not None:
                modules.news.add(name)


_shipped: weakref.WeakValueDictionary[int, ShippedModules] = weakref.WeakValueDictionary()
_IMPORTS: Any = _ImportObserver()


def _get_spec(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)


# -- names that the driver has set after the import, of which the workers don't hear


def list_rebound(classes: Iterable[type]) -> list[str]:
    """Describe module names that role code uses and that the driver has rebound since the import.

    Only names that a module's source binds once are compared: to a plain value, or as a function or class.
    """
    trees: dict[str, ast.Module] = {}
    used: set[str] = set()
    for cls in classes:
        functions = [getattr(value, "__wrapped__", value) for value in vars(cls).values()]
        codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
        used.update(name for code in codes for inner in _iter_code(code) for name in inner.co_names)
        for root in _iter_roots(cls, codes):
            if root not in trees:
                for name, source in collect_sources(root).items():
                    if isinstance(source, Source) and name in sys.modules:
                        # The source may have changed since the import. Workers will then raise the error.
                        with suppress(SyntaxError, ValueError):
                            trees[name] = ast.parse(source.text)
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
    return [text for module, tree in trees.items() for name, text in _iter_changed(module, tree) if name in used]


def _iter_roots(cls: type, codes: Iterable[CodeType]) -> Iterator[str]:
    """Yield the names of modules that workers import for a role. A role of the script imports the script's modules."""
    if not is_main(cls.__module__):
        yield cls.__module__
    elif (main := get_main_module()) is not None:
        modules = [value for value in list(vars(main).values()) if isinstance(value, ModuleType)]
        for name in [module.__name__ for module in modules if not is_installed(module)]:
            if not is_shipped_with_python(name):
                yield name
                yield from (below for below in list(sys.modules) if below.startswith(f"{name}."))
        for code in codes:
            yield from _iter_imports(code, str(main.__dict__.get("__package__") or ""))


def _iter_changed(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name in a module with a value that differs from the source, and a description of both values."""
    bound: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            bound.update(node.names * 2)  # Count such names twice, because only names bound once are compared.
    for top in tree.body:
        is_definition = isinstance(top, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in [top] if is_definition else ast.walk(top):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound[node.name] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound[node.id] += 1
    for top in tree.body:
        for name, says in _iter_bindings(top):
            now = vars(sys.modules[module]).get(name, MISSING)
            if isinstance(says, ast.stmt):
                is_so = getattr(now, "__module__", None) == module and getattr(now, "__qualname__", None) == name
            else:
                is_so = type(says) is type(now) and (says == now or says != says)
            if not is_so and bound[name] == 1:
                yield (
                    name,
                    f"{module}.{name} is {_describe_value(now)} now, and {_describe_value(says)} where the module "
                    "is imported",
                )


def _iter_bindings(node: ast.stmt) -> Iterator[tuple[str, Any]]:
    """Yield the names that a top-level statement binds, each with a plain value or the defining statement."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list:
        yield node.name, node
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        with suppress(ValueError):  # The value may not be a literal.
            plain = ast.literal_eval(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if type(plain) in _PLAIN:
                yield from [(target.id, plain) for target in targets if isinstance(target, ast.Name)]


def _describe_value(value: Any) -> str:
    if isinstance(value, ast.stmt):
        return f"what line {value.lineno} defines"
    if value is MISSING:
        return "deleted"
    if type(value) in _PLAIN:
        text = repr(value)
        return text if len(text) < 60 else f"{text[:60]}..."
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}"
