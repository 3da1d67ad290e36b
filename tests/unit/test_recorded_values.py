"""Values as they are recorded: the same when they are read, and nothing that is read runs code."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import json
import os
import pickle
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
from colocate.features.recordings.digests import digest_of, first_difference
from colocate.features.recordings.documents import RankCalls
from colocate.features.recordings.files import Writer
from colocate.features.recordings.values import NotRecorded, finder, head_of, packed, unpacked
from colocate.testing.waiting import PATIENCE_S


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    name: str


class Colour(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "first second")


class Plain:
    pass


def _written(value: Any, **about: Any) -> bytes:
    pieces, length = packed(value, about)
    data = b"".join(map(bytes, pieces))
    assert len(data) == length
    return data


def _read(data: bytes) -> Any:
    head = 8 + int.from_bytes(data[:8], "little")
    _, entries, _ = head_of(data[8:head])
    return unpacked(bytearray(data[head:]), entries, finder())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(other) is torch.Tensor and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize(
    "value",
    [
        *(torch.arange(6).to(dtype).view(2, 3) for dtype in (torch.int64, torch.bfloat16, torch.float16, torch.uint8)),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(12.0).view(3, 4).t(),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        np.arange(6, dtype="i2").reshape(2, 3),
        np.array(["a", "bc"]),
        np.float64(0.1),
        float("inf"),
        -0.0,
        10**40,
        "\udcff",
        {"a": [1, (2, b"3")], 4: {5, frozenset({6})}},
        Colour.RED,
        Pair(1, None),
        torch.float32,
        collections.OrderedDict(a=1),
        Path("a/b"),
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_they_come_back(value: Any) -> None:
    assert _same(value, _read(_written(value)))


def test_records_and_what_is_there_twice() -> None:
    ids = torch.arange(3)
    one, other = _read(_written([Batch(ids, "x"), ids]))
    assert (type(one), one.name) == (Batch, "x")
    assert one.ids is other
    assert torch.equal(other, ids)


def test_a_parameter_with_a_graph_comes_back_without() -> None:
    found = _read(_written(torch.nn.Parameter(torch.ones(2)) * 2))
    assert not found.requires_grad
    assert found.tolist() == [2.0, 2.0]


def test_jagged() -> None:
    value = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    assert [row.tolist() for row in _read(_written(value)).unbind()] == [[0, 1], [0, 1, 2]]


def test_others_read_it() -> None:
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
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_recorded(value: Any) -> None:
    with pytest.raises(NotRecorded):
        packed(value, {})


class _Runs:
    def __init__(self, what: Callable[..., Any], *args: Any) -> None:
        self._runs = what, args

    def __reduce__(self) -> Any:
        return self._runs


@pytest.mark.parametrize(
    "value",
    [
        _Runs(os.system, "touch ran"),
        _Runs(eval, "open('ran', 'w')"),
        _Runs(getattr, Plain, "mro"),
        _Runs(torch.load, "ran"),
        _Runs(np.save, "ran.npy", 1),
        _Runs(Plain),
    ],
)
def test_nothing_runs(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that somebody else has put into a file makes nothing but values."""
    monkeypatch.chdir(tmp_path)
    evil = pickle.dumps(value)
    header = {
        "__metadata__": {"colocate": "{}"},
        "value": {"dtype": "U8", "shape": [len(evil)], "data_offsets": [0, len(evil)]},
    }
    text = json.dumps(header).encode()
    with pytest.raises(SerializationError, match="isn't known here, or isn't a record"):
        _read(len(text).to_bytes(8, "little") + text + evil)
    assert not [*tmp_path.iterdir()]


