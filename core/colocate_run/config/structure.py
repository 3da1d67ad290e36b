"""From plain data to the schema's classes, by cattrs and strictly: what is wrong is noted, and the rest goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import attrs
from cattrs import ClassValidationError, Converter, ForbiddenExtraKeysError, IterableValidationError
from cattrs.cols import list_structure_factory, mapping_structure_factory
from cattrs.gen import make_dict_structure_fn, override

from colocate.signatures import Place, Problem, path_text, problems, shown
from colocate.texts import nearest
from colocate_run.config.schema import Config, key_of, keys
from colocate_run.config.source import Document

_MISSING = "is missing"


def structure(document: Document) -> Config | None:
    """The config as far as it is right; mistakes go to the document. None when nothing is left of it."""
    data = copy.deepcopy(document.data)
    found = _try(data)
    if isinstance(found, list):
        told = {mistake.path for mistake in document.mistakes}
        # A key that is misspelt isn't missing besides.
        meant = {(*problem.place[:-1], problem.nearest) for problem in found if problem.nearest is not None}
        for problem in found:
            if problem.message == _MISSING and problem.place in meant:
                continue
            if path_text(problem.place) not in told:  # what could not be read is null here
                document.wrong(problem.place, problem.message, problem.nearest)
    # What is wrong is taken out and the rest is tried again, so that the checks of the whole see all that is right.
    while isinstance(found, list):
        for problem in found:
            if not _drop(data, problem.place):
                return None
        found = _try(data)
    return found


class _Misfit(ValueError):
    """A value that doesn't fit its field."""

    def __init__(self, found: list[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in found))
        self.found = found


def _try(data: Any) -> Config | list[Problem]:
    try:
        return _CONVERTER.structure(data, Config)
    except (ClassValidationError, _Misfit) as error:
        return list(_problems(error, (), Config))


def _drop(data: Any, place: Place) -> bool:
    """Take a place out of the data; the nearest one above it that exists, when it is missing itself."""
    here, path = data, []
    for key in place:
        if not (isinstance(here, dict) and key in here):
            break
        path.append((here, key))
        here = here[key]
    if not path:
        return False
    parent, key = path[-1]
    # Something missing or wrong inside a list spoils what it belongs to.
    del parent[key]
    return True


def _problems(error: BaseException, place: Place, owner: Any) -> Iterator[Problem]:
    """The nested errors of cattrs as flat problems with places."""
    if isinstance(error, ClassValidationError):
        noted, plain = error.group_exceptions()
        for inner, note in noted:
            yield from _problems(inner, (*place, key_of(note.name)), note.type)
        for other in plain:
            yield from _problems(other, place, error.cl)
    elif isinstance(error, IterableValidationError):
        noted_items, plain = error.group_exceptions()
        for inner, item_note in noted_items:
            yield from _problems(inner, (*place, item_note.index), item_note.type)
        for other in plain:
            yield from _problems(other, place, owner)
    elif isinstance(error, ForbiddenExtraKeysError):
        valid = [key_of(field.name) for field in keys(error.cl)]
        for key in sorted(error.extra_fields):
            yield _unknown_key(key, valid, place)
    elif isinstance(error, _Misfit):
        yield from (Problem((*place, *each.place), each.message, each.nearest) for each in error.found)
    elif isinstance(error, KeyError):
        yield Problem(place, _MISSING)
    else:
        yield Problem(place, str(error))


def _unknown_key(key: str, valid: list[str], place: Place) -> Problem:
    near = nearest(key, valid)
    known = "" if near else f"; known here: {', '.join(valid)}"
    if known and "with" in valid:
        known += "; options go under 'with'"
    return Problem((*place, key), f"unknown key {key!r}{known}", near)


def _of_classes(kind: type, item: int) -> Callable[[Any], bool]:
    return lambda annotation: get_origin(annotation) is kind and attrs.has(get_args(annotation)[item])


def _holds_class(annotation: Any) -> bool:
    is_class = isinstance(annotation, type) and attrs.has(annotation)  # and no note of an annotated kind
    return is_class or any(_holds_class(each) for each in get_args(annotation))


def _of_class(annotation: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    fields: dict[str, Any] = {field.name: override(omit=True) for field in attrs.fields(annotation)}
    fields.update({field.name: override(rename=key_of(field.name)) for field in keys(annotation)})
    return _only(dict, "a mapping", make_dict_structure_fn(annotation, converter, **fields))


def _of_mapping(annotation: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    return _only(dict, "a mapping", mapping_structure_factory(annotation, converter))


def _of_list(annotation: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    return _only(list, "a list", list_structure_factory(annotation, converter))


def _only(kind: type, words: str, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def hook(value: Any, annotation: Any) -> Any:
        if not isinstance(value, kind):
            raise _Misfit([Problem((), f"must be {words}, not {shown(value)}")])
        return inner(value, annotation)

    return hook


def _of_plain(value: Any, annotation: Any) -> Any:
    if found := list(problems(value, annotation)):
        raise _Misfit(found)
    return value


def _new_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for scalar in (int, float, str, bool):  # cattrs would convert these, and looks here first
        converter.register_structure_hook(scalar, _of_plain)
    converter.register_structure_hook_func(lambda annotation: not _holds_class(annotation), _of_plain)
    converter.register_structure_hook_factory(_of_classes(dict, 1), _of_mapping)
    converter.register_structure_hook_factory(_of_classes(list, 0), _of_list)
    converter.register_structure_hook_factory(attrs.has, _of_class)
    return converter


_CONVERTER = _new_converter()
