"""The leak fixture finds what it is there for, and the pytest plugin costs nothing to those who don't use it."""

import mmap
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from colocate.testing import leaks
from colocate.testing.leaks import Watch, shared


@contextmanager
def a_thread() -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def a_process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield
        process.kill()


@contextmanager
def a_zombie() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield
    process.wait()


@contextmanager
def a_descriptor() -> Iterator[None]:
    read, write = os.pipe()
    yield
    os.close(read)
    os.close(write)


@contextmanager
def memory() -> Iterator[None]:
    file = os.memfd_create("forgotten")
    os.truncate(file, 4096)
    with mmap.mmap(file, 4096):
        os.close(file)
        yield


@contextmanager
def a_file() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="forgotten"):
        yield


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (a_thread, "thread 'forgotten'"),
        (a_process, "input()"),
        (a_zombie, "a zombie"),
        (a_descriptor, "pipe:"),
        (memory, "memfd:forgotten"),
        (a_file, "temporary file"),
    ],
)
def test_what_is_left_is_found(
    monkeypatch: pytest.MonkeyPatch, leave: Callable[[], AbstractContextManager[None]], words: str
) -> None:
    """Everything that may be left is found and named; once it is gone there is nothing to say."""
    monkeypatch.setattr(leaks, "_PATIENCE_S", 0.0)
    outer, inner = Watch(), Watch()
    with leave():
        with pytest.raises(AssertionError, match=r"^left behind: ") as caught:
            inner.check()
        assert words in str(caught.value)
    outer.check()


def test_what_is_shared_is_no_leak() -> None:
    """What several tests share is its maker's to close."""
    outer = Watch()
    with shared():
        read, write = os.pipe()
    assert outer.leaked() == []
    os.close(read)
    os.close(write)
    outer.check()


def test_what_a_gpu_needs_is_no_leak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA opens its devices when it is first used, and closes them when the process ends."""
    watch = Watch()
    with (tmp_path / "nvidia0").open("w"):
        assert any("nvidia0" in words for words in watch.leaked())
        monkeypatch.setattr(leaks, "_OF_GPUS", (*leaks._OF_GPUS, str(tmp_path / "nvidia")))
        assert watch.leaked() == []
    watch.check()


def test_what_goes_by_itself_is_waited_for() -> None:
    """Ends that come asynchronously are no leaks."""
    watch = Watch()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    threading.Timer(0.05, release.set).start()
    watch.check()
    assert not thread.is_alive()


def test_in_a_project(tmp_path: Path) -> None:
    """Another project's tests have the fixture as soon as colocate is installed, and use it by naming it."""
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        import os

        from colocate.testing import leaks

        leaks._PATIENCE_S = 0.0

        def test_clean(no_leaks):
            pass

        def test_leaking(no_leaks):
            os.pipe()

        def test_without():
            os.pipe()
        """)
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base"), "."],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert "3 passed, 1 error" in run.stdout
    assert "file descriptor" in run.stdout


def test_the_plugin_loads_nothing() -> None:
    """The plugin imports no torch, no engine and nothing that it may need later."""
    code = (
        "import sys, colocate.testing.pytest_plugin; "
        "print([name for name in ('torch', 'numpy', 'psutil', 'ray', 'distributed', 'colocate.testing.leaks', "
        "'colocate.testing.executors', 'colocate_local') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_test_says_what_holds() -> None:
    """Each test of the executor suite has a docstring: a third party reads it when the test fails."""
    from colocate.testing.executors import ExecutorSuite

    tests = [value for area in ExecutorSuite.__mro__ for name, value in vars(area).items() if name.startswith("test")]
    assert [test.__name__ for test in tests if not test.__doc__] == []
