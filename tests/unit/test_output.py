"""Lines that role code prints carry its role and rank; others don't."""

from __future__ import annotations

import io

import pytest

import colocate
from colocate._role import context
from colocate.worker.output import LabelledStream, split_label


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
