"""The example of the page Write an executor on several machines, with posts started by ssh."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.distributions.install import Installed

import colocate
from colocate import First, Role, method
from colocate.errors import ConfigError, PlacementError, WorkerDied
from colocate.testing.executors import Smoke
from colocate.testing.waiting import PATIENCE_S

HOSTS = ["127.0.0.2", "127.0.0.3"]  # two addresses of this machine stand for two machines
FAKE = """#!/bin/sh
# As ssh does: options, a machine, and words that a shell there runs.
while [ "${1#-}" != "$1" ]; do shift 2; done
[ "$1" = 127.0.0.4 ] && exit 255
shift
exec sh -c "exec $*"
"""
SSHD = """
Port {port}
ListenAddress 127.0.0.2
ListenAddress 127.0.0.3
HostKey {folder}/host
AuthorizedKeysFile {folder}/me.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
SetEnv PYTHONPATH={path}
"""


class Where(Role):
    """A role that returns its pid, and sums over ranks."""

    @method
    def pid(self) -> int:
        return os.getpid()

    @method(collect=First())
    def total(self) -> float:
        import torch

        value = torch.ones(1)
        torch.distributed.all_reduce(value, group=self.ctx.process_group())
        return float(value)

    @method
    def wait(self) -> None:
        time.sleep(PATIENCE_S)


@pytest.fixture(scope="module", autouse=True)
def outpost(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Install the example, and an `ssh` that stays on this machine."""
    programs = tmp_path_factory.mktemp("programs")
    (programs / "ssh").write_text(FAKE)
    (programs / "ssh").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        folder = str(installed("outpost"))
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", folder, prepend=":")
        patch.setenv("PATH", str(programs), prepend=":")
        yield str(programs)


class TestTwoHosts(Smoke):
    """Each pair of slots lies on two hosts."""

    executor = "outpost"
    options: ClassVar = {"hosts": HOSTS}
    private: ClassVar = {}
    strategy = "spread"
    last_words = "its post ended with exit code -9"

    def test_the_slots_lie_on_both(self, pair: colocate.ColocatedGroup) -> None:
        """The two slots lie on the two hosts; otherwise these tests would prove nothing."""
        assert [slot.node for slot in pair.owner.slots] == HOSTS


@pytest.mark.parametrize("env", [{}, {"LONG": "x" * 200_000}], ids=["after", "amid"])
def test_a_host_that_cannot_be_reached(env: dict[str, str]) -> None:
    """An unreachable host is named in the error, and no slot stays held, at whichever moment ssh ends.

    The long variable exceeds a pipe's capacity, so that ssh has ended before all of it is written.
    """
    with colocate.connect("outpost", hosts=["127.0.0.2", "127.0.0.4"], cpus=1) as runtime:
        with pytest.raises(PlacementError, match=r"the post on 127\.0\.0\.4 ended at once, with exit code 255"):
            runtime.reserve(2, strategy="spread", env=env)
        assert not runtime.audit()
        runtime.reserve(1, timeout=0)


def test_a_host_that_would_be_an_option() -> None:
    with pytest.raises(ConfigError, match="'-oProxyCommand=evil' isn't the name of a machine"):
        colocate.connect("outpost", hosts=["-oProxyCommand=evil"])


@pytest.fixture
def through(outpost: str, tmp_path: Path) -> Iterator[list[str]]:
    """Start a real sshd on both addresses; yield the ssh command that reaches it."""
    path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if each != outpost)
    sshd = shutil.which("sshd", path=f"{path}:/usr/sbin")
    ssh, keygen = shutil.which("ssh", path=path), shutil.which("ssh-keygen", path=path)
    if sshd is None or ssh is None or keygen is None:
        pytest.skip("there is no sshd: apt-get install openssh-server")
    if os.geteuid():
        pytest.skip("sshd in a namespace of its own needs root")
    for name in "host", "me":
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    config = tmp_path / "sshd_config"
    config.write_text(SSHD.format(port=port, folder=tmp_path, path=os.environ["PYTHONPATH"]))
    own = f"mount -t tmpfs none /run && mkdir /run/sshd && exec {sshd} -D -e -f {config}"
    process = subprocess.Popen(["unshare", "--mount", "sh", "-c", own], stderr=subprocess.PIPE, text=True)
    options = ["-F", "none", "-p", str(port), "-i", str(tmp_path / "me"), "-o", "BatchMode=yes"]
    options += ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={tmp_path}/known", "-o", "LogLevel=ERROR"]
    try:
        assert process.stderr is not None
        line = ""
        while "Server listening" not in line:
            line = process.stderr.readline()
            if not line:
                pytest.skip(f"sshd doesn't start here: exit code {process.wait()}")
        yield [ssh, *options]
    finally:
        process.kill()
        process.communicate()


def test_by_a_real_sshd(through: list[str]) -> None:
    """Over a real sshd, values and process groups cross between hosts, and a killed worker is reported."""
    options: dict[str, Any] = {"hosts": HOSTS, "through": through}
    with colocate.connect("outpost", **options) as runtime, runtime.reserve(2, strategy="spread") as pool:
        group = pool.spawn({"where": colocate.role(Where)})
        where = group.role("where", Where)
        assert [slot.node for slot in pool.slots] == HOSTS
        assert where.total() == 2.0
        pids = where.pid()
        call = where.wait.submit()
        os.kill(pids[1], signal.SIGKILL)
        error = call.exception(PATIENCE_S)
        assert isinstance(error, WorkerDied)
        assert (error.rank, error.node) == (1, HOSTS[1])
        assert not runtime.audit()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
