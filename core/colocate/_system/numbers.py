"""Check values that users pass: durations, amounts, sizes, ports, names and variables.

Functions named `..._problem` return an error text, or None for a valid value. Every checked duration is finite and
small enough for any system call. `FOREVER_S` stands for no limit.
"""

from __future__ import annotations

import contextlib
import numbers
import operator
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, SupportsIndex

from colocate.errors import ConfigError

FOREVER_S = 1e9  # This is 31 years; locks can't wait longer than 292 years.
_MOST = 1_000_000  # An amount above this default limit is surely a mistake.
_LONGEST_NAME = 100  # A name has at most this many bytes, because file names add a host or a rank, within 255.


def find_duration_problem(value: Any, *, positive: bool = False) -> str | None:
    """Return an error text for an invalid number of seconds, or None."""
    requirement = "a number of seconds, more than 0" if positive else "a number of seconds, 0 or more"
    if not _is_number(value) or value != value or value < 0 or (positive and value == 0):
        return f"must be {requirement} (math.inf, in YAML .inf, for ever), not {format_value(value)}"
    return None


def parse_seconds(value: Any, what: str, *, positive: bool = False) -> float:
    """Check a duration in seconds, and return the number, at most `FOREVER_S`.

    Raises:
        ConfigError: The value is no valid duration.
    """
    problem = find_duration_problem(value, positive=positive)
    if problem is not None:
        raise ConfigError(f"{what} {problem}")
    if value >= FOREVER_S:
        return FOREVER_S
    # Plain numbers aren't converted, so that errors quote the number as the user wrote it.
    return value if type(value) in (int, float) else float(value)


def parse_limit(value: Any, what: str, *, positive: bool = False) -> float | None:
    """Check a duration as `parse_seconds` does, but return None for None."""
    return None if value is None else parse_seconds(value, what, positive=positive)


def find_amount_problem(value: Any, *, whole: bool = False, least: int = 0, most: int = _MOST) -> str | None:
    """Return an error text for an invalid amount (of CPUs or slots, for example), or None."""
    fits = isinstance(value, numbers.Integral) if whole else _is_number(value)
    if not fits or isinstance(value, bool) or value != value or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        return f"must be {kind} from {least} to {most:,}, not {format_value(value)}"
    return None


find_step_problem = partial(find_amount_problem, whole=True, most=2**63 - 1)
"""Returns an error text for an invalid step number, or None."""


def find_gpus_problem(value: Any) -> str | None:
    problem = find_amount_problem(value, whole=True)
    if isinstance(value, float) and 0 < value < _MOST and not value.is_integer():
        return f"{problem}: a slot has whole GPUs; to share a GPU, put several roles into one group"
    return problem


def find_ports_problem(value: object) -> str | None:
    match = re.fullmatch("([0-9]{4,5})-([0-9]{4,5})", value) if isinstance(value, str) else None
    if value is None or (match is not None and 1024 <= int(match[1]) <= int(match[2]) <= 65535):
        return None
    return (
        f"must be the first and the last of some ports from 1024 to 65535, as '20000-20100', not {format_value(value)}"
    )


def parse_ports(value: str | None, what: str) -> tuple[int, int] | None:
    """Return the first and last port of a range such as "20000-20100"; None for None."""
    if (problem := find_ports_problem(value)) is not None:
        raise ConfigError(f"{what} {problem}")
    if value is None:
        return None
    first, _, last = value.partition("-")
    return int(first), int(last)


def find_name_problem(name: object) -> str | None:
    """Return an error text for an invalid name of a run, pool, group or role, or None.

    Files and folders get these names.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        return f"must be text, not {format_value(name)}"
    if len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
        return (
            f"must be a name of at most {_LONGEST_NAME} bytes, because it is used as a file name; this has "
            f"{len(name):,} letters"
        )
    if re.fullmatch(r"\w[\w.-]*", name) is None:
        return f"is {format_value(name)}, but must be usable as a file name: use letters, digits, '-', '_' and '.'"
    return None


def find_variable_problem(name: object, value: object) -> str | None:
    if not isinstance(name, str) or not name or "=" in name or "\0" in f"{name}{value}":
        return f"is {value!r}; no environment can have such a variable"
    return None


def find_labels_problem(value: object) -> str | None:
    if not isinstance(value, Mapping) or not all(
        isinstance(text, str) and text for pair in value.items() for text in pair
    ):
        return f"must be a mapping from names of labels to values, all text, not {format_value(value)}"
    odd = next((text for text in value.values() if re.fullmatch(r"!?(in\([^()!]+\)|[^()!]+)", text) is None), None)
    if odd is not None:
        return f"has the value {odd!r}; one is written as 'H100', '!H100', 'in(A100,H100)' or '!in(A100,H100)'"
    return None


def find_resources_problem(value: object) -> str | None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        return f"must be a mapping from names of resources to numbers, not {format_value(value)}"
    for name, amount in value.items():
        if (option := _OWN_RESOURCES.get(name.lower())) is not None:
            return f"has {name!r}, which {option} is for"
        if (problem := find_amount_problem(amount)) is not None or amount == 0:
            return f"of {name!r} {problem or 'must be more than 0'}"
    return None


_OWN_RESOURCES = {"cpu": "cpus", "gpu": "gpus", "memory": "host_memory"}


def find_url_problem(url: object) -> str | None:
    if url is None or (isinstance(url, str) and re.fullmatch(r"[a-z][a-z0-9+.-]*://.+", url)):
        return None
    return f"must be the address of a folder in a store, as s3://bucket/folder, not {format_value(url)}"


def find_together_problem(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return None
    return f"must be the name of a label, not {format_value(value)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def format_count(count: int, noun: str) -> str:
    """Format a count with a noun: `3 slots`, `1 slot`, `2 processes`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def format_value(value: Any) -> str:
    """Return the repr of a value, shortened for errors."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers with thousands of digits.
        return "a number of thousands of digits"
    return text if len(text) <= 40 else f"{text[:40]}..."


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MOST_BYTES = 1 << 60  # No machine has more memory than an exbibyte.
_LEAST_WITHOUT_UNIT = 1024
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: str | SupportsIndex, what: str) -> int:
    """Parse a number of bytes, such as "20GiB", "512MB" or a whole number (also of a NumPy type).

    Raises:
        ConfigError: The value is no valid size.
    """
    unit, size = "", -1.0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is not None and match[2].upper() in _UNITS:
            unit = match[2]
            size = float(match[1]) * _UNITS[unit.upper()]
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # A value that isn't a whole number is refused below.
            size = operator.index(value)
    if not 0 <= size <= _MOST_BYTES:
        raise ConfigError(
            f"{what}={format_value(value)} is no size; write it like '20GiB', '512MB' or a number of bytes"
        )
    if not unit and 0 < size < _LEAST_WITHOUT_UNIT:
        raise ConfigError(
            f"{what}={format_value(value)} has no unit, and would be bytes; write '{value}GiB', '{value}MB' or, if "
            "it is so "
            f"little, '{value}B'"
        )
    return int(size)


def find_size_problem(value: Any) -> str | None:
    try:
        parse_bytes(value, "")
    except ConfigError as error:
        return error.message.removeprefix("=")
    return None


def format_size(count: float) -> str:
    """Format a number of bytes with a unit, for messages."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.1f}".removesuffix(".0") + f" {units[0]}"
