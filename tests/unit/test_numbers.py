"""Durations and amounts: every API accepts the same numbers and refuses others in the same words."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy
import pytest

import colocate
from colocate import ConfigError, Runtime
from colocate._system.numbers import FOREVER_S, find_amount_problem, parse_seconds
from colocate.config import load_config
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S

ROLES = {"echo": colocate.role(Echo)}


class RunningGroup:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.group = runtime.reserve(1).spawn(ROLES)
        self.echo = self.group.role("echo", Echo).echo

    def call(self) -> Any:
        return self.echo.submit(1)


@pytest.fixture(scope="module")
def made() -> Iterator[RunningGroup]:
    with colocate.connect() as runtime:
        yield RunningGroup(runtime)


def _spawned(made: RunningGroup, value: Any) -> None:
    with made.runtime.reserve(1) as pool, pool.spawn(ROLES, timeout=value):
        pass


def _closed(made: RunningGroup, what: str, value: Any) -> None:
    with colocate.connect("local") if what == "runtime" else made.runtime.reserve(1) as owner:
        (owner.spawn(ROLES) if what == "group" else owner).close(grace=value)  # type: ignore[union-attr]


def _connected(**options: Any) -> None:
    with colocate.connect("local", **options) as runtime:
        assert RunningGroup(runtime).echo(1) == [1]


# Each API that takes a duration: its name in the error, and a use.
DURATIONS: dict[str, Callable[[RunningGroup, Any], Any]] = {
    "options(timeout)": lambda made, value: made.echo.options(timeout=value)(1),
    "connect(call_timeout)": lambda made, value: _connected(call_timeout=value),
    "connect(collective_timeout)": lambda made, value: _connected(collective_timeout=value),
    "result(timeout)": lambda made, value: made.call().result(value),
    "exception(timeout)": lambda made, value: made.call().exception(timeout=value),
    "wait(timeout)": lambda made, value: colocate.wait([made.call()], timeout=value),
    "as_completed(timeout)": lambda made, value: list(colocate.as_completed([made.call()], timeout=value)),
    "fetch(timeout)": lambda made, value: made.echo.keep(1).fetch(timeout=value),
    "close(grace)": lambda made, value: _closed(made, "group", value),
    "close(grace) ": lambda made, value: _closed(made, "pool", value),
    "close(grace)  ": lambda made, value: _closed(made, "runtime", value),
    "reserve(...)": lambda made, value: made.runtime.reserve(timeout=value).close(),
    "spawn(timeout)": _spawned,
    "wait_ready(timeout)": lambda made, value: made.group.wait_ready(value),
}
POSITIVE = {"options(timeout)", "connect(call_timeout)", "connect(collective_timeout)"}
FOR_EVER = [math.inf, 1e12, sys.maxsize, 10**5000]
ACCEPTED = [PATIENCE_S, 1000, Fraction(2001, 2), numpy.float32(1000), numpy.int64(1000)]
REFUSED = [math.nan, numpy.float64("nan"), -1, -math.inf, -0.001, "3", True, 1j, [1]]


@pytest.mark.parametrize("where", DURATIONS)
def test_durations(made: RunningGroup, where: str) -> None:
    """Infinity and huge numbers mean no limit; NaN, negatives and non-numbers are refused with the option's name."""
    for value in [*FOR_EVER, *ACCEPTED]:
        DURATIONS[where](made, value)
    least = "more than 0" if where in POSITIVE else "0 or more"
    for value in [*REFUSED, *([0, 0.0] if where in POSITIVE else [])]:
        with pytest.raises(ConfigError) as caught:
            DURATIONS[where](made, value)
        assert where.strip() in str(caught.value)
        told = f"must be a number of seconds, {least} (math.inf, in YAML .inf, for ever), not {value!r}"
        assert told in str(caught.value)
    assert made.echo(1) == [1]


def test_for_ever_in_processes() -> None:
    """Worker processes accept an infinite timeout, which is parsed as FOREVER_S."""
    with colocate.connect("local", processes=True) as runtime:
        for where in ("options(timeout)", "fetch(timeout)", "close(grace)", "spawn(timeout)", "wait_ready(timeout)"):
            DURATIONS[where](RunningGroup(runtime), math.inf)
    assert parse_seconds(math.inf, "x") == parse_seconds(10**400, "x") == parse_seconds(FOREVER_S, "x") == FOREVER_S
    assert FOREVER_S < threading.TIMEOUT_MAX


def test_amounts(made: RunningGroup) -> None:
    """Amounts of slots, GPUs, CPUs and restarts are refused when infinite, NaN or out of range."""
    for name in ("slots", "gpus", "cpus"):
        wrongs: list[Any] = [math.nan, math.inf, -1, "3", True, 10**12, 10**5000, *([0] if name == "slots" else [])]
        for value in wrongs:
            with pytest.raises(ConfigError) as caught:
                made.runtime.reserve(**{name: value})
            kind, least = "a number" if name == "cpus" else "a whole number", 1 if name == "slots" else 0
            assert f"{name}: must be {kind} from {least} to 1,000,000, not " in str(caught.value)
    assert find_amount_problem(10**5000) == "must be a number from 0 to 1,000,000, not a number of thousands of digits"
    for value in [0, 1.5, math.nan, math.inf]:
        with pytest.raises(ConfigError, match=r"spawn\(restarts\) must be a whole number from 1"):
            made.group.owner.spawn(ROLES, on_failure="restart", restarts=value)


HALF_A_GPU = (
    "must be a whole number from 0 to 1,000,000, not 0.5: a slot has whole GPUs; to share a GPU, put several roles "
    "into one group"
)


@pytest.mark.parametrize("executor", ["local", "ray", "dask"])
def test_a_part_of_a_gpu(executor: str) -> None:
    """A fraction of a GPU is refused by every executor, with the reason."""
    with pytest.raises(ConfigError, match=f"gpus: {HALF_A_GPU}"):
        colocate.connect(executor, gpus=0.5)


def test_numbers_in_a_config() -> None:
    """Wrong numbers in a config are refused in the same words."""
    for pool, words in [
        ({"slots": 0}, "pools.a.slots: must be a whole number from 1 to 1,000,000, not 0"),
        (
            {"slots": 1, "timeout": -1},
            "pools.a.timeout: must be a number of seconds, 0 or more (math.inf, in YAML .inf,",
        ),
        ({"slots": 1, "gpus": 0.5}, f"pools.a.gpus: {HALF_A_GPU}"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config({"name": "numbers", "pools": {"a": pool}})
        assert words in str(caught.value)


@pytest.mark.parametrize("value", ["20000", "20100-20000", "80-90", "65000-70000", "20000-20100,", 20000])
def test_ports(value: Any) -> None:
    """A value of `ports` is refused unless it is a range of ports from 1024."""
    with pytest.raises(ConfigError, match=r"connect\(ports\) must be the first and the last of some ports from 1024"):
        colocate.connect(ports=value)
