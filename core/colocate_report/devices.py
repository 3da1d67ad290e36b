"""The GPUs of a run: what each did all the time, in few numbers, and a lane for each below the timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from colocate.texts import size_text
from colocate_report.scale import percent

if TYPE_CHECKING:
    from colocate.driver import DeviceSample

MOST_POINTS = 1024
"""So many moments of a GPU are kept: then each two become one, and each counts for twice as long."""


class Point(NamedTuple):
    """A stretch of time of a GPU: when it ended, and means over it."""

    time: float
    use: float
    memory: float


@attrs.frozen
class DeviceUse:
    """A GPU over a run; None for what it couldn't tell.

    Attributes:
        node: Its node.
        slots: The group and slot of each worker that had it.
        uuid: NVIDIA's name of it.
        name: Its kind.
        use: The mean part of the time in which it has computed anything.
        most_memory: The most bytes that were in use.
        memory: Bytes in all.
        watts: The mean power.
        most_celsius: The highest temperature.
        xids: How often which XID error came.
        points: What it did when.
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


class _Kept:
    """What is kept of one GPU."""

    def __init__(self) -> None:
        self.last: DeviceSample | None = None
        self.slots: dict[tuple[str, int], None] = {}
        self.sums, self.counts = Counter[str](), Counter[str]()
        self.most: dict[str, float] = {}
        self.xids = Counter[int]()
        self.points: list[Point] = []
        self._gathered: list[Point] = []
        self._each = 1

    def add(self, sample: DeviceSample) -> None:
        self.last = sample
        self.slots |= dict.fromkeys((group, slot) for group, slot in sample.slots)
        self.xids.update(sample.xids)
        for name in ("use", "watts", "memory", "celsius"):
            value = getattr(sample, name)
            if value is not None:
                self.sums[name] += value
                self.counts[name] += 1
                self.most[name] = max(self.most.get(name, value), value)
        self._gathered.append(Point(sample.time, sample.use or 0.0, (sample.memory or 0) / (sample.memory_total or 1)))
        if len(self._gathered) >= self._each:
            self.points.append(_mean(self._gathered))
            self._gathered.clear()
        if len(self.points) >= MOST_POINTS:
            self.points = [_mean(self.points[at : at + 2]) for at in range(0, len(self.points), 2)]
            self._each *= 2

    def mean(self, name: str) -> float | None:
        return self.sums[name] / self.counts[name] if self.counts[name] else None


def _mean(points: Sequence[Point]) -> Point:
    count = len(points)
    return Point(points[-1].time, sum(each.use for each in points) / count, sum(each.memory for each in points) / count)


class DeviceLog:
    """An observer that keeps what GPUs do, in bounded memory."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], _Kept] = {}

    def colocate_devices_sampled(self, samples: Sequence[DeviceSample]) -> None:
        """GPUs were looked at."""
        for sample in samples:
            self._kept.setdefault((sample.node, sample.uuid), _Kept()).add(sample)

    def uses(self) -> tuple[DeviceUse, ...]:
        """Return what each has done, in the order of the slots that have them."""
        found = []
        for kept in self._kept.values():
            last = kept.last
            assert last is not None
            memory, celsius = kept.most.get("memory"), kept.most.get("celsius")
            found.append(
                DeviceUse(
                    node=last.node,
                    slots=tuple(kept.slots),
                    uuid=last.uuid,
                    name=last.name,
                    use=kept.mean("use"),
                    most_memory=None if memory is None else int(memory),
                    memory=last.memory_total,
                    watts=kept.mean("watts"),
                    most_celsius=celsius,
                    xids=dict(kept.xids),
                    points=tuple(kept.points),
                )
            )
        return tuple(sorted(found, key=lambda each: [*each.slots]))


@attrs.frozen
class DeviceLane:
    """A GPU over the whole run, as the page draws it.

    Attributes:
        label: Its slots.
        use: The area of its use, an SVG path of 1000 by 100.
        memory: The line of its memory, likewise.
        busy: The mean use, as text.
    """

    label: str
    use: str
    memory: str
    busy: str


def lanes(uses: Sequence[DeviceUse], start: float, end: float) -> tuple[DeviceLane, ...]:
    """Return a lane for each GPU, on the timeline's axis."""
    found = []
    for each in uses:
        places = [
            (percent((point.time - start) / ((end - start) or 1.0)) * 10, point)
            for point in each.points
            if start <= point.time <= end
        ]
        if not places:
            continue
        use = " ".join(f"L{x:.1f} {100 - 100 * point.use:.1f}" for x, point in places)
        memory = " ".join(f"{x:.1f},{100 - 100 * point.memory:.1f}" for x, point in places)
        found.append(
            DeviceLane(
                ", ".join(_slots(each)),
                f"M{places[0][0]:.1f} 100 {use} L{places[-1][0]:.1f} 100 Z",
                memory,
                "" if each.use is None else f"{each.use:.0%}",
            )
        )
    return tuple(found)


def _slots(use: DeviceUse) -> list[str]:
    return [f"{group} {slot}" for group, slot in use.slots]


def rows(uses: Sequence[DeviceUse]) -> list[dict[str, Any]]:
    """Return a row for each GPU: what it is, and what it did."""
    return [
        {
            "slots": ", ".join(_slots(each)),
            "node": each.node,
            "GPU": each.name,
            "use": "" if each.use is None else f"{each.use:.0%}",
            "most memory": "" if each.most_memory is None else size_text(each.most_memory),
            "of": "" if each.memory is None else size_text(each.memory),
            "mean power": "" if each.watts is None else f"{each.watts:.0f} W",
            "hottest": "" if each.most_celsius is None else f"{each.most_celsius:.0f} °C",
            "XID errors": ", ".join(
                f"{number}" if count == 1 else f"{number} ({count} times)"
                for number, count in sorted(each.xids.items())
            ),
        }
        for each in uses
    ]
