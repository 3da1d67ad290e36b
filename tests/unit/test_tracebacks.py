"""Tracebacks as users read them: their own frames, and the framework's as a number."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator

import pytest

import colocate
from colocate import Concat, Role, Scatter, method
from colocate._system import tracebacks
from colocate._system.lines import is_own_code
from colocate._system.tracebacks import frames_of_users, told
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


@pytest.mark.parametrize("strict", [False, True])
def test_a_remote_traceback_has_the_frames_of_roles(strict: bool) -> None:
    error = raised(strict)
    trace = str(error.remote_traceback)
    assert re.findall(r", in (\w+)", trace)[:2] == ["outer", "inner"]
    assert "/colocate/" not in trace


def test_an_error_names_the_line_that_made_the_call() -> None:
    error = raised(False)
    assert re.fullmatch(r".*test_tracebacks\.py:\d+", str(error.called_at))
    assert f"\nThe call was made at {error.called_at}\n" in str(error)


def test_frames_of_the_framework_are_a_number() -> None:
    error = raised(False)
    text = told(error)
    assert re.search(
        r'  File ".*test_tracebacks.py", line \d+, in raised\n(?:    .*\n)+  \.\.\. \d+ frames? of coloc', text
    )
    assert "direct cause" not in text  # the traceback of the worker tells the cause
    assert text.startswith(f"Traceback (most recent call last):\n{frames_of_users(error)}")


def test_what_stands_between_them_belongs_to_them() -> None:
    """A context manager of the framework brings a frame of contextlib's; one of users' is theirs."""
    config = colocate.load_config({"pools": {"main": {"slots": 1}}})
    with pytest.raises(OSError, match="mine") as caught, colocate.launch(config):
        raise OSError("mine")
    assert "contextlib" not in told(caught.value)

    @contextlib.contextmanager
    def others() -> Iterator[None]:
        yield

    with pytest.raises(KeyError) as theirs, others():
        raise KeyError("a")
    assert "colocate" not in told(theirs.value).replace(__file__, "")


def test_without_users_frames_what_a_role_raised_is_told_by_its_own() -> None:
    """A job's role fails while the framework calls it: nobody's frames but the framework's are on the way."""
    error = raised(False)
    trace = error.__traceback__
    while trace is not None and not is_own_code(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error.__traceback__ = trace
    text = told(error)
    assert frames_of_users(error) == ""
    assert re.match(r"Traceback \(most recent call last\):\n  \.\.\. \d+ frames? of colocate\ncolocate", text), text


def test_without_users_frames_all_of_them_are_shown() -> None:
    """The fault is the framework's then."""
    with pytest.raises(colocate.ConfigError) as caught:
        colocate.load_config({"seed": "x"})
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    assert frames_of_users(error) == ""
    assert "frames of colocate" not in told(error)
    assert "read_config" in told(error)


class Broken(Role):
    def __init__(self) -> None:
        raise ValueError("at the start")

    @method
    def never(self) -> None: ...


def test_a_failed_spawn_shows_no_more_of_the_framework_than_a_call_does() -> None:
    """Which frames of it have found out says nothing; users' own, as those of a dispatch, stay."""
    raising = pytest.raises(colocate.RoleStartError, match="at the start")
    with colocate.connect() as runtime, runtime.reserve(slots=1) as pool, raising as caught:
        pool.spawn({"broken": colocate.role(Broken)})
    assert [entry.name for entry in caught.traceback] == [
        "test_a_failed_spawn_shows_no_more_of_the_framework_than_a_call_does",
        "spawn",
        "_spawn",
    ]
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_group_of_what_roles_have_raised_is_told_by_these() -> None:
    """Closing raises what no call has told: where the framework has put that together says nothing."""
    with colocate.connect() as runtime:
        nested = runtime.reserve(slots=1).spawn({"nested": colocate.role(Nested)})["nested"]
        nested.outer.keep([0])
        nested.outer([1])  # that one has failed by now
        with pytest.raises(ExceptionGroup) as caught:
            runtime.close()
    error = caught.value
    trace = error.__traceback__
    while trace is not None and not is_own_code(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error.__traceback__ = trace
    assert frames_of_users(error) == ""
    text = told(error)
    assert "/colocate/" not in text.replace(__file__, "")
    assert "direct cause" not in text
    assert "in inner" in text


def test_what_cannot_be_told_to_its_end_is_told_in_part() -> None:
    """Of more groups, one in another, than calls can be nested, the outermost is told."""
    error: Exception = ValueError("the innermost")
    for _ in range(sys.getrecursionlimit()):
        error = ExceptionGroup("a group", [error])
    with pytest.raises(ExceptionGroup) as caught:
        raise error
    text = told(caught.value)
    assert "raise error" in text
    assert "ExceptionGroup: a group (1 sub-exception)" in text
    assert "can't be told: RecursionError" in text


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (colocate.MemoryBudgetError("after one.train, 6 MiB of cpu are in use"), False),  # it says who has what itself
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_out_of_memory(error: BaseException, is_one: bool) -> None:
    """Of torch's allocators, of CUDA's own, and of its libraries."""
    pytest.importorskip("torch")
    assert is_out_of_memory(error) is is_one


def test_frames_of_an_executor_are_a_number_once_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which packages are its own: nobody knows them by name."""
    monkeypatch.setattr(tracebacks, "_executors", set())
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("no JSON")
    assert "json/decoder.py" in told(caught.value)
    tracebacks.fold_frames_of(("json", "colocate_of_nobody"))
    assert "json/decoder.py" not in told(caught.value)
    assert "frames of colocate" in told(caught.value)
