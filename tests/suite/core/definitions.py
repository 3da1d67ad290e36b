"""Sent classes, functions and values: a script's class is one class everywhere; unsendable values raise an error."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest
from tests.suite.probes.starved import without_threads

import colocate
from colocate import Call, ColocatedGroup, Runtime
from colocate.errors import RoleError, SerializationError
from colocate.executor import OwnProcess
from colocate.testing.executors import definitions
from colocate.testing.executors._base import needs, needs_feature
from colocate.testing.probes.faulty import Faulty, Stubborn, Unreadable, make_nested
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, wait_until

_SWITCHES = """
import torch
from torch.backends import cudnn

APART = torch.ops, torch.classes, torch.ops.aten
KEPT = {torch.ops.aten.mm.default}

def tell(connection):
    connection.send(type(torch.backends.cudnn).__name__)

class Switches(Role):
    @method
    def kinds(self):
        kinds = (type(each).__name__ for each in (torch.backends.cudnn, *APART) if cudnn is torch.backends.cudnn)
        return *kinds, *(each.__name__ for each in KEPT & {torch.ops.aten.mm.default})

    @method
    def of_a_child(self):
        return self.ctx.start(tell, fails=None).connection.recv()
"""


class Definitions(definitions.Definitions):
    """Definitions of the script in its workers."""

    def test_names_of_the_script(self, runtime: Runtime, script: Any) -> None:
        """A redefined class is sent as a second class beside the old one, with the globals that its code names."""
        with runtime.reserve(1) as pool:
            worker = pool.spawn({"worker": colocate.role(script.Worker, script.Batch(0))})["worker"]
            old, resident = script.Batch, worker.make.keep(1)
            assert type(resident.fetch()[0]) is old
            exec("class Batch:\n    def over(self):\n        return NEW\n", script.__dict__)
            script.NEW = "new"
            assert worker.look(script.Batch(), script.Colour.RED) == [(True, True, True, "new")]
            assert worker.look(old(2), script.Colour.RED) == [(True, False, True, True)]
            assert type(resident.fetch()[0]) is old

    @needs_feature("children")
    def test_modules_that_code_names(self, runtime: Runtime, script: Any) -> None:
        """Modules and torch objects with classes of their own are sent by name, to workers and to their children."""
        pytest.importorskip("torch")
        exec(_SWITCHES, script.__dict__)
        with runtime.reserve(1) as pool:
            switches = pool.spawn({"switches": colocate.role(script.Switches)})["switches"]
            assert switches.kinds() == [("CudnnModule", "_Ops", "_Classes", "_OpNamespace", "mm.default")]
            assert switches.of_a_child() == ["CudnnModule"]

    @pytest.mark.in_make_test("False")
    @needs(OwnProcess)
    @pytest.mark.parametrize("dies", [False, True])
    @needs_feature("functions")
    def test_a_driver_without_a_thread_for_answers(self, pair: ColocatedGroup, dies: bool) -> None:
        """A worker's import fails if the driver can start no thread to answer; the next import is answered."""
        name = f"colocate_nothing_{dies}"
        words = r"the driver can't answer: .*can't start new thread"
        with without_threads(dies), pytest.raises(RoleError, match=words):
            pair.run(_import_module, name)
        with pytest.raises(RoleError, match=f"No module named '{name}'"):
            pair.run(_import_module, name)

    @needs_feature("functions")
    def test_a_name_that_is_bound_anew(self, runtime: Runtime, script: Any) -> None:
        """Sent code keeps a global's old value, with one warning, until new code with the global is sent."""
        with runtime.reserve(2) as pool:
            group = pool.spawn({"worker": colocate.role(script.Worker, script.Batch(0))})
            worker = group["worker"]
            assert worker.limit() == [1, 1]
            script.LIMIT = 2
            if not runtime._node.services.executor.in_process:
                with pytest.warns(RuntimeWarning, match="has assigned LIMIT again"):
                    assert worker.limit() == [1, 1]
                assert worker.limit() == [1, 1]
            exec("def limit(ctx):\n    return LIMIT\n", script.__dict__)
            assert group.run(script.limit) == worker.limit() == [2, 2]

    def test_nothing_is_left_of_a_closed_group(self, runtime: Runtime, script: Any) -> None:
        """A closed group and its classes are freed while the pool is still open."""
        with runtime.reserve(1) as pool:

            def use() -> list[weakref.ref[Any]]:
                with pool.spawn({"worker": colocate.role(script.Worker, script.Batch(0))}) as group:
                    worker = group["worker"]
                    worker.look(script.Batch(2), script.Colour.RED)
                    (batch,), (inner,), (apart,) = worker.make(3), worker.make_class(), worker.make_apart()
                    assert worker.took([batch, batch]) == [[True, True]]
                    worker.kind({"it": (inner, apart)})
                    objects = group, script.Worker, script.Batch, script.Colour, type(inner), type(apart), apart.held()
                return [weakref.ref(item) for item in objects]

            refs = use()
            script.__dict__.clear()

            def gone() -> bool:
                gc.collect()
                return not any(ref() for ref in refs)

            wait_until(gone, "all of it is gone")


