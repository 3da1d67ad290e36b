"""The driver's end of its envoy: the process that is in Ray on the driver's behalf. Imports no Ray."""

from __future__ import annotations

import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil

import colocate
from colocate import wire
from colocate.errors import ColocateError, EngineError
from colocate.gpus import VARIABLE, listed
from colocate.keeper import Request, Requests, read
from colocate_ray import janitor
from colocate_ray.private import new_folder
from colocate_ray.terms import HEAD, OPEN, PING, Cluster, EnvoyDid, EnvoyDo, EnvoyLost, Failure

_STARTS_WITHIN_S = 120.0
_JOINS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 10.0
# An envoy that has been silent for so long is asked whether it is there, and ended when it isn't.
_SILENCE_S = 2.0
_PONG_WITHIN_S = 3.0
_PARTY = "the envoy"  # who owes answers
MARK = "COLOCATE_ENVOY"  # in the environment of an envoy, and of what it has started
_LAST_WORDS_BYTES = 2000
# What the driver's shell, or a job that it was submitted as, says of other clusters.
_OF_OTHERS = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")

Asked: TypeAlias = Request[str, Any]


class Envoy:
    """A process that is in one Ray. Its end is the end of all that this driver has there.

    Attributes:
        folder: Where its private Ray keeps its files; None when it has joined a cluster.
    """

    def __init__(self, cluster: Cluster, lost: Callable[[int, int, str], None]) -> None:
        """Start it, and wait until it is in.

        Args:
            cluster: Which Ray.
            lost: Told when an actor is gone, on a thread of the envoy's: number of the reservation, index, Ray's words.

        Raises:
            EngineError: The cluster can't be joined.
            ColocateError: A private Ray can't be started.
        """
        self.folder = new_folder() if cluster.private else None
        self._ray = "Ray" if cluster.private else f"the Ray cluster (address={cluster.address!r})"
        self._lost = lost
        self._requests = Requests[str, Any]()
        self._closing = False
        self._log = tempfile.TemporaryFile(prefix="colocate-")  # noqa: SIM115  # until `close`
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                mark = f"{MARK}={secrets.token_hex(8)}"
                self._process = _started(cluster, theirs, self._log.fileno(), mark)
            self._janitor = _watched(self._process, mark, self.folder)
        except BaseException:
            ours.close()
            self._log.close()
            raise
        self._hub = wire.Hub("ray-envoy")
        self._lane = self._hub.attach(ours, self._heard, self._gone)
        try:
            opened = self.post(OPEN, cluster, self.folder)
            if not opened.wait(_STARTS_WITHIN_S if cluster.private else _JOINS_WITHIN_S):
                raise _too_slow(cluster, self._last_words())
            opened.result()
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any, within_s: float | None = None, patience_s: float = 0.0) -> Any:
        """Have it do something, and wait for the result: while the envoy lives, and at most so many seconds.

        Args:
            name: What.
            arguments: Its arguments.
            within_s: How long; None for as long as the head of the cluster answers.
            patience_s: From when on the head is asked whether it does.

        Raises:
            ColocateError: It failed, or took longer, or the envoy is gone.
        """
        asked = self.post(name, *arguments)
        if within_s is None:
            self._wait_on_head(asked, patience_s)
        elif not self.wait([asked], within_s):
            raise ColocateError(f"Ray hasn't done within {within_s:g} s what it was asked for ({name})")
        [answer] = asked.result()
        return answer

    def _wait_on_head(self, asked: Asked, patience_s: float) -> None:
        """Wait while the head of the cluster answers: Ray itself waits on one that doesn't, for ever."""
        silence_s = max(patience_s, _SILENCE_S)
        while not self.wait([asked], silence_s):
            head = self.post(HEAD)
            self.wait([head])
            head.result()
            silence_s = _SILENCE_S

    def wait(self, posted: Sequence[Asked], within_s: float | None = None) -> bool:
        """Wait for what was posted; whether all of it is done. An envoy that shows no life meanwhile is ended."""
        deadline = math.inf if within_s is None else time.monotonic() + within_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            silent = time.monotonic() + min(_SILENCE_S, left)
            if all(each.wait(max(0.0, silent - time.monotonic())) for each in posted):
                return True
            if left <= _SILENCE_S:
                return False
            if not self.post(PING).wait(_PONG_WITHIN_S):
                # Stopped, or stuck. What it holds can be freed by its end alone, of which the reader will tell.
                self._process.kill()

    def post(self, name: str, *arguments: Any) -> Asked:
        """Have it do something."""
        body = wire.pack(arguments)
        asked = self._requests.open([_PARTY])
        if not asked.over:  # if it is gone, whatever is asked for is about to fail
            self._lane.send(EnvoyDo(asked.token, name).head(), body)
        return asked

    def close(self) -> None:
        """End it: it leaves its cluster, or ends its own. Idempotent."""
        self._closing = True
        self._hub.close()
        self._end()
        self._log.close()

    def _end(self) -> None:
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while not _has_ended(self._process, 1.0):
            if time.monotonic() > deadline or _is_stopped(self._process.pid):
                self._process.kill()
        if not _has_ended(self._janitor, _ENDS_WITHIN_S):
            self._janitor.kill()
            self._janitor.wait()

    def _heard(self, head: wire.Head, body: wire.Packed | None) -> None:
        told = read(head)
        assert body is not None
        said = wire.unpack(body)
        if isinstance(told, EnvoyLost):
            self._lost(*said)
            return
        assert isinstance(told, EnvoyDid)
        if isinstance(said, Failure):
            self._requests.refused(told.token, said.error())
        else:
            self._requests.answered(told.token, _PARTY, said)

    def _gone(self, _reason: str) -> None:
        why = "it was closed" if self._closing else self._post_mortem()
        self._requests.fail_all(EngineError(f"the connection to {self._ray} has ended: {why}"))

    def _post_mortem(self) -> str:
        self._end()
        ended = f"the process that was in Ray ended with code {self._process.returncode}"
        return f"{ended}. Close the runtime, and connect again. {self._last_words()}".strip()

    def _last_words(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        text = tail.decode(errors="replace").strip()
        return f"Its last words:\n{text}" if text else ""


def _started(cluster: Cluster, sock: socket.socket, log: int, mark: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(_import_path()), MARK: mark.partition("=")[2]}
    if cluster.private:
        for name in _OF_OTHERS:
            env.pop(name, None)
        if (gpus := listed(env)) is not None:
            env[VARIABLE] = ",".join(gpus)  # Ray would count what CUDA doesn't: "-1", a GPU that is named twice
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", "colocate_ray.service", str(sock.fileno()), str(os.getpid())],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[sock.fileno()],
        start_new_session=True,  # Ctrl-C is the driver's
    )


def _watched(envoy: subprocess.Popen[bytes], mark: str, folder: str | None) -> subprocess.Popen[bytes]:
    """Start the janitor of an envoy."""
    try:
        pidfds = [os.pidfd_open(pid) for pid in (os.getpid(), envoy.pid)]
        try:
            return subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", janitor.__file__),
                    *(*map(str, pidfds), str(envoy.pid), mark, folder or ""),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=pidfds,
                start_new_session=True,
            )
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
    except BaseException:
        envoy.kill()
        envoy.wait()
        raise


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _import_path() -> list[str]:
    """A path on which these very packages are found, however this process has come to find them."""
    homes = [str(Path(module).parent.parent) for module in (colocate.__file__, __file__)]
    return list(dict.fromkeys([*filter(None, [os.environ.get("PYTHONPATH")]), *homes]))


def _too_slow(cluster: Cluster, words: str) -> ColocateError:
    if cluster.private:
        return ColocateError(f"a private Ray did not start within {_STARTS_WITHIN_S:g} s. {words}".strip())
    return EngineError(
        f"the Ray cluster at {cluster.address} did not let this driver in within {_JOINS_WITHIN_S:g} s: is it a Ray "
        f"cluster of the same version that listens there? {words}".strip()
    )
