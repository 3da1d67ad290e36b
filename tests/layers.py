"""The layers of core, and the imports between them: `python -m tests.layers` prints the tables of
docs/internals/architecture.md.

A package imports only from packages above it. Imports in functions, relative imports and `import_module` count, too.
Inside the kernel (all but features) an import for type checkers may point down, so that two classes that refer to each
other need no interface. An import from the package itself counts as one from the name's home. `testing` is below all.

The packages around core have layers of modules: a module imports only from earlier layers of its package, and of
colocate's other packages only core.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import colocate

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "colocate"

# Each package or module of core with its description, from top to bottom.
LAYERS = {
    "_version": "the version",
    "errors": "every error",
    "_signals": "the law of signals: where users' code may run between two lines of ours",
    "_system": "files, processes, threads, clocks, lines of code",
    "features": "the table of features; a folder below has each of them",
    "_display": "things as text in columns, and as html",
    "gpus": "the GPUs that a process may use",
    "_devices": "memory of devices: copies, and what workers lend each other",
    "_definitions": "classes and functions on their way; values as bytes",
    "wire": "messages on sockets",
    "_values": "rows of values: split, join, reduce, walk",
    "_role": "what users declare, and what a role object answers by itself",
    "executor": "the seam for clusters",
    "placement": "a ledger of nodes, for clusters that keep none",
    "_signatures": "whether values fit a signature",
    "signatures": "the same, for packages beside core",
    "_protocol": "what driver and worker both know: messages, requests, what residents are named by",
    "worker": "inside a slot: `birth` of a process, `serving`, `residents`; a call's way",
    "hosting": "role objects elsewhere, and what they hold",
    "keeper": "worker processes on a machine that isn't the driver's",
    "_plugins": "entry points",
    "plugins": "the same, for packages beside core",
    "texts": "numbers, names and errors in messages, for packages beside core",
    "_owned": "the ownership law",
    "_calls": "a call: its view, its messages, its place in the order, the hold, residents",
    "_worker_group": "the workers of a group: start, watch, end, restart",
    "_api": "the live objects",
    "features.*": "what isn't kernel, a folder for each: the table below",
    "torch": "what features offer to roles with torch",
    "connecting": "`connect` and `spawn`",
    "driver": "a driver from inside, for packages beside core",
    "config": "what a file says, of `colocate_run`",
    "cli": "commands, of `colocate_run`",
    "__main__": "`python -m colocate`",
}

# Core imports these packages only when a user takes a name of core that lives in one of these.
BESIDE = {"colocate_report": "what is known of a run; its page, its trace", "colocate_run": "configs, jobs, commands"}

# Imports for type checkers: public signatures of the kernel name classes of these features.
DOORS = {
    ("_api.group", "features.memory.tables"),
    ("_calls.sending", "features.pipelines.driver"),
    ("_role.context", "features.children.child"),
    ("_api.runtime", "features.looking.audit"),
    ("_api.runtime", "features.looking.graph"),
    ("_api.runtime", "features.recordings.driver"),
    ("_role.role", "features.recordings.given"),
    ("_role.method", "features.rows.row_stream"),
}

# The only allowed imports between features: (importer, imported).
FEATURES_ON = {("profiling", "looking"), ("profiling", "process_groups"), ("rows", "standalone")}

# The modules of each package around core, from bottom to top.
AROUND = {
    "executors/colocate_local": ["machine", "threads processes", "local", "plugin"],
    "executors/colocate_ray": [
        "growing janitor silence terms",
        "nodes proxy",
        "private listing holder",
        "envoy joining names holders",
        "executor leftovers placing",
        "owner",
        "owners",
        "plugin service",
    ],
    "executors/colocate_dask": [
        "loop offers scratch undocumented",
        "far private",
        "reservations",
        "connection",
        "executor",
        "plugin",
    ],
    "plugins/colocate_ppo": [
        "maths options spread task",
        "tokenizer",
        "learner model parallel recovery rollout",
        "checkpoint forward",
        "generation reward",
        "actor",
        "critic group_actor reference",
        "team",
        "training",
        "grpo job",
        "grpo_plugin plugin",
    ],
    "plugins/colocate_rollout": [
        "buffer contract lent plugin process unpacked",
        "models",
        "child transformers vllm",
        "role",
        "testing",
    ],
    "plugins/colocate_verl": [
        "data private",
        "roles",
        "driver",
        "results",
        "groups",
        "demo.config demo.cpu demo.rollout plugin",
        "demo.trainers",
        "demo.__main__",
    ],
    "plugins/colocate_observers": ["mlflow opentelemetry prometheus tensorboard wandb"],
}


# All installed packages of this project.
PACKAGES = ("core/colocate", *(f"core/{name}" for name in BESIDE), *AROUND)


class Arrow(NamedTuple):
    """An import of one module by another."""

    importer: str
    imported: str


def modules(core: Path = CORE) -> dict[str, Path]:
    """Return the modules of core by name, without the suites in `testing` and the package itself."""
    found = {}
    for path in core.rglob("*.py"):
        parts = path.relative_to(core).with_suffix("").parts
        if parts[0] != "testing" and (name := ".".join(parts).removesuffix("__init__").removesuffix(".")):
            found[name] = path
    return found


def layer_of(module: str) -> str:
    """Return the layer of a module."""
    top, _, rest = module.partition(".")
    return f"{top}.*" if top == "features" and rest else top


@functools.cache
def arrows(core: Path = CORE) -> list[Arrow]:
    """Return the imports between modules of core, without `DOORS`."""
    known = modules(core)
    return [
        Arrow(name, imported)
        for name, path in known.items()
        for imported in dict.fromkeys(_imported(path, _package(name, path), known))
        if imported != name and (name, imported) not in DOORS
    ]


def _package(name: str, path: Path) -> str:
    """Return the package that a module's relative imports start from."""
    full = f"colocate.{name}"
    return full if path.name == "__init__.py" else full.rpartition(".")[0]


