"""Show the GPUs of a run: totals in a table, and a lane for each GPU below the timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from colocate.texts import format_size
from colocate_report.scale import format_percent

if TYPE_CHECKING:
    from colocate.driver import DeviceSample

MOST_POINTS = 1024
"""Number of points kept per GPU; beyond, each two points are merged, and later points cover twice the time."""


class Point(NamedTuple):
    """A GPU's mean use and memory over a time span, which ends at `time`."""

    time: float
    use: float
    memory: float


@attrs.frozen
class DeviceUse:
    """The use of a GPU in a run; None for values that the GPU couldn't report.

    Attributes:
        node: The GPU's node.
        slots: Group and slot of each worker on the GPU.
        uuid: NVIDIA's identifier.
        name: The model.
        use: The mean share of time with any computation.
        most_memory: The most bytes in use.
        memory: Bytes in all.
        watts: The mean power.
        most_celsius: The highest temperature.
        xids: Counts of XID errors, by number.
        points: Use and memory over time.
    """

    node: str
    slots: Sequence[tuple[str, int]]
    uuid: str
    name: str
    use: float | None
    most_memory: int | None
    memory: int | None
    watts: float | None
    most_celsius: float | None
    xids: Mapping[int, int]
    points: Sequence[Point]


class _DeviceSamples:
    """A summary of one GPU's samples, of bounded size."""

    def __init__(self) -> None:
        self.last: DeviceSample | None = None
        self.slots: dict[tuple[str, int], None] = {}
        self.sums, self.counts = Counter[str](), Counter[str]()
        self.highest: dict[str, float] = {}
        self.xids = Counter[int]()
        self.points: list[Point] = []
        self._gathered: list[Point] = []
        self._stride = 1

    def add_sample(self, sample: DeviceSample) -> None:
        self.last = sample
        self.slots |= dict.fromkeys((group, slot) for group, slot in sample.slots)
        self.xids.update(sample.xids)
        for name in ("use", "watts", "memory", "celsius"):
            value = getattr(sample, name)
            if value is not None:
                self.sums[name] += value
                self.counts[name] += 1
                self.highest[name] = max(self.highest.get(name, value), value)
        self._gathered.append(Point(sample.time, sample.use or 0.0, (sample.memory or 0) / (sample.memory_total or 1)))
        if len(self._gathered) >= self._stride:
            self.points.append(_mean_point(self._gathered))
            self._gathered.clear()
        if len(self.points) >= MOST_POINTS:
            self.points = [_mean_point(self.points[at : at + 2]) for at in range(0, len(self.points), 2)]
            self._stride *= 2

    def mean_of(self, name: str) -> float | None:
        return self.sums[name] / self.counts[name] if self.counts[name] else None


def _mean_point(points: Sequence[Point]) -> Point:
    count = len(points)
    return Point(
        points[-1].time, sum(point.use for point in points) / count, sum(point.memory for point in points) / count
    )


class DeviceLog:
    """An observer that stores a summary of each GPU's samples, of bounded size."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], _DeviceSamples] = {}

    def colocate_devices_sampled(self, samples: Sequence[DeviceSample]) -> None:
        """Add samples of GPUs to the summaries."""
        for sample in samples:
            self._samples.setdefault((sample.node, sample.uuid), _DeviceSamples()).add_sample(sample)

    def uses(self) -> tuple[DeviceUse, ...]:
        """Return the use of each GPU, in the order of slots."""
        uses = []
        for samples in self._samples.values():
            last = samples.last
            assert last is not None
            memory, celsius = samples.highest.get("memory"), samples.highest.get("celsius")
            uses.append(
                DeviceUse(
                    node=last.node,
                    slots=tuple(samples.slots),
                    uuid=last.uuid,
                    name=last.name,
                    use=samples.mean_of("use"),
                    most_memory=None if memory is None else int(memory),
                    memory=last.memory_total,
                    watts=samples.mean_of("watts"),
                    most_celsius=celsius,
                    xids=dict(samples.xids),
                    points=tuple(samples.points),
                )
            )
        return tuple(sorted(uses, key=lambda each: [*each.slots]))


@attrs.frozen
class DeviceLane:
    """The lane of a GPU below the page's timeline.

    Attributes:
        label: The GPU's slots.
        use: The area of the use, as an SVG path of 1000 by 100.
        memory: The line of the memory, as points in the same units.
        busy: The mean use, as text.
    """

    label: str
    use: str
    memory: str
    busy: str


def device_lanes(uses: Sequence[DeviceUse], start: float, end: float) -> tuple[DeviceLane, ...]:
    """Return a lane for each GPU with samples, on the timeline's axis."""
    lane_list = []
    for device_use in uses:
        places = [
            (format_percent((point.time - start) / ((end - start) or 1.0)) * 10, point)
            for point in device_use.points
            if start <= point.time <= end
        ]
        if not places:
            continue
        use = " ".join(f"L{x:.1f} {100 - 100 * point.use:.1f}" for x, point in places)
        memory = " ".join(f"{x:.1f},{100 - 100 * point.memory:.1f}" for x, point in places)
        lane_list.append(
            DeviceLane(
                ", ".join(_format_slots(device_use)),
                f"M{places[0][0]:.1f} 100 {use} L{places[-1][0]:.1f} 100 Z",
                memory,
                "" if device_use.use is None else f"{device_use.use:.0%}",
            )
        )
    return tuple(lane_list)


def _format_slots(use: DeviceUse) -> list[str]:
    return [f"{group} {slot}" for group, slot in use.slots]


def device_rows(uses: Sequence[DeviceUse]) -> list[dict[str, Any]]:
    """Return a table row for each GPU."""
    return [
        {
            "slots": ", ".join(_format_slots(device_use)),
            "node": device_use.node,
            "GPU": device_use.name,
            "use": "" if device_use.use is None else f"{device_use.use:.0%}",
            "most memory": "" if device_use.most_memory is None else format_size(device_use.most_memory),
            "of": "" if device_use.memory is None else format_size(device_use.memory),
            "mean power": "" if device_use.watts is None else f"{device_use.watts:.0f} W",
            "hottest": "" if device_use.most_celsius is None else f"{device_use.most_celsius:.0f} °C",
            "XID errors": ", ".join(
                f"{number}" if count == 1 else f"{number} ({count} times)"
                for number, count in sorted(device_use.xids.items())
            ),
        }
        for device_use in uses
    ]
