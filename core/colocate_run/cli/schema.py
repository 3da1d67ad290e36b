"""`colocate schema`: print the JSON Schema of configs, for editors that complete and check YAML."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from colocate_run.cli.output import print_json
from colocate_run.cli.plugin import read_docstring_section
from colocate_run.config.schema import Config, yaml_fields, yaml_key

_TYPES: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}


def show_schema() -> int:
    """Print the JSON Schema of configs."""
    print_json(json_schema())
    return 0


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config's file.

    Rules that depend on a signature, a plugin or another key are left out.
    """
    defined: dict[str, Any] = {}
    top = _class_schema(Config, defined)
    top["required"].remove("name")  # The name defaults to the file's stem.
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "colocate", **top, "$defs": defined}


def _class_schema(cls: type[attrs.AttrsInstance], defined: dict[str, Any]) -> dict[str, Any]:
    hints, docs = get_type_hints(cls), dict(read_docstring_section(cls, "Attributes:"))
    properties, required = {}, []
    for field in yaml_fields(cls):
        key = yaml_key(field.name)
        entry = properties[key] = {"description": docs[field.name], **_value_schema(hints[field.name], defined)}
        if field.default is attrs.NOTHING:
            required.append(key)
        elif not isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
            entry["default"] = field.default
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value_schema(annotation: Any, defined: dict[str, Any]) -> dict[str, Any]:
    origin, of = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value_schema(of[0], defined)
    if origin is Literal:
        return {"enum": [*of]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_value_schema(member, defined) for member in of]}
    if origin is list:
        return {"type": "array", "items": _value_schema(of[0], defined)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _value_schema(of[1], defined)}
    if attrs.has(annotation):
        return _refer_to_class(annotation, defined)
    return {"type": _TYPES[annotation]} if annotation in _TYPES else {}


def _refer_to_class(cls: type[attrs.AttrsInstance], defined: dict[str, Any]) -> dict[str, Any]:
    name = cls.__name__.removesuffix("Config").lower()
    if name not in defined:
        defined[name] = {}
        defined[name] = _class_schema(cls, defined)
    whole = {"$ref": f"#/$defs/{name}"}
    # An entry with only the key `use` may be written as a plain name.
    return {"anyOf": [{"type": "string"}, whole]} if "use" in attrs.fields_dict(cls) else whole
