"""Tracebacks for users: their own frames, and a count of the framework's."""

import contextlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import colocate
from colocate import Concat, Role, Scatter, method
from colocate._system import tracebacks
from colocate._system.tracebacks import format_exception, format_user_frames
from colocate.worker.serving.failure import is_out_of_memory


class Nested(Role):
    @method(dispatch=Scatter("numbers"), collect=Concat())
    def outer(self, numbers: list[int]) -> list[int]:
        return self.inner(numbers)  # type: ignore[return-value]

    @method
    def inner(self, numbers: list[int]) -> list[int]:
        return [1 // number for number in numbers]


def raised(strict: bool) -> colocate.RoleError:
    with colocate.connect(strict=strict) as runtime, runtime.reserve(slots=1) as pool:
        with pytest.raises(colocate.RoleError) as caught:
            pool.spawn({"nested": colocate.role(Nested)})["nested"].outer([0])
        return caught.value


def test_an_error_of_a_role() -> None:
    """A role's error has the frames of roles, the line of the call, and a count of the framework's frames."""
    error = raised(strict=True)
    trace = str(error.remote_traceback)
    assert re.findall(r", in (\w+)", trace)[:2] == ["outer", "inner"]
    assert "/colocate/" not in trace
    assert re.fullmatch(r".*test_tracebacks\.py:\d+", str(error.called_at))
    assert f"\nThe call was made at {error.called_at}\n" in str(error)
    text = format_exception(error)
    assert re.search(
        r'  File ".*test_tracebacks.py", line \d+, in raised\n(?:    .*\n)+  \.\.\. \d+ frames? of coloc', text
    )
    assert "direct cause" not in text  # the worker's traceback has the cause
    assert text.startswith(f"Traceback (most recent call last):\n{format_user_frames(error)}")


def test_lines_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that declares itself a library is skipped in `called_at`, which is then a line of its user."""
    (tmp_path / "built_on_it").mkdir()
    (tmp_path / "built_on_it" / "__init__.py").write_text("")
    (tmp_path / "built_on_it" / "groups.py").write_text("def call(method, *args):\n    return method(*args)\n")
    monkeypatch.syspath_prepend(tmp_path)
    call = importlib.import_module("built_on_it.groups").call

    def line() -> str:
        with pytest.raises(colocate.RoleError) as caught:
            call(nested.outer, [0])
        return str(caught.value.called_at)

    with colocate.connect() as runtime, runtime.reserve(slots=1) as pool:
        nested = pool.spawn({"nested": colocate.role(Nested)})["nested"]
        assert line() == f"{tmp_path / 'built_on_it' / 'groups.py'}:2"
        colocate.library("built_on_it")
        assert line().startswith(f"{__file__}:")
    with pytest.raises(colocate.ConfigError, match=r"no module of that name.*says colocate\.library\(__name__\)"):
        colocate.library("built_on_nothing")


def test_library_frames_belong_to_context_owner() -> None:
    """A contextlib frame belongs to the framework in its context managers, and to the user otherwise."""
    config = colocate.load_config({"pools": {"main": {"slots": 1}}})
    with pytest.raises(OSError, match="mine") as caught, colocate.launch(config):
        raise OSError("mine")
    assert "contextlib" not in format_exception(caught.value)

    @contextlib.contextmanager
    def others() -> Iterator[None]:
        yield

    with pytest.raises(KeyError) as theirs, others():
        raise KeyError("a")
    assert "colocate" not in format_exception(theirs.value).replace(__file__, "")


def test_traceback_without_user_frames_is_complete() -> None:
    """A traceback without user frames shows all frames."""
    with pytest.raises(colocate.ConfigError) as caught:
        colocate.load_config({"seed": "x"})
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    assert format_user_frames(error) == ""
    assert "frames of colocate" not in format_exception(error)
    assert "read_config" in format_exception(error)


def test_allocator_errors_are_out_of_memory() -> None:
    """Errors of torch's allocators, of CUDA and of its libraries are out-of-memory errors; a budget's error isn't."""
    pytest.importorskip("torch")  # Without torch, only Python's own error is one.
    for is_one in (
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ):
        assert is_out_of_memory(is_one)
    for is_none in (
        colocate.MemoryBudgetError("after one.train, 6 MiB of cpu are in use"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory"),
    ):
        assert not is_out_of_memory(is_none)


def test_declared_executor_frames_become_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor's frames become a count once its packages are declared."""
    monkeypatch.setattr(tracebacks, "_executors", set())
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("no JSON")
    assert "json/decoder.py" in format_exception(caught.value)
    tracebacks.add_folded_packages(("json", "colocate_of_nobody"))
    assert "json/decoder.py" not in format_exception(caught.value)
    assert "frames of colocate" in format_exception(caught.value)


SCRIPT = """
import sys
import colocate

class Failing(colocate.Role):
    @colocate.method
    def fail(self):
        raise ValueError("on purpose")

def called(role):
    getattr(role, sys.argv[1])()

if sys.argv[1] == "early":
    1 / 0
with colocate.connect() as runtime, runtime.reserve(slots=1) as pool:
    role = pool.spawn({"failing": colocate.role(Failing)}).role("failing", Failing)
    if sys.argv[1] == "own":
        1 / 0
    called(role)
"""


@pytest.mark.parametrize("what", ["fail", "fale", "early", "own"])
def test_failed_script_shows_own_frames(tmp_path: Path, what: str) -> None:
    """A failed script shows its own frames, a count of colocate's, and one hint; its own errors are unchanged."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py", what], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert ("frame" in done.stderr) == (what in ("fail", "fale"))
    assert "_calls" not in done.stderr
    assert ", in called\n" in done.stderr or what in ("early", "own")
    if what == "fale":
        assert done.stderr.count("did you mean") == 1
        assert "Did you mean" not in done.stderr
    if what in ("early", "own"):
        assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_connect_keeps_existing_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """`connect()` keeps an excepthook that is set already."""
    told: list[object] = []
    monkeypatch.setattr(sys, "excepthook", hook := lambda *error: told.append(error))
    with colocate.connect():
        assert sys.excepthook is hook