def _imported(path: Path, package: str, known: dict[str, Path]) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_checkers = set() if _is_feature(package) else _for_checkers(tree)
    for node in ast.walk(tree):
        for name in _full_names(node, package):
            found = _module_of(name, known)
            if found is not None and (node not in for_checkers or _is_feature(name)):
                yield found


def _is_feature(name: str) -> bool:
    return name.startswith("colocate.features.")


def _for_checkers(tree: ast.AST) -> set[ast.AST]:
    """Return the syntax nodes below `if TYPE_CHECKING`."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {node for block in blocks for line in block.body for node in ast.walk(line)}


def _full_names(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the full names that an import names, or that an attribute as in `colocate.connect` uses."""
    if isinstance(node, ast.ImportFrom):
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Attribute) and _root(node) == "colocate":
        yield ast.unparse(node)
    elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__"):
        constants = [each.value for each in node.args if isinstance(each, ast.Constant)]
        if constants and isinstance(constants[0], str):
            base = str(constants[1]) if len(constants) > 1 else package
            yield importlib.util.resolve_name(constants[0], base)


def _root(node: ast.expr) -> str | None:
    """Return the name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else _root(node)


def _module_of(name: str, known: dict[str, Path]) -> str | None:
    """Return the module that defines one of our names; None for other names, and for names of the package itself."""
    top, *parts = name.split(".")
    if top != "colocate" or not parts:
        return None
    if parts[0] == "testing":
        return "testing"
    for end in range(len(parts), 0, -1):
        if (found := ".".join(parts[:end])) in known:
            return found
    return colocate._HOME_OF.get(parts[0])


def private(folder: Path) -> list[Arrow]:
    """Return the imports of core's private names in a folder of modules that are built on core."""
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


def beside() -> list[Arrow]:
    """Return core's imports of the packages beside core."""
    return [
        Arrow(name, imported)
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for imported in (_names(node) if isinstance(node, ast.Import | ast.ImportFrom) else ())
        if imported.partition(".")[0] in BESIDE
    ]


def against(core: Path = CORE) -> list[Arrow]:
    """Return the arrows from a layer to a lower one."""
    order = [*LAYERS, "testing"]
    return [
        arrow for arrow in arrows(core) if order.index(layer_of(arrow.imported)) > order.index(layer_of(arrow.importer))
    ]


