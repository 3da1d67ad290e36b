"""Options become values of their annotated types, such as paths, enumerations and dtypes, or are mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.config.test_mistakes import mistakes

import colocate
from colocate import Context
from colocate.signatures import options_of
from colocate_local.plugin import colocate_executor
from colocate_rollout.child import _EngineServer
from colocate_rollout.role import EngineRole

MODULE = """
from __future__ import annotations

import collections, dataclasses, datetime, decimal, enum, os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, TypedDict, TypeVar, Union

import attrs
import colocate
import torch


class Mode(enum.Enum):
    A = "a"
    B = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Files(TypedDict):
    root: Path
    modes: NotRequired[list[Mode]]


class Span(NamedTuple):
    first: datetime.date
    last: Optional[datetime.date] = None


@dataclasses.dataclass
class Inner:
    path: Path
    dtype: torch.dtype = torch.float32


@attrs.frozen
class Outer:
    inner: Inner
    levels: frozenset[Level] = frozenset()


Bound = TypeVar("Bound", bound=Path)


class Taker(colocate.Role):
    def __init__(
        self,
        path: Path = Path(),
        anywhere: os.PathLike[str] | None = None,
        either: Union[int, Path] = 0,
        text: str | Path = "",
        mode: Mode | None = None,
        level: Annotated[Level, "how much"] = Level.LOW,
        choice: Literal[Mode.B, "all"] = "all",
        dtype: torch.dtype = torch.float32,
        device: Optional[torch.device] = None,
        day: datetime.date | None = None,
        at: datetime.datetime | None = None,
        names: set[str] = frozenset(),
        modes: Sequence[Mode] = (),
        lists: list[list[Path]] = [],
        last: collections.deque[int] = None,
        betas: tuple[float, float] = (0.0, 0.0),
        sizes: tuple[int, ...] = (),
        by_name: dict[str, Path] = {},
        by_number: Mapping[int, Mode] = {},
        files: Files | None = None,
        span: Span | None = None,
        outer: Outer | list[Outer] | None = None,
        bound: Bound = None,
        money: decimal.Decimal | None = None,
        function: Callable[[int], int] | None = None,
        anything: Any = None,
        object: object = None,
        **others: Path,
    ) -> None:
        self.given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}

    @colocate.method(collect=colocate.First())
    def told(self, name: str) -> Any:
        return self.given[name]


def job(run, *, path: Path, mode: Mode = Mode.A, names: set[str] = frozenset()) -> None:
    run.show("told", [{"told": repr((path, mode, sorted(names)))}])


class Watcher:
    def __init__(self, path: Path, mode: list[Mode]) -> None:
        self.given = path, mode

    def colocate_run_finished(self, record, error) -> None:
        print("watched", self.given)
