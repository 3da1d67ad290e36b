"""The program of the envoy, the process that joins Ray on the driver's behalf.

Run as `python -m colocate_ray.service FD DRIVER_PID`.

The process ends with the driver. DRIVER_PID serves only people and tools that list the processes of this machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from colocate.keeper import Thread
from colocate.worker.birth.signals import ignore_signals
from colocate_ray.private import PrivateFolder, adopt_orphans, end_children, reap_orphans
from colocate_ray.proxy import ProxyProcess
from colocate_ray.terms import Cluster

if TYPE_CHECKING:
    from colocate_ray.owners import OwnedPlacing

_LEAVES_WITHIN_S = 2.5
_TRIES = "3"  # The number of attempts to join, each of one second. Ray's own default is twenty.


class Service(ProxyProcess):
    """The envoy's side of the connection: handles requests with an `OwnedPlacing` and the functions of `names`."""

    engine = "Ray"

    def __init__(self) -> None:
        self._folder: PrivateFolder | None = None
        self._placing: OwnedPlacing | None = None
        self._joined = False

    def open(self, cluster: Cluster, folder: str | None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start a private Ray in a folder, or join an existing Ray cluster."""
        if folder is not None:
            self._folder = PrivateFolder(folder)
            _disable_metrics()
        _prepare_environment(cluster.token_file if self._folder is None else str(self._folder.token))
        from colocate_ray import joining
        from colocate_ray.owners import OwnedPlacing

        if self._folder is not None:
            joining.start_private(cluster, self._folder)
            Thread(target=reap_orphans, name="reaper").start()
        else:
            joining.join_cluster(cluster)
            self._joined = True
        ignore_signals(
            [signal.SIGTERM]
        )  # Ray has set a handler for SIGTERM, but the driver decides when this process ends.

        self._placing = OwnedPlacing(cluster, self.notify_driver)

    def find_method(self, name: str) -> Callable[..., Any]:
        """Return the method for a request: a method of the `OwnedPlacing`, or else a function of `names`."""
        from colocate_ray import names

        assert self._placing is not None
        function: Callable[..., Any] = getattr(self._placing if hasattr(self._placing, name) else names, name)
        return function

    def leave(self) -> None:
        """Leave Ray, and end all processes and remove all files of this driver. Called at the driver's end."""
        if self._joined:
            import ray

            # This timer bounds the wait for a cluster that is gone.
            signal.setitimer(signal.ITIMER_REAL, _LEAVES_WITHIN_S)
            if self._placing is not None:
                self._placing.abandon()
            ray.shutdown()
        end_children()
        if self._folder is not None:
            self._folder.remove_folder()


def _prepare_environment(token_file: str | None) -> None:
    if token_file is not None:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=os.path.expanduser(token_file))
        os.environ.pop("RAY_AUTH_TOKEN", None)
    # Without this setting, a request in progress at the driver's end would start a new Ray after the shutdown.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", _TRIES)
    # This is Ray's future default, set early to silence a warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def _disable_metrics() -> None:
    """Restrict a private Ray to the processes of colocate's actors, and turn off metrics."""
    os.environ.update(
        # Without these settings, Ray may serve metrics to anyone on all addresses. -1 disables the port.
        AUTOSCALER_METRIC_PORT="-1",
        DASHBOARD_METRIC_PORT="-1",
        RAY_enable_metrics_collection="0",
        # Without these settings, Ray keeps one spare process for each CPU.
        RAY_prestart_worker_first_driver="0",
        RAY_enable_worker_prestart="0",
        RAY_num_workers_soft_limit="0",
        RAY_idle_worker_killing_time_threshold_ms="100",
        RAY_kill_idle_workers_interval_ms="100",
    )


if __name__ == "__main__":
    adopt_orphans()
    Service.serve()
