"""`connect(debug=True)` and the driver's PYTHONBREAKPOINT: where they are refused, and what goes with them."""

from __future__ import annotations

import pytest

import colocate
from colocate.errors import CapabilityError


def test_on_threads() -> None:
    """A thread of the driver has Python's own breakpoint(), and nothing to stop in where a role raises."""
    with pytest.raises(CapabilityError, match="stop where a role raises"):
        colocate.connect("local", debug=True)


@pytest.mark.parametrize(
    ("debug", "hook", "told"),
    [
        (False, None, None),
        (True, None, (True, "")),
        (False, "debugpy.breakpoint", (False, "debugpy.breakpoint")),
        (True, "0", (True, "0")),
        (False, "ray.util.rpdb._driver_set_trace", None),  # which Ray sets in a driver that it was connected from
    ],
)
def test_what_workers_are_told(
    monkeypatch: pytest.MonkeyPatch, debug: bool, hook: str | None, told: tuple[bool, str] | None
) -> None:
    """Nothing where nobody debugs: the feature isn't there, then."""
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    if hook is not None:
        monkeypatch.setenv("PYTHONBREAKPOINT", hook)
    with colocate.connect("local", processes=True, debug=debug, collective_timeout=5.0) as runtime:
        services = runtime._node.services
        assert services.debugging == told
        assert services.collective_timeout == (86400.0 if debug else 5.0)
