"""Read YAML 1.2 as plain data, with the line number of each value, and write YAML."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from colocate.errors import ConfigError, Mistake
from colocate.signatures import Place, brief, path_text
from colocate.texts import format_count
from colocate_report.scale import shorten_text
from colocate_run.config.secrets import hide_secrets
from colocate_run.config.variables import FilledText, Variables

_YAML = "tag:yaml.org,2002:"
_MERGE = f"{_YAML}merge"
_PLAIN_TAGS = tuple(f"{_YAML}{name}" for name in ("null", "bool", "int", "float", "str"))
_TIMESTAMP = f"{_YAML}timestamp"  # YAML 1.2's core schema has no timestamps, so these are texts.
_MOST_DEPTH = 100  # The deepest nesting, because reading and checking recurse.
_TOO_DEEP = f"more than {_MOST_DEPTH} lists and mappings inside each other"
_MOST_BUILT = 2_000_000  # The most characters and values, because nested aliases can expand to any size.
_MOST_SHOWN = 100_000  # The most characters of a config in a report.
_MOST_BYTES = 1_000_000  # The most bytes of a file, because parsing a megabyte takes half a minute.


@attrs.define(eq=False)
class Document:
    """A config that is being read and checked, with the mistakes found so far."""

    name: str
    variables: Variables | None = None  # The variables to fill in; None keeps `${NAME}` as written.
    data: dict[str, Any] = attrs.field(factory=dict)
    lines: dict[Place, int] = attrs.field(factory=dict)  # The line number of each value from a file.
    origins: dict[Place, str] = attrs.field(factory=dict)  # The command-line option that has set a value.
    # Arguments that a command-line option has set, and that the config doesn't have.
    unfounded: set[Place] = attrs.field(factory=set)
    withheld: dict[Place, str] = attrs.field(factory=dict)  # Values with secrets, before variables were filled in.
    missing_modules: set[str] = attrs.field(factory=set)  # Modules that were reported as not installed.
    mistakes: list[Mistake] = attrs.field(factory=list)
    warnings: list[Mistake] = attrs.field(factory=list)  # Warnings about valid settings that are probably unintended.

    def add_mistake(self, place: Place, message: str, nearest: str | None = None) -> None:
        """Add a mistake, with the line number or the command-line option of the wrong value."""
        mistake = self._make_mistake(place, message, nearest)
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)

    def add_warning(self, place: Place, message: str) -> None:
        """Add a warning for a valid setting that is probably a mistake."""
        self.warnings.append(self._make_mistake(place, message, None))

    def _make_mistake(self, place: Place, message: str, nearest: str | None) -> Mistake:
        line, option = self._find_source(place)
        return Mistake(path_text(place), line, f"{message} (from {option})" if option else message, nearest)

    def fill_variables(self, text: str, place: Place) -> str:
        """Return a text with variables filled in; record mistakes and secrets."""
        result = FilledText(text) if self.variables is None else self.variables.fill(text)
        for problem in result.mistakes:
            self.add_mistake(place, problem)
        if result.difference is not None:
            self.add_warning(place, result.difference)
        if result.has_secret:
            self.withheld[place] = text
        return result.text

    def set_value(self, place: Place, value: Any, option: str) -> None:
        """Set a value for a command-line option, in an existing mapping or list."""
        parent: Any = self.data
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = value
        table: dict[Place, Any]
        for table in (self.lines, self.origins, self.withheld):
            for below in [entry for entry in table if entry[: len(place)] == place]:
                del table[below]
        self.origins[place] = option

    def is_from_caller(self, place: Place) -> bool:
        """Return whether a value was set by the caller's options, and not by the config."""
        return any(place[:length] in self.origins for length in range(len(place) + 1))

    def to_error(self) -> ConfigError:
        """Return one error with all mistakes, in the order of the file."""
        count = len(self.mistakes)
        ordered = sorted(self.mistakes, key=lambda mistake: (mistake.line is None, mistake.line or 0))
        message = f"{self.name}: {format_count(count, 'mistake')}"
        return ConfigError(message, mistakes=tuple(ordered))

    def find_origins(self) -> dict[str, tuple[str, int]]:
        """Return the source of the executor and of each pool and group: file and line number, or option and 0."""
        entries = [(kind, name) for kind in ("pools", "groups") for name in self.data.get(kind) or ()]
        origins = {}
        for place in (("executor",), *entries):
            line, option = self._find_source(place)
            if option is not None:
                origins[path_text(place)] = option, 0
            elif line is not None:
                origins[path_text(place)] = self.name, line
        return origins

    def _find_source(self, place: Place) -> tuple[int | None, str | None]:
        for length in range(len(place), -1, -1):
            if (option := self.origins.get(place[:length])) is not None:
                return None, option
            if (line := self.lines.get(place[:length])) is not None:
                return line, None
        return None, None


def read_file(path: Path, variables: Variables | None = None) -> Document:
    """Read a config from a file or a pipe."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{path} is no config: it has more than {_MOST_BYTES:,} bytes")
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"can't read the config {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return read_text(text.replace("\r\n", "\n").replace("\r", "\n"), str(path), variables)


def read_text(text: str, name: str, variables: Variables | None = None) -> Document:
    """Parse the YAML text of a config; the top level must be a mapping."""
    document = Document(name, variables)
    value = read_value(text, document)
    if document.mistakes and value is None:
        raise document.to_error()
    if not isinstance(value, dict):
        instead = "empty" if value is None else f"a {type(value).__name__}"
        text = f"a config is a mapping of keys to values: executor, pools, groups, job; it is {instead}"
        document.add_mistake((), text)
        raise document.to_error()
    document.data = value
    return document


def read_dict(config: Mapping[str, Any], name: str, variables: Variables | None = None) -> Document:
    """Copy a config's dict into a `Document`."""
    document = Document(name, variables)
    document.data = _copy_plain(config, (), document)
    return document


