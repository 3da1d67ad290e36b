"""Names of modules that were set after their import, which the workers don't hear of: found when a group is spawned."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import attrs

from colocate._definitions.names import MISSING, is_installed, is_main, main_module
from colocate._definitions.sources import Source, answer, imports, is_shipped_with_python

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@attrs.frozen
class Rebound:
    """A name that isn't what its module's source says: `source` is what that says, `now` what it is."""

    module: str
    name: str
    source: str
    now: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name} is {self.now} now, and {self.source} where the module is imported"


def rebound(classes: Iterable[type]) -> list[Rebound]:
    """The names that code of some roles uses and that the driver has set since their modules were imported.

    Looks at names that a module's source gives a plain value, or defines as a function or class, once.

    Args:
        classes: The roles.
    """
    trees: dict[str, ast.Module] = {}
    used: set[str] = set()
    for cls in classes:
        used.update(_names_in_class(cls))
        for root in _roots(cls):
            if root not in trees:
                trees.update(_parsed(root))
    for tree in trees.values():
        used.update(_names_in(tree))
    found = [each for module, tree in trees.items() for each in _changed(module, tree)]
    return [each for each in found if each.name in used]


def _roots(cls: type) -> Iterator[str]:
    """The modules that the workers import for a role."""
    if not is_main(cls.__module__):
        yield cls.__module__
    elif (main := main_module()) is not None:
        modules = [value for value in list(vars(main).values()) if isinstance(value, ModuleType)]
        for name in [each.__name__ for each in modules if not is_installed(each)]:
            if is_shipped_with_python(name):
                continue
            yield name
            yield from (below for below in list(sys.modules) if below.startswith(f"{name}."))
        for code in _codes_of(cls):
            yield from imports(code, str(main.__dict__.get("__package__") or ""))


def _parsed(root: str) -> dict[str, ast.Module]:
    trees: dict[str, ast.Module] = {}
    for name, source in answer(root).items():
        if isinstance(source, Source) and name in sys.modules:
            try:
                trees[name] = ast.parse(source.text)
            except (SyntaxError, ValueError):  # it has changed since its import; the workers will say
                continue
    return trees


def _names_in_class(cls: type) -> Iterator[str]:
    for code in _codes_of(cls):
        yield from _names_in_code(code)


def _codes_of(cls: type) -> Iterator[CodeType]:
    functions = [getattr(value, "__wrapped__", value) for value in vars(cls).values()]
    yield from (function.__code__ for function in functions if isinstance(function, FunctionType))


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in_code(const)


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def _changed(module: str, tree: ast.Module) -> Iterator[Rebound]:
    names = vars(sys.modules[module])
    bound = _bound(tree)
    for node in tree.body:
        for name, says in _says(node):
            now = names.get(name, MISSING)
            if bound.count(name) == 1 and not _is_so(says, now, module, name):
                yield Rebound(module, name, _words(says), _words(now))


def _bound(tree: ast.Module) -> list[str]:
    """Each name that code of the module binds in it, as often as it does."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found += [*node.names, *node.names]  # its own code sets it, at some time
    for top in tree.body:
        if isinstance(top, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(top.name)
        else:
            found += [name for node in ast.walk(top) if (name := _bound_by(node))]
    return found


def _bound_by(node: ast.AST) -> str:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""


def _says(node: ast.stmt) -> Iterator[tuple[str, Any]]:
    """What a statement at the top of a module binds: a plain value, or the statement that defines it."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list:
        yield node.name, node
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if value is None:
        return
    try:
        plain = ast.literal_eval(value)
    except ValueError:
        return
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    if type(plain) in _PLAIN:
        yield from ((target.id, plain) for target in targets if isinstance(target, ast.Name))


def _is_so(says: Any, now: Any, module: str, name: str) -> bool:
    if isinstance(says, ast.stmt):
        return getattr(now, "__module__", None) == module and getattr(now, "__qualname__", None) == name
    return type(says) is type(now) and (says == now or says != says)


def _words(value: Any) -> str:
    if isinstance(value, ast.stmt):
        return f"what line {value.lineno} defines"
    if value is MISSING:
        return "deleted"
    if type(value) in _PLAIN:
        text = repr(value)
        return text if len(text) < 60 else f"{text[:60]}..."
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}"
