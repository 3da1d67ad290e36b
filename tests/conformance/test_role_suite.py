"""The role suite passes for roles that keep the laws, and fails for a role that breaks one, with the place."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import Concat, Role, Scatter, method
from colocate.errors import RoleError, SerializationError
from colocate.testing.probes.rows import Rows
from colocate.testing.roles import RoleSuite, Sample, sample


class Counter(Role):
    def __init__(self, step: int = 1) -> None:
        self.step = step
        self.count = 0

    @method(dispatch=Scatter("batch"), collect=Concat())
    def add(self, batch: list[int]) -> list[int]:
        self.count += self.step
        return [row + self.count for row in batch]

    @method
    def save(self, directory: str) -> None:
        (Path(directory) / f"{self.ctx.rank}.json").write_text(json.dumps(self.count))

    @method
    def restore(self, directory: str) -> None:
        self.count = json.loads((Path(directory) / f"{self.ctx.rank}.json").read_text())


class Forgetful(Counter):
    @method
    def restore(self, directory: str) -> None:
        pass


class Writer(Role):
    @method
    def write(self, x: Any) -> None:
        x += 1


class Hoarder(Role):
    def __init__(self, lock: Any = None) -> None:
        self.lock = lock

    @method
    def give(self) -> Any:
        return threading.Lock()


@colocate.needs("process_group")
class Summing(Role):
    @method(dispatch=Scatter("x"), collect=Concat())
    def total(self, x: Any) -> Any:
        import torch

        total = x.sum()
        torch.distributed.all_reduce(total, group=self.ctx.process_group())
        return total.expand(len(x)).clone()


class CounterSuite(RoleSuite):
    role = colocate.role(Counter, step=2)

    def calls(self) -> Mapping[str, Sample]:
        return {"add": sample([1, 2, 3])}


class TestCounter(CounterSuite):
    """The suite on a role that a test module defines."""


class TestSumming(RoleSuite):
    """The suite on a role that needs a process for each rank."""

    role = colocate.role(Summing)

    def calls(self) -> Mapping[str, Sample]:
        torch = pytest.importorskip("torch")
        return {"total": sample(torch.ones(3))}


class TestByName(RoleSuite):
    """The suite on a role given by its name."""

    role = colocate.role("colocate.testing.probes.rows:Rows")
    ranks = 3

    def calls(self) -> Mapping[str, Sample]:
        batch = [1, 2, 3, 4]
        scattered = {name: sample(batch) for name in METHODS if name not in OTHERS}
        return scattered | {
            "zipped": sample(batch, right=batch),
            "each": sample([1, 2, 3]),
            "on_one": sample("x"),
            "highest": sample(),
            "lowest": sample(),
            "produce": sample(2),
            "produce_each": sample([2, 1, 3]),
        }

    def test_every_method_has_a_call(self) -> None:
        """The suite names the one method without a sample call, whose result isn't valid."""
        with pytest.raises(AssertionError, match="no call for: no_rows"):
            super().test_every_method_has_a_call()

    def test_alone(self) -> None:
        """A method that needs rank 1 fails with DispatchError on one rank, and the note says so."""
        with pytest.raises(colocate.DispatchError) as caught:
            super().test_alone()
        assert "alone" in caught.value.__notes__[0]


OTHERS = {"zipped", "each", "on_one", "highest", "lowest", "produce", "produce_each", "no_rows"}
METHODS = [name for name in vars(Rows) if not name.startswith("_")]


def test_forgetful(tmp_path: Path) -> None:
    class Suite(CounterSuite):
        role = colocate.role(Forgetful)

    with pytest.raises(AssertionError):
        Suite().test_save_and_restore(tmp_path)


def test_calls_that_do_not_fit() -> None:
    with pytest.raises(AssertionError, match="no call for: add"):
        TestCounter.test_every_method_has_a_call(_with_calls({}))
    with pytest.raises(AssertionError, match="calls of what is no role method: subtract"):
        TestCounter.test_every_method_has_a_call(_with_calls({"add": sample([1]), "subtract": sample(1)}))


def test_writer() -> None:
    torch = pytest.importorskip("torch")

    class Suite(RoleSuite):
        role = colocate.role(Writer)

        def calls(self) -> Mapping[str, Sample]:
            return {"write": sample(torch.ones(2))}

    Suite().test_threads()
    with pytest.raises(RoleError, match=r"role\.write changed in place") as caught:
        Suite().test_writes()
    assert "in the call of 'write'" in caught.value.__notes__[0]


def test_hoarder() -> None:
    class Suite(RoleSuite):
        role = colocate.role(Hoarder)

        def calls(self) -> Mapping[str, Sample]:
            return {"give": sample()}

    Suite().test_threads()
    with pytest.raises(SerializationError, match="result"):
        Suite().test_strict()
    Suite.role = colocate.role(Hoarder, threading.Lock())
    with pytest.raises(SerializationError, match="constructor"):
        Suite().test_strict()


def test_without_calls() -> None:
    class Suite(RoleSuite):
        role = colocate.role(Counter)

    with pytest.raises(NotImplementedError, match="Suite has to say"):
        Suite().test_alone()


def _with_calls(calls: Mapping[str, Sample]) -> Any:
    class Suite(CounterSuite):
        def calls(self) -> Mapping[str, Sample]:
            return calls

    return Suite()
