"""Machines are what they are taken for: apart from each other, cut silently, killed at once, new when they boot."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.clusters.engines import OnMachines
from tests.clusters.machines import Machines

from colocate.testing.waiting import wait_until

LISTENS = """
import socket
listener = socket.create_server(("0.0.0.0", 7000))
print("listens", flush=True)
while True:
    listener.accept()[0].sendall(b"here")
"""
ASKS = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=1) as made:
    print(made.recv(4).decode())
"""
WHERE = """
import sys
import colocate
from colocate import Role, method

class Where(Role):
    @method
    def where(self):
        import os
        return os.uname().nodename

with colocate.connect(sys.argv[1], address=sys.argv[2]) as runtime:
    with runtime.reserve(slots=2, strategy="spread") as pool:
        print(*sorted(pool.spawn({"where": colocate.role(Where)})["where"].where()))
"""


def test_apart_and_together(machines: Callable[[int], Machines]) -> None:
    found = machines(2)
    one, two = found
    ids = {each.run("cat", "/proc/sys/kernel/random/boot_id").stdout for each in found}
    assert len(ids | {Path("/proc/sys/kernel/random/boot_id").read_text()}) == 3
    assert [each.run("hostname").stdout for each in found] == ["n0\n", "n1\n"]
    one.run("touch", "/tmp/mine", "/dev/shm/mine", f"{found.shared}/ours")
    assert two.run("ls", "/tmp/mine", check=False).returncode
    assert not Path("/dev/shm/mine").exists()
    two.run("ls", f"{found.shared}/ours")
    two.boot_again()
    assert two.run("cat", "/proc/sys/kernel/random/boot_id").stdout not in ids
    assert two.processes() == {}


def test_cut_and_healed(machines: Callable[[int], Machines]) -> None:
    found = machines(2)
    one, two = found
    listens = two.start("python", "-c", LISTENS)
    assert listens.stdout is not None
    assert listens.stdout.readline() == "listens\n"

    def asks() -> subprocess.CompletedProcess[str]:
        return one.run("python", "-c", ASKS, two.address, check=False)

    assert asks().stdout == "here\n"
    two.cut()
    assert "timed out" in asks().stderr  # nobody says that nobody is there
    assert "LOWER_UP" in two.run("ip", "link", "show", "eth0").stdout
    two.heal()
    wait_until(lambda: asks().stdout == "here\n", "it is there again")
    two.kill()
    assert listens.wait() != 0
    assert asks().stdout == ""


def test_nothing_is_left(namespaces: None) -> None:
    """Of a test process that was killed neither."""
    script = "from tests.clusters.machines import Machines\nwith Machines(2) as m: print(m.state, flush=True); input()"
    before = links()
    running = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with running:
        assert running.stdout is not None
        state = Path(running.stdout.readline().strip())
        wait_until(lambda: len(of(state)) >= 2, "its machines run")
        assert links() == before
        running.send_signal(signal.SIGKILL)
    wait_until(lambda: not of(state), "its machines have ended")
    assert links() == before
    shutil.rmtree(state)
    with Machines(1) as again:
        assert len(again) == 1
    assert not again.state.exists()


@pytest.mark.parametrize("on", [0, 1])
def test_an_engine_on_them(cluster: Callable[..., OnMachines], on: int) -> None:
    """Workers run where they are reserved, for drivers on any machine."""
    found = cluster(2)
    script = found.machines.shared / "where.py"
    script.write_text(WHERE)
    driver = found.driver(script, on=on)
    out, err = driver.communicate(timeout=120)
    assert out.splitlines()[-1:] == ["n1 n2"], err


def links() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def of(state: Path) -> list[int]:
    """The processes that were started with its folder in their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if str(state).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
        except OSError:
            pass
    return found
