"""Machines out of namespaces: each with a network, mounts, processes, a host name, /tmp and a boot id of its own.

The machines' bridge is in a namespace, too: this machine's own namespaces don't change. Everything ends with the block,
and with the process that runs the block. Root, iproute2 and util-linux are needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).parents[2]
NETWORK = "10.90.0"
PATIENCE_S = 60.0
_FIRST = """
import os, select, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
woken, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
signal.signal(signal.SIGCHLD, lambda *_: None)
while 0 not in select.select([0, woken], [], [])[0]:
    os.read(woken, 512)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""
"""The init process of a machine: reaps orphans, and exits at the end of its stdin."""
_BOOTS = r"""
set -e
state=$1 name=$2
shift 2
hostname "$name"
mkdir "$state/under"
mount --bind / "$state/under"  # where what is hidden below is still seen
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777,size=4g tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
for kept; do
    mkdir -p "$kept"
    mount --rbind "$state/under$kept" "$kept"
done
umount -l "$state/under"
rmdir "$state/under"
mkdir -p /run/lock /run/munge /run/slurm
mount --bind "$state/../hosts" /etc/hosts
mount --bind "$state/boot_id" /proc/sys/kernel/random/boot_id
if [ -d "$state/../etc-slurm" ]; then
    mount --bind "$state/../etc-slurm" /etc/slurm
fi
ip link set lo up
echo up
exec "$PYTHON" -I -S -c "$FIRST"
"""


def lacks() -> str | None:
    """Return the reason why this machine can't make others, or None."""
    if os.geteuid():
        return "machines out of namespaces need root"
    for program, package in {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}.items():
        if shutil.which(program) is None:
            return f"machines out of namespaces need {program}: apt-get install {package}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    return f"namespaces can't be made here: {tried.stderr.strip()}" if tried.returncode else None


