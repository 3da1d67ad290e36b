"""The layers of core, and the imports between them: `python -m tests.layers` prints the table of docs/architecture.md.

A package imports only from those above it. Imports for type checkers and inside functions count.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CORE = Path(__file__).parents[1] / "core" / "colocate"

# From the top of the house to its ground: each package or module of core, and what it is.
LAYERS = {
    "errors": "every error",
    "_system": "files, processes, threads, clocks, lines of code",
    "gpus": "the GPUs that a process may use",
    "_definitions": "classes and functions on their way; values as bytes",
    "wire": "messages on sockets",
    "_values": "rows of values: split, join, reduce, walk",
    "_role": "what users declare, and what a role object answers by itself",
    "executor": "the seam for engines",
    "placement": "a ledger of nodes, for engines that keep none",
    "_signatures": "whether values fit a signature",
    "_protocol": "what driver and worker both know: messages, requests, what residents are named by",
    "worker": "inside a slot",
    "keeper": "worker processes on a machine that isn't the driver's",
    "_plugins": "entry points",
    "_owned": "the ownership law",
    "_calls": "one order of calls, the hold, deadlines",
    "_kept": "residents, the driver's half",
    "_crew": "the workers of a group: start, watch, end, restart",
    "_views": "sending: views, pipelines, functions",
    "_api": "the live objects",
    "config": "what a file says",
    "_runs": "what is known of a run",
    "report": "a run as a page",
    "_job": "running it",
    "cli": "commands",
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


def layer_of(module: str) -> str:
    """The layer that a module is in."""
    return module.partition(".")[0]


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
    return [
        arrow for arrow in arrows() if order.index(layer_of(arrow.imported)) > order.index(layer_of(arrow.importer))
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
    for layer, what in LAYERS.items():
        print(f"{layer:12} {count[layer]:7} {upwards[layer]:9} {wrong[layer]:7}  {what}")
    print(
        f"{'':12} {sum(count.values()):7} {sum(upwards.values()):9} {sum(wrong.values()):7}  circles: {len(circles())}"
    )


if __name__ == "__main__":
    main()
