"""Samples the GPUs of a runtime's groups once a second. One worker of each node samples for all slots there."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from colocate._protocol.message import Message
from colocate._system.jobs import Timer
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.features.devices.messages import AskDevices, DeviceReport

if TYPE_CHECKING:
    from colocate._api.connection import Connection

EVERY_S = 1.0
HOOK = "colocate_devices_sampled"
_log = logging.getLogger("colocate")


@attrs.frozen
class DeviceSample:
    """The state of a GPU at one moment. A value that the GPU doesn't report is None.

    Attributes:
        time: The moment of the sample, in seconds of time.time().
        node: The GPU's node.
        slots: The group and slot of each worker on this GPU.
        uuid: The GPU's UUID, from NVIDIA's driver.
        name: The model, as "NVIDIA H200".
        use: The share of the last moment in which the GPU computed anything, from 0 to 1.
        memory: Bytes in use, by all processes.
        memory_total: Bytes in all.
        watts: The power draw.
        celsius: The temperature.
        xids: The numbers of the XID errors since the last sample; see NVIDIA's list.
    """

    time: float
    node: str
    slots: Sequence[tuple[str, int]]
    uuid: str
    name: str
    use: float | None
    memory: int | None
    memory_total: int | None
    watts: float | None
    celsius: float | None
    xids: Sequence[int] = ()


class DevicesOfGroup(GroupFeature):
    """The driver's record of the devices of a group's slots.

    Attributes:
        own_uuids: The UUID of each worker's device, "" while unknown.
        latest: The last sample of each slot's device.
        watch: The sampler that asked this group's workers last, and gets the answers.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.own_uuids: dict[Worker, str] = {}
        self.latest: dict[int, DeviceSample] = {}
        self.watch: DeviceWatch | None = None

    def on_restarted(self) -> None:
        """Drop the records of the former workers."""
        self.own_uuids.clear()
        self.latest.clear()

    def on_message(self, worker: Worker, message: Message, body: object) -> None:
        """Pass a worker's samples to the sampler."""
        assert isinstance(message, DeviceReport)
        if self.watch is not None:
            self.watch.on_report(worker, message)


class DeviceWatch:
    """Samples all devices in use once a second, and notifies observers (`HOOK`)."""

    def __init__(self, connection: Connection) -> None:
        """Start sampling. Args: connection: The runtime's connection."""
        self._connection = connection
        self._is_over = False
        self._failed_nodes: set[str] = set()  # Nodes that can't be sampled.
        # Maps each node to the workers and GPUs of the last request.
        self._requested: dict[str, list[tuple[DevicesOfGroup, Worker, str]]] = {}
        self._timer: Timer | None = None
        self._schedule_next()

    def stop_sampling(self) -> None:
        """Cancel the timer for samples, and notify observers no more."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def _schedule_next(self) -> None:
        if not self._is_over:
            self._timer = self._connection.services.timers.call_later(EVERY_S, self._request_samples)

    def _request_samples(self) -> None:
        """Ask one worker of each node for samples. Runs on the timers' thread."""
        nodes: defaultdict[str, list[tuple[DevicesOfGroup, Worker, str]]] = defaultdict(list)
        for worker_group in tuple(self._connection.worker_groups.values()):
            for worker in worker_group.workforce.workers:
                node = worker.boot.node
                if worker.boot.device == "cpu" or worker.exit or worker.hello is None or node in self._failed_nodes:
                    continue
                part = cast("DevicesOfGroup", worker_group.get_part("devices"))
                part.watch = self
                if worker not in part.own_uuids:
                    part.own_uuids[worker] = ""
                    worker.send(AskDevices(()))
                elif uuid := part.own_uuids[worker]:
                    nodes[node].append((part, worker, uuid))
        self._requested = dict(nodes)
        for entries in nodes.values():
            entries[0][1].send(AskDevices(sorted({uuid for _, _, uuid in entries})))
        self._schedule_next()

    def on_report(self, worker: Worker, told: DeviceReport) -> None:
        """Record a worker's samples, and notify observers. Runs on the receiving thread."""
        node, group = worker.boot.node, self._connection.worker_groups.get(worker.boot.group)
        if told.trouble:
            if node not in self._failed_nodes:
                self._failed_nodes.add(node)
                _log.info("GPUs of node %s aren't sampled: %s", node, told.trouble)
            return
        if told.own_uuid and group is not None:
            cast("DevicesOfGroup", group.get_part("devices")).own_uuids[worker] = told.own_uuid
        now, requested, samples = time.time(), self._requested.get(node, ()), list[DeviceSample]()
        for uuid, name, *values in told.samples:
            having = [(part, peer) for part, peer, device_uuid in requested if device_uuid == uuid]
            slots = [(peer.boot.group, peer.slot) for _, peer in having]
            samples.append(sample := DeviceSample(now, node, slots, uuid, name, *cast("Any", values)))
            for part, peer in having:
                part.latest[peer.slot] = sample
        if samples and not self._is_over:
            self._connection.services.notify_observers(HOOK, samples)
