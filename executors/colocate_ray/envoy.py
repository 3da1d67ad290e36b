"""The driver's side of the envoy, a process that joins Ray on the driver's behalf. Imports no Ray."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from colocate.errors import ClusterError, ColocateError
from colocate.gpus import VARIABLE, list_visible_gpus
from colocate_ray.private import choose_folder, make_cluster_error
from colocate_ray.proxy import DriverProxy, Question
from colocate_ray.terms import HEAD, Cluster

_STARTS_WITHIN_S = 120.0
_JOINS_WITHIN_S = 60.0
_ASKS_EVERY_S = 0.5  # The cluster's head is pinged at this interval while a request waits.
MARK = "COLOCATE_ENVOY"  # This variable is set in an envoy's environment, and in all processes below the envoy.
# A private Ray must not inherit these variables of the driver's shell or job, which describe another cluster.
_OF_OTHERS = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")


class Envoy(DriverProxy):
    """A process that has joined one Ray. When the envoy ends, everything that this driver has in Ray ends."""

    def __init__(self, cluster: Cluster, lost: Callable[[int, int, str], None]) -> None:
        """Start the envoy, and wait until the envoy has joined Ray.

        Raises:
            ClusterError: The cluster can't be joined.
            ColocateError: A private Ray can't be started.
        """
        # The folder for the files of a private Ray; None for a joined cluster.
        self.folder = choose_folder() if cluster.private else None
        super().__init__(
            "colocate_ray.service",
            engine="Ray" if cluster.private else f"the Ray cluster (address={cluster.address!r})",
            heard=lost,
            env=_environment(cluster),
            mark=MARK,
            folder=self.folder,
        )
        if not self.open(cluster, self.folder, within_s=_STARTS_WITHIN_S if cluster.private else _JOINS_WITHIN_S):
            error = _timeout_error(cluster, self.folder, self.read_last_output())
            self.close()
            raise error

    def call(self, name: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Call a method of the envoy, and wait for the result while the envoy and Ray's head are alive.

        Raises:
            ClusterError: The envoy is gone, or the head doesn't answer. The call continues once the head answers.
            ColocateError: The method failed, or took longer than `within_s` seconds.
        """
        question = self.call_soon(name, *arguments)
        if within_s is None:
            self._wait_on_head(question)
        elif not self.wait_for([question], min(within_s, _ASKS_EVERY_S)):
            self._check_head()
            if not self.wait_for([question], within_s):
                raise ColocateError(f"{self._engine} hasn't done within {within_s:g} s what it was asked for ({name})")
        [answer] = question.result()
        return answer

    def make_lost_error(self, why: str) -> ClusterError:
        """Return the error for an envoy that ended by itself. For a private Ray, the error has the last log lines."""
        return super().make_lost_error(why) if self.folder is None else make_cluster_error(self.folder, why)

    def _wait_on_head(self, asked: Question) -> None:
        """Wait while the cluster's head answers pings. Ray itself would wait on a silent head for ever."""
        while not self.wait_for([asked], _ASKS_EVERY_S):
            self._check_head()

    def _check_head(self) -> None:
        head = self.call_soon(HEAD)
        self.wait_for([head])
        head.result()


def _environment(cluster: Cluster) -> dict[str, str]:
    env = dict(os.environ)
    if cluster.private:
        for name in _OF_OTHERS:
            env.pop(name, None)
        if (gpus := list_visible_gpus(env)) is not None:
            # Without this, Ray would also count entries that CUDA rejects, such as "-1" or a duplicate name.
            env[VARIABLE] = ",".join(gpus)
    return env


def _timeout_error(cluster: Cluster, folder: str | None, words: str) -> ClusterError:
    if folder is not None:
        return make_cluster_error(folder, f"a private Ray did not start within {_STARTS_WITHIN_S:g} s. {words}".strip())
    return ClusterError(
        f"the Ray cluster at {cluster.address} did not let this driver in within {_JOINS_WITHIN_S:g} s: is it a Ray "
        f"cluster of the same version that listens there? {words}".strip()
    )