"""
MADE: list[tuple[str, Any, str]] = [
    ("path", "/a/b", "PosixPath('/a/b')"),
    ("path", "~/b", f"PosixPath('{Path.home()}/b')"),
    ("anywhere", "/a", "PosixPath('/a')"),
    ("either", "/a", "PosixPath('/a')"),
    ("either", 3, "3"),
    ("text", "/a", "'/a'"),
    ("mode", "a", "<Mode.A: 'a'>"),
    ("mode", "B", "<Mode.B: 'b'>"),
    ("mode", None, "None"),
    ("level", 2, "<Level.HIGH: 2>"),
    ("level", "LOW", "<Level.LOW: 1>"),
    ("choice", "b", "<Mode.B: 'b'>"),
    ("choice", "all", "'all'"),
    ("dtype", "bfloat16", "torch.bfloat16"),
    ("dtype", "torch.half", "torch.float16"),
    ("device", "cuda:1", "device(type='cuda', index=1)"),
    ("day", "2026-11-29", "datetime.date(2026, 11, 29)"),
    ("at", "2026-11-29 10:30:00", "datetime.datetime(2026, 11, 29, 10, 30)"),
    ("names", ["x", "x"], "{'x'}"),
    ("modes", ["a", "b"], "[<Mode.A: 'a'>, <Mode.B: 'b'>]"),
    ("lists", [["/a"], []], "[[PosixPath('/a')], []]"),
    ("last", [1, 2], "deque([1, 2])"),
    ("betas", [0.8, 1], "(0.8, 1)"),
    ("sizes", [1, 2, 3], "(1, 2, 3)"),
    ("by_name", {"x": "/a"}, "{'x': PosixPath('/a')}"),
    ("by_number", {"3": "a"}, "{3: <Mode.A: 'a'>}"),
    ("files", {"root": "/a"}, "{'root': PosixPath('/a')}"),
    ("files", {"root": "/a", "modes": ["a"]}, "{'root': PosixPath('/a'), 'modes': [<Mode.A: 'a'>]}"),
    ("span", {"first": "2026-11-29"}, "Span(first=datetime.date(2026, 11, 29), last=None)"),
    (
        "outer",
        [{"inner": {"path": "/a", "dtype": "float64"}, "levels": [1, "HIGH"]}],
        "[Outer(inner=Inner(path=PosixPath('/a'), dtype=torch.float64), levels=frozenset({<Level.LOW: 1>, "
        "<Level.HIGH: 2>}))]",
    ),
    ("bound", "/a", "PosixPath('/a')"),
    ("anything", ["/a"], "['/a']"),
    ("object", "/a", "'/a'"),
]
WRONG: list[tuple[str, Any, str]] = [
    ("path", 5, "path: must be a path, not 5"),
    ("mode", "c", "mode: must be 'a' or 'b', not the text 'c'"),
    ("level", True, "level: must be 1 or 2, not true"),
    ("choice", "a", "choice: must be 'b' or 'all', not the text 'a'"),
    ("dtype", "float33", "dtype: must be a dtype of torch's, as in 'bfloat16', not the text 'float33' (torch has none"),
    ("dtype", "nn", "dtype: must be a dtype of torch's"),
    ("device", "gpu", "device: must be a device, as in 'cuda:0', not the text 'gpu'"),
    ("day", "soon", "day: must be a date, as in '2026-11-29', not the text 'soon'"),
    ("at", 5, "at: must be a date and time, as in '2026-11-29T10:00', not 5"),
    ("names", "x", "names: must be a list, not the text 'x'"),
    ("names", [1], "names[0]: must be text, not 1"),
    ("modes", ["a", "q"], "modes[1]: must be 'a' or 'b', not the text 'q'"),
    ("lists", [["/a", 3]], "lists[0][1]: must be a path, not 3"),
    ("betas", [0.8], "betas: must be a list of 2, not of 1"),
    ("betas", [0.8, "x"], "betas[1]: must be a number, not the text 'x'"),
    ("by_number", {"x": "a"}, "by_number.x: the key must be an integer, not the text 'x'"),
    ("files", {"rot": "/a"}, "files.rot: Files has no parameter 'rot' (did you mean 'root'?)"),
    ("files", {}, "files: Files needs 'root' (Path)"),
    ("span", [1, 2], "span: must be a mapping (first, last), not a list"),
    ("outer", {"inner": {"path": "/a", "dtype": "x"}}, "outer.inner.dtype: must be a dtype of torch's"),
    (
        "money",
        "1.5",
        "money: must be of the class Decimal, which a config can't say, not the text '1.5': annotate what",
    ),
    ("function", "math:sqrt", "function: must be of the class Callable, which a config can't say"),
    ("more", 5, "more: must be a path, not 5"),
]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kinds_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def config(options: dict[str, Any], processes: bool = False) -> dict[str, Any]:
    roles = {"taker": {"use": "kinds_module:Taker", "with": options}}
    return {
        "executor": {"use": "local", "with": {"processes": processes}},
        "pools": {"main": {"slots": 1}},
        "groups": {"group": {"pool": "main", "roles": roles}},
    }


def test_role_receives_converted_options() -> None:
    """A role in a process gets all its options converted, and the config itself stays plain."""
    together: dict[str, Any] = {}
    for name, value, _ in MADE:
        together.setdefault(name, value)
    loaded = colocate.load_config(config(together, processes=True))
    assert colocate.load_config(loaded.to_dict()) == loaded
    with colocate.launch(loaded) as job:
        taker = job.groups["group"]["taker"]
        for name, value, made in MADE:
            if value == together[name]:
                assert repr(taker.told(name)) == made


@pytest.mark.parametrize(("name", "value", "made"), MADE, ids=lambda each: str(each)[:20])
def test_option_values_are_converted(name: str, value: Any, made: str) -> None:
    with colocate.launch(colocate.load_config(config({name: value}))) as job:
        assert repr(job.groups["group"]["taker"].told(name)) == made


@pytest.mark.parametrize(("name", "value", "told"), WRONG, ids=lambda each: str(each)[:20])
def test_wrong_options_are_reported_with_place(name: str, value: Any, told: str) -> None:
    """A wrong option is reported with its place."""
    (found,) = mistakes(config({name: value}))
    assert str(found).startswith(f"groups.group.roles.taker.with.{told}")


def test_of_jobs_and_observers(capsys: pytest.CaptureFixture[str]) -> None:
    whole = config({}) | {
        "job": {"use": "kinds_module:job", "with": {"path": "/a", "mode": "b", "names": ["x"]}},
        "observe": [{"use": "kinds_module:Watcher", "with": {"path": "/w", "mode": ["a"]}}],
    }
    with colocate.launch(colocate.load_config(whole)) as job:
        (row,) = job.run(quiet=True).tables["told"]
    assert row["told"] == "(PosixPath('/a'), <Mode.B: 'b'>, ['x'])"
    assert "watched (PosixPath('/w'), [<Mode.A: 'a'>])" in capsys.readouterr().out
    whole["job"]["with"]["mode"] = whole["observe"][0]["with"]["mode"] = "c"
    assert [each.path for each in mistakes(whole)] == ["job.with.mode", "observe[0].with.mode"]


def test_of_executors() -> None:
    """An executor's options are converted and checked by their annotations."""

    class Placed(colocate_executor()):  # type: ignore[misc]
        name = "placed"

        @classmethod
        def connect(cls, folder: Path | None = None, **more: Any) -> Any: ...

    options = options_of(Placed)
    assert options.convert({"folder": "/a"}) == {"folder": Path("/a")}
    assert [each.message for each in options.problems({"folder": 3})] == ["must be a path, not 3"]


class Engine:
    """An engine that keeps its arguments."""

    def __init__(self, ctx: Context, path: Path, names: set[str]) -> None:
        self.given = path, names

    def managed(self) -> dict[str, int]:
        return {}


def test_of_engines() -> None:
    """An engine gets converted options, also from an engine server."""
    options: dict[str, Any] = {"path": "/a", "names": ["x"]}
    made: Any = EngineRole(Engine, **options).engine
    serving = _EngineServer(None)  # type: ignore[arg-type]
    serving.make_engine(Engine, options, {"device": "cpu", "role": "r", "group": "g", "node": "n"})
    for engine in (made, serving._engine):
        assert engine.given == (Path("/a"), {"x"})
    with pytest.raises(colocate.ConfigError, match=r"path: must be a path, not 3"):
        EngineRole(Engine, **{**options, "path": 3})
