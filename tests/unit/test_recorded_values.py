"""Recorded values: they read back the same, and reading runs no code."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import colocate
from colocate import Role, method
from colocate.errors import SerializationError
from colocate.features.recordings import files
from colocate.features.recordings.differences import Difference
from colocate.features.recordings.documents import RankCalls, RankFiles
from colocate.features.recordings.files import Writer
from colocate.features.recordings.values import (
    UnrecordableError,
    decode_document,
    encode_document,
    make_finder,
    parse_head,
    seal_document,
)
from colocate.testing.waiting import PATIENCE_S


class Plain:
    pass


@dataclasses.dataclass
class Empty:
    pass


RAN = list[str]()
"""The names of methods of these classes that have run."""


@dataclasses.dataclass
class Runs:
    """A record whose class defines every method that Python might call to make a value."""

    name: str

    def __post_init__(self) -> None:
        RAN.append("__post_init__")

    def __setstate__(self, state: object) -> None:
        RAN.append("__setstate__")

    def __setattr__(self, name: str, value: object) -> None:
        RAN.append("__setattr__")

    def __reduce__(self) -> Any:
        return RAN.append, ("__reduce__",)


@dataclasses.dataclass
class Removes:
    name: str

    def __del__(self) -> None:
        RAN.append("__del__")


@dataclasses.dataclass(frozen=True)
class Hashes:
    name: str

    def __hash__(self) -> int:
        RAN.append("__hash__")
        return 1


def _code(name: str, result: Any) -> Any:
    def run(*_: Any) -> Any:
        RAN.append(name)
        return result

    return run


class HasX:
    __slots__ = ("x",)


@dataclasses.dataclass
class Calls(HasX):
    """A record with every method and attribute that constructors of other types ask for."""

    name: str = ""

    __index__, __len__, __bool__ = _code("__index__", 1), _code("__len__", 1), _code("__bool__", True)
    __iter__, items, keys = _code("__iter__", iter(())), _code("items", ()), _code("keys", ())
    replace, __fspath__, __str__ = _code("replace", "0" * 32), _code("__fspath__", "x"), _code("__str__", "x")
    __getattr__ = _code("__getattr__", None)
    x = property(_code("x", 1), _code("x", None))


@dataclasses.dataclass
class OwnDict:
    name: str = ""
    __dict__ = property(_code("__dict__", {}))


class NamedMember(enum.Enum):
    NAME = "name"
    __str__ = _code("__str__", "x")


class Iterated(collections.namedtuple("Iterated", "first")):
    __slots__ = ()
    __iter__ = _code("__iter__", iter(()))


class OwnArgsError(Exception):
    args = property(_code("args", ()), _code("args", None))


def _local() -> Any:
    @dataclasses.dataclass
    class Local:
        pass

    return Local


Local = _local()
LEADS_BACK: list[Any] = [[]]
LEADS_BACK[0].append(LEADS_BACK)


def _written(value: Any, **about: Any) -> bytes:
    pieces, length = encode_document(value, about)
    data = b"".join(map(bytes, pieces))
    assert len(data) == length
    return data


def _read(data: bytes) -> Any:
    head = 8 + int.from_bytes(data[:8], "little")
    _, entries, _ = parse_head(data[8:head])
    return decode_document(bytearray(data[head:]), entries, make_finder())


def test_jagged() -> None:
    value = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    assert [row.tolist() for row in _read(_written(value)).unbind()] == [[0, 1], [0, 1, 2]]


def test_a_jagged_tensor_that_is_transposed_is_not_recorded() -> None:
    value = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], layout=torch.jagged)
    with pytest.raises(UnrecordableError, match="dimension 2 is ragged"):
        encode_document(value.transpose(1, 2), {})


def _difference(was: Any, now: Any) -> str | None:
    found = Difference()
    found.compare_parts(was, now)
    return found.first


def test_jagged_tensors_with_lengths_are_compared_row_by_row() -> None:
    """Jagged tensors may differ in lengths alone; values between the rows don't count."""
    offsets, jagged = torch.tensor([0, 2, 6]), torch.nested.nested_tensor_from_jagged
    between = torch.arange(6.0)
    between[1] = 9
    short = jagged(torch.arange(6.0), offsets=offsets, lengths=torch.tensor([1, 2]))
    assert _difference(short, jagged(torch.arange(6.0), offsets=offsets, lengths=torch.tensor([2, 2]))) is not None
    assert _difference(short, jagged(torch.arange(6.0), offsets=offsets)) is not None
    assert _difference(short, jagged(between, offsets=offsets, lengths=torch.tensor([1, 2]))) is None


def test_safetensors_reads_recorded_values() -> None:
    load = pytest.importorskip("safetensors.torch").load
    assert torch.equal(load(_written({"x": torch.ones(3)}))["0"], torch.ones(3))


