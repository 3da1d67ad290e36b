"""The envoy's process: `python -m colocate_ray.service FD DRIVER_PID`. It is in Ray on the driver's behalf.

It ends with the driver, whose process id is there for whoever looks at the processes of this machine.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from colocate import wire
from colocate.errors import ColocateError
from colocate.keeper import Message, read
from colocate_ray.private import PrivateFolder, adopt_orphans, end_children, reap_orphans
from colocate_ray.terms import OPEN, PING, Cluster, EnvoyDid, EnvoyDo, EnvoyLost, Failure

if TYPE_CHECKING:
    from colocate_ray.owners import OwnedPlacing

_LEAVES_WITHIN_S = 5.0
_TRIES = "3"  # to join, of a second each, where Ray makes twenty


class Service:
    """Does what the driver asks, each request on a thread of its own, until the driver lets go or is gone."""

    def __init__(self, sock: socket.socket) -> None:
        """Serve one driver."""
        self._sock = sock
        self._to_open: queue.SimpleQueue[tuple[int, Cluster, str | None]] = queue.SimpleQueue()
        self._folder: PrivateFolder | None = None
        self._placing: OwnedPlacing | None = None
        self._joined = False

    def run(self) -> None:
        """Serve. On the main thread: the kernel ties the lives of Ray's processes to the thread that starts them."""
        self._lane = wire.Hub("driver").attach(self._sock, self._heard, self._leave)
        token, cluster, folder = self._to_open.get()
        try:
            self._open(cluster, folder)
        except BaseException as error:
            self._answer(token, _portable(error))
        else:
            self._answer(token, None)
        threading.Event().wait()

    def _open(self, cluster: Cluster, folder: str | None) -> None:
        if folder is not None:
            self._folder = PrivateFolder(folder)
            _keep_to_ourselves()
        _prepare_environment(cluster.token_file if self._folder is None else str(self._folder.token))
        from colocate_ray import joining
        from colocate_ray.owners import OwnedPlacing

        if self._folder is not None:
            joining.start(cluster, self._folder)
            threading.Thread(target=reap_orphans, name="reaper", daemon=True).start()
        else:
            joining.join(cluster)
            self._joined = True

        self._placing = OwnedPlacing(cluster, lambda *what: self._say(EnvoyLost(), what))

    def _heard(self, head: wire.Head, body: wire.Packed | None) -> None:
        asked = read(head)
        assert isinstance(asked, EnvoyDo)
        assert body is not None
        arguments = wire.unpack(body)
        if asked.name == PING:
            self._answer(asked.token, None)
        elif asked.name == OPEN:
            self._to_open.put((asked.token, *arguments))
        else:
            threading.Thread(target=self._do, args=(asked, arguments), name=asked.name, daemon=True).start()

    def _do(self, asked: EnvoyDo, arguments: tuple[Any, ...]) -> None:
        assert self._placing is not None
        try:
            self._answer(asked.token, getattr(self._placing, asked.name)(*arguments))
        except BaseException as error:
            self._answer(asked.token, _portable(error))

    def _answer(self, token: int, answer: Any) -> None:
        self._say(EnvoyDid(token), answer)

    def _say(self, message: Message, value: Any) -> None:
        self._lane.send(message.head(), wire.pack(value))  # if nobody listens, `_leave` is about to be called

    def _leave(self, _reason: str) -> None:
        """The driver has let go, or is gone: end all that is ours, and this process."""
        if self._joined:
            import ray

            threading.Timer(_LEAVES_WITHIN_S, os._exit, (1,)).start()  # a cluster that is gone answers nothing
            if self._placing is not None:
                self._placing.abandon()
            ray.shutdown()
        end_children()
        if self._folder is not None:
            self._folder.remove()
        os._exit(0)


def _prepare_environment(token_file: str | None) -> None:
    """What Ray reads when it is imported."""
    if token_file is not None:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=os.path.expanduser(token_file))
        os.environ.pop("RAY_AUTH_TOKEN", None)
    # A request that is still under way when the driver goes would start a Ray of its own, after `ray.shutdown()`.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", _TRIES)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as it will be anyway: silences a warning


def _keep_to_ourselves() -> None:
    """A private Ray runs nothing but our actors, and is nobody else's to watch."""
    os.environ.update(
        # Ray serves numbers to whoever asks, on all addresses, where it finds what it needs for that. -1 is no port.
        AUTOSCALER_METRIC_PORT="-1",
        DASHBOARD_METRIC_PORT="-1",
        RAY_enable_metrics_collection="0",
        # It needs no processes in stock, one for each CPU.
        RAY_prestart_worker_first_driver="0",
        RAY_enable_worker_prestart="0",
        RAY_num_workers_soft_limit="0",
        RAY_idle_worker_killing_time_threshold_ms="100",
        RAY_kill_idle_workers_interval_ms="100",
    )


def _portable(error: BaseException) -> Failure:
    """An error for the driver, which may have no Ray to unpickle one of Ray's with."""
    if not isinstance(error, ColocateError):
        error = ColocateError(f"Ray failed: {type(error).__name__}: {error}")
    return Failure(type(error), error.message, dict(error.__dict__))


def main() -> None:
    """Run as a process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, lambda *_: None
        )  # the driver decides when it ends; by handlers, which children don't inherit
    adopt_orphans()
    Service(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
