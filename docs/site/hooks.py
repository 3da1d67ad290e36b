"""What the site has that no page does: tables of keys and options, plugins' roles and jobs, examples as they are.

Between `<!-- generated: NAME ARGUMENT -->` and `<!-- end -->` a page has what the function
`_NAME(ARGUMENT)` below writes; of a public name (`api`) the site shows more than the page in the repository
(`reference.py`). Other pages link to an example by a line of its own, under which the site shows the file.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

import colocate
from colocate._signatures import describe
from colocate.plugins import find_executor, find_job, find_observer, find_role
from colocate.signatures import methods_of
from colocate_run.config import schema, trust
from colocate_run.config.schema import yaml_fields, yaml_key

MARKER = re.compile(r"^(<!-- generated: (\w+) ([^\n]+) -->)$.*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
_EXAMPLE = re.compile(r"^\[([\w./-]+)\]\((examples/[\w./-]+\.(py|yaml|toml))\)$", re.MULTILINE)


def on_startup(command: str, dirty: bool) -> None:
    """Plugins' signatures are read although what they need isn't installed."""
    sys.path.append(str(Path(__file__).parent))
    from absent import stand_in

    stand_in()


def on_env(env: object, config: MkDocsConfig, files: Files) -> None:
    """Search works without the script that the plugin `offline` would have fetched: site/worker.js does it."""
    config.extra["polyfills"] = ["site/worker.js"]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write what is generated."""
    markdown = MARKER.sub(lambda found: "\n".join(GENERATED[found[2]](found[3])), markdown)
    return _EXAMPLE.sub(lambda found: _shown(found, Path(config.docs_dir)), markdown)


def _shown(link: re.Match[str], docs: Path) -> str:
    text = (docs / link[2]).read_text(encoding="utf-8")
    language = {"py": "python"}.get(link[3], link[3])
    return f'``` {{.{language} title="{link[1]}"}}\n{text}```'


def _config(name: str) -> Iterator[str]:
    """The keys of a part of a config."""
    cls = vars(schema)[name]
    said = _attributes(inspect.getdoc(cls) or "")
    types = typing.get_type_hints(cls)
    rows = [(f"`{yaml_key(f.name)}`", words(types[f.name]), _default(f), said[f.name]) for f in yaml_fields(cls)]
    return _table("key", rows)


def _options(name: str) -> Iterator[str]:
    """The options of an executor."""
    connect = find_executor(name).connect
    return _table("option", _parameters(connect, [*inspect.signature(connect).parameters.values()], None))


def _variables(name: str) -> Iterator[str]:
    """The variables that a list of `colocate_run.config.trust` names."""
    yield ", ".join(f"`{each}`" for each in sorted(vars(trust)[name]))


def _observer(name: str) -> Iterator[str]:
    """The options of an observer."""
    made: Any = find_observer(name).load().__init__  # type: ignore[misc]
    given = list(inspect.signature(made).parameters.values())[1:]
    return _table("option", _parameters(made, given, None))


def _plugin(name: str) -> Iterator[str]:
    """A plugin's roles, with the options that a config gives under `with`, and its jobs."""
    (module,) = [entry.load() for entry in _entry_points(name)]
    for role in module.colocate_roles():
        cls = find_role(f"{name}.{role}").load()
        makes = next(base for base in cls.__mro__ if "__init__" in vars(base))  # whose options it has
        doc = (inspect.getdoc(cls) or "").partition("\n\nArgs:")[0]
        doc += "".join((inspect.getdoc(makes) or "").partition("\n\nArgs:")[1:])
        yield from _titled(f"{name}.{role}", cls, cls.__init__, doc)
        yield "Methods:\n"
        for method in methods_of(cls):
            plain = inspect.unwrap(inspect.getattr_static(cls, method))
            first = (inspect.getdoc(plain) or "").partition("\n\n")[0].replace("\n", " ")
            yield f"- `{method}({', '.join([*inspect.signature(plain).parameters][1:])})`: {first}"
        yield ""
    for job in getattr(module, "colocate_jobs", dict)():
        function = find_job(f"{name}.{job}").load()
        yield from _titled(f"{name}.{job}", function, function, inspect.getdoc(function) or "")


