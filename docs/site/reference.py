"""Write the generated parts of pages, for readers of the repository; `--check` says which aren't current.

The site has the same parts by mkdocstrings, with links between them (`hooks.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
from absent import stand_in
from hooks import GENERATED, MARKER, entry_of

DOCS = Path(__file__).parents[1]
_SOURCES = [DOCS.parent / folder for folder in ("core", "executors", "plugins")]
_LISTS = {
    griffe.DocstringSectionKind.parameters: "Args",
    griffe.DocstringSectionKind.attributes: "Attributes",
    griffe.DocstringSectionKind.returns: "Returns",
    griffe.DocstringSectionKind.yields: "Yields",
    griffe.DocstringSectionKind.raises: "Raises",
    griffe.DocstringSectionKind.warns: "Warns",
}


class Api:
    """Public names as Markdown, read from the sources without importing these."""

    def __init__(self) -> None:
        loader = griffe.GriffeLoader(search_paths=_SOURCES)
        for package in sorted({folder.name for source in _SOURCES for folder in source.iterdir() if folder.is_dir()}):
            loader.load(package)
        loader.resolve_aliases(implicit=True)
        self._packages = loader.modules_collection

    def entry(self, path: str, level: int = 2, title: bool = True, members: tuple[str, ...] | None = None) -> str:
        """Return the heading, signature and docstring of a name, and of its members."""
        thing = _target(self._packages[path])
        blocks = [f"{'#' * level} {path.rpartition('.')[2]}"] if title else []
        blocks += _described(thing)
        level += title
        prefix = f"{thing.name}." if thing.is_class else ""
        documented = list(_members(thing, members))
        if attributes := [f"- `{name}`: {_text(member)}" for name, member in documented if member.is_attribute]:
            blocks.append("\n".join(attributes))
        for name, member in documented:
            if member.is_class:
                blocks.append(self.entry(f"{thing.path}.{name}", level))
            elif member.is_function:
                blocks += [f"{'#' * level} {prefix}{name}", *_described(member)]
        return "\n\n".join(blocks)


def _target(thing: griffe.Object | griffe.Alias) -> griffe.Object:
    return thing.final_target if isinstance(thing, griffe.Alias) else thing


def _members(thing: griffe.Object, names: tuple[str, ...] | None) -> Iterator[tuple[str, griffe.Object]]:
    """Yield the documented public members: the named ones, or its own in the source's order and inherited methods."""
    if not (thing.is_class or thing.is_module):
        return
    if names is not None:
        if missing := [name for name in names if name not in thing.all_members]:
            raise LookupError(f"docs/ names what {thing.path} hasn't: {', '.join(missing)}")
        yield from ((name, _target(thing.all_members[name])) for name in names)
        return
    direct = [name for name, member in thing.members.items() if not member.is_alias or name in (thing.exports or ())]
    for name in (*direct, *(thing.inherited_members if thing.is_class else ())):
        try:
            member = _target(thing.all_members[name])
        except griffe.AliasResolutionError:  # of a package that isn't ours
            continue
        inherited = name not in thing.members
        if not name.startswith("_") and member.docstring is not None and not (inherited and member.is_attribute):
            yield name, member


def _described(thing: griffe.Object) -> Iterator[str]:
    """Yield the signature, if there is a public one, and the docstring."""
    sections = thing.docstring.parse("google", warnings=False) if thing.docstring else []
    init = thing.members.get("__init__") if thing.is_class else None
    if isinstance(init, griffe.Function) and init.docstring is not None:
        sections += init.docstring.parse("google", warnings=False)
    if isinstance(thing, griffe.Function):
        yield f"`{thing.name}({_parameters(thing)})" + (f" -> {thing.returns}`" if thing.returns else "`")
    elif isinstance(init, griffe.Function) and any(s.kind is griffe.DocstringSectionKind.parameters for s in sections):
        yield f"`{thing.name}({_parameters(init)})`"
    for section in sections:
        if section.kind not in _LISTS:
            yield str(section.value).strip()
            continue
        items = [
            f"- {name}{': ' if name else ''}{item.description.strip()}".replace("\n", "\n  ")
            for item in section.value
            for name in [f"`{getattr(item, 'name', '') or item.annotation or ''}`".replace("``", "")]
        ]
        yield f"{section.title or _LISTS[section.kind]}:"
        yield "\n".join(items)


def _text(thing: griffe.Object) -> str:
    return thing.docstring.value.replace("\n", "\n  ") if thing.docstring else ""


def _parameters(function: griffe.Function) -> str:
    words: list[str] = []
    kinds = griffe.ParameterKind
    before: griffe.ParameterKind | None = None
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        if before is kinds.positional_only and parameter.kind is not before:
            words.append("/")
        if parameter.kind is kinds.keyword_only and before not in (kinds.keyword_only, kinds.var_positional):
            words.append("*")
        star = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(parameter.kind or kinds.keyword_only, "")
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and not star else ""
        words.append(f"{star}{parameter.name}{annotation}{default}")
        before = parameter.kind
    return ", ".join(words)


def _written(api: Api, kind: str, argument: str) -> str:
    if kind == "api":
        path, options = entry_of(argument)
        return api.entry(path, **options)
    return "\n".join(GENERATED[kind](argument)).strip()


def main() -> int:
    stand_in()
    api = Api()
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        content = MARKER.sub(lambda match: f"{match[1]}\n\n{_written(api, match[2], match[3])}\n\n{match[4]}", text)
        if content != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(content, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"docs/ isn't what the code says: {', '.join(stale)}. `make reference` writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
