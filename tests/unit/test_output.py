"""Lines that role code prints carry their group, role and rank, and stay whole."""

from __future__ import annotations

import pytest

import colocate


class Speaker(colocate.Role):
    @colocate.method
    def say(self) -> None:
        print("one\ntwo")
        print("half ", end="")
        print("and half")


def test_lines_of_role_code_are_labelled(capfd: pytest.CaptureFixture[str]) -> None:
    with colocate.connect("local", processes=True) as runtime:
        group = runtime.reserve(slots=2).spawn({"speaker": colocate.role(Speaker).on(slots=[1])}, name="talk")
        group.role("speaker", Speaker).say()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[talk")]
    assert lines == [f"[talk/speaker 0] {line}" for line in ("one", "two", "half and half")]
