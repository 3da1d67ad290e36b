"""`colocate check`: print the plan of a config without starting anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from colocate.placement import describe_placement
from colocate.plugins import find_job, find_role, plugins
from colocate.texts import format_size, parse_bytes
from colocate_run.cli.output import load_command_config, print_json, report_errors
from colocate_run.config import Config
from colocate_run.screen import console, show_table

_SIZES = ("device_memory", "host_memory", "reserve_activations")
_MODES = ("residency", "step", "sleep")
_WHERE = ("labels", "resources", "together", "grow")


@report_errors
def show_plan(
    file: Path, executor: str | None, changes: Iterable[str], *, json: bool, allow_import: bool = True
) -> int:
    """Print the plan of a config, or all mistakes in the config; return exit status 1 if there are mistakes."""
    plan = describe_config(load_command_config(file, executor, changes, allow_import=allow_import))
    if json:
        print_json(plan)
    else:
        _print_plan(plan, console())
    return 0


def describe_config(config: Config) -> dict[str, Any]:
    """Return the plan of a config as plain data."""
    origins = {plugin.name: plugin.origin for plugin in plugins() if plugin.kind == "executor"}
    plain = config.to_dict()  # `plain` leaves secrets of the environment out.
    executor, job = plain["executor"], plain["job"]
    return {
        "name": config.name,
        "seed": config.seed,
        "executor": {"use": executor["use"], "from": origins[executor["use"]], "with": executor["with"]},
        "pools": {
            name: {entry: pool[entry] for entry in ("slots", "cpus", "gpus", "strategy", "env")}
            | {entry: pool[entry] for entry in _WHERE if pool[entry] not in ({}, None)}
            | ({"where": place} if (place := describe_placement(config.pools[name])) else {})
            | _describe_memory(pool)
            for name, pool in plain["pools"].items()
        },
        "groups": {
            name: _describe_group(group, plain["pools"][group["pool"]]["slots"])
            for name, group in plain["groups"].items()
        },
        "job": job and {"use": job["use"], "from": find_job(job["use"]).origin, "with": job["with"]},
        "observe": [entry.use for entry in config.observe],
        "trace": config.trace,
    }


def _describe_group(group: dict[str, Any], slots: int) -> dict[str, Any]:
    roles: dict[str, dict[str, Any]] = {
        name: {
            "use": role["use"],
            "from": find_role(role["use"]).origin,
            "with": role["with"],
            "slots": list(range(slots)) if role["slots"] is None else role["slots"],
            "mesh": role["mesh"] or group["mesh"],
            **_describe_memory(role),
        }
        for name, role in group["roles"].items()
    }
    by_slot = [[name for name, role in roles.items() if slot in role["slots"]] for slot in range(slots)]
    return {"pool": group["pool"], "roles": roles, "slots": by_slot, **_describe_memory(group)}


def _describe_memory(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the memory settings of a pool, a group or a role, with budgets in bytes."""
    values = {name: entry.get(name) for name in (*_SIZES, *_MODES)}
    shown = {name: value for name, value in values.items() if value is not None}
    return {name: parse_bytes(value, name) if name in _SIZES else value for name, value in shown.items()}


def _print_plan(plan: dict[str, Any], to: Console) -> None:
    text = f"{plan['name']}: the plan is sound (seed {plan['seed']}; nothing was started)"
    to.print(Text(text, "bold"), soft_wrap=True)
    rows = [{"": "executor", "name": plan["executor"]["use"], **_origin_cells(plan["executor"])}]
    if plan["job"]:
        rows.append({"": "job", "name": plan["job"]["use"], **_origin_cells(plan["job"])})
    show_table("engine and job", rows, to)
    if plan["pools"]:
        pools = [
            {
                "pool": name,
                **{key: value for key, value in pool.items() if key not in (*_SIZES, *_WHERE)},
                "where": pool.get("where", ""),
                "env": _format_options(pool["env"]),
                "memory": _format_budgets(pool),
            }
            for name, pool in plan["pools"].items()
        ]
        show_table("pools (per slot)", _drop_empty_columns(pools), to)
    for name, group in plan["groups"].items():
        budgets = f" ({suffix})" if (suffix := _format_budgets(group)) else ""
        show_table(f"group {name} in pool {group['pool']}{budgets}: roles", _role_rows(group), to)
        show_table(f"group {name}: roles per slot", _slot_rows(group["slots"]), to)


def _role_rows(group: dict[str, Any]) -> list[dict[str, Any]]:
    whole = list(range(len(group["slots"])))
    roles = [
        {
            "role": name,
            "use": role["use"],
            **_origin_cells(role),
            "slots": "all" if role["slots"] == whole else ", ".join(map(str, role["slots"])),
            "mesh": _format_options(role["mesh"] or {"dp": len(role["slots"])}),
            "memory": _format_budgets(role),
        }
        for name, role in group["roles"].items()
    ]
    return _drop_empty_columns(roles)


def _format_budgets(entry: dict[str, Any]) -> str:
    sizes = {name: format_size(entry[name]) for name in _SIZES if name in entry}
    return _format_options(sizes | {name: entry[name] for name in _MODES if name in entry})


def _drop_empty_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    empty = {column for column in ("memory", "where") if not any(row.get(column) for row in rows)}
    return [{column: value for column, value in row.items() if column not in empty} for row in rows]


def _slot_rows(by_slot: list[list[str]]) -> list[dict[str, Any]]:
    """Return a table row for each range of consecutive slots that have the same roles."""
    rows: list[tuple[int, int, list[str]]] = []
    for slot, roles in enumerate(by_slot):
        if rows and rows[-1][2] == roles:
            rows[-1] = (rows[-1][0], slot, roles)
        else:
            rows.append((slot, slot, roles))
    return [
        {"slot": str(first) if first == last else f"{first}-{last}", "roles": ", ".join(roles) or "(none)"}
        for first, last, roles in rows
    ]


def _origin_cells(entry: dict[str, Any]) -> dict[str, str]:
    return {"from": entry["from"], "with": _format_options(entry["with"])}


def _format_options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
