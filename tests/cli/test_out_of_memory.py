"""The page "Out of memory: whose is it?": its commands, each in its own terminal, print the page's output."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tests.cli.conftest import CommandLine
from tests.cli.test_debug import Screen
from tests.cli.test_it_hangs import _read
from tests.docs.blocks import ROOT, blocks_of
from tests.docs.outputs import matches
from tests.docs.pages import _commands

from colocate_run.cli.cluster import Cluster, find_strays
from colocate_run.cli.doctor import _describe_devices

PAGE = ROOT / "docs" / "out-of-memory.md"
GIB = 1 << 30
HOLDS = """
import sys, torch
torch.multiprocessing.set_sharing_strategy("file_system")
held = torch.zeros(1 << 20).share_memory_()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sharer() -> Iterator[subprocess.Popen[str]]:
    """Start a process with a tensor in /dev/shm."""
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout is not None
        assert found.stdout.readline() == "held\n"
        yield found
        found.communicate(timeout=60)


@pytest.fixture
def played(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], str]]:
    """Return functions that run colocate's commands with the memory of the page's container."""
    host = psutil.virtual_memory()._replace(total=256 * GIB, available=200 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr("colocate_run.cli.doctor.read_free_memory", lambda: 5 * GIB // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=64 << 20, free=3 << 20))
    monkeypatch.setattr("colocate.driver.list_strays", list)

    def audit() -> str:
        assert find_strays(Cluster(), json=False) == 0
        return capsys.readouterr().out

    def doctor() -> str:
        return "\n".join(f"{name} {text}" for name, text in _describe_devices().items())

    return {"colocate audit": audit, "colocate doctor": doctor}


@pytest.mark.long
def test_the_commands_of_the_page(
    colocate: CommandLine, sharer: subprocess.Popen[str], played: dict[str, Callable[[], str]]
) -> None:
    """Each command prints the limits, kills and files of the page; under cgroup v1, by the names in its table."""
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `(/sys/fs/cgroup/\S+)` \| `(/sys/fs/cgroup/\S+)` \|$", page, re.MULTILINE)
    assert len(rows) == 3
    commands = [each for block in blocks_of(PAGE) if block.language == "console" for each in _commands(block)]
    assert [each.text.split()[0] for each in commands] == ["colocate", "cat", "grep", "df", "ls", "colocate"]
    for each in commands:
        assert each.shown is not None
        if each.text in played:
            assert matches(each.shown, output := played[each.text]()), f"{each.text} shows\n{output}"
            continue
        _, environment = colocate.command()
        typed = shlex.split(_of_this_machine(each.text, rows))
        if any(word.startswith("/sys/") and not Path(word).exists() for word in typed):
            continue  # this machine has no such cgroup file
        shown = Screen(typed, colocate.folder, environment | {"TERM": "xterm", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"})
        try:
            found = _read(shown, colocate.folder)
        finally:
            shown.close()
        if each.text.startswith("ls "):
            assert re.search(rf"^FILE torch_{sharer.pid}_\d+_\d+$", _numbers(found), re.MULTILINE), found
            assert re.search(r"^FILE torch_\d+_\d+_\d+$", _numbers(each.shown), re.MULTILINE)
        else:
            assert matches(_numbers(each.shown), _numbers(found)), f"{each.text} shows\n{found}"


def _of_this_machine(command: str, rows: list[tuple[str, str]]) -> str:
    if Path(rows[0][1]).exists():
        for unified, of_v1 in rows:
            command = command.replace(unified, of_v1)
    return command


def _numbers(text: str) -> str:
    """Return the text without sizes and without the columns of `ls` before a name."""
    text = re.sub(r"^-rw-[-rw]+ +1 \S+ \S+ +\d+ \w+ +\d+ +[\d:]+ +", "FILE ", text, flags=re.MULTILINE)
    text = re.sub(r"^(tmpfs|shm) ", "tmpfs ", text, flags=re.MULTILINE)
    text = re.sub(r"^(\d+|max)$", "N", text, flags=re.MULTILINE)
    text = re.sub(r"^oom_kill \d+$", "oom_kill N", text, flags=re.MULTILINE)
    return re.sub(r"(?<![\w./])\d+(\.\d+)?([KMGT%]| [KMGT]iB)?(?= |$)", "N", text, flags=re.MULTILINE)
