"""Start Ray or Dask in a process of its own, for tests to join."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Ray starts no unused processes, which leak checks would count, and doesn't warn of future changes.
SPARING = {
    "RAY_prestart_worker_first_driver": "0",  # otherwise Ray starts a worker per CPU for each driver
    "RAY_enable_worker_prestart": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # otherwise Ray's workers starve while other tests keep the machine busy
}
# Ray ends idle workers at once.
NONE_IDLE = {
    "RAY_num_workers_soft_limit": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "100",
    "RAY_kill_idle_workers_interval_ms": "100",
}
# Dask's workers monitor themselves less often, and their processes are forks of one that has imported Dask.
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
    """Start an engine; yield its process, and the options for `connect`.

    Args:
        engine: `ray` or `dask`.
        command: Prints a line of JSON, the options for `connect`, and exits at the end of its stdin.
        env: Variables that the engine's environment has in addition.
        token: The token that Ray requires from a client.
        own_temporary: Whether all temporary files of the engine are deleted at its end, not only Ray's.
        stderr: The engine's stderr, as for `Popen`.
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
                    process.kill()  # otherwise the end of the block would wait for the process
                    raise