def modules_around(folder: Path) -> dict[str, Path]:
    """Return the modules of a package around core by name, without the package itself."""
    paths = (path for path in folder.rglob("*.py") if path.name != "__init__.py")
    return {".".join(path.relative_to(folder).with_suffix("").parts): path for path in paths}


@functools.cache
def arrows_around(folder: Path) -> list[Arrow]:
    """Return the imports between modules of a package around core; another such package keeps its full name."""
    packages = {Path(each).name for each in AROUND} | {folder.name}
    known = modules_around(folder)
    found = []
    for importer, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _full_names(node, folder.name):
                top, _, rest = name.partition(".")
                if top in packages:
                    ends = [rest.rsplit(".", count)[0] for count in range(rest.count(".") + 1)]
                    inside = next((end for end in ends if end in known), None) if top == folder.name else name
                    found += [Arrow(importer, inside)] if inside not in (None, importer) else []
    return list(dict.fromkeys(found))


def against_around(folder: Path, layers: list[str]) -> list[Arrow]:
    """Return the arrows of a package around core that don't lead to an earlier layer than the importer's."""
    at = {name: number for number, layer in enumerate(layers) for name in layer.split()}
    return [arrow for arrow in arrows_around(folder) if at.get(arrow.imported, len(layers)) >= at[arrow.importer]]


def drawing(folders: Iterable[str] = PACKAGES, root: Path = ROOT) -> dict[str, list[str]]:
    """Return the imports of each module of our packages, by full names, as a drawing of the imports shows these.

    The packages themselves are included, with all names that each offers, also names that are imported on first use.
    """
    known = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to((root / folder).parent).with_suffix("").parts
            known[".".join(parts).removesuffix(".__init__")] = path
    ways: dict[str, list[str]] = {}
    for importer, path in known.items():
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_checkers = _for_checkers(tree) if importer.startswith("colocate.") and not _is_feature(importer) else set()
        names = [
            name
            for node in ast.walk(tree)
            if not isinstance(node, ast.Attribute) and node not in for_checkers
            for name in _full_names(node, package)
        ]
        found = (name if name in known else name.rpartition(".")[0] for name in names)
        ways[importer] = [name for name in dict.fromkeys(found) if name in known and name != importer]
    return ways


def circles(around: Path | None = None) -> list[set[str]]:
    """Return the import circles of core, or of a package around core."""
    ways: dict[str, list[str]] = {name: [] for name in (modules_around(around) if around else modules())}
    for arrow in arrows_around(around) if around else arrows(CORE):
        assert arrow.imported in ways, arrow
        ways[arrow.importer].append(arrow.imported)
    return circles_of(ways)


def circles_of(ways: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Return the strongly connected components with more than one module, by Tarjan's algorithm."""
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


def between_features() -> set[tuple[str, str]]:
    """Return the imports between features: (importer, imported)."""
    found = set()
    for arrow in arrows(CORE):
        ends = [end.split(".") for end in arrow]
        if all(len(end) > 1 and end[0] == "features" for end in ends) and ends[0][1] != ends[1][1]:
            found.add((ends[0][1], ends[1][1]))
    return found


def main() -> None:
    """Print the tables."""
    places = {name: layer_of(name) for name in modules()}
    count = Counter(places.values())
    upwards = Counter(
        places[arrow.importer] for arrow in arrows(CORE) if places[arrow.importer] != layer_of(arrow.imported)
    )
    wrong = Counter(places[arrow.importer] for arrow in against())
    print(f"{'layer':12} {'modules':>7} {'arrows up':>9} {'against':>7}  what it is")
    for layer, what in LAYERS.items():
        print(f"{layer:12} {count[layer]:7} {upwards[layer]:9} {wrong[layer]:7}  {what}")
    print(
        f"{'':12} {sum(count.values()):7} {sum(upwards.values()):9} {sum(wrong.values()):7}  circles: {len(circles())}"
    )
    for package, layers in AROUND.items():
        folder = ROOT / package
        arrows_in, down = arrows_around(folder), against_around(folder, layers)
        print(f"\n{package}: {len(arrows_in)} arrows, {len(down)} against, {len(circles(folder))} circles")
        print("  " + " < ".join(layer.replace(" ", ", ") for layer in layers))


if __name__ == "__main__":
    main()