@dataclasses.dataclass
class RefBox:
    """A dataclass around any value."""

    content: Any


def _import_module(ctx: colocate.Context, name: str) -> None:
    importlib.import_module(name)


def _import_later(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Serialization(definitions.Serialization):
    """Values that can't be sent raise an error that names the value."""

    def test_argument(self, copying: ColocatedGroup) -> None:
        """An argument that can't be sent raises SerializationError with its name and the path inside."""
        with pytest.raises(SerializationError) as caught:
            copying.role("echo", Echo).echo({"fine": 1, "bad": [0, Stubborn()]})
        error = caught.value
        assert isinstance(error, TypeError)
        assert (error.argument, error.path) == ("value", "value['bad'][1].lock")
        assert "echo.echo" in str(error)
        assert "lock" in str(error)
        assert copying.role("echo", Echo).first(1) == 1

    def test_modules(self, copying: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        """Modules are sent by their import names, whatever their class; a module made by code is refused."""
        echo, lazy = copying.role("echo", Echo), _import_later("wave")
        monkeypatch.setitem(sys.modules, "wave", lazy)
        for module in (lazy, os.path, json.decoder):
            assert echo.first(module) is module

        class Own(ModuleType):
            pass

        with pytest.raises(SerializationError, match="code has made this module, and no import leads to it") as caught:
            echo.first([Own("own")])
        assert caught.value.path == "value[0]"

    def test_process_bound_values_are_refused(self, copying: ColocatedGroup) -> None:
        """Values that only this process can use, such as pipes, locks and proxies, are refused with the reason."""
        echo, context = copying.role("echo", Echo), multiprocessing.get_context("fork")
        local_end, remote_end = context.Pipe()
        value: Any
        with local_end, remote_end, context.Manager() as manager:
            for value, why in (
                (manager.dict(), "its Manager lets in only processes that multiprocessing has started"),
                (manager.Queue(), "its Manager lets in only processes that multiprocessing has started"),
                (local_end, "it is a descriptor, which this process alone has"),
            ):
                with pytest.raises(SerializationError, match=why) as caught:
                    echo.first({"a": value})
                assert caught.value.path == "value['a']"
        for value in context.Queue(), context.Lock(), (number for number in range(3)), threading.Lock():
            with pytest.raises(SerializationError, match="value can't be sent: it is a "):
                echo.first(value)
        assert echo.first(1) == 1

    def test_result(self, copying: ColocatedGroup) -> None:
        """A result that can't be sent raises SerializationError with the method, the path and the rank."""
        faulty = copying.role("faulty", Faulty)
        with pytest.raises(SerializationError) as caught:
            faulty.return_lock(nested=True)
        error = caught.value
        assert (error.argument, error.path) == ("result", "result['bad'][1].lock")
        assert (error.group, error.role, error.method) == (copying.name, "faulty", "return_lock")
        assert error.rank in (0, 1)
        with pytest.raises(SerializationError, match="lock"):
            faulty.return_lock.submit().result()
        assert faulty.fine() == [0, 1]

    def test_unrebuildable_value_error_names_the_call(self, copying: ColocatedGroup) -> None:
        """An argument or result that can't be rebuilt raises an error with its call, caused by the original error."""
        faulty, echo = copying.role("faulty", Faulty), copying.role("echo", Echo)
        words = "can't be rebuilt on the driver: ValueError: it can't be read"
        with faulty.return_unreadable.keep() as resident:
            for use in (faulty.return_unreadable, faulty.return_unreadable.submit().result, resident.fetch):
                with pytest.raises(SerializationError, match=words) as caught:
                    use()
                error = caught.value
                assert isinstance(error.__cause__, ValueError)
                assert (error.group, error.role, error.method) == (copying.name, "faulty", "return_unreadable")
                assert (error.rank, error.argument) == (0, "result")
        words = r"echo\.first could not begin on rank \d .*: an argument can't be rebuilt there: ValueError"
        with pytest.raises(RoleError, match=words) as refused:
            echo.first(Unreadable())
        assert isinstance(refused.value.__cause__, ValueError)
        assert faulty.fine() == [0, 1]

    @pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
    @needs_feature("functions")
    def test_values_without_an_end(self, pair: ColocatedGroup, kind: str) -> None:
        """A value that contains itself, or is nested too deeply, raises a SerializationError that says so."""
        echo, rows, faulty = pair.role("echo", Echo), pair.role("rows", Rows), pair.role("faulty", Faulty)
        words = "it contains itself, or is nested too deeply. Give it flat"
        deep = make_nested(kind, 5000)
        uses: list[Callable[[], object]] = [
            lambda: echo.first({"x": [deep]}),
            lambda: pair.run(lambda ctx, value: None, {"x": [deep]}),
            lambda: rows.seen((["a", "b"], [deep, 1])),
        ]
        for use in uses:
            with pytest.raises(SerializationError, match=words):
                use()
        for call in (faulty.nest.submit(kind, 5000), faulty.nest.keep(kind, 5000)):
            with pytest.raises(SerializationError, match=words) as caught:
                call.result(PATIENCE_S) if isinstance(call, Call) else call.fetch()
            assert (caught.value.argument, caught.value.method) == ("result", "nest")
        if kind != "tuple":
            with pytest.raises(SerializationError, match=words):
                echo.first({"x": make_nested(kind, 0)})
            with pytest.raises(SerializationError, match=words):
                faulty.nest(kind, 0)
        assert echo.first(1) == 1

    def test_residents_where_none_is_looked_for(self, copying: ColocatedGroup) -> None:
        """A resident inside a set, a dict's key or an object can't be sent; the error has its path."""
        echo = copying.role("echo", Echo)
        with echo.first.keep("text") as resident:
            ref: Any = resident.ref
            for value, path in (
                ({ref}, "value['x'][0][0]"),
                ({(ref, 1): 1}, "value['x'][0].keys()[0][0]"),
                (RefBox([1, {"a": ref}]), "value['x'][0].content[1]['a']"),
                (RefBox(resident), "value['x'][0].content"),
                (RefBox(echo), "value['x'][0].content"),
            ):
                with pytest.raises(SerializationError, match=r"can't be (sent|pickled)[:;]") as caught:
                    echo.first({"x": [value]})
                assert (caught.value.argument, caught.value.path) == ("value", path)
        assert echo.first(1) == 1

    @needs_feature("functions")
    def test_definition_with_unsendable_value_is_refused(self, copying: ColocatedGroup) -> None:
        """A class or function that holds an unsendable value is refused, and the error names the held value."""
        echo, lock = copying.role("echo", Echo), threading.Lock()

        class Held:
            things: ClassVar[dict[str, Any]] = {"a": [1, lock]}

        class Closes:
            @property
            def it(self) -> Any:
                return lock

        def closes() -> Any:
            return [lock]

        def calls() -> Any:
            return copying

        driver = "as an argument: a value, or a resident; inside a worker, ctx.sibling(name, cls) returns another role"
        for value, words in (
            (Held(), "Held.things['a'][1] is a _thread.lock"),
            (Closes(), "the variable lock of it is a _thread.lock"),
            ([closes], "echo.first: the variable lock of closes can't be sent: it is a _thread.lock"),
            (calls, "echo.first: the variable copying of calls can't be sent: it is a colocate.ColocatedGroup"),
            (calls, driver),
        ):
            with pytest.raises(SerializationError) as caught:
                echo.first(value)
            assert words in str(caught.value)
            assert (driver in str(caught.value)) == (value is calls)

        def run_it(ctx: colocate.Context) -> None:
            closes()

        with pytest.raises(SerializationError, match="function run_it: the variable lock of closes can't be sent"):
            copying.run(run_it)
        assert echo.first(1) == 1

    def test_kept_result(self, copying: ColocatedGroup) -> None:
        """A result that can't be sent can be kept, and only its fetch fails."""
        faulty, echo = copying.role("faulty", Faulty), copying.role("echo", Echo)
        keep = faulty.return_lock.options(ranks=[0]).keep
        with keep(nested=True) as resident, pytest.raises(SerializationError) as caught:
            resident.fetch()
        error = caught.value
        assert error.message.startswith("the result of faulty.return_lock: result['bad'][1].lock can't be sent")
        assert (error.argument, error.path) == ("result", "result['bad'][1].lock")
        assert (error.group, error.role, error.method, error.rank) == (copying.name, "faulty", "return_lock", 0)
        assert echo.first(1) == 1

    def test_constructor_argument(self, copying: ColocatedGroup) -> None:
        """A constructor argument that can't be sent is named in the error, and no group is left."""
        with copying.owner.owner.reserve(1, cpus=0) as pool:
            with pytest.raises(SerializationError) as caught:
                pool.spawn({"echo": colocate.role(Echo, "fine", extra={"deep": Stubborn()})})
            assert pool.groups == {}
        assert (caught.value.argument, caught.value.path) == ("extra", "extra['deep'].lock")
        assert "role 'echo'" in str(caught.value)

    def test_constructor_argument_that_lives_on_the_driver(self, runtime: Runtime, pair: ColocatedGroup) -> None:
        """A resident, call, view or group as a constructor argument is refused, also in lists, with a remedy."""
        echo = pair.role("echo", Echo)
        endless: list[Any] = []
        endless.append(endless)
        call = echo.first.submit(1)
        with runtime.reserve(1, cpus=0) as pool, echo.first.keep("text") as resident:
            ref: Any = resident.ref
            for value, path, words in (
                (ref, "extra", "Give the constructor the value"),
                (resident, "extra", "Give the constructor the value"),
                ([1, {"a": (ref,)}], "extra", "Give the constructor the value"),
                (call, "extra", r"its result\(\)"),
                (echo, "extra", r"ctx\.sibling"),
                ([pair], "extra", r"ctx\.sibling"),
                (endless, "extra", "it contains itself"),
            ):
                with pytest.raises(SerializationError, match=f"the constructor of role 'echo': .*{words}") as caught:
                    pool.spawn({"echo": colocate.role(Echo, "fine", extra=value)})
                assert (caught.value.argument, caught.value.path) == ("extra", path)
            assert pool.groups == {}
            assert (
                pool.spawn({"echo": colocate.role(Echo, "fine", extra=resident.fetch())}).role("echo", Echo).first(1)
                == 1
            )

    def test_value_semantics(self, copying: ColocatedGroup) -> None:
        """A sent value is a copy from the moment of the call, and each rank's result is a separate object."""
        echo = copying.role("echo", Echo)
        value = [1, 2]
        call = echo.echo.submit(value)
        value.append(3)
        first, second = call.result()
        assert first == second == [1, 2]
        assert first is not second
