"""docs/reference/trust.md lists all listening sockets, and strangers achieve nothing at ours."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.trust import MEASURED, Listening

import colocate
from colocate import Runtime
from colocate.testing.probes.plain import Echo
from colocate.wire import connect, encode, new_key

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "trust.md"
WAIT_S = 20.0


def documented(executor: str) -> set[Listening]:
    """Return the page's rows for an executor."""
    rows = [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in PAGE.read_text().splitlines()]
    return {Listening(*row[1:4]) for row in rows if len(row) == 6 and row[0] == executor}


@pytest.mark.parametrize(
    "executor", [each if "local" in each else pytest.param(each, marks=pytest.mark.long) for each in MEASURED]
)
def test_trust_page_matches_measured_listeners(executor: str) -> None:
    """The page lists who listens, on what kind of socket, and for whom."""
    assert MEASURED[executor]() == documented(executor)


class Bomb:
    """An object whose unpickling makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@contextmanager
def spawned(executor: str) -> Iterator[Runtime]:
    options = {"processes": True} if executor == "local" else {}
    with colocate.connect(executor, cpus=2, **options) as runtime, runtime.reserve(2) as pool:
        pool.spawn({"echo": colocate.role(Echo)}, name="target")
        yield runtime


def ours() -> list[str]:
    """Return the addresses of colocate's listening sockets in this process and below it."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {row[6]: row[7][1:] for row in rows if len(row) == 8 and row[7].startswith("@colocate-")}
    found: set[str] = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                inode = os.readlink(entry).removeprefix("socket:[").removesuffix("]")
            except FileNotFoundError:  # The file was just closed.
                continue
            if inode in names:
                found.add(names[inode])
    return sorted(found)


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.long), "dask"])
def test_strangers(executor: str, tmp_path: Path) -> None:
    """A stranger of the same user who is silent, sends a pickle or has another key achieves and blocks nothing."""
    pytest.importorskip({"local": "psutil", "ray": "ray", "dask": "distributed"}[executor])
    bomb = pickle.dumps(Bomb(tmp_path / "made"))
    with encode((Bomb(tmp_path / "made"),)) as frame:  # A driver would send this.
        well_formed = bytes(frame._inline)
    with spawned(executor) as runtime, ExitStack() as silent:
        echo = runtime.groups["target"].role("echo", Echo)
        with echo.first.keep(b"x" * (1 << 20)) as kept:
            assert len(echo.first(kept.ref)) == 1 << 20  # From here on the workers listen.
            addresses = ours()
            if executor != "local":
                assert len(addresses) >= 2, "each slot's keeper listens"
            for address in addresses:
                for words in (well_formed, bomb, b"", b"GET / HTTP/1.1\r\n\r\n", bomb * 20):
                    stranger = silent.enter_context(socket.socket(socket.AF_UNIX))
                    stranger.settimeout(WAIT_S)
                    stranger.connect(f"\0{address}")
                    with suppress(BrokenPipeError):  # The server may have closed already.
                        stranger.sendall(words)
                    if len(words) >= 64:  # This is a nonce without a proof.
                        with suppress(ConnectionResetError):
                            while stranger.recv(100):
                                pass
                with pytest.raises(ConnectionRefusedError, match="the keys differ"):
                    connect(f"unix:{address}", new_key(), WAIT_S)
            assert echo.echo(1) == [1, 1]
            assert len(echo.first(kept.ref)) == 1 << 20
        with runtime.reserve(1, cpus=0) as pool:  # Silent strangers don't delay new workers.
            assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).echo(2) == [2]
    assert not (tmp_path / "made").exists()
