"""Reading YAML 1.2 into plain data that remembers its lines, and writing it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from colocate.config.values import Place, path_text
from colocate.errors import ConfigError, Mistake

_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))
_TIMESTAMP = "tag:yaml.org,2002:timestamp"  # no type of YAML 1.2's core schema: text


@attrs.define(eq=False)
class Document:
    """A config on its way from text to `Config`, with what was found wrong so far.

    Attributes:
        name: What messages call it.
        data: Its plain data.
        lines: The line of each place that came from a file.
        origins: The command-line option that each changed place came from.
        mistakes: What is wrong.
    """

    name: str
    data: dict[str, Any] = attrs.field(factory=dict)
    lines: dict[Place, int] = attrs.field(factory=dict)
    origins: dict[Place, str] = attrs.field(factory=dict)
    mistakes: list[Mistake] = attrs.field(factory=list)

    def wrong(self, place: Place, message: str, nearest: str | None = None) -> None:
        """Note a mistake, with the line or the option that the place came from."""
        line, option = self._source(place)
        text = f"{message} (from {option})" if option else message
        mistake = Mistake(path_text(place), line, text, nearest)
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)

    def put(self, place: Place, value: Any, option: str) -> None:
        """Set the value of a place whose parent exists, because a command-line option says so."""
        parent: Any = self.data
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = value
        known: dict[Place, Any]
        for known in (self.lines, self.origins):
            for below in [each for each in known if each[: len(place)] == place]:
                del known[below]
        self.origins[place] = option

    def is_callers(self, place: Place) -> bool:
        """Whether a place came from an option of the caller's, not from the config."""
        return any(place[:length] in self.origins for length in range(len(place) + 1))

    def error(self) -> ConfigError:
        """All mistakes as one error, in the order of the file."""
        count = len(self.mistakes)
        ordered = sorted(self.mistakes, key=lambda mistake: (mistake.line is None, mistake.line or 0))
        message = f"{self.name}: {count} mistake{'s' if count > 1 else ''}"
        return ConfigError(message, mistakes=tuple(ordered))

    def file_lines(self) -> dict[str, tuple[str, int]]:
        """File and line of the executor and of each pool and group, by path."""
        if not self.lines:
            return {}
        entries = [place for place in self.lines if len(place) == 2 and place[0] in ("pools", "groups")]
        found = {path_text(place): (self.name, self.lines[place]) for place in entries}
        return {**found, "executor": (self.name, self.lines.get(("executor",), 1))}

    def _source(self, place: Place) -> tuple[int | None, str | None]:
        for length in range(len(place), -1, -1):
            if (option := self.origins.get(place[:length])) is not None:
                return None, option
            if (line := self.lines.get(place[:length])) is not None:
                return line, None
        return None, None


def read_file(path: Path) -> Document:
    """The document of a file.

    Raises:
        ConfigError: It can't be read, or its syntax is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read the config {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Document:
    """The document of a text, which must be a mapping at its top.

    Raises:
        ConfigError: Its syntax is wrong.
    """
    document = Document(name)
    value = read_value(text, document)
    if document.mistakes and value is None:
        raise document.error()
    if not isinstance(value, dict):
        document.wrong((), "a config is a mapping of keys to values: executor, pools, groups, job" + _instead(value))
        raise document.error()
    document.data = value
    return document


def read_dict(config: Mapping[str, Any], name: str) -> Document:
    """The document of a dict; its data are copies."""
    document = Document(name)
    document.data = _copied(config, (), document)
    return document


def read_value(text: str, document: Document) -> Any:
    """Any YAML value as plain data; lines and mistakes go to the document. None, with a mistake, for bad syntax."""
    yaml = YAML(typ="safe", pure=True)
    try:
        node = yaml.compose(text)
        return None if node is None else _Builder(yaml, document).build(node, (), ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f"{error.context}: " if error.context else ""
        problem = f"{context}{error.problem}".partition("\n")[0]
        document.mistakes.append(Mistake("", mark.line + 1 if mark else None, f"not YAML: {problem}"))
    except YAMLError as error:
        document.mistakes.append(Mistake("", None, f"not YAML: {error}".partition("\n")[0]))
    return None


def write_yaml(data: Any) -> str:
    """Plain data as YAML text, keys in their order."""
    yaml: Any = YAML(typ="safe", pure=True)  # its settings are typed by their defaults, mostly None
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.allow_unicode = True
    text = io.StringIO()
    yaml.dump(data, text)
    return text.getvalue()


@attrs.frozen
class _Builder:
    """Builds data from YAML nodes. Every alias becomes a copy: setting one place must not change another."""

    yaml: YAML
    document: Document

    def build(self, node: Node, place: Place, above: tuple[int, ...]) -> Any:
        self.document.lines.setdefault(place, node.start_mark.line + 1)
        if id(node) in above:
            self.document.wrong(place, "an alias stands for something that contains it")
            return None
        above = (*above, id(node))
        if isinstance(node, MappingNode):
            return self._mapping(node, place, above)
        if isinstance(node, SequenceNode):
            return [self.build(item, (*place, i), above) for i, item in enumerate(node.value)]
        return self._scalar(node, place)

    def _scalar(self, node: Node, place: Place) -> Any:
        if node.tag == _TIMESTAMP:
            return node.value
        if node.tag not in _PLAIN_TAGS:
            self.document.wrong(place, f"the tag {node.tag} is not known; a config has plain values only")
            return None
        return self.yaml.constructor.construct_object(node)

    def _mapping(self, node: MappingNode, place: Place, above: tuple[int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in self._items(node, place):
            key = key_node.value
            if not isinstance(key_node, ScalarNode):
                self.document.wrong(place, "a key must be text, not a list or a mapping")
                continue
            below = (*place, key)
            line = key_node.start_mark.line + 1
            if key in found:
                text = f"the key {key!r} is there twice: first in line {self.document.lines[below]}"
                self.document.mistakes.append(Mistake(path_text(below), line, text))
                continue
            self.document.lines[below] = line
            found[key] = self.build(value_node, below, above)
        for base_place, base_node in self._bases(node, place):
            merged = self.build(base_node, base_place, above)
            if isinstance(merged, dict):
                found.update({key: value for key, value in merged.items() if key not in found})
            else:
                self.document.wrong(base_place, "what << merges must be a mapping, or a list of mappings")
        return found

    def _items(self, node: MappingNode, place: Place) -> Iterator[tuple[Node, Node]]:
        return ((key, value) for key, value in node.value if key.tag != _MERGE)

    def _bases(self, node: MappingNode, place: Place) -> Iterator[tuple[Place, Node]]:
        for key, value in node.value:
            if key.tag == _MERGE:
                several = isinstance(value, SequenceNode)
                yield from ((place, each) for each in (value.value if several else [value]))


def _copied(value: Any, place: Place, document: Document) -> Any:
    """Plain data copied; what YAML can't say is a mistake."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                document.wrong(place, f"a key must be text, not {key!r}")
        return {key: _copied(each, (*place, key), document) for key, each in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return [_copied(each, (*place, i), document) for i, each in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    document.wrong(place, f"a config has plain values only (text, numbers, lists, dicts), not {type(value).__name__}")
    return None


def _instead(value: Any) -> str:
    return "; it is empty" if value is None else f"; it is a {type(value).__name__}"
