"""An engine in a process of its own, which tests join."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# How Ray starts no more processes than are used, which leak checks would count, and doesn't warn of what will change.
SPARING = {
    "RAY_prestart_worker_first_driver": "0",  # otherwise as many as it has CPUs, for each driver
    "RAY_enable_worker_prestart": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # otherwise its workers starve as long as other tests keep the machine busy
}
# Nor does it keep those that nobody uses any more.
NONE_IDLE = {
    "RAY_num_workers_soft_limit": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "100",
    "RAY_kill_idle_workers_interval_ms": "100",
}
# How Dask's workers look less often at what they do, and their processes are forks of one that has imported Dask.
QUIET = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "500ms",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "10s",
    "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver",
}


@contextmanager
def started(
    engine: str,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    token: str = "ab" * 32,
    own_temporary: bool = False,
    stderr: int | None = None,
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start one; the process, and what to connect with.

    Args:
        engine: `ray` or `dask`.
        command: It prints a line of JSON, the options to connect with, and ends with its input.
        env: What is different in its environment.
        token: What Ray wants to be told by who joins.
        own_temporary: Whether all its temporary files go when it ends, and not only Ray's.
        stderr: Where it complains.
    """
    with tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short, for Ray
        more = {"TMPDIR": folder} if own_temporary else {}
        options: dict[str, Any] = {}
        if engine == "ray":
            token_file = Path(folder) / "token"
            token_file.write_text(token)
            more |= {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
            options["token_file"] = str(token_file)
        usual = QUIET if engine == "dask" else {}
        process = subprocess.Popen(
            command,
            env={**usual, **os.environ, **more, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        with process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the engine doesn't start"
            try:
                yield process, {**json.loads(line), **options}
            finally:
                try:
                    process.communicate(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()  # or leaving the block would wait for it
                    raise
