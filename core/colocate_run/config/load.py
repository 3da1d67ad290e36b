"""`load_config`: read, expand, change, structure, check; every mistake at once."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from colocate_run.config.schema import Config

if TYPE_CHECKING:
    from colocate.errors import Mistake
    from colocate_run.config.source import Document


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    executor: str | None = None,
    set: Iterable[str] = (),
    allow_import: bool = True,
) -> Config:
    """Read a config and check all of it: names, types, references, and arguments against signatures.

    Imports the plugins and roles that it names, and starts nothing.

    Args:
        source: A YAML file, or the same as a dict.
        executor: The name of another executor, which replaces the whole entry.
        set: Changes "path=value", applied in order; values are read as YAML. "+path=value" makes a name (of a pool, a
            group, a role, a variable) that the config doesn't have.
        allow_import: Whether it may name "module:Class", which is imported; False for configs of others.

    Raises:
        ConfigError: Something is wrong; its `mistakes` are all there are.

    Warns:
        UserWarning: It reserves a pool that no group of it uses.
    """
    config, warned = read_config(source, executor=executor, set=set, allow_import=allow_import)
    for each in warned:
        warnings.warn(str(each), UserWarning, stacklevel=2)
    return config


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    executor: str | None = None,
    set: Iterable[str] = (),
    allow_import: bool = True,
) -> tuple[Config, Sequence[Mistake]]:
    """As `load_config`, with what it would warn of."""
    # Imported when it is used: `import colocate` and `connect` need neither YAML nor cattrs.
    from colocate_run.config.check import check
    from colocate_run.config.edit import assign, expand, replace_executor
    from colocate_run.config.structure import structure

    document = _read(source)
    expand(document)
    if executor is not None:
        replace_executor(document, executor)
    for change in set:
        assign(document, change)
        expand(document)
    config = structure(document)
    if config is not None:
        check(config, document, allow_import)
    if document.mistakes or config is None:
        raise document.error()
    return attrs.evolve(config, origins=document.made_at()), tuple(document.warnings)


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Document:
    from colocate_run.config.source import read_dict, read_file

    if isinstance(source, Mapping):
        document = read_dict(source, "config")
        document.data.setdefault("name", "run")
        return document
    path = Path(source)
    document = read_file(path)
    document.data.setdefault("name", re.sub(r"[^\w.-]+", "-", path.stem) or "run")
    return document
