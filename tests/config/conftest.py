import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROLES = """
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from colocate import Role, checks, method, needs

if TYPE_CHECKING:
    import nothing_like_this


class Actor(Role):
    def __init__(
        self,
        hidden: int,
        lr: float = 1e-5,
        kind: Literal["policy", "value"] = "policy",
        sizes: list[int] | None = None,
        names: dict[str, str] | None = None,
        frozen: bool = False,
        anything: Any = None,
        unknown: nothing_like_this.Type | None = None,
    ) -> None:
        self.hidden = hidden

    @method
    def act(self) -> int:
        return self.hidden


@needs("process_group")
class Together(Role):
    @method
    def act(self) -> int:
        return 1


def wrong(options, own, before):
    if options["size"] % 2:
        yield "size", "must be even"
    if options["beside"] not in before:
        yield ("names", 0), f"{own.target} comes after {', '.join(before) or 'none'}"
    if options["size"] == 100:
        raise ArithmeticError("no idea")


@checks(wrong)
class Checked(Role):
    def __init__(self, size: int = 3, beside: str = "actor", names: list[str] | None = None) -> None: ...

    @method
    def act(self) -> int:
        return 1


class Below(Checked):
    pass


def wrong_job(options, groups):
    if options["steps"] > len(groups):
        yield "steps", f"more than {', '.join(f'{name} ({len(roles)})' for name, roles in groups.items())}"


@checks(wrong_job)
def judged(run: Any, *, steps: int = 3) -> None: ...


class Open(Role):
    def __init__(self, **options: Any) -> None: ...

    @method
    def act(self) -> int:
        return 1


def train(run: Any, *, steps: int = 3, shuffle: bool = False) -> None: ...


def bare(run: Any) -> None: ...


def untyped(run, steps): ...


async def waits(run: Any) -> None: ...


def yields(run: Any) -> Any:
    yield run


def alone() -> None: ...


def named(*, run: Any) -> None: ...
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a config, with the module of its roles (`config_roles`) importable."""
    (tmp_path / "config_roles.py").write_text(ROLES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def file(text: str) -> Path:
        path = tmp_path / "demo.yaml"
        path.write_text(textwrap.dedent(text))
        return path

    return file
