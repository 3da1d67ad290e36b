"""What is installed, as metadata tells; a distribution that was removed by half has none any more."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import Distribution, PackageNotFoundError
from typing import Any


def name_and_version(found: Distribution) -> tuple[str, str] | None:
    """The name and the version of a distribution; None where its folder has no METADATA."""
    try:
        metadata = found.metadata
    except FileNotFoundError:  # importlib_metadata raises it; Python's own has nothing to tell
        return None
    return (metadata["Name"], metadata["Version"]) if "Name" in metadata and "Version" in metadata else None


def without_metadata(found: Distribution) -> str:
    """Whose metadata is lost, and what to do, in words."""
    place: Any = getattr(found, "_path", "a distribution")  # no public name leads to the folder
    return f"{place}, which has no METADATA: install it again, or delete this folder"


def version_of(name: str) -> str | None:
    """The version of a distribution; None where it isn't installed, or doesn't tell."""
    try:
        known = name_and_version(importlib.metadata.distribution(name))
    except PackageNotFoundError:
        return None
    return known[1] if known is not None else None
