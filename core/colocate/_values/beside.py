"""Plain values that are scattered together with a resident of which only the workers will know the rows."""

from __future__ import annotations

from typing import Any

import attrs

from colocate._system.numbers import plural
from colocate.errors import DispatchError


@attrs.frozen
class Beside:
    """What such a resident is compared with, once its rows are known.

    Attributes:
        name: The first parameter of plain rows.
        rows: How many it has.
        owner: The parameter that the resident is.
    """

    name: str
    rows: int
    owner: str

    def check(self, rows: int) -> None:
        """Raise unless the resident has as many rows.

        Raises:
            DispatchError: It has others.
        """
        same_rows(self.name, self.rows, self.owner, rows)


@attrs.frozen(eq=False)
class Cut:
    """A plain value on its way to all ranks: each takes the rows that lie beside its own part of a resident.

    Attributes:
        value: It, whole.
        by: The placeholder of that part.
        beside: What the resident is compared with.
    """

    value: Any
    by: Any
    beside: Beside


def check_sets(what: str, rows: int, of: int, parameter: str | None = None) -> None:
    """Raise unless rows are whole sets of those that stay together.

    Raises:
        DispatchError: They aren't.
    """
    if rows % of:
        raise DispatchError(
            f"{what} has {plural(rows, 'row')}, which is no multiple of {of}: Scatter(rows_of={of}) keeps every {of} "
            "rows together",
            parameter=parameter,
        )


def same_rows(first: str, rows: int, other: str, others: int) -> None:
    """Raise unless two parameters that are scattered together have as many rows.

    Raises:
        DispatchError: They haven't.
    """
    if rows != others:
        raise DispatchError(
            f"the parameter {other!r} has {plural(others, 'row')} but {first!r} has {rows}: what is scattered together "
            "needs as many rows each",
            parameter=other,
        )
