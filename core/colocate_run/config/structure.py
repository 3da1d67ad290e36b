"""Convert plain data to the schema's classes. Mistakes are recorded, and all valid parts are built."""

from __future__ import annotations

from typing import Any, get_args, get_origin, get_type_hints

import attrs

from colocate.signatures import Place, Problem, path_text, problems, shown
from colocate.texts import nearest
from colocate_run.config.schema import Config, key_of, keys
from colocate_run.config.source import Document

_MISSING = "is missing"
_WRONG: Any = object()  # The result for a part that can't be built because of a mistake.


def structure(document: Document) -> Config | None:
    """Build the valid part of a config, or return None; add mistakes to the document.

    A wrong value of a key with a default is replaced by the default, so that later checks see the rest of the entry.
    """
    wrong: list[Problem] = []
    config = _of_class(document.data, Config, (), wrong)
    reported = {mistake.path for mistake in document.mistakes}
    # Don't report the right name of a misspelt key as missing, too.
    meant = {(*problem.place[:-1], problem.nearest) for problem in wrong if problem.nearest is not None}
    for problem in wrong:
        is_misspelt = problem.message == _MISSING and problem.place in meant
        if not is_misspelt and path_text(problem.place) not in reported:  # Unreadable values are null.
            document.wrong(problem.place, problem.message, problem.nearest)
    return None if config is _WRONG else config


def _made(value: Any, annotation: Any, place: Place, wrong: list[Problem]) -> Any:
    kinds = (annotation, *get_args(annotation))
    kind = next((item for item in kinds if isinstance(item, type) and attrs.has(item)), None)
    container = get_origin(annotation)
    if kind is None or (value is None and container not in (dict, list)):
        faults = [*problems(value, annotation, place)]
        wrong += faults
        return _WRONG if faults else value
    if container is dict:
        if _is_of(dict, "a mapping", value, place, wrong):
            assert value is not None
            parts = {key: _of_class(item, kind, (*place, key), wrong) for key, item in value.items()}
            return {key: item for key, item in parts.items() if item is not _WRONG}
        return _WRONG
    if container is list:
        if _is_of(list, "a list", value, place, wrong):
            assert value is not None
            items = [_of_class(item, kind, (*place, index), wrong) for index, item in enumerate(value)]
            return items if all(item is not _WRONG for item in items) else _WRONG
        return _WRONG
    return _of_class(value, kind, place, wrong)


def _of_class(value: Any, kind: type[attrs.AttrsInstance], place: Place, wrong: list[Problem]) -> Any:
    if not _is_of(dict, "a mapping", value, place, wrong):
        return _WRONG
    hints, fields = get_type_hints(kind, include_extras=True), {key_of(field.name): field for field in keys(kind)}
    values: dict[str, Any] = {}
    is_whole = True
    for key, field in fields.items():
        if key not in value:
            if field.default is attrs.NOTHING:
                wrong.append(Problem((*place, key), _MISSING))
                is_whole = False
        elif (part := _made(value[key], hints[field.name], (*place, key), wrong)) is not _WRONG:
            values[field.name] = part
        else:
            is_whole &= field.default is not attrs.NOTHING
    wrong += [_unknown_key(key, [*fields], place) for key in sorted(value.keys() - fields)]
    return kind(**values) if is_whole else _WRONG


def _is_of(kind: type, words: str, value: Any, place: Place, wrong: list[Problem]) -> bool:
    if is_it := isinstance(value, kind):
        return is_it
    wrong.append(Problem(place, f"must be {words}, not {shown(value)}"))
    return False


def _unknown_key(key: str, valid: list[str], place: Place) -> Problem:
    near = nearest(key, valid)
    hint = "" if near else f"; known here: {', '.join(valid)}"
    if hint and "with" in valid:
        hint += "; options go under 'with'"
    return Problem((*place, key), f"unknown key {key!r}{hint}", near)
