"""The layers of core, and the imports between them: `python -m tests.layers` prints the table of docs/architecture.md.

A package imports only from those above it. Imports for type checkers and inside functions count.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

CORE = Path(__file__).parents[1] / "core" / "colocate"

# From the top of the house to its ground: what it is, and which modules it has.
LAYERS = {
    "errors": ("every error", "errors"),
    "system": (
        "files, processes, threads, clocks, lines of code",
        "_atomic _by_type _bytes _epochs _here _imported _jobs _lines _numbers _off_main _parent _printer _rebuilding "
        "_requests _tracebacks gpus",
    ),
    "definitions": ("classes and functions on their way; values as bytes", "_definitions _definitions.*"),
    "wire": ("messages on sockets", "wire wire.*"),
    "torch": ("process groups in torch", "_torch_groups"),
    "values": (
        "rows of values: split, join, reduce, walk",
        "_arguments _batch _beside _codec _collect _dispatch _leaves _mesh _nesting _reduce _scatter _tree _values",
    ),
    "role": (
        "what users declare, and what a role object answers by itself",
        "_call _context _method _method_spec _on_driver _resident _role _role_info _standalone",
    ),
    "executor": ("the seam for engines", "executor placement"),
    "signatures": ("whether values fit a signature", "_annotations _signatures"),
    "protocol": (
        "what driver and worker both know",
        "_bundle _protocol _protocol.* worker.batch worker.consequence worker.uses",
    ),
    "worker": ("inside a slot", "_processes worker worker.*"),
    "keeper": ("worker processes on a machine that isn't the driver's", "keeper keeper.*"),
    "plugins": ("entry points", "_needs _plugin_group _plugins _strays"),
    "owned": ("the ownership law", "_dispatcher _lifecycle _owned"),
    "order": (
        "one order of calls, the hold, deadlines",
        "_cancel _failures _joiner _link _order _pending _records _services _stacks",
    ),
    "kept": ("residents, the driver's half", "_fetch _handles _kept _leases _residents"),
    "crew": (
        "the workers of a group: start, watch, end, restart",
        "_crew _questions _restart _saved _ship _spawn _stages _taught _tenancy _worker _workforce",
    ),
    "views": ("sending: views, pipelines, functions", "_checkpoint _drafts _functions _pipeline _sending _view"),
    "api": (
        "the live objects",
        "_audit _connection _detached _graph _group _held _pool _record _runtime _slots _slow",
    ),
    "config": ("what a file says", "config config.*"),
    "runs": ("what is known of a run", "_calls _run_record _stage"),
    "report": ("a run as a page", "report report.*"),
    "job": ("running it", "_launch _run _run_folder _run_log _screen"),
    "cli": ("commands", "cli cli.*"),
}


class Arrow(NamedTuple):
    """One module imports another one."""

    importer: str
    imported: str


def modules() -> dict[str, Path]:
    """The modules of core by name, but for the suites in `testing` and the names that the package itself offers."""
    found = {}
    for path in CORE.rglob("*.py"):
        parts = path.relative_to(CORE).with_suffix("").parts
        if parts[0] != "testing" and (name := ".".join(parts).removesuffix("__init__").removesuffix(".")):
            found[name] = path
    return found


def layer_of(module: str) -> str | None:
    """The layer that a module is in; one that is named counts before a pattern."""
    named = {name: layer for layer, (_, names) in LAYERS.items() for name in names.split()}
    if module in named:
        return named[module]
    return next((layer for pattern, layer in named.items() if fnmatch(module, pattern)), None)


def arrows() -> list[Arrow]:
    """Every import of one module of core in another one."""
    known = modules()
    return [
        Arrow(name, imported)
        for name, path in known.items()
        for imported in dict.fromkeys(_imported(ast.parse(path.read_text(encoding="utf-8")), known))
        if imported != name
    ]


def _imported(tree: ast.Module, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = (node.module or "").removeprefix("colocate").removeprefix(".")
            if node.module is not None and node.module.split(".")[0] == "colocate":
                for alias in node.names:
                    inner = f"{base}.{alias.name}".removeprefix(".")
                    found = inner if inner in known else base
                    if found in known:
                        yield found
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("colocate.") and (name := alias.name.removeprefix("colocate.")) in known:
                    yield name


def private(folder: Path) -> list[Arrow]:
    """The imports of core's private names in what is built on core."""
    return [
        Arrow(str(path.relative_to(folder)), name)
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _names(node)
        if name.startswith("colocate.") and any(part.startswith("_") for part in name.split("."))
    ]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def against() -> list[Arrow]:
    """The arrows from a layer to one below it."""
    order = list(LAYERS)
    places = {name: layer_of(name) for name in modules()}
    return [
        arrow
        for arrow in arrows()
        if order.index(places[arrow.imported] or "errors") > order.index(places[arrow.importer] or "cli")
    ]


def circles() -> list[set[str]]:
    """Modules that import each other, directly or not (Tarjan)."""
    ways: dict[str, list[str]] = {name: [] for name in modules()}
    for arrow in arrows():
        ways[arrow.importer].append(arrow.imported)
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        path.append(name)
        for other in ways[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in path:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            start = path.index(name)
            circle = set(path[start:])
            del path[start:]
            if len(circle) > 1:
                found.append(circle)

    for name in ways:
        if name not in number:
            visit(name)
    return found


def main() -> None:
    """Print the table."""
    places = {name: layer_of(name) for name in modules()}
    count = Counter(places.values())
    upwards = Counter(places[arrow.importer] for arrow in arrows() if places[arrow.importer] != places[arrow.imported])
    wrong = Counter(places[arrow.importer] for arrow in against())
    print(f"{'layer':12} {'modules':>7} {'arrows up':>9} {'against':>7}  what it is")
    for layer, (what, _) in LAYERS.items():
        print(f"{layer:12} {count[layer]:7} {upwards[layer]:9} {wrong[layer]:7}  {what}")
    print(
        f"{'':12} {sum(count.values()):7} {sum(upwards.values()):9} {sum(wrong.values()):7}  circles: {len(circles())}"
    )


if __name__ == "__main__":
    main()
