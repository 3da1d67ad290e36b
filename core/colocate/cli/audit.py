"""`colocate audit`: what is there under our name although its driver is gone, here and on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from colocate._audit import Audit, audit_strays
from colocate._plugins import find_executor
from colocate._screen import console
from colocate._strays import of_this_machine
from colocate.cli.output import guarded, load, print_json
from colocate.config.arguments import options_of
from colocate.errors import ColocateError, ConfigError

ADDRESS = "address"  # the option by which an executor joins what is there; without it there is nothing to join


def find_strays(
    file: Path | None, executor: str | None, address: str | None, changes: Iterable[str], *, json: bool
) -> int:
    """Show what drivers that are gone have left; exit status 1 when there is something."""

    def command() -> int:
        name, options = engine_of(file, executor, address, changes, "audit")
        joins = name is not None and ADDRESS in options_of(find_executor(name)).parameters
        audit = audit_strays(of_this_machine)
        looked_at = ["this machine"]
        if name is not None and options.get(ADDRESS) is not None:
            try:
                there = _of_cluster(name, options)
            except ColocateError:
                if not json:  # what was found here is worth knowing; the error follows
                    _show(audit, looked_at)
                raise
            audit = Audit((*audit.leaked, *there.leaked))
            looked_at.append(f"{name} at {options[ADDRESS]}")
        if json:
            print_json({**audit.data(), "looked_at": looked_at})
        else:
            _show(audit, looked_at)
            if joins and len(looked_at) == 1:
                console().print(f"no cluster of {name} was looked at: that needs its --{ADDRESS}", markup=False)
        return 1 if audit else 0

    return guarded(command, as_json=json)


def engine_of(
    file: Path | None, executor: str | None, address: str | None, changes: Iterable[str], command: str
) -> tuple[str | None, Mapping[str, Any]]:
    """Which executor, and its options."""
    if file is not None:
        more = [] if address is None else [f"executor.with.{ADDRESS}={address}"]
        config = load(file, executor, [*changes, *more])
        return config.executor.use, config.executor.with_
    if list(changes):
        raise ConfigError(f"--set changes a config: name one, as in `colocate {command} FILE --set ...`")
    if address is not None and executor is None:
        raise ConfigError(f"--address {address} is that of which engine? Say --executor ray, --executor dask, ...")
    return executor, {} if address is None else {ADDRESS: address}


def _of_cluster(name: str, options: Mapping[str, Any]) -> Audit:
    from colocate import connect

    with connect(name, **options) as runtime:
        return audit_strays(runtime.executor.strays)


def _show(audit: Audit, looked_at: list[str]) -> None:
    to = console()
    where = " and ".join(looked_at)
    if not audit:
        to.print(Text(f"clean: nothing has been left on {where}"), soft_wrap=True)
        return
    to.print(Text(f"{len(audit.leaked)} left on {where}", "bold"), soft_wrap=True)
    to.print(Text(str(audit)), soft_wrap=True)
