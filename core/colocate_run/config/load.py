"""Load a config: read the YAML, expand short forms, apply changes, build the schema's classes, check all parts."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from colocate.errors import Mistake
from colocate.signatures import Place, brief, path_text
from colocate.texts import find_nearest
from colocate_run.config.schema import Config, Shape

if TYPE_CHECKING:
    from colocate_run.config.source import Document


def expand_short_forms(document: Document) -> None:
    """Expand short forms: the name of an executor, role, job or observer becomes `{use: name}`."""
    data = document.data
    for key in ("executor", "job"):
        if isinstance(data.get(key), str):
            data[key] = {"use": data[key]}
    if isinstance(data.get("observe"), list):
        data["observe"] = [{"use": observer} if isinstance(observer, str) else observer for observer in data["observe"]]
    groups = data.get("groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        roles = group.get("roles") if isinstance(group, dict) else None
        if isinstance(roles, dict):
            roles.update({name: {"use": role} for name, role in roles.items() if isinstance(role, str)})


def apply_option(document: Document, text: str) -> None:
    """Apply one change `--set path=value`; the value is read as YAML.

    Only `+path=value` can add a name that the config doesn't have.
    """
    path, equals, value_text = text.partition("=")
    option = brief(f"--set {text}")
    makes = path.startswith("+")
    place = _parse_place(path.removeprefix("+").strip())
    if not equals or not place:
        _note_mistake(document, path, option, "write --set path=value, as in --set pools.main.slots=2")
        return
    from colocate_run.config.source import Document, read_value
    from colocate_run.config.variables import Variables

    reading = Document(option, Variables.from_environment())
    value = read_value(value_text, reading)
    if reading.mistakes:
        _note_mistake(document, path, option, f"the value {brief(repr(value_text))}: {reading.mistakes[0].message}")
        return
    if mistake := _find_obstacle(document.data, place, makes, option):
        document.mistakes.append(mistake)
        return
    for depth in range(1, len(place)):
        if _get_value(document.data, place[:depth]) is None:
            document.set_value(place[:depth], {}, option)
    if not makes and is_argument(place) and _get_value(document.data, place) is None:
        document.unfounded.add(place)
    document.set_value(place, value, option)
    document.withheld |= {(*place, *below): text for below, text in reading.withheld.items()}
    for warning in reading.warnings:
        document.add_warning(place, warning.message)


def _find_obstacle(data: Any, place: Place, makes: bool, option: str) -> Mistake | None:
    """Return the mistake if the value at a path in the config can't be set, else None.

    A key of the schema, or an argument, may be new, because a later check finds unknown keys. A name that the config
    chooses (of a pool, a group, a role, an environment variable) must exist, unless `makes` is set.
    """
    node: Any = data
    shape = Shape.from_annotation(Config)
    for depth, key in enumerate(place):
        above = path_text(place[:depth])
        if obstacle := _check_key(node, key, above or "the config"):
            return Mistake(path_text(place), None, f"{obstacle} (from {option})")
        if shape.has_user_keys and not makes and key not in node:
            near = find_nearest(str(key), node)
            new = f"--set +{option.removeprefix('--set ')}"
            text = f"{above} has no {key!r}; to add one, write {new}"
            return Mistake(path_text(place[: depth + 1]), None, f"{text} (from {option})", near)
        node = _get_value(node, (key,))
        node = {} if node is None and depth < len(place) - 1 else node
        shape = shape.child_shape(key)
    return None


def is_argument(place: Place) -> bool:
    """Return whether a path in the config leads to an argument of an executor, a role or a job."""
    shape = Shape.from_annotation(Config)
    for key in place[:-1]:
        shape = shape.child_shape(key)
    return shape.arguments


def _check_key(here: Any, key: str | int, name: str) -> str | None:
    if isinstance(here, list):
        exists = isinstance(key, int) and key < len(here)
        return None if exists else f"{name} is a list of {len(here)}: write {name}[0] …"
    if isinstance(key, int):
        return f"{name} is not a list"
    return None if isinstance(here, dict) else f"{name} is {here!r}, which has no keys"


def _get_value(data: Any, place: Place) -> Any:
    for key in place:
        data = data.get(key) if isinstance(data, dict) else data[key]
    return data


def _note_mistake(document: Document, path: str, option: str, message: str) -> None:
    document.mistakes.append(Mistake(path, None, f"{message} (from {option})"))


def _parse_place(path: str) -> Place:
    """Parse a path such as `pools.main.slots` or `roles.actor.slots[0]`; return () if the path is invalid."""
    keys: list[str | int] = []
    for part in path.split("."):
        match = re.fullmatch(r"([^\[\]]+)((?:\[\d+\])*)", part)
        if match is None:
            return ()
        keys += [match[1], *(int(index) for index in re.findall(r"\d+", match[2]))]
    return tuple(keys)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    executor: str | None = None,
    set: Iterable[str] = (),
    allow_import: bool = True,
) -> Config:
    """Read a config and check all parts: names, types, references, and arguments against signatures.

    Imports the named plugins and roles, and starts nothing.

    Args:
        source: A YAML file, or a dict of the same structure.
        executor: The name of an executor, which replaces the config's whole entry.
        set: Changes "path=value", applied in order; values are read as YAML. "+path=value" makes a name (of a pool, a
            group, a role, a variable) that the config doesn't have.
        allow_import: Whether the config may name "module:Class", to be imported; False for configs of others.

    Raises:
        ConfigError: The config is wrong; the attribute `mistakes` has all mistakes.

    Warns:
        UserWarning: The config reserves a pool that no group uses.
    """
    config, warned = read_config(source, executor=executor, set=set, allow_import=allow_import)
    for warning in warned:
        warnings.warn(str(warning), UserWarning, stacklevel=2)
    return config


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    executor: str | None = None,
    set: Iterable[str] = (),
    allow_import: bool = True,
) -> tuple[Config, Sequence[Mistake]]:
    """Read a config like `load_config`; return the config and the warnings."""
    # Imported here, because a worker that imports `colocate.Run` with a role's module needs no YAML.
    from colocate_run.config.check import check_config
    from colocate_run.config.structure import build_config

    document = _read_source(source, allow_import)
    expand_short_forms(document)
    if executor is not None:  # Replace the whole entry, including the options.
        document.set_value(("executor",), {"use": executor}, f"--executor {executor}")
    for change in set:
        apply_option(document, change)
        expand_short_forms(document)
    config = build_config(document)
    if config is not None:
        check_config(config, document, allow_import)
    if document.mistakes or config is None:
        raise document.to_error()
    whole = attrs.evolve(config, origins=document.find_origins(), withheld=document.withheld)
    return whole, tuple(document.warnings)


def _read_source(source: str | os.PathLike[str] | Mapping[str, Any], allow_import: bool) -> Document:
    from colocate_run.config.source import read_dict, read_file
    from colocate_run.config.variables import Variables

    variables = Variables.from_environment(allow_import)
    if isinstance(source, Mapping):
        document = read_dict(source, "config", variables)
        document.data.setdefault("name", "run")
        return document
    path = Path(source)
    document = read_file(path, variables)
    document.data.setdefault("name", re.sub(r"[^\w.-]+", "-", path.stem) or "run")
    return document
