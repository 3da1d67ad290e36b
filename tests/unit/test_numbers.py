"""Durations and amounts: the same is accepted, and refused in the same words, wherever a number is taken."""

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
from colocate import ConfigError, Role, Runtime, method
from colocate._system.numbers import FOREVER_S, amount_problem, seconds
from colocate.config import load_config
from colocate.testing.waiting import PATIENCE_S


class Echo(Role):
    @method
    def echo(self, value: Any) -> Any:
        return value


class Made:
    """A group that works, and what was made with it."""

    def __init__(self, runtime: Runtime, processes: bool) -> None:
        self.runtime = runtime
        self.processes = processes
        self.pool = runtime.reserve(1)
        self.group = self.pool.spawn({"echo": colocate.role(Echo)})
        self.echo = self.group.role("echo", Echo).echo
        self.echo.keep(1).fetch()  # what is made when it is first needed is made now

    def call(self) -> Any:
        return self.echo.submit(1)


@pytest.fixture(params=[False, True], ids=["threads", "processes"], scope="module")
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    with colocate.connect("local", processes=request.param) as runtime:
        yield Made(runtime, request.param)


def _spawned(made: Made, value: Any) -> Any:
    with made.runtime.reserve(1) as pool, pool.spawn({"echo": colocate.role(Echo)}, timeout=value) as group:
        return group.role("echo", Echo).echo(1)


def _reserved(made: Made, **numbers: Any) -> None:
    made.runtime.reserve(**numbers).close()


def _closed(made: Made, what: str, value: Any) -> None:
    pool = made.runtime.reserve(1)
    group = pool.spawn({"echo": colocate.role(Echo)})
    try:
        {"group": group, "pool": pool}[what].close(grace=value)
    finally:
        pool.close()


def _runtime_closed(made: Made, value: Any) -> None:
    runtime = colocate.connect("local")
    try:
        runtime.close(grace=value)
    finally:
        runtime.close()


def _connected(**options: Any) -> None:
    with colocate.connect("local", **options) as runtime:
        group = runtime.reserve(1).spawn({"echo": colocate.role(Echo)})
        assert group.role("echo", Echo).echo(1) == [1]


def _fetched(made: Made, value: Any) -> None:
    with made.echo.keep(1) as kept:
        assert kept.fetch(timeout=value) == [1]


# Where a duration is taken: its name in the error, and what uses it.
DURATIONS: dict[str, Callable[[Made, Any], Any]] = {
    "options(timeout)": lambda made, value: made.echo.options(timeout=value)(1),
    "connect(call_timeout)": lambda made, value: _connected(call_timeout=value),
    "connect(collective_timeout)": lambda made, value: _connected(collective_timeout=value),
    "result(timeout)": lambda made, value: made.call().result(value),
    "exception(timeout)": lambda made, value: made.call().exception(timeout=value),
    "wait(timeout)": lambda made, value: colocate.wait([made.call()], timeout=value),
    "as_completed(timeout)": lambda made, value: list(colocate.as_completed([made.call()], timeout=value)),
    "fetch(timeout)": _fetched,
    "close(grace)": lambda made, value: _closed(made, "group", value),
    "close(grace) ": lambda made, value: _closed(made, "pool", value),
    "close(grace)  ": _runtime_closed,
    "reserve(...)": lambda made, value: _reserved(made, timeout=value),
    "spawn(timeout)": _spawned,
    "wait_ready(timeout)": lambda made, value: made.group.wait_ready(value),
}
POSITIVE = {"options(timeout)", "connect(call_timeout)", "connect(collective_timeout)"}
# What starts a worker for each value: with processes only what waits for ever is theirs, the rest is the driver's.
STARTS = {"close(grace)", "close(grace) ", "spawn(timeout)"}
FOR_EVER = [math.inf, 1e12, sys.maxsize, 10**5000]
ACCEPTED = [PATIENCE_S, 1000, Fraction(2001, 2), numpy.float32(1000), numpy.int64(1000)]
REFUSED = [math.nan, numpy.float64("nan"), -1, -math.inf, -0.001, "3", True, 1j, [1]]


