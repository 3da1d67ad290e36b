"""Choose the cluster of a command, and implement `colocate audit`, `colocate groups` and `colocate close`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from rich.text import Text

from colocate import driver
from colocate.errors import ColocateError, ConfigError
from colocate.plugins import about_executor, abouts, find_executor
from colocate.texts import attribute_to
from colocate_run.cli.output import load_command_config, print_json, report_errors
from colocate_run.screen import console, show_table

if TYPE_CHECKING:
    from colocate.connecting import Runtime

_ADDRESS = "address"  # The address option of executors that don't declare another.


def joining_option(executor: str) -> str:
    """Return the option by which an executor joins a running cluster; empty if the executor has none."""
    about = about_executor(executor)
    return _ADDRESS if about is None else about.joins


@attrs.frozen
class Cluster:
    """A cluster that the command line names, by a config or by an executor and an address."""

    file: Path | None = None
    executor: str | None = None
    address: str | None = None
    changes: Sequence[str] = ()
    allow_import: bool = True

    @property
    def is_given(self) -> bool:
        """Whether the command line names a cluster."""
        return any([self.file, self.executor, self.address, self.changes])

    def connect(self, command: str, lacks: str) -> Runtime:
        """Connect a runtime to the cluster.

        Args:
            command: The command, for the error text.
            lacks: Objects that a private cluster never has, for the error text.
        """
        from colocate.connecting import connect

        name, options = self.executor_options(command)
        if name is not None:
            find_executor(name)  # Raise a clear error if no such executor is installed.
        if name is None or options.get(joining_option(name)) is None:
            which = name if name is not None and joining_option(name) else next(iter(_joining_executors()), "NAME")
            raise ConfigError(
                f"name a cluster (a private one has no {lacks}): `colocate {command} --executor {which} --address "
                "...`, or a config with an executor's address"
            )
        return connect(name, **options)

    def executor_options(self, command: str) -> tuple[str | None, Mapping[str, Any]]:
        """Return the executor's name and options; the name is None if the command line names no cluster."""
        if self.file is not None:
            config = load_command_config(self.file, self.executor, self.changes, allow_import=self.allow_import)
            return config.executor.use, {**config.executor.with_, **self._joining_options(config.executor.use)}
        if self.changes:
            raise ConfigError(f"--set changes a config: name one, as in `colocate {command} FILE --set ...`")
        if self.address is not None and self.executor is None:
            which = ", ".join(f"--executor {name}" for name in _joining_executors()) or "--executor NAME"
            raise ConfigError(f"--address {self.address} is that of which cluster? Say {which}")
        return self.executor, {} if self.executor is None else self._joining_options(self.executor)

    def _joining_options(self, executor: str) -> dict[str, str]:
        if self.address is None:
            return {}
        option = joining_option(executor)
        if not option:
            raise ConfigError(f"--address {self.address}: executor {executor!r} has no cluster to join; leave it out")
        return {option: self.address}


def _joining_executors() -> list[str]:
    return [plugin.name for plugin, about in abouts() if about.joins]


@report_errors
def find_strays(cluster: Cluster, *, json: bool) -> int:
    """Print processes and files that dead drivers have left; return exit status 1 if there are any."""
    name, options = cluster.executor_options("audit")
    if name is not None:
        find_executor(name)  # Raise a clear error if no such executor is installed.
    option = "" if name is None else joining_option(name)
    audit = driver.audit_strays(driver.list_strays)
    looked_at = ["this machine"]
    if name is not None and options.get(option) is not None:
        try:
            cluster_audit = _audit_cluster(name, options)
        except ColocateError:
            if not json:  # Print the results for this machine before the error is raised.
                _show_strays(audit, looked_at)
            raise
        audit = driver.Audit((*audit.leaked, *cluster_audit.leaked))
        looked_at.append(f"{name} at {options[option]}")
    if json:
        print_json({**audit.data(), "looked_at": looked_at})
    else:
        _show_strays(audit, looked_at)
        if option and len(looked_at) == 1:
            console().print(f"no cluster of {name} was looked at: that needs its --address", markup=False)
    return 1 if audit else 0


def _audit_cluster(name: str, options: Mapping[str, Any]) -> driver.Audit:
    from colocate.connecting import connect

    with connect(name, **options) as runtime:
        return driver.audit_strays(driver.Driver(runtime).executor.strays)


def _show_strays(audit: driver.Audit, looked_at: list[str]) -> None:
    to = console()
    where = " and ".join(looked_at)
    if not audit:
        to.print(Text(f"clean: nothing has been left on {where}"), soft_wrap=True)
        return
    to.print(Text(f"{len(audit.leaked)} left on {where}", "bold"), soft_wrap=True)
    to.print(Text(str(audit)), soft_wrap=True)


@report_errors
def show_groups(cluster: Cluster, *, json: bool) -> int:
    """Print the detached pools of a cluster."""
    with cluster.connect("groups", "detached pools") as runtime:
        pools = sorted(runtime.detached(), key=lambda each: str(each["name"]))
    if json:
        print_json(
            {"pools": [{**each, "since": time.strftime("%FT%T%z", time.localtime(each["since"]))} for each in pools]}
        )
    elif pools:
        show_table("detached pools", [_pool_row(each) for each in pools], console())
    else:
        console().print(Text("no pool is detached in this cluster"), soft_wrap=True)
    return 0


@report_errors
def close_pool(name: str, cluster: Cluster, *, force: bool, json: bool) -> int:
    """Close a detached pool."""
    action = f"close {name}"
    with cluster.connect(action, "detached pools") as runtime, attribute_to((f"colocate {action}", 0)):
        driver.Driver(runtime).close_detached(name, force)
    if json:
        print_json({"closed": name})
    else:
        console().print(Text(f"closed: {name}"), soft_wrap=True)
    return 0


def _pool_row(found: Mapping[str, Any]) -> dict[str, Any]:
    groups = ", ".join(f"{name} ({', '.join(roles)})" for name, roles in found["groups"].items())
    remaining = "" if found["left_s"] is None else f"{found['left_s']:.0f} s"
    driver = found["driver"] or ""
    if not found["answers"]:
        driver = "(it doesn't answer)"
    return {
        "name": found["name"],
        "groups": groups,
        "slots": found["slots"],
        "nodes": ", ".join(found["nodes"]),
        "driver": f"{driver}, owns it" if driver and found["owned"] else driver,
        "left": remaining,
        "epoch": "" if found["epoch"] is None else found["epoch"],
    }