def test_files_turn_over_and_what_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is full, and another one begins; what isn't whole at the end isn't read until it is."""
    monkeypatch.setattr("colocate.features.recordings.files._FILE_BYTES", 2000)
    writer = Writer(tmp_path, 0, None, pytest.fail)
    for number in range(10):
        writer.add(*packed(torch.full((100,), float(number)), {"method": "it", "call": number, "place": number}))
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert 3 <= len(files) < 10
    calls = RankCalls(tmp_path, 0)
    assert [call.end.value(finder())[0].item() for call in calls.all().values() if call.end] == [*map(float, range(10))]
    whole = files[-1].read_bytes()
    for cut in (1, 9, len(whole) // 2):
        files[-1].write_bytes(whole[:-cut])
        calls = RankCalls(tmp_path, 0)
        assert len(calls.all()) == 9
        assert calls.files.is_torn
        files[-1].write_bytes(whole)
        assert len(calls.all()) == 10
        assert not calls.files.is_torn


def test_a_disk_that_is_full_ends_it_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    writer = Writer(tmp_path / "isn't there", 3, None, said.append)
    for _ in range(3):
        writer.add(*packed(1, {}))
    writer.close()
    assert len(said) == 1
    assert "rank 3, is recorded any more: FileNotFoundError" in said[0]


def test_where_arguments_differ() -> None:
    """The first path at which they do is told, with what was there and what is."""
    given: dict[str, Any] = {
        "batch": {"ids": torch.arange(6).view(2, 3), "large": torch.zeros(100_000), "texts": ["a"] * 40},
        "temperature": 0.7,
        "record": Batch(torch.ones(2), "x" * 100),
        "pairs": [(1, 2), (3, None)],
    }
    told = json.loads(json.dumps(digest_of(given)))

    def difference(change: Callable[[dict[str, Any]], object]) -> str | None:
        other = copy.deepcopy(given)
        change(other)
        return first_difference(told, digest_of(other))

    assert difference(lambda it: None) is None
    assert difference(lambda it: it.update(temperature=1)) == "temperature is 1, and was 0.7"
    assert difference(lambda it: it.update(top_k=1)) == "top_k is given, and was not"
    assert difference(lambda it: it.pop("pairs")) == "pairs was given, and is not"
    assert difference(lambda it: it["batch"]["ids"].add_(1)) == "batch['ids'] is int64[2, 3] with other contents"
    assert (
        difference(lambda it: it["batch"].update(ids=torch.zeros(2)))
        == "batch['ids'] is float32[2], and was int64[2, 3]"
    )
    assert (
        difference(lambda it: it["batch"]["large"][-1:].fill_(1))
        == "batch['large'] is float32[100000] with other contents"
    )
    assert difference(lambda it: it["batch"]["texts"].append("b")) == "batch['texts'] is list of 41, and was list of 40"
    assert difference(lambda it: it["batch"].pop("ids")) == "batch['ids'] was given, and is not"
    assert (
        difference(lambda it: setattr(it["record"], "name", "y" * 100))
        == "record.name is str of 102 with other contents"
    )
    assert difference(lambda it: it["pairs"].append(5)) == "pairs[2] is given, and was not"
    assert difference(lambda it: it["pairs"].__setitem__(1, (3, 4))) == "pairs[1][1] is 4, and was None"


def test_of_a_tensor_the_same_is_remembered_however_it_lies() -> None:
    tensor = torch.randn(300, 400)
    assert (
        digest_of({"x": tensor})
        == digest_of({"x": tensor.t().contiguous().t()})
        == digest_of({"x": tensor.numpy().copy()})
    )


def test_many_parts_are_small() -> None:
    """What is remembered doesn't grow with what is given, and changes with any of it."""
    many = {"rows": [{"id": index, "text": str(index)} for index in range(1000)]}
    other = copy.deepcopy(many)
    other["rows"][900]["text"] = "x"
    assert len(json.dumps(digest_of(many))) < 1000
    assert (
        first_difference(digest_of(many), digest_of(other)) == "rows[8]['id'], or what comes after it, is another one"
    )


def test_a_slow_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where it is slow to write calls wait, and no more than the bound is held in memory; all is written in the end."""
    free, waits, queued = threading.Event(), threading.Event(), list[int]()

    class Slow(FileIO):
        def write(self, data: Any) -> int:
            assert free.wait(PATIENCE_S)
            queued.append(writer._queued)
            return super().write(data)

    def wait(timeout: float | None = None) -> bool:
        waits.set()
        return threading.Condition.wait(writer._room, timeout)

    monkeypatch.setattr(files, "FileIO", Slow)
    monkeypatch.setattr(files, "_QUEUED_BYTES", 1000)
    writer = Writer(tmp_path, 0, None, print)
    monkeypatch.setattr(writer._room, "wait", wait)
    documents = [bytes([number]) * 400 for number in range(20)]

    def add() -> None:
        for each in documents:
            writer.add([each], len(each))

    with ThreadPoolExecutor(1) as caller:
        adding = caller.submit(add)
        try:
            assert waits.wait(PATIENCE_S)
            assert (writer._queued, adding.done()) == (800, False)
        finally:
            free.set()
        adding.result(PATIENCE_S)
    writer.close()
    assert max(queued) == 800
    assert (tmp_path / "rank-0.0000.calls").read_bytes() == b"".join(documents)


class Counter(Role):
    @method
    def count(self, to: int) -> list[int]:
        return [*range(to)]


def test_values_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    """Calls are listed without them: of one that is damaged nothing is lost but its value."""
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        view = pool.spawn({"counter": colocate.role(Counter)}, name="group").role("counter", Counter)
        with runtime.record(view, tmp_path / "it"):
            view.count(2)
            view.count(3)
    (file,) = (tmp_path / "it" / "group.counter").glob("*.calls")
    file.write_bytes(file.read_bytes()[:-4] + b"\xff" * 4)
    first, second = colocate.load_recording(tmp_path / "it")["counter"].calls
    assert (first.value(), second.arguments()["to"]) == ([0, 1], [["", "3"]])
    with pytest.raises(SerializationError, match=r"rank-0\.0000\.calls is damaged at byte \d+: UnpicklingError"):
        second.value()