@pytest.mark.parametrize("where", DURATIONS)
def test_durations(made: Made, where: str) -> None:
    """For ever is infinity and whatever is as good as that; NaN, negative and no numbers are refused by name."""
    for value in FOR_EVER:
        DURATIONS[where](made, value)
    if made.processes and where in STARTS:
        return
    for value in ACCEPTED:
        DURATIONS[where](made, value)
    for value in [*REFUSED, *([0, 0.0] if where in POSITIVE else [])]:
        with pytest.raises(ConfigError) as caught:
            DURATIONS[where](made, value)
        assert where.strip() in str(caught.value)
        least = "more than 0" if where in POSITIVE else "0 or more"
        assert f"must be a number of seconds, {least} (math.inf, in YAML .inf, for ever), not {value!r}" in str(
            caught.value
        )
    assert made.echo(1) == [1]


@pytest.mark.parametrize("name", ["slots", "gpus", "cpus"])
def test_amounts(made: Made, name: str) -> None:
    """Of CPUs, GPUs and slots there is no infinity."""
    for value in [math.nan, math.inf, -1, "3", True, 10**12, 10**5000, *([0] if name == "slots" else [])]:
        with pytest.raises(ConfigError) as caught:
            made.runtime.reserve(**{name: value})
        kind, least = "a number" if name == "cpus" else "a whole number", 1 if name == "slots" else 0
        assert f"{name}: must be {kind} from {least} to 1,000,000, not " in str(caught.value)


def test_restarts(made: Made) -> None:
    """How often is a whole number."""
    with made.runtime.reserve(1) as pool:
        for value in [0, 1.5, math.nan, math.inf]:
            with pytest.raises(ConfigError, match=r"spawn\(restarts\) must be a whole number from 1"):
                pool.spawn({"echo": colocate.role(Echo)}, on_failure="restart", restarts=value)


HALF_A_GPU = (
    "must be a whole number from 0 to 1,000,000, not 0.5: only its group uses the GPUs of a slot, which several roles "
    "share by being in one group"
)


@pytest.mark.parametrize("executor", ["local", "ray", "dask"])
def test_a_part_of_a_gpu(made: Made, executor: str) -> None:
    """It is refused with the reason wherever a number of GPUs is given."""
    if executor == "local":
        with pytest.raises(ConfigError, match=f"gpus: {HALF_A_GPU}"):
            made.runtime.reserve(1, gpus=0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"gpus: {HALF_A_GPU}"):
        colocate.connect(executor, gpus=0.5)


CONFIG = """
name: numbers
call_timeout: {call_timeout}
executor: {{use: local, with: {{cpus: {cpus}}}}}
pools: {{a: {{slots: {slots}, timeout: {timeout}, cpus: {pool_cpus}, gpus: {gpus}}}}}
"""
FINE = {"call_timeout": "5", "cpus": "4", "slots": "1", "timeout": ".inf", "pool_cpus": "0.5", "gpus": "0"}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("call_timeout", ".nan", "call_timeout: must be a number of seconds, more than 0"),
        ("cpus", ".inf", "executor.with.cpus: must be a number from 0 to 1,000,000, not inf"),
        ("slots", "0", "pools.a.slots: must be a whole number from 1 to 1,000,000, not 0"),
        (
            "timeout",
            "-1",
            "pools.a.timeout: must be a number of seconds, 0 or more (math.inf, in YAML .inf, for ever), not -1",
        ),
        ("gpus", "0.5", f"pools.a.gpus: {HALF_A_GPU}"),
        ("gpus", "'1'", "pools.a.gpus: must be an integer, not the text '1'; remove the quotes"),
    ],
)
def test_numbers_in_a_config(tmp_path: Any, key: str, value: str, words: str) -> None:
    """The same words, with the place."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(**FINE))
    assert load_config(file).pools["a"].timeout == math.inf
    file.write_text(CONFIG.format(**{**FINE, key: value}))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert words in str(caught.value)


def test_bounds() -> None:
    """What for ever is."""
    assert seconds(math.inf, "x") == seconds(10**400, "x") == seconds(FOREVER_S, "x") == FOREVER_S
    assert FOREVER_S < threading.TIMEOUT_MAX
    assert amount_problem(10**5000) == "must be a number from 0 to 1,000,000, not a number of thousands of digits"


@pytest.mark.parametrize("value", ["20000", "20100-20000", "80-90", "65000-70000", "20000-20100,", 20000])
def test_ports(value: Any) -> None:
    """They are the first and the last of a range, of those that anybody may listen on."""
    with pytest.raises(ConfigError, match=r"connect\(ports\) must be the first and the last of some ports from 1024"):
        colocate.connect(ports=value)
