"""Lines that role code prints carry its role and rank; others don't."""

from __future__ import annotations

import io

import pytest

import colocate
from colocate._role import context
from colocate.worker.serving.output import LabelledStream, Tail, shown, split_label, written_over


class Speaker(colocate.Role):
    @colocate.method()
    def say(self, text: str) -> None:
        print(text)


def test_lines_of_role_code_are_labelled() -> None:
    raw = io.BytesIO()
    stream = LabelledStream(raw, write_through=True)
    ctx = context.Context(1, 2, 0, "here", "actor", "policy", 0, 0, {})
    print("before", file=stream)
    token = context.set_current(ctx)
    print("one\ntwo", file=stream)
    print("half ", end="", file=stream)
    print("and half", file=stream)
    print(file=stream)
    context.reset_current(token)
    print("after", file=stream)
    lines = raw.getvalue().decode().removesuffix("\n").split("\n")
    raw_lines = [split_label(line) for line in lines]
    assert raw_lines == [
        (None, "before"),
        ("actor 1", "one"),
        ("actor 1", "two"),
        ("actor 1", "half and half"),
        ("actor 1", ""),
        (None, "after"),
    ]


def test_the_driver_shows_group_role_and_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with colocate.connect("local", processes=True) as runtime:
        group = runtime.reserve(slots=2).spawn({"speaker": colocate.role(Speaker).on(slots=[1])}, name="talk")
        group.role("speaker", Speaker).say("hello")
    assert "[talk/speaker 0] hello\n" in capfd.readouterr().err


def test_of_a_line_that_is_written_over_the_last_state_is_shown() -> None:
    assert [shown(line) for line in ("", "plain", "\r1\r2", "1\r2\r", "1\r\n".strip("\n"), "\r    \rnext")] == [
        *("", "plain", "2", "2", "1", "next"),
    ]


def test_all_that_is_written_over_needn_t_be_kept() -> None:
    rest = b""
    for state in (b"1 of 3\r", b"2 of", b" 3\r", b"3 of 3\r"):
        rest = written_over(rest + state)
    assert rest == b"3 of 3\r"
    assert shown(rest.decode() + "done") == "done"


def test_the_last_lines_have_one_state_of_each_line() -> None:
    tail = Tail()
    for line in ("before", "1 of 2\r", "2 of 2\r", "2 of 2", "after"):
        tail.append(line)
    assert list(tail) == ["before", "2 of 2", "after"]
