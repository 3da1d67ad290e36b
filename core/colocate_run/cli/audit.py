"""`colocate audit`: what is there under our name although its driver is gone, here and on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from colocate import Audit
from colocate.driver import Driver, audit_strays
from colocate.errors import ColocateError
from colocate.plugins import find_executor, of_this_machine
from colocate_run.cli.cluster import Cluster, joins
from colocate_run.cli.output import guarded, print_json
from colocate_run.screen import console


def find_strays(cluster: Cluster, *, json: bool) -> int:
    """Show what drivers that are gone have left; exit status 1 when there is something."""

    def command() -> int:
        name, options = cluster.engine("audit")
        if name is not None:
            find_executor(name)  # one that there isn't is told of as such
        option = "" if name is None else joins(name)
        audit = audit_strays(of_this_machine)
        looked_at = ["this machine"]
        if name is not None and options.get(option) is not None:
            try:
                there = _of_cluster(name, options)
            except ColocateError:
                if not json:  # what was found here is worth knowing; the error follows
                    _show(audit, looked_at)
                raise
            audit = Audit((*audit.leaked, *there.leaked))
            looked_at.append(f"{name} at {options[option]}")
        if json:
            print_json({**audit.data(), "looked_at": looked_at})
        else:
            _show(audit, looked_at)
            if option and len(looked_at) == 1:
                console().print(f"no cluster of {name} was looked at: that needs its --address", markup=False)
        return 1 if audit else 0

    return guarded(command, as_json=json)


def _of_cluster(name: str, options: Mapping[str, Any]) -> Audit:
    from colocate import connect

    with connect(name, **options) as runtime:
        return audit_strays(Driver(runtime).executor.strays)


def _show(audit: Audit, looked_at: list[str]) -> None:
    to = console()
    where = " and ".join(looked_at)
    if not audit:
        to.print(Text(f"clean: nothing has been left on {where}"), soft_wrap=True)
        return
    to.print(Text(f"{len(audit.leaked)} left on {where}", "bold"), soft_wrap=True)
    to.print(Text(str(audit)), soft_wrap=True)
