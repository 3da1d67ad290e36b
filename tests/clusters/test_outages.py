"""A slice of the outages: an engine survives one of each kind. `python -m tests.chaos.outages` plays hundreds."""

from __future__ import annotations

from argparse import Namespace

import pytest
from tests.chaos.ledger import Ledger
from tests.chaos.outages import ENGINES, KINDS, play


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("engine", ENGINES)
def test_slice(engine: str) -> None:
    pytest.importorskip({"ray": "ray", "dask": "distributed"}[engine])
    ledger = Ledger(part="outages")
    play(engine, ledger, range(len(KINDS)), Namespace(lanes=1, minutes=10.0))
    assert ledger.problems == []
    assert [ledger.tally(engine, kind).survived for kind in KINDS] == [1] * len(KINDS)
