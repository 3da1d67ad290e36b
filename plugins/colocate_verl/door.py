"""What puts colocate's classes into verl, in the driver and in workers, which import the same modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import colocate

from . import private
from .driver import ENGINE


def install(executor: str, options: Mapping[str, Any]) -> None:
    """See `colocate_verl.install`."""
    private.check_version()
    ENGINE.choose(executor, options)
    private.home()
    colocate.library(private.PASSED_BY)
    from . import groups

    if (found := getattr(groups, "REPLACED", None)) is not None:
        private.replace(found)  # else it is what has imported verl, and does so by its last line
    private.patch_ray(ENGINE.end, executor)


def refuse(error: Exception) -> None:
    """Have the first worker group or resource pool raise what has kept the door shut."""

    class Refused:
        def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise error

    private.replace({"RayWorkerGroup": Refused, "RayResourcePool": Refused})