def read_value(text: str, document: Document) -> Any:
    """Parse any YAML value as plain data; add line numbers and mistakes to the `Document`.

    Returns None, and adds a mistake, if the syntax is wrong.
    """
    try:
        yaml = YAML(typ="safe", pure=True)
        node = yaml.compose(text)
        return None if node is None else _Builder(yaml, document).build(node, (), ())
    except RecursionError:
        document.mistakes.append(Mistake("", None, _TOO_DEEP))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f"{error.context}: " if error.context else ""
        problem = f"{context}{error.problem}".partition("\n")[0]
        if mark is not None and text[mark.index - 1 : mark.index + 1] == "${":
            problem += "; inside of {...} and [...] a value with ${NAME} stands in quotes"
        document.mistakes.append(Mistake("", mark.line + 1 if mark else None, f"not YAML: {problem}"))
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.mistakes.append(Mistake("", line, f"not YAML: {error}".partition("\n")[0]))
    except YAMLError as error:
        document.mistakes.append(Mistake("", None, f"not YAML: {error}".partition("\n")[0]))
    return None


def write_yaml(data: Any) -> str:
    """Convert plain data to YAML text; keys keep their order."""
    yaml: Any = YAML(typ="safe", pure=True)  # Typed Any, because the settings' defaults are None.
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.allow_unicode = True
    text = io.StringIO()
    yaml.dump(data, text)
    return text.getvalue()


@attrs.define
class _Builder:
    """A builder of plain data from YAML nodes. An alias becomes a copy, so that setting one value changes no other."""

    yaml: YAML
    document: Document
    _built: int = attrs.field(default=0, init=False)

    def build(self, node: Node, place: Place, above: tuple[int, ...]) -> Any:
        if self._built > _MOST_BUILT:
            return None
        self._built += 1 + len(node.value)
        if self._built > _MOST_BUILT:
            self.document.add_mistake(place[:1], "with what its aliases stand for it is more than a config can hold")
            return None
        if len(place) > _MOST_DEPTH:
            self.document.add_mistake(place[:1], _TOO_DEEP)
            return None
        self.document.lines.setdefault(place, node.start_mark.line + 1)
        if id(node) in above:
            self.document.add_mistake(place, "an alias stands for something that contains it")
            return None
        above = (*above, id(node))
        if isinstance(node, MappingNode):
            return self._build_mapping(node, place, above)
        if isinstance(node, SequenceNode):
            return [self.build(item, (*place, i), above) for i, item in enumerate(node.value)]
        return self._build_scalar(node, place)

    def _build_scalar(self, node: Node, place: Place) -> Any:
        if (text := self.document.fill_variables(node.value, place)) != node.value:
            assert isinstance(node, ScalarNode)
            tag = node.tag if node.style else self.yaml.resolver.resolve(ScalarNode, text, (True, False))
            node = ScalarNode(tag, text)
        if node.tag == _TIMESTAMP:
            return node.value
        if node.tag not in _PLAIN_TAGS:
            self.document.add_mistake(place, f"the tag {node.tag} is not known; a config has plain values only")
            return None
        try:
            return self.yaml.constructor.construct_object(node)
        except (ValueError, KeyError):  # The value doesn't match the tag, or has too many digits.
            self.document.add_mistake(place, f"{brief(repr(node.value))} is no {node.tag.removeprefix(_YAML)}")
            return None

    def _build_mapping(self, node: MappingNode, place: Place, above: tuple[int, ...]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        bases: list[Node] = []
        for key_node, value_node in node.value:
            key = key_node.value
            if key_node.tag == _MERGE:
                bases += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
                continue
            if not isinstance(key_node, ScalarNode):
                self.document.add_mistake(place, "a key must be text, not a list or a mapping")
                continue
            below = (*place, key)
            line = key_node.start_mark.line + 1
            if key in mapping:
                text = f"the key {key!r} is there twice: first in line {self.document.lines[below]}"
                self.document.mistakes.append(Mistake(path_text(below), line, text))
                continue
            self.document.lines[below] = line
            mapping[key] = self.build(value_node, below, above)
        for base in bases:
            merged = self.build(base, place, above)
            if isinstance(merged, dict):
                mapping.update({key: value for key, value in merged.items() if key not in mapping})
            else:
                self.document.add_mistake(place, "what << merges must be a mapping, or a list of mappings")
        return mapping


def _copy_plain(value: Any, place: Place, document: Document) -> Any:
    if len(place) > _MOST_DEPTH:
        document.add_mistake(place[:1], _TOO_DEEP)
        return None
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                document.add_mistake(place, f"a key must be text, not {key!r}")
        return {key: _copy_plain(item, (*place, key), document) for key, item in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return [_copy_plain(item, (*place, i), document) for i, item in enumerate(value)]
    if isinstance(value, str):
        return document.fill_variables(str(value), place)
    if value is None or type(value) in (bool, int, float):
        return value
    document.add_mistake(
        place, f"a config has plain values only (text, numbers, lists, dicts), not {type(value).__name__}"
    )
    return None


def config_text(config: str) -> str:
    """Return a config's YAML for the report, shortened and without secrets."""
    if not config.strip():
        return ""
    try:
        data = read_text(config, "config").data
    except ConfigError:
        return shorten_text(config, _MOST_SHOWN)
    hidden = hide_secrets(data)
    return shorten_text(config if hidden == data else write_yaml(hidden), _MOST_SHOWN)
