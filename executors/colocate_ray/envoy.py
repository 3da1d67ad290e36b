"""The driver's end of the envoy: the process that is in Ray on the driver's behalf. Imports no Ray."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from colocate.errors import ClusterError, ColocateError
from colocate.gpus import VARIABLE, listed
from colocate_ray.private import cluster_error, new_folder
from colocate_ray.proxy import Asked, DriverProxy
from colocate_ray.terms import HEAD, Cluster

_STARTS_WITHIN_S = 120.0
_JOINS_WITHIN_S = 60.0
_ASKS_EVERY_S = 0.5  # seconds between pings of the cluster's head
MARK = "COLOCATE_ENVOY"  # in the environment of an envoy, and of all processes below the envoy
# Variables for other clusters, from the driver's shell or from a job's submission.
_OF_OTHERS = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")


class Envoy(DriverProxy):
    """A process that is in one Ray. The end of the envoy ends everything that this driver has there."""

    def __init__(self, cluster: Cluster, lost: Callable[[int, int, str], None]) -> None:
        """Start the envoy, and wait until Ray is joined.

        Raises:
            ClusterError: The cluster can't be joined.
            ColocateError: A private Ray can't be started.
        """
        # the folder of a private Ray's files; None for a joined cluster
        self.folder = new_folder() if cluster.private else None
        super().__init__(
            "colocate_ray.service",
            engine="Ray" if cluster.private else f"the Ray cluster (address={cluster.address!r})",
            heard=lost,
            env=_environment(cluster),
            mark=MARK,
            folder=self.folder,
        )
        if not self.open(cluster, self.folder, within_s=_STARTS_WITHIN_S if cluster.private else _JOINS_WITHIN_S):
            error = _too_slow(cluster, self.folder, self.last_words())
            self.close()
            raise error

    def call(self, name: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Call a method of the envoy; wait for the result as long as the envoy and Ray's head are alive.

        Raises:
            ClusterError: The envoy is gone, or the head doesn't answer; the call goes on once the head answers.
            ColocateError: The method failed, or took longer than `within_s` seconds.
        """
        question = self.post(name, *arguments)
        if within_s is None:
            self._wait_on_head(question)
        elif not self.wait([question], min(within_s, _ASKS_EVERY_S)):
            self._ask_head()
            if not self.wait([question], within_s):
                raise ColocateError(f"{self._engine} hasn't done within {within_s:g} s what it was asked for ({name})")
        [answer] = question.result()
        return answer

    def lost(self, why: str) -> ClusterError:
        """Return the error of an envoy that ended by itself, with the last log lines of a private Ray."""
        return super().lost(why) if self.folder is None else cluster_error(self.folder, why)

    def _wait_on_head(self, asked: Asked) -> None:
        """Wait while the head of the cluster answers: Ray itself would wait for ever on a silent head."""
        while not self.wait([asked], _ASKS_EVERY_S):
            self._ask_head()

    def _ask_head(self) -> None:
        head = self.post(HEAD)
        self.wait([head])
        head.result()


def _environment(cluster: Cluster) -> dict[str, str]:
    env = dict(os.environ)
    if cluster.private:
        for name in _OF_OTHERS:
            env.pop(name, None)
        if (gpus := listed(env)) is not None:
            env[VARIABLE] = ",".join(gpus)  # Ray would also count GPUs that CUDA rejects: "-1", or a duplicate name
    return env


def _too_slow(cluster: Cluster, folder: str | None, words: str) -> ClusterError:
    if folder is not None:
        return cluster_error(folder, f"a private Ray did not start within {_STARTS_WITHIN_S:g} s. {words}".strip())
    return ClusterError(
        f"the Ray cluster at {cluster.address} did not let this driver in within {_JOINS_WITHIN_S:g} s: is it a Ray "
        f"cluster of the same version that listens there? {words}".strip()
    )
