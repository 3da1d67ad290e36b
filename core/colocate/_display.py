"""Format objects as text in columns, and as HTML for notebooks.

The HTML is self-contained, and readable in light and dark themes. Only the dot of a state has a colour of its own:
text and lines take the page's colours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# The repeated class name gives these CSS rules precedence over a notebook's own rules for tables.
_STYLE = """
<style>
.colocate.colocate{font:13px/1.5 system-ui,sans-serif;color:inherit;max-width:100%;overflow-x:auto}
.colocate.colocate b{font-weight:600}
.colocate.colocate small,.colocate.colocate th{font-size:12px;opacity:.72}
.colocate.colocate i{display:inline-block;width:.6em;height:.6em;border-radius:50%;
 margin:0 .3em 0 .5em;background:#8c959f}
.colocate.colocate i.good{background:#2da44e}
.colocate.colocate i.busy{background:#bf8700}
.colocate.colocate i.bad{background:#e5534b}
.colocate.colocate pre{font:12px/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:.3em 0;
 padding:.1em .7em;border-left:3px solid #8c959f;background:none;color:inherit}
.colocate.colocate pre.bad{border-color:#e5534b}
.colocate.colocate table{border-collapse:collapse;table-layout:auto;margin:.4em 0;background:none;color:inherit}
.colocate.colocate tr{background:none}
.colocate.colocate th,.colocate.colocate td{text-align:left;vertical-align:top;padding:.15em 1.1em .15em 0;
 border:0;border-bottom:1px solid rgba(128,128,128,.35);font-weight:400;overflow-wrap:anywhere}
.colocate.colocate th{white-space:nowrap}
.colocate.colocate ul{list-style:none;margin:0;padding:0 0 0 .9em;border-left:1px solid rgba(128,128,128,.35)}
.colocate.colocate li,.colocate.colocate summary{margin:0;padding:.05em 0;overflow-wrap:anywhere}
.colocate.colocate li>span{padding-left:1em}
.colocate.colocate summary{cursor:pointer}
</style>
"""
_LOOKS = {
    "good": ("ready", "running", "kept"),
    "busy": ("starting", "restarting", "closing", "pending"),
    "bad": ("failed", "poisoned", "lost"),
    "over": ("closed", "exited", "freed"),
}
_LOOK_OF = {state: look for look, states in _LOOKS.items() for state in states}
MOST = 64  # A table shows at most 64 rows, and a tree at most 64 children of a node.


# `html.escape` isn't used, because a user's own html.py would shadow Python's module.
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})


def page(*parts: str) -> str:
    return f'{_STYLE}<div class="colocate">{"".join(parts)}</div>'


def heading(kind: str, name: object, state: str, more: str = "") -> str:
    look = _LOOK_OF.get(state)
    dot = f'<i class="{look}"></i>' if look else " "
    rest = f" <small>{_text(more)}</small>" if more else ""
    return f"{_text(kind)} <b>{_text(name)}</b>{dot}{_text(state)}{rest}"


def reason(text: str, look: str = "") -> str:
    """Return as HTML why an object is unusable; `look` is the CSS class, "bad" for an error."""
    return f'<pre class="{look}">{_text(text)}</pre>'


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as an HTML table, with the keys of the first row as columns; "" if there are no rows."""
    if not rows:
        return ""
    head = _row("th", rows[0])
    body = "".join(_row("td", row.values()) for row in rows[:MOST])
    return f"<table>{head}{body}</table>{_omitted_note(rows)}"


def tree(children: Sequence[Mapping[str, Any]], known: Callable[[Mapping[str, Any]], str]) -> str:
    """Return nodes of the ownership graph as a foldable HTML tree. Nodes below workers are folded at first."""
    if not children:
        return ""
    return f"<ul>{''.join(_item(node, known) for node in children[:MOST])}</ul>{_omitted_note(children)}"


def _item(node: Mapping[str, Any], known: Callable[[Mapping[str, Any]], str]) -> str:
    shown = heading(node["kind"], node["name"], node["state"], known(node))
    if not node["children"]:
        return f"<li><span>{shown}</span></li>"
    opened = "" if node["kind"] == "worker" else " open"
    return f"<li><details{opened}><summary>{shown}</summary>{tree(node['children'], known)}</details></li>"


def _row(cell: str, values: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{cell}>{_text(value)}</{cell}>' for value in values)}</tr>"


def _omitted_note(shown: Sequence[object]) -> str:
    return f"<small>and {len(shown) - MOST} more</small>" if len(shown) > MOST else ""


def _text(value: object) -> str:
    return str(value).translate(_ESCAPES)


def columns(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Format rows of cells as lines of text with aligned columns; `right` says which columns are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def weights_age(came: tuple[int, float] | None, stale: str | None) -> str:
    """Describe a role's weights in words: the version, the age, and the reason if the weights are out of sync."""
    text = "no weights yet" if came is None else f"weights version {came[0]}"
    if came is not None and came[1]:
        text += f", {time.time() - came[1]:.0f} s old"
    return text if stale is None else f"{text}, not in sync: {stale}"
