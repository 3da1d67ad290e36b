"""What comes between reading and checking: short forms, `--executor`, `--set`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from colocate.config.source import Document, read_value
from colocate.config.values import Place, path_text
from colocate.errors import Mistake


def expand(document: Document) -> None:
    """Write short forms out: a name where an executor, a role or a job stands is `{use: name}`."""
    data = document.data
    for key in ("executor", "job"):
        if isinstance(data.get(key), str):
            data[key] = {"use": data[key]}
    for group in _mappings(data.get("groups")):
        roles = group.get("roles")
        if isinstance(roles, dict):
            roles.update({name: {"use": role} for name, role in roles.items() if isinstance(role, str)})


def replace_executor(document: Document, name: str) -> None:
    """`--executor NAME`: the whole entry is replaced, options and all."""
    document.put(("executor",), {"use": name}, f"--executor {name}")


def assign(document: Document, text: str) -> None:
    """`--set path=value`: the value is read as YAML; missing keys on the way are made."""
    path, equals, value_text = text.partition("=")
    option = f"--set {text}"
    place = _place(path.strip())
    if not equals or not place:
        _wrong(document, path, option, "write --set path=value, as in --set pools.main.slots=2")
        return
    reading = Document(option)
    value = read_value(value_text, reading)
    if reading.mistakes:
        _wrong(document, path, option, f"the value {value_text!r}: {reading.mistakes[0].message}")
        return
    if _make_way(document, place, option):
        document.put(place, value, option)


def _make_way(document: Document, place: Place, option: str) -> bool:
    """See that the parent of a place exists; False, with a mistake, where it can't."""
    here: Any = document.data
    for depth, key in enumerate(place):
        if obstacle := _obstacle(here, key, path_text(place[:depth]) or "the config"):
            _wrong(document, path_text(place), option, obstacle)
            return False
        if depth < len(place) - 1:
            here = _below(here, key, place[: depth + 1], document, option)
    return True


def _obstacle(here: Any, key: str | int, name: str) -> str | None:
    """Why a key can't be set in a value, if it can't."""
    if isinstance(here, list):
        known = isinstance(key, int) and key < len(here)
        return None if known else f"{name} is a list of {len(here)}: write {name}[0] …"
    if isinstance(key, int):
        return f"{name} is not a list"
    return None if isinstance(here, dict) else f"{name} is {here!r}, which has no keys"


def _below(here: Any, key: str | int, place: Place, document: Document, option: str) -> Any:
    """The value of a key, made when it is missing."""
    if isinstance(here, dict) and here.get(key) is None:
        document.put(place, {}, option)
    return here[key]


def _wrong(document: Document, path: str, option: str, message: str) -> None:
    document.mistakes.append(Mistake(path, None, f"{message} (from {option})"))


def _place(path: str) -> Place:
    """`pools.main.slots`, `roles.actor.slots[0]`; nothing for what is no path."""
    keys: list[str | int] = []
    for part in path.split("."):
        found = re.fullmatch(r"([^\[\]]+)((?:\[\d+\])*)", part)
        if found is None:
            return ()
        keys += [found[1], *(int(index) for index in re.findall(r"\d+", found[2]))]
    return tuple(keys)


def _mappings(value: Any) -> Iterable[dict[str, Any]]:
    return [each for each in value.values() if isinstance(each, dict)] if isinstance(value, dict) else []