@pytest.mark.parametrize(
    "value",
    [
        Plain(),
        [Plain],
        print,
        lambda: 1,
        functools.partial(print),
        os,
        np.array([Plain()], object),
        torch.ones(2).to_sparse(),
        np.rec.array([(1,)], dtype=[("x", "i4")]),
        np.ma.array([1]),
        Removes("x"),
        {Hashes("x"): 1},
        {Hashes("x")},
        Local(),
        collections.defaultdict(list),
        int,
        LEADS_BACK,
    ],
    ids=lambda value: type(value).__name__,
)
def test_unrecordable_values_are_refused(value: Any) -> None:
    with pytest.raises(UnrecordableError):
        encode_document(value, {})


def _hostile(value: bytes) -> bytes:
    header = {
        "__metadata__": {"colocate": "{}"},
        "value": {"dtype": "U8", "shape": [len(value)], "data_offsets": [0, len(value)]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + value


_HERE = __name__


CALLS = ["record", [f"{_HERE}:Calls", None, ["dict", []]]]
NOTHING = ["dict", []]


NODES: list[Any] = [
    *([kind, [CALLS]] for kind in ("range", "complex", "PosixPath", "PurePosixPath", "PureWindowsPath")),
    *([kind, [CALLS]] for kind in ("timedelta", "timezone", "Decimal")),
    *([kind, [CALLS, 1, 1]] for kind in ("date", "datetime", "time")),
    ["jagged", [CALLS, CALLS, CALLS]],
    ["TensorDict", [[1], CALLS]],
    *([["TensorDict", [[], ["dict", ["a", CALLS]]]]] if "tensordict" in sys.modules else []),
    ["record", [f"{_HERE}:Calls", None, CALLS]],
    ["record", [f"{_HERE}:Empty", None, ["dict", [["member", [f"{_HERE}:NamedMember", "NAME"]], 1]]]],
    ["record", [f"{_HERE}:OwnDict", None, ["dict", ["other", 1]]]],
    ["error", ["builtins:ValueError", CALLS, NOTHING]],
    ["error", ["builtins:ValueError", ["named", [f"{_HERE}:Iterated", [1]]], NOTHING]],
    ["error", ["builtins:ValueError", ["tuple", []], CALLS]],
    ["error", ["builtins:ExceptionGroup", ["tuple", ["x", CALLS]], NOTHING]],
    ["error", ["builtins:UnicodeDecodeError", ["tuple", ["x", ["bytes", "value"], CALLS, CALLS, "x"]], NOTHING]],
    ["error", ["builtins:eval", ["tuple", ["1"]], NOTHING]],
    ["leaves", ["os:system", "touch ran"]],
    ["error", ["os:system", ["tuple", ["touch ran"]], ["dict", []]]],
    ["record", ["subprocess:Popen", None, ["dict", ["args", "touch ran"]]]],
    ["record", ["numpy.f2py.__main__:main", None, ["dict", []]]],
    ["record", ["this:x", None, ["dict", []]]],
    ["record", [f"{_HERE}:os.system", None, ["dict", []]]],
    ["record", [f"{_HERE}:Removes", None, ["dict", ["name", "x"]]]],
    ["set", [["record", [f"{_HERE}:Hashes", None, ["dict", ["name", "x"]]]]]],
    ["dict", [["record", [f"{_HERE}:Hashes", None, ["dict", ["name", "x"]]]], 1]],
    ["named", [f"{_HERE}:Plain", []]],
    ["tensor", [0, "load", [1], False]],
    ["array", [0, "'|O'", [1]]],
    ["_record", []],
    ["again", 1],
    [[], 1],
    [],
    {"list": []},
    ["int", ["1" * 5000]],
]


@pytest.mark.parametrize(
    "value",
    [
        pickle.dumps(functools.partial(print)),
        b"cos\nsystem\n(S'touch ran'\ntR.",
        *(json.dumps(node).encode() for node in NODES),
        b"[" * 100_000,
        b"9" * 5000,
        b"\xff",
        b"",
    ],
)
def test_nothing_runs(value: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile content of a file makes no value, imports nothing and runs nothing."""
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    RAN.clear()
    with pytest.raises(SerializationError):
        _read(_hostile(value))
    assert not [*tmp_path.iterdir()]
    assert not {*sys.modules} - before
    assert not RAN


@pytest.mark.parametrize(
    "node",
    [
        ["record", [f"{_HERE}:Calls", None, ["dict", ["x", 5]]]],
        ["error", ["builtins:OSError", ["tuple", [CALLS, CALLS]], NOTHING]],
        ["error", ["builtins:SyntaxError", ["tuple", ["x", CALLS]], NOTHING]],
        ["error", [f"{_HERE}:OwnArgsError", ["tuple", [1]], NOTHING]],
        ["set", [["named", [f"{_HERE}:Iterated", [1]]]]],
    ],
    ids=lambda node: str(node[1][0]),
)
def test_values_are_made_without_code(node: Any) -> None:
    """Values that can be made of hostile content run no code of their parts or classes."""
    RAN.clear()
    _read(_hostile(json.dumps(node).encode()))
    assert not RAN


def test_record_skips_constructor_and_setters() -> None:
    """Recording and reading a record call neither its constructor nor its `__setstate__` and `__setattr__`."""
    given = object.__new__(Runs)
    vars(given)["name"] = "x"
    RAN.clear()
    found = _read(_written([given, given]))
    assert (type(found[0]), found[0].name, found[0] is found[1]) == (Runs, "x", True)
    assert not RAN


def test_class_search_imports_no_lazy_module(tmp_path: Path) -> None:
    """A search for a class imports no lazy module, neither by its name nor as an attribute of another module."""
    (tmp_path / "lazy.py").write_text("print('ran')\nclass Error(Exception):\n    pass\n")
    (tmp_path / "others.py").write_text("import sys\nlazy = sys.modules['lazy']\nclass Has:\n    lazy = lazy\n")
    code = (
        "import importlib.util, sys\n"
        "from colocate.features.recordings.values import make_finder\n"
        "spec = importlib.util.find_spec('lazy')\n"
        "spec.loader = importlib.util.LazyLoader(spec.loader)\n"
        "module = sys.modules['lazy'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "import others\n"
        "find = make_finder()\n"
        "print(find('lazy', 'Error'), find('others', 'lazy.Error'), find('others', 'Has.lazy.Error'))\n"
        "print(find('others', 'Has'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["None None None", "<class 'others.Has'>"]


_ABOUT: dict[str, Any] = {"method": "it", "call": 0, "place": 0, "seq": 1, "begun": 1.0, "ended": 1.0, "digest": {}}


def test_files_rotate_and_torn_entry_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file is followed by another one, and a torn entry at the end is left out until it is whole."""
    monkeypatch.setattr("colocate.features.recordings.files._FILE_BYTES", 2000)
    writer = Writer(tmp_path, 0, None, pytest.fail)
    for number in range(10):
        writer.add_document(
            *encode_document(torch.full((100,), float(number)), {**_ABOUT, "call": number, "place": number})
        )
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert 3 <= len(files) <= 10
    calls = RankCalls(tmp_path, 0)
    assert [call.end.read_value(make_finder())[0].item() for call in calls.read_all().values() if call.end] == [
        *map(float, range(10))
    ]
    whole = files[-1].read_bytes()
    for cut in (1, 9, len(whole) // 2):
        files[-1].write_bytes(whole[:-cut])
        calls = RankCalls(tmp_path, 0)
        assert len(calls.read_all()) == 9
        assert calls.files.is_torn
        files[-1].write_bytes(whole)
        assert len(calls.read_all()) == 10
        assert not calls.files.is_torn


def test_a_file_that_is_torn_amid_a_recording_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn entry in a file before the last one raises an error."""
    monkeypatch.setattr("colocate.features.recordings.files._FILE_BYTES", 2000)
    writer = Writer(tmp_path, 0, None, pytest.fail)
    for number in range(10):
        writer.add_document(
            *encode_document(torch.full((100,), float(number)), {**_ABOUT, "call": number, "place": number})
        )
    writer.close()
    first, *_ = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes()[:-10])
    with pytest.raises(SerializationError, match="ends amid an entry, and another file follows"):
        RankCalls(tmp_path, 0).read_all()


def test_a_file_is_full_as_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are written while a live reader looks for the next file aren't lost."""
    whole = [*map(_document, range(3))]
    path, following = (tmp_path / f"rank-0.000{number}.calls" for number in range(2))
    path.write_bytes(whole[0])
    reader = RankFiles(tmp_path, 0)
    assert [each.about["call"] for each in reader.read_more()] == [0]
    exists = Path.exists

    def meanwhile(asked: Path) -> bool:
        monkeypatch.setattr(Path, "exists", exists)
        with path.open("ab") as file:
            file.write(whole[1])
        following.write_bytes(whole[2])
        return exists(asked)

    monkeypatch.setattr(Path, "exists", meanwhile)
    found = list[int]()
    while documents := reader.read_more():
        found += [each.about["call"] for each in documents]
    assert found == [1, 2]


def _document(number: int) -> bytes:
    pieces, _ = encode_document(number, {**_ABOUT, "call": number, "place": number})
    return b"".join(map(bytes, seal_document(pieces)))


def test_write_failure_ends_recording_with_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    writer = Writer(tmp_path / "isn't there", 3, None, said.append)
    for _ in range(3):
        writer.add_document(*encode_document(1, {}))
    writer.close()
    assert len(said) == 1
    assert "rank 3, is recorded any more: FileNotFoundError" in said[0]


def test_a_slow_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While the disk is slow, calls wait and the queue keeps to its bound; all entries are written in the end."""
    free, waits, queued = threading.Event(), threading.Event(), list[int]()

    class Slow(FileIO):
        def write(self, data: Any) -> int:
            assert free.wait(PATIENCE_S)
            queued.append(writer._queued)
            return super().write(data)

    def wait(timeout: float | None = None) -> bool:
        waits.set()
        return threading.Condition.wait(writer._room_condition, timeout)

    documents = [encode_document(bytes([number]) * 40, {}) for number in range(20)]
    length = documents[0][1]
    monkeypatch.setattr(files, "FileIO", Slow)
    monkeypatch.setattr(files, "_QUEUED_BYTES", 2 * length + 1)
    writer = Writer(tmp_path, 0, None, print)
    monkeypatch.setattr(writer._room_condition, "wait", wait)

    def add() -> None:
        for each in documents:
            writer.add_document(*each)

    with ThreadPoolExecutor(1) as caller:
        adding = caller.submit(add)
        try:
            assert waits.wait(PATIENCE_S)
            assert (writer._queued, adding.done()) == (2 * length, False)
        finally:
            free.set()
        adding.result(PATIENCE_S)
    writer.close()
    assert max(queued) == 2 * length
    assert (tmp_path / "rank-0.0000.calls").read_bytes() == b"".join(
        b"".join(seal_document(each)) for each, _ in documents
    )


class Counter(Role):
    @method
    def count(self, to: int) -> list[int]:
        return [*range(to)]

    @method(rows="row", concurrency=2)
    async def each(self, row: int) -> int:
        return row


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a recording with a file of each kind."""
    folder = tmp_path_factory.mktemp("recorded") / "it"
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"counter": colocate.role(Counter)}, name="group")
        view = group.role("counter", Counter)
        with runtime.record(view, folder):
            assert view.count(2) == [[0, 1]]
            assert view.each([1, 2]) == [1, 2]
            part: Any = group._node.get_part("recordings")
            part.mark_step(1)
    files.mark_end(folder / "group.counter", "it was enough")
    return folder


def _all_of(folder: Path) -> Any:
    role = colocate.load_recording(folder)["counter"]
    (count,), (each,) = role["count"], role["each"]
    for part in each._by_rank.values():  # the end entry gives the number of rows
        assert part.end is not None
        assert part.end.read_value(make_finder()) is None
    steps = files.read_lines(folder / files.STEPS, lambda told: None)
    return (
        (role.cls, role.ranks, role.seed, role.ended, steps),
        (count.value(), count.arguments(), count.begun, count.seconds),
        [(row.index, row.value, row.ended) for row in each.rows],
    )


@pytest.mark.in_make_test("role.json")
@pytest.mark.parametrize("name", ["role.json", "ended.txt", "rows.jsonl", "steps.jsonl", "rank-0.0000.calls"])
def test_damaged_byte_is_reported(recorded: Path, name: str, tmp_path: Path) -> None:
    """A changed bit in any byte of a file is an error that names the file and a byte, or changes no value."""
    whole, other = _all_of(recorded), tmp_path / "it"
    shutil.copytree(recorded, other)
    (file,) = other.rglob(name)
    data = file.read_bytes()
    draw = random.Random(1)
    for at in range(len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :])
        found = None
        try:
            found = _all_of(other)
        except SerializationError as error:
            words = str(error)
        if found is None:
            assert re.match(re.escape(str(file)) + " is damaged at byte \\d+: ", words), words
        else:  # For example, one blank has replaced another.
            assert (found, data[at : at + 1].isspace()) == (whole, True)


@pytest.mark.parametrize("name", ["role.json", "ended.txt", "rows.jsonl", "rank-0.0000.calls"])
@pytest.mark.parametrize("what", ["pipe", "folder", "device", "words", "lists"])
def test_foreign_content_is_refused(recorded: Path, name: str, what: str, tmp_path: Path) -> None:
    """A path that is no file blocks no reader, and foreign content is an error with the path."""
    shutil.copytree(recorded, other := tmp_path / "it")
    (file,) = other.rglob(name)
    file.unlink()
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(file),
        "folder": file.mkdir,
        "device": lambda: file.symlink_to("/dev/zero"),
        "words": lambda: file.write_bytes(b'{"seq": 1, "rows": 5, "x": "\xff"}\n' * 9),
        "lists": lambda: file.write_bytes(b"[" * 100_000 + b"\n"),
    }
    make[what]()
    with pytest.raises(SerializationError, match=re.escape(str(file))):
        _all_of(other)
