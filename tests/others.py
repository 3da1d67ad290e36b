"""Leave files and processes as another user's colocate, Ray, Dask and torch do; `fresh.sh others` runs this.

Some processes and ports remain until this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

USER = 4711
FOLDERS = (
    "/tmp/ray/session_2026-11-30_01-02-03_000004_5/logs",
    "/tmp/ray/session_2026-11-30_01-02-03_000004_5/sockets",
    "/tmp/colocate-ray-0a1b2c3d/r/session_2026-11-30_01-02-03_000004_5/logs",
    "/tmp/colocate-dask-0a1b2c3d",
    "/tmp/colocate-vmm-0a1b2c3d",
    "/tmp/dask-scratch-space/worker-0a1b2c3d",
    "/tmp/pytest-of-other/pytest-0",
    "/tmp/torchinductor_other",
    "/tmp/vllm-0a1b2c3d",
    "/var/tmp/colocate-0a1b2c3d",
    "/var/tmp/machines-0a1b2c3d/n0",
)
FILES = (
    "/tmp/colocate-0a1b2c3d",
    "/tmp/colocate-ray-0a1b2c3d/token",
    "/tmp/dask-scratch-space/global.lock",
    "/tmp/dask-scratch-space/worker-0a1b2c3d.dirlock",
    "/dev/shm/colocate-0a1b2c3d",
    "/dev/shm/colocate-0a1b2c3d-cpushm_0",
    "/dev/shm/nccl-0a1b2c",
    "/dev/shm/plasma0a1b2c3d",
    "/dev/shm/psm_0a1b2c3d",
    "/dev/shm/sem.mp-0a1b2c3d",
    "/dev/shm/torch_5_6_7",
)
# The ports of Ray's head and dashboard, Dask's scheduler and dashboard, and torchrun.
PORTS = (6379, 8265, 8786, 8787, 29500)
GONE = "4000000"
OLD = 1_700_000_000
# Command lines like those of colocate's processes after their driver's exit.
LEFT = (
    ["-m", "colocate.worker", "3", GONE, "waits", f"elsewhere-{GONE}-1/pool#0"],
    ["-m", "colocate_ray.service", "3", GONE],
    ["raylet", "--session-dir=/tmp/colocate-ray-0a1b2c3d/r/session_2026-11-30_01-02-03_000004_5"],
)


BECOME = f"import os; os.setgroups([]); os.setgid({USER}); os.setuid({USER}); os.umask(0o022); os.chdir('/')\n"


def main() -> None:
    for words in LEFT:
        subprocess.Popen([sys.executable, "-c", f"import signal\n{BECOME}signal.pause()", *words])
    exec(BECOME)
    for folder in FOLDERS:
        Path(folder).mkdir(parents=True)
        os.utime(folder, (OLD, OLD))
    for file in FILES:
        Path(file).touch(mode=0o600)
        os.utime(file, (OLD, OLD))
    Path("/tmp/ray").chmod(0o777)
    Path("/tmp/dask-scratch-space").chmod(0o1777)
    Path("/tmp/ray/session_latest").symlink_to("/tmp/ray/session_2026-11-30_01-02-03_000004_5")
    Path("/tmp/ray/ray_current_cluster").write_text("127.0.0.1:6379")
    listeners = [socket.socket() for _ in PORTS]
    for listener, port in zip(listeners, PORTS, strict=True):
        with contextlib.suppress(OSError):  # another process has the port already
            listener.bind(("127.0.0.1", port))
            listener.listen()
    print("left", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
