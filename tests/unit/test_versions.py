"""Version checks: a driver and its worker, and a driver and the record of another driver's pool."""

from __future__ import annotations

import pickle
import platform
from typing import Any

import pytest

import colocate
from colocate import ColocateError, RoleStartError, wire
from colocate._api.detached import load_record
from colocate._protocol import versions
from colocate.testing.probes.plain import Echo


def test_facts_that_differ() -> None:
    """The first difference is described, with both versions and the cure, also for a side without a version."""
    here = {"colocate": "2.0", "protocol": 3, "python": "3.12"}
    cure = "install the same in both: pip install . in checkouts of colocate of the same commit"
    assert versions.describe_mismatch(here, dict(here, pid=1)) is None
    assert versions.describe_mismatch(here, dict(here, colocate="1.0")) == f"has colocate 1.0, the driver 2.0: {cure}"
    assert versions.describe_mismatch(here, {"colocate": "2.0"}) == (
        f"has protocol None, the driver 3: both are colocate 2.0; {cure}"
    )
    assert versions.describe_mismatch(here, dict(here, python="3.11")) == (
        "has Python 3.11, the driver 3.12: install the same in both"
    )


def test_worker_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose worker has another version doesn't start, says why, and leaves nothing behind."""
    facts: dict[str, Any] = {**versions.own_facts(), "protocol": 99}
    monkeypatch.setattr(versions, "own_facts", lambda: facts)
    with colocate.connect(processes=True) as runtime, runtime.reserve(1) as pool:
        with pytest.raises(RoleStartError, match=r"has protocol .*pip install \. in checkouts of"):
            pool.spawn({"echo": colocate.role(Echo)}, timeout=60)
        assert not runtime.audit()


def test_lane_that_begins_otherwise(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A worker whose first message is unknown exits at once, and says so."""
    monkeypatch.setattr("colocate_local.processes.first_message", lambda boot: (("boot",), wire.pack(boot)))
    with colocate.connect(processes=True) as runtime, runtime.reserve(1) as pool:
        with pytest.raises(RoleStartError, match="exited with code 1"):
            pool.spawn({"echo": colocate.role(Echo)}, timeout=60)
        assert not runtime.audit()
    assert "the first message on this worker's lane is 'boot'" in capfd.readouterr().err


def test_record_of_another_form() -> None:
    """A record of another version is refused before anything in it is unpickled."""
    here = platform.python_version().rpartition(".")[0]
    for of, words in (
        ((colocate.__version__, here), rf"colocate {colocate.__version__} \(records of form 1\) and Python {here}"),
        (("0.0.1", "3.8", 7), r"colocate 0\.0\.1 \(records of form 7\) and Python 3\.8"),
    ):
        told = rf"pool 'theirs' was detached by a driver with {words}, and this one has"
        with pytest.raises(ColocateError, match=told):
            load_record(pickle.dumps((of, b"no pickle at all")), "theirs")
