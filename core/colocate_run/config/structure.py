"""Convert plain data to the schema's classes. Mistakes are recorded, and all valid parts are built."""

from __future__ import annotations

from typing import Any, get_args, get_origin, get_type_hints

import attrs

from colocate.signatures import Place, Problem, path_text, problems, shown
from colocate.texts import find_nearest
from colocate_run.config.schema import Config, yaml_fields, yaml_key
from colocate_run.config.source import Document

_MISSING = "is missing"
_WRONG: Any = object()  # The result for a part that can't be built because of a mistake.


def build_config(document: Document) -> Config | None:
    """Build the valid part of a config, or return None; add mistakes to the `Document`.

    A wrong value of a key with a default is replaced by the default, so that later checks see the rest of the entry.
    """
    wrong: list[Problem] = []
    config = _build_object(document.data, Config, (), wrong)
    reported = {mistake.path for mistake in document.mistakes}
    # The keys that misspelt keys probably mean aren't reported as missing, too.
    meant = {(*problem.place[:-1], problem.nearest) for problem in wrong if problem.nearest is not None}
    for problem in wrong:
        is_misspelt = problem.message == _MISSING and problem.place in meant
        # An unreadable value is null here, and its mistake is already in `reported`.
        if not is_misspelt and path_text(problem.place) not in reported:
            document.add_mistake(problem.place, problem.message, problem.nearest)
    return None if config is _WRONG else config


def _build_value(value: Any, annotation: Any, place: Place, wrong: list[Problem]) -> Any:
    kinds = (annotation, *get_args(annotation))
    kind = next((item for item in kinds if isinstance(item, type) and attrs.has(item)), None)
    container = get_origin(annotation)
    if kind is None or (value is None and container not in (dict, list)):
        faults = [*problems(value, annotation, place)]
        wrong += faults
        return _WRONG if faults else value
    if container is dict:
        if _check_kind(dict, "a mapping", value, place, wrong):
            assert value is not None
            parts = {key: _build_object(item, kind, (*place, key), wrong) for key, item in value.items()}
            return {key: item for key, item in parts.items() if item is not _WRONG}
        return _WRONG
    if container is list:
        if _check_kind(list, "a list", value, place, wrong):
            assert value is not None
            items = [_build_object(item, kind, (*place, index), wrong) for index, item in enumerate(value)]
            return items if all(item is not _WRONG for item in items) else _WRONG
        return _WRONG
    return _build_object(value, kind, place, wrong)


def _build_object(value: Any, kind: type[attrs.AttrsInstance], place: Place, wrong: list[Problem]) -> Any:
    if not _check_kind(dict, "a mapping", value, place, wrong):
        return _WRONG
    hints, fields = (
        get_type_hints(kind, include_extras=True),
        {yaml_key(field.name): field for field in yaml_fields(kind)},
    )
    values: dict[str, Any] = {}
    is_whole = True
    for key, field in fields.items():
        if key not in value:
            if field.default is attrs.NOTHING:
                wrong.append(Problem((*place, key), _MISSING))
                is_whole = False
        elif (part := _build_value(value[key], hints[field.name], (*place, key), wrong)) is not _WRONG:
            values[field.name] = part
        else:
            is_whole &= field.default is not attrs.NOTHING
    wrong += [_unknown_key_mistake(key, [*fields], place) for key in sorted(value.keys() - fields)]
    return kind(**values) if is_whole else _WRONG


def _check_kind(kind: type, words: str, value: Any, place: Place, wrong: list[Problem]) -> bool:
    if is_it := isinstance(value, kind):
        return is_it
    wrong.append(Problem(place, f"must be {words}, not {shown(value)}"))
    return False


def _unknown_key_mistake(key: str, valid: list[str], place: Place) -> Problem:
    near = find_nearest(key, valid)
    hint = "" if near else f"; known here: {', '.join(valid)}"
    if hint and "with" in valid:
        hint += "; options go under 'with'"
    return Problem((*place, key), f"unknown key {key!r}{hint}", near)
