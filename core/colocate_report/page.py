"""Convert a run's record to the data of the page's template, and render the page."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from jinja2 import Environment, PackageLoader, StrictUndefined

from colocate.texts import format_count
from colocate_report.calls import KEPT_SPANS
from colocate_report.contention import make_contention_rows, make_idle_rows
from colocate_report.curves import Curves, Series, collect_series, headline_series, make_curves
from colocate_report.devices import DeviceLane, device_lanes, device_rows
from colocate_report.ownership import Memory, Node, memory_of_groups, ownership_tree
from colocate_report.record import describe_restarts, describe_savings, phase_seconds
from colocate_report.scale import format_duration, format_number
from colocate_report.tables import Table, make_tables
from colocate_report.timeline import Timeline, make_timeline
from colocate_report.times import COLOURS, Times, make_times

if TYPE_CHECKING:
    from colocate_report.record import RunRecord

_INVISIBLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@attrs.frozen
class Tile:
    """A number at the top of the page, with a label, and with the first value (empty if there is none)."""

    label: str
    value: str
    before: str = ""


@attrs.frozen
class Page:
    """The data that the page's template shows."""

    name: str
    verdict: str
    began: str
    error: str
    restarts: tuple[str, ...]
    log: str
    tiles: tuple[Tile, ...]
    curves: Curves
    tables: tuple[Table, ...]
    times: Times
    waits: Table | None
    idle: Table | None
    saved: str
    timeline: Timeline
    devices: tuple[DeviceLane, ...]
    device_table: Table | None
    dropped: int
    roles: Mapping[str, int]
    memory: tuple[Memory, ...]
    ownership: Node | None
    config: str
    environment: Mapping[str, str]


def render_page(record: RunRecord, error: str | None) -> str:
    """Render the page of a run."""
    environment = Environment(
        loader=PackageLoader("colocate_report"),
        autoescape=True,
        finalize=make_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(page=make_page(record, error))


def make_visible(value: Any) -> Any:
    """Replace characters in a string that are invisible, or that HTML forbids, by visible signs."""
    return _INVISIBLE.sub(_replacement, value) if type(value) is str else value


def make_page(record: RunRecord, error: str | None = None) -> Page:
    """Convert a run's record to the data of the template."""
    holding = (role.role for group in record.memory for slot in group.slots for role in slot.roles)
    names = dict.fromkeys([*(total.role for total in record.totals), *(span.role for span in record.spans), *holding])
    # Roles are numbered by first calls. The number is the role's colour on the whole page.
    roles, waiting = (
        {name: index % COLOURS for index, name in enumerate(names)},
        make_contention_rows(record.contention),
    )
    idle_rows = make_idle_rows(record.idle)
    series = collect_series(record.metrics)
    dropped = len(record.spans) >= KEPT_SPANS
    start = min((span.start for span in record.spans), default=record.started) if dropped else record.started
    return Page(
        name=record.name,
        verdict="failed" if error is not None else f"stopped by {record.stopped}" if record.stopped else "finished",
        began=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.started)),
        error=error or "",
        restarts=tuple(describe_restarts(record)),
        tiles=tuple(_make_tiles(record, series)),
        curves=make_curves(series),
        tables=make_tables(record.tables),
        log=record.log,
        times=make_times(phase_seconds(record), record.totals, roles, record.seconds),
        waits=make_tables({"waits": waiting})[0] if waiting else None,
        idle=make_tables({"idle": idle_rows})[0] if idle_rows else None,
        saved=describe_savings(record),
        timeline=make_timeline(record.spans, roles, start, record.started + record.seconds, record.restarts),
        devices=device_lanes(record.devices, start, record.started + record.seconds),
        device_table=make_tables({"devices": device_rows(record.devices)})[0] if record.devices else None,
        dropped=KEPT_SPANS if dropped else 0,
        roles=roles,
        memory=memory_of_groups(record.memory, roles),
        ownership=ownership_tree(record.graph, roles),
        config=record.config,
        environment=record.environment,
    )


def _make_tiles(record: RunRecord, series: Sequence[Series]) -> list[Tile]:
    tiles = [
        Tile(line.label, line.last, format_number(line.values[0]) if len(line.values) > 1 else "")
        for line in headline_series(series)[:2]
    ]
    if record.metrics:
        tiles.append(Tile("Last step", format_number(max(row["step"] for row in record.metrics))))
    tiles.append(Tile("Wall time", format_duration(record.seconds)))
    called = [total for total in record.totals if total.role]  # Leave out functions, sleeps and checkpoints.
    if called:
        slots = len({(span.group, span.slot) for span in record.spans})
        count = len({(total.group, total.role) for total in called})
        calls = sum(total.calls for total in called)
        tiles.append(
            Tile(f"Calls to {format_count(count, 'role')} on {format_count(slots, 'slot')}", format_number(calls))
        )
    seed = re.search(r"^seed: (\S+)$", record.config, re.MULTILINE)
    return [*tiles, Tile("Seed", seed[1])] if seed else tiles


def _replacement(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "\u2421" if code == 0x7F else chr(0x2400 + code) if code < 0x20 else "\ufffd"
