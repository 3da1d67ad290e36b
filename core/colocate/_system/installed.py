"""Report installed distributions by their metadata, and build install commands for messages.

Commands never name colocate on the public index, where the name is another project's. A missing extra is described by
its requirements, which hold for a wheel and for a checkout.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from email import message_from_string
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any


def read_name_and_version(found: Distribution) -> tuple[str, str] | None:
    """Return name and version of a distribution; None if METADATA is missing."""
    try:
        text = found.read_text("METADATA")  # Only the fields are parsed, because a long README may follow.
        metadata: Any = found.metadata if text is None else message_from_string(text.partition("\n\n")[0])
    except FileNotFoundError:  # Only the package `importlib_metadata` raises this error.
        return None
    return (metadata["Name"], metadata["Version"]) if "Name" in metadata and "Version" in metadata else None


def describe_lost_metadata(found: Distribution) -> str:
    """Return an error text for a distribution without METADATA, with advice."""
    place: Any = getattr(found, "_path", "a distribution")  # No public attribute has the distribution's folder.
    return f"{place}, which has no METADATA: install it again, or delete this folder"


def get_version(name: str) -> str | None:
    """Return the version of a distribution; None if the distribution isn't installed or has no METADATA."""
    try:
        name_version = read_name_and_version(importlib.metadata.distribution(name))
    except PackageNotFoundError:
        return None
    return name_version[1] if name_version is not None else None


def get_pip_line(extra: str | None = None) -> str:
    """Return the command that installs colocate, or the requirements of an extra."""
    if extra is not None and (needed := _list_requirements(extra)):
        return f"pip install {' '.join(map(repr, needed))}"
    if _is_from_checkout():
        return f"pip install {'.' if extra is None else repr(f'.[{extra}]')} in a checkout of colocate"
    return "pip install the wheel of colocate again"


def get_same_line() -> str:
    """Return the command that installs the same version of colocate on two machines."""
    same = "pip install . in checkouts of colocate of the same commit"
    return same if _is_from_checkout() else "pip install the same wheel of colocate"


def get_distribution_line(distribution: str, extra: str | None) -> str:
    if distribution == "colocate":
        return get_pip_line(extra)
    return f"pip install '{distribution}[{extra}]'" if extra else f"pip install {distribution}"


def get_version_line(distribution: str, version: str | None) -> str:
    return get_same_line() if distribution == "colocate" else f"pip install '{distribution}=={version}'"


@functools.cache
def _is_from_checkout() -> bool:
    """Return whether colocate was installed from a folder, or is on the path without being installed."""
    try:
        origin = distribution("colocate").read_text("direct_url.json")
    except PackageNotFoundError:
        return True
    return origin is not None and '"dir_info"' in origin


def _list_requirements(name: str) -> list[str]:
    pattern = re.compile(rf"extra == ['\"]{re.escape(name)}['\"]")
    try:
        needed = [line.partition(";") for line in distribution("colocate").requires or ()]
    except PackageNotFoundError:  # Colocate is on the path, but not installed.
        return []
    return [requirement.strip() for requirement, _, marker in needed if pattern.search(marker)]
