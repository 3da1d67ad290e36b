"""`colocate recordings`: list the recorded calls of a run, by role and method, or one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from colocate import RecordedCall, RecordedRole, Recording, load_recording
from colocate.texts import format_size
from colocate_run.cli.output import print_json, report_errors
from colocate_run.screen import console, show_table


@report_errors
def show_recordings(run: Path, role: str | None, *, json: bool) -> int:
    """Print a run's recorded methods, or one role's recorded calls."""
    recording = load_recording(run)
    rows = _method_rows(recording) if role is None else _call_rows(recording[role])
    if json:
        print_json({"folder": str(recording.folder), "methods" if role is None else "calls": rows})
        return 0
    to = console()
    show_table(f"recorded in {run}" if role is None else f"calls of {role}", [_format_row(row) for row in rows], to)
    for name, recorded in recording.items():
        words = [f"the last entry of {name}, rank {rank}, is torn: it isn't read" for rank in recorded.torn]
        words += [f"the recording of {name} ends early, as {recorded.ended}"] if recorded.ended else []
        for text in words if role in (None, name) else ():
            to.print(Text(text), soft_wrap=True)
    return 0


def _method_rows(recording: Recording) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, role in recording.items():
        by_method: dict[str, list[RecordedCall]] = {}
        for call in role.calls:
            by_method.setdefault(call.method, []).append(call)
        rows += [
            {
                "role": name,
                "method": method,
                "ranks": role.ranks,
                "calls": len(calls),
                "raised": sum(call.error is not None for call in calls),
                "bytes": sum(call.nbytes for call in calls),
                "seconds": round(sum(call.seconds for call in calls), 3),
            }
            for method, calls in by_method.items()
        ]
    return rows


def _call_rows(role: RecordedRole) -> list[dict[str, Any]]:
    return [
        {
            "place": call.place,
            "method": call.method,
            "call": call.number,
            "ranks": len(call.ranks),
            "rows": len(call.rows) or None,
            "bytes": call.nbytes,
            "seconds": round(call.seconds, 3),
            "not recorded": call.missing,
            "raised": None if call.error is None else f"{call.error.cls.partition(':')[2]}: {call.error.text}",
        }
        for call in role.calls
    ]


def _format_row(row: dict[str, Any]) -> dict[str, Any]:
    shown = {key: "" if value is None else value for key, value in row.items()}
    return {**shown, "bytes": format_size(row["bytes"]), "seconds": f"{row['seconds']:.3f} s"}
