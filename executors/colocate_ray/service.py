"""The envoy's process: `python -m colocate_ray.service FD DRIVER_PID`. It is in Ray on the driver's behalf.

It ends with the driver, whose process id is there for whoever looks at the processes of this machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from colocate.keeper import Thread
from colocate.worker.birth.signals import pass_over
from colocate_ray.private import PrivateFolder, adopt_orphans, end_children, reap_orphans
from colocate_ray.proxy import Proxied
from colocate_ray.terms import Cluster

if TYPE_CHECKING:
    from colocate_ray.owners import OwnedPlacing

_LEAVES_WITHIN_S = 2.5
_TRIES = "3"  # to join, of a second each, where Ray makes twenty


class Service(Proxied):
    """Does what the driver asks: what its side of Ray can do, `OwnedPlacing` and `names`."""

    engine = "Ray"

    def __init__(self) -> None:
        """Be in none yet."""
        self._folder: PrivateFolder | None = None
        self._placing: OwnedPlacing | None = None
        self._joined = False

    def open(self, cluster: Cluster, folder: str | None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Be in a Ray: its own, in a folder, or one that is there."""
        if folder is not None:
            self._folder = PrivateFolder(folder)
            _keep_to_ourselves()
        _prepare_environment(cluster.token_file if self._folder is None else str(self._folder.token))
        from colocate_ray import joining
        from colocate_ray.owners import OwnedPlacing

        if self._folder is not None:
            joining.start(cluster, self._folder)
            Thread(target=reap_orphans, name="reaper").start()
        else:
            joining.join(cluster)
            self._joined = True
        pass_over([signal.SIGTERM])  # Ray has set a handler of its own: the driver decides when it ends

        self._placing = OwnedPlacing(cluster, self.say)

    def method(self, name: str) -> Callable[..., Any]:
        """By name, of its side of Ray, or of the tables of names in Ray's store."""
        from colocate_ray import names

        assert self._placing is not None
        found: Callable[..., Any] = getattr(self._placing if hasattr(self._placing, name) else names, name)
        return found

    def leave(self) -> None:
        """The driver has let go, or is gone: end all that is ours."""
        if self._joined:
            import ray

            signal.setitimer(signal.ITIMER_REAL, _LEAVES_WITHIN_S)  # a cluster that is gone answers nothing
            if self._placing is not None:
                self._placing.abandon()
            ray.shutdown()
        end_children()
        if self._folder is not None:
            self._folder.remove()


def _prepare_environment(token_file: str | None) -> None:
    """Set what Ray reads when it is imported."""
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


if __name__ == "__main__":
    adopt_orphans()
    Service.serve()
