"""The driver's end of its envoy: the process that is in Ray on the driver's behalf. Imports no Ray."""

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
_ASKS_EVERY_S = 0.5  # whether the head of a cluster answers
MARK = "COLOCATE_ENVOY"  # in the environment of an envoy, and of what it has started
# What the driver's shell, or a job that it was submitted as, says of other clusters.
_OF_OTHERS = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")


class Envoy(DriverProxy):
    """A process that is in one Ray. Its end is the end of all that this driver has there."""

    def __init__(self, cluster: Cluster, lost: Callable[[int, int, str], None]) -> None:
        """Start it, and wait until it is in.

        Raises:
            ClusterError: The cluster can't be joined.
            ColocateError: A private Ray can't be started.
        """
        # Where its private Ray keeps its files; None when it has joined a cluster
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
        """Have it do something, and wait for the result: while envoy and head live, and at most so many seconds.

        Raises:
            ClusterError: The envoy is gone, or the head doesn't answer; the envoy goes on with it when that does.
            ColocateError: It failed, or took longer.
        """
        asked = self.post(name, *arguments)
        if within_s is None:
            self._wait_on_head(asked)
        elif not self.wait([asked], min(within_s, _ASKS_EVERY_S)):
            self._ask_head()
            if not self.wait([asked], within_s):
                raise ColocateError(f"{self._engine} hasn't done within {within_s:g} s what it was asked for ({name})")
        [answer] = asked.result()
        return answer

    def lost(self, why: str) -> ClusterError:
        """The error when it has ended by itself: of a private Ray, with what that has logged last."""
        return super().lost(why) if self.folder is None else cluster_error(self.folder, why)

    def _wait_on_head(self, asked: Asked) -> None:
        """Wait while the head of the cluster answers: Ray itself waits on one that doesn't, for ever."""
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
            env[VARIABLE] = ",".join(gpus)  # Ray would count what CUDA doesn't: "-1", a GPU that is named twice
    return env


def _too_slow(cluster: Cluster, folder: str | None, words: str) -> ClusterError:
    if folder is not None:
        return cluster_error(folder, f"a private Ray did not start within {_STARTS_WITHIN_S:g} s. {words}".strip())
    return ClusterError(
        f"the Ray cluster at {cluster.address} did not let this driver in within {_JOINS_WITHIN_S:g} s: is it a Ray "
        f"cluster of the same version that listens there? {words}".strip()
    )
