"""GPUs in a run's report and in `colocate top`, with a fake NVML: the test machines have no GPU."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.conftest import CommandLine
from tests.suite.devices import probes

from colocate import DeviceSample
from colocate.testing.waiting import wait_until
from colocate_report.devices import MOST_POINTS, DeviceLog, device_lanes, device_rows

CONFIG = """
    name: gpus
    executor: {use: local, with: {processes: true, gpus: 2}}
    pools: {main: {slots: 2, gpus: 1}}
    groups: {policy: {pool: main, roles: {net: {use: "net:Net"}}}}
    job: {use: "net:job"}
"""
NET = """
    import os, sys, time
    import colocate
    from played import make_fake_nvml

    class Net(colocate.Role):
        def __init__(self):
            sys.modules["pynvml"] = make_fake_nvml([79])

        @colocate.method
        def step(self):
            pass

    def job(run):
        while not os.path.exists("go on"):
            run.groups["policy"].role("net").step()
            time.sleep(0.1)
"""


def test_a_run_with_gpus(colocate: CommandLine) -> None:
    """`colocate top` shows the GPU of each slot, and the report shows the use of both GPUs."""
    colocate.write("net.py", NET)
    colocate.write("played.py", Path(probes.__file__).read_text())
    colocate.write("gpus.yaml", CONFIG)
    with colocate.start("run", "gpus.yaml") as run:
        wait_until(lambda: "W, " in colocate("top", "gpus", "--once").stdout, "a GPU was sampled")
        shown = colocate("top", "gpus", "--once").stdout
        colocate.write("go on", "")
        run.communicate()
    assert "87%, 41 GiB, 310 W, 61 °C" in shown or "87%, 41 GiB, 311 W, 61 °C" in shown
    assert "47%, 42 GiB, 62 °C" in shown
    page = (colocate.folder / "runs" / "gpus" / "report.html").read_text()
    assert "GPU of slot 0: in use 87% of the time" in page or "GPU of policy 0: in use 87% of the time" in page
    for text in ("NVIDIA Played", "80 GiB", "62 °C", ">79<"):
        assert text in page
    assert len(re.findall(r'<polyline class="held"', page)) == 2


def sample(number: int, **values: object) -> DeviceSample:
    given: dict[str, object] = {
        "time": float(number),
        "node": "n",
        "slots": [("policy", 0)],
        "uuid": "GPU-1",
        "name": "G",
        "use": 0.5,
        "memory": 20,
        "memory_total": 80,
        "watts": None,
        "celsius": None,
    }
    return DeviceSample(**{**given, **values})  # type: ignore[arg-type]


def test_a_long_run() -> None:
    """The device log of a long run stays bounded, and keeps its ends, means and errors."""
    log = DeviceLog()
    count = 5 * MOST_POINTS
    for number in range(count):
        log.colocate_devices_sampled([sample(number, use=float(number >= count // 2), xids=[13] if not number else [])])
    (use,) = log.uses()
    assert len(use.points) < MOST_POINTS
    assert (use.use, use.most_memory, dict(use.xids), use.watts) == (0.5, 20, {13: 1}, None)
    assert use.points[-1].time > count - 16
    first, last = use.points[: len(use.points) // 3], use.points[-len(use.points) // 3 :]
    assert {point.use for point in first} == {0.0}
    assert {point.use for point in last} == {1.0}
    (lane,) = device_lanes([use], 0.0, float(count))
    assert lane.busy == "50%"
    assert device_rows([use])[0]["mean power"] == ""