@attrs.define(eq=False)
class Machine:
    """A machine, made by `Machines`.

    Attributes:
        name: The host name, n0, n1 ...
        address: The address of the interface eth0.
    """

    name: str
    address: str
    _all: Machines
    _outer: subprocess.Popen[str] | None = None
    _pid: int = 0  # of the init process

    def boot(self) -> None:
        """Start the machine, which is off, with a new boot id and an empty /tmp."""
        assert self._outer is None, f"{self.name} is on"
        state = self._all.state / self.name
        state.mkdir(exist_ok=True)
        (state / "boot_id").write_text(f"{uuid.uuid4()}\n")
        own = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        with (state / "console").open("a") as console:
            self._outer = subprocess.Popen(
                ["unshare", *own, "bash", "-c", _BOOTS, "boot", str(state), self.name, *_hidden()],
                env={**os.environ, "PYTHON": os.path.realpath(sys.executable), "FIRST": _FIRST},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=console,
                text=True,
                start_new_session=True,
            )
        assert self._outer.stdout is not None
        line = self._outer.stdout.readline()
        assert line == "up\n", f"{self.name} doesn't boot: {(state / 'console').read_text()}"
        (self._pid,) = _children(self._outer.pid)
        port, mac = f"p{self.name}", f"02:00:00:00:00:{int(self.address.rpartition('.')[2]):02x}"
        self._all.ip(f"link add {port} type veth peer name eth0 netns {self._pid}")
        self._all.ip(f"link set {port} master br0 up")
        for words in f"link set eth0 address {mac}", f"addr add {self.address}/24 dev eth0", "link set eth0 up":
            self.run("ip", *words.split())

    def kill(self) -> None:
        """Switch the machine off at once, without a shutdown."""
        outer, self._outer = self._outer, None
        if outer is not None:
            with outer:
                outer.kill()  # the init process ends with it, and with init all others
            self._all.ip(f"link del p{self.name}", check=False)

    def boot_again(self) -> None:
        """Switch the machine off and on."""
        self.kill()
        self.boot()

    def cut(self) -> None:
        """Drop all packets to and from the machine; its link stays up, so that nothing reports the cut."""
        self._all.ip(f"link set p{self.name} nomaster")

    def heal(self) -> None:
        """Undo a cut."""
        self._all.ip(f"link set p{self.name} master br0")

    def inside(self, *command: str, cwd: Path | str | None = None) -> list[str]:
        """Return the command line that runs a command on this machine."""
        enter = ["nsenter", "-t", str(self._pid), "-n", "-m", "-u", "-i", "-p", f"--wd={cwd or self._all.shared}"]
        return [*enter, "--", *command]

    def run(
        self,
        *command: str,
        check: bool = True,
        timeout: float = PATIENCE_S,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine to its end."""
        done = subprocess.run(
            self.inside(*command, cwd=cwd),
            env=self._all.environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"{self.name}: {command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start_driver(
        self,
        *command: str,
        log: Path | None = None,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on this machine in a session of its own, with its output in a file or in pipes."""
        printed: Any = subprocess.PIPE if log is None else log.open("a")
        with contextlib.nullcontext() if log is None else printed:
            started = subprocess.Popen(
                self.inside(*command, cwd=cwd),
                env=self._all.environment(env),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT if log is not None else subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self._all.started.append(started)
        return started

    def signal(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        """Send a signal to a process that `start_driver` has started, and to no other."""
        for pid in _children(process.pid):  # the process itself is nsenter, which waits for its child
            os.kill(pid, number)

    def processes(self) -> dict[int, str]:
        """Return the command lines on this machine by process id, as seen from outside."""
        namespace, found = os.readlink(f"/proc/{self._pid}/ns/pid"), {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == namespace and int(pid) != self._pid:
                    words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                    if words:  # a zombie has no command line
                        found[int(pid)] = words
        return found


class Machines:
    """A context manager for the machines n0 to n(count - 1), with the machines as items.

    Attributes:
        state: A folder that is deleted with the machines.
        shared: A folder in `state` that all machines see under this name, like this machine's disk. Each machine has a
            /tmp, /run and /dev/shm of its own.
        verbs: The actions for `ask`: cut, heal, kill, boot, and additions of a test.
    """

    def __init__(self, count: int) -> None:
        self.state = Path(tempfile.mkdtemp(prefix="machines-", dir="/var/tmp"))
        self.shared = self.state / "shared"
        self._machines = [Machine(f"n{i}", f"{NETWORK}.{10 + i}", self) for i in range(count)]
        self.started: list[subprocess.Popen[str]] = []
        self.verbs: dict[str, Callable[[Machine], object]] = {
            "cut": Machine.cut,
            "heal": Machine.heal,
            "kill": Machine.kill,
            "boot": Machine.boot,
        }
        self._stack = contextlib.ExitStack()

    def __getitem__(self, number: int) -> Machine:
        return self._machines[number]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines)

    def __len__(self) -> int:
        return len(self._machines)

    def __enter__(self) -> Machines:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.state, ignore_errors=True)
            self.shared.mkdir()
            self.shared.chmod(0o777)
            self.state.chmod(0o755)
            names = "".join(f"{each.address} {each.name}\n" for each in self)
            (self.state / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
            self._switch = subprocess.Popen(
                ["unshare", "--net", "--mount", "--", "sh", "-c", "echo up; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.enter_context(self._switch)
            stack.callback(self._switch.kill)
            assert self._switch.stdout is not None
            self._switch.stdout.readline()
            for words in "link set lo up", "link add br0 type bridge", "link set br0 up":
                self.ip(words)
            stack.callback(self._wait)
            for each in self:
                stack.callback(each.kill)
                each.boot()
            stack.enter_context(self._answering())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _wait(self) -> None:
        for each in self.started:  # all have ended with their machines
            each.wait()
            for stream in filter(None, (each.stdout, each.stderr)):
                stream.close()

    def ip(self, words: str, check: bool = True) -> None:
        """Run `ip` in the namespace of the bridge."""
        command = ["nsenter", "-t", str(self._switch.pid), "-n", "--", "ip", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"ip {words}: {done.stderr}"

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a command on a machine: with our programs, without variables of engines outside."""
        left = "RAY_", "DASK_", "SLURM_", "TMPDIR"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(left)}
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        asks = {"MACHINES": str(self.state / "asked"), "PYTHONPATH": str(ROOT), "PATH": path}
        ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
        return {**kept, **ray, **asks, **(more or {})}

    def do(self, verb: str, name: str) -> None:
        """Apply one of `verbs` to a machine, at a driver's request by `ask`."""
        (machine,) = (each for each in self if each.name == name)
        self.verbs[verb](machine)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.state / "asked"))
        listener.listen()

        def obey(made: socket.socket) -> None:
            with made, made.makefile("rw") as file:
                trouble = ""
                try:
                    self.do(*json.loads(file.readline()))
                except Exception as error:
                    trouble = repr(error)
                with contextlib.suppress(OSError):
                    file.write(json.dumps(trouble) + "\n")
                    file.flush()

        def answer() -> None:
            obeying: list[threading.Thread] = []
            while True:
                try:
                    made, _ = listener.accept()
                except OSError:  # the listener is closed
                    break
                obeying.append(threading.Thread(target=obey, args=(made,)))
                obeying[-1].start()
            for each in obeying:
                each.join()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join()


def ask(verb: str, name: str) -> float:
    """On a machine, request an action on a machine from outside; return the `time.time()` of its end."""
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(os.environ["MACHINES"])
        with made.makefile("rw") as file:
            file.write(json.dumps([verb, name]) + "\n")
            file.flush()
            trouble = json.loads(file.readline())
    assert not trouble, trouble
    return time.time()


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in found.split()]


def _hidden() -> list[str]:
    """Return the folders that machines need below /tmp and /run, which each machine has of its own."""
    needed = {str(ROOT), sys.prefix, sys.base_prefix, *(each for each in sys.path if os.path.isdir(each))}
    hidden = sorted(each for each in needed if each.startswith(("/tmp/", "/run/")))
    return [each for i, each in enumerate(hidden) if not any(each.startswith(f"{one}/") for one in hidden[:i])]