def _api(argument: str) -> Iterator[str]:
    """A public name, for mkdocstrings."""
    path, options = entry_of(argument)
    yield f"::: {path}"
    yield "    options:"
    yield f"      heading_level: {options['level']}"
    yield f"      show_root_heading: {str(options['title']).lower()}"
    if options["members"] is not None:
        yield f"      members: [{', '.join(options['members'])}]"


def entry_of(argument: str) -> tuple[str, dict[str, Any]]:
    """Return the path of a public name, and how it is shown: `PATH[!] [LEVEL] [MEMBER,...]`, `!` without a heading.

    `-` stands for no members, and `CLASS.PROPERTY()` for the class that the property has.
    """
    path, *words = argument.split()
    options: dict[str, Any] = {"level": 2, "title": not path.endswith("!"), "members": None}
    for word in words:
        if word.isdigit():
            options["level"] = int(word)
        else:
            options["members"] = tuple(word.split(",")) if word != "-" else ()
    path = path.removesuffix("!")
    if path.endswith("()"):
        cls, _, name = path.removesuffix("()").rpartition(".")
        found = typing.get_type_hints(inspect.getattr_static(getattr(colocate, cls), name).fget)["return"]
        path = f"{found.__module__}.{found.__qualname__}"
    return path, options


GENERATED = {
    "api": _api,
    "config": _config,
    "options": _options,
    "observer": _observer,
    "plugin": _plugin,
    "variables": _variables,
}


def _entry_points(name: str) -> Iterable[Any]:
    from importlib.metadata import entry_points

    return entry_points(group="colocate.roles", name=name)


def _titled(name: str, thing: Any, signature: Any, doc: str) -> Iterator[str]:
    yield f"## {name}\n"
    yield doc.partition("\n\nArgs:")[0].replace("\n", " ") + "\n"
    own = [p for p in inspect.signature(signature).parameters.values() if p.name not in ("self", "run")]
    given = [p for p in own if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    yield from _table("option", _parameters(signature, given, doc)) if given else ("It has no options.\n",)


def _parameters(function: Any, parameters: list[inspect.Parameter], doc: str | None = None) -> list[tuple[str, ...]]:
    said = _attributes(inspect.getdoc(function) if doc is None else doc)
    types = typing.get_type_hints(function)
    return [(f"`{p.name}`", words(types[p.name]), _yaml(p.default), said[p.name]) for p in parameters]


def _attributes(doc: str | None) -> dict[str, str]:
    """What a docstring says of each attribute or argument."""
    sections = griffe.Docstring(doc or "").parse("google", warnings=False)
    kinds = (griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters)
    return {each.name: each.description.replace("\n", " ") for s in sections if s.kind in kinds for each in s.value}


def _table(what: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {what} | type | default | meaning |"
    yield "|---|---|---|---|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


def words(annotation: Any) -> str:
    """A type as a config's author says it."""
    if annotation is Any:
        return "anything"
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    own = [each for each in (annotation, *arguments) if getattr(each, "__module__", "") == schema.__name__]
    if own:
        name = own[0].__name__.removesuffix("Config").lower()
        return {dict: f"{name}s by name", list: f"list of {name}s"}.get(typing.get_origin(annotation), name)
    return describe(annotation)


def _default(field: Any) -> str:
    if field.default is attrs.NOTHING:
        return "required" if field.name != "name" else "the file's stem"
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        made = field.default.factory()
        return _yaml(made.use) if hasattr(made, "use") else "none"
    return _yaml(field.default)


def _yaml(value: object) -> str:
    """A value as YAML says it."""
    if value is inspect.Parameter.empty:
        return "required"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"
