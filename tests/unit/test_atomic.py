"""A folder gets its name when it is complete, whatever had the name before and whatever fails."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

import colocate
from colocate._system import files as atomic
from colocate._system.files import atomic_folder
from colocate.testing.waiting import PATIENCE_S, wait_until


def written_and_interrupted(final: Path) -> None:
    """Write a folder, and wait for an interruption."""
    written(final, "new")
    wait_until(lambda: False, "the interruption comes")


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """Return a folder's path; the folder is alone in its parent."""
    return tmp_path / "all" / "final"


def written(final: Path, text: str) -> None:
    """Write a folder with one file, which holds `text`."""
    with atomic_folder(final) as part:
        (part / "text").write_text(text)


def found(final: Path) -> dict[str, str]:
    """Return the text in each folder beside `final`, by name."""
    return {path.name: (path / "text").read_text() for path in final.parent.iterdir()}


def test_renaming_fails(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the new folder can't be renamed, the old one has its name again."""
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


def test_interrupted_rename_leaves_complete_folder(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the rename is raised when the complete new folder is the only one there."""
    rename, at_it, may = Path.rename, threading.Event(), threading.Event()

    def slow(path: Path, to: Path) -> Path:
        if path.name.startswith(".part-") and to == final:
            at_it.set()
            assert may.wait(PATIENCE_S)
        return rename(path, to)

    def interrupt() -> None:
        assert at_it.wait(PATIENCE_S)
        signal.raise_signal(signal.SIGINT)
        threading.Timer(0.1, may.set).start()

    written(final, "old")
    monkeypatch.setattr(Path, "rename", slow)
    monkeypatch.setattr(atomic, "_exchange", lambda path, other: False)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with colocate.connect(), pytest.raises(KeyboardInterrupt):
        written_and_interrupted(final)
    interrupting.join()
    assert found(final) == {"final": "new"}
