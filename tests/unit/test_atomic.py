"""Folders that get their name when they are complete, whatever was there and whatever goes wrong."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from colocate._system import files as atomic
from colocate._system.files import atomic_folder
from colocate.testing.waiting import PATIENCE_S


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """A folder's name, alone in its parent."""
    return tmp_path / "all" / "final"


def written(final: Path, text: str) -> None:
    """Put a folder there that says something."""
    with atomic_folder(final) as part:
        (part / "text").write_text(text)


def found(final: Path) -> dict[str, str]:
    """What is there, by name."""
    return {path.name: (path / "text").read_text() for path in final.parent.iterdir()}


def test_renaming_fails(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one has its name back."""
    written(final, "old")
    rename = Path.rename

    def failing(path: Path, to: Path) -> Path:
        if path.name.startswith(".part-") and to == final:
            raise OSError("on purpose")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr(atomic, "_exchange", lambda path, other: False)
    with pytest.raises(OSError, match="on purpose"):
        written(final, "new")
    assert found(final) == {"final": "old"}


def test_interrupted_while_it_gets_its_name(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C there, on the main thread: one of the two is there, whole, and nothing else."""
    rename, at_it, may = Path.rename, threading.Event(), threading.Event()

    def slow(path: Path, to: Path) -> Path:
        if path.name.startswith(".part-") and to == final:
            at_it.set()
            assert may.wait(PATIENCE_S)
        return rename(path, to)

    def interrupt() -> None:
        assert at_it.wait(PATIENCE_S)
        signal.raise_signal(signal.SIGINT)

    written(final, "old")
    monkeypatch.setattr(Path, "rename", slow)
    monkeypatch.setattr(atomic, "_exchange", lambda path, other: False)
    remove = atomic._discard

    def discard(part: Path) -> None:
        threading.Timer(0.1, may.set).start()  # it is waited for there
        remove(part)

    monkeypatch.setattr(atomic, "_discard", discard)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        written(final, "new")
    interrupting.join()
    assert found(final) == {"final": "new"}
