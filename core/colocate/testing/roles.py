"""`RoleSuite`: tests that the author of a role class runs on the class.

Subclass it, and say how the role is constructed and how each method may be called:

    from colocate.testing.roles import RoleSuite, sample

    class TestReward(RoleSuite):
        role = colocate.role("acme.reward", scale=2.0)

        def calls(self):
            return {"score": sample(["a", "bb", "ccc"], answer="a")}

A batch needs at least as many rows as there are `ranks` (2), or as the method's dispatch requires. The calls run in the
given order, on one instance per rank, so list a method after the methods that must run before it. `save(directory)`
and `restore(directory)` need no call, because the suite tests both together.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs

import colocate
from colocate import RoleSpec
from colocate._plugins.needs import lacks_processes
from colocate._plugins.plugins import find_executor, find_role
from colocate._role.method_spec import MethodSpec
from colocate._role.role import methods_of
from colocate.features.checkpoints.share import find_hook
from colocate.testing.probes.plain import Echo

_CHECKPOINT = frozenset({"save", "restore"})


@attrs.frozen
class Sample:
    """The arguments for a call of a role's method."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def sample(*args: Any, **kwargs: Any) -> Sample:
    """Return the arguments for a call of a role's method."""
    return Sample(args, kwargs)


class RoleSuite:
    """Tests of one role: outside workers, in a group, through the wire format, and against the rules for roles.

    A role that needs a process for each rank (`@colocate.needs("process_group")`) runs in processes, not on threads.

    Attributes:
        role: The role and its constructor's arguments, as for `pool.spawn`.
        ranks: The number of ranks in the tests.
    """

    role: ClassVar[RoleSpec[Any]]
    ranks: ClassVar[int] = 2

    def calls(self) -> Mapping[str, Sample]:
        """Return the arguments for a call of each method, by method name. Each test calls `calls` again."""
        raise NotImplementedError(f"{type(self).__name__} has to say how the role's methods may be called")

    def test_every_method_has_a_call(self) -> None:
        """`calls` has an entry for each method of the role, and no other entries."""
        declared, tried = set(self._method_names()) - _CHECKPOINT, set(self.calls())
        assert not declared - tried, f"no call for: {', '.join(sorted(declared - tried))}"
        assert not tried - declared, f"calls of what is no role method: {', '.join(sorted(tried - declared))}"

    def test_alone(self) -> None:
        """All calls work on an instance that is constructed outside any worker."""
        role = self._make_role()
        for name, sample in self.calls().items():
            with _name_call_in_errors(name, "alone"):
                getattr(role, name)(*sample.args, **sample.kwargs)

    def test_threads(self) -> None:
        """All calls work in a group, both with collected results and with results kept on the workers."""
        with self._spawn_group() as group:
            self._call_methods(group, "in a group")

    def test_strict(self) -> None:
        """The class, the constructor's arguments, all call arguments and all results can be sent."""
        with self._spawn_group(strict=True) as group:
            self._call_methods(group, "through the wire format")

    def test_writes(self) -> None:
        """Methods change neither their arguments nor their earlier results in place."""
        with self._spawn_group(strict=True) as group:
            view, echo = group.role("role"), group.role("echo", Echo)
            residents = []
            for name, sample in self.calls().items():
                with _name_call_in_errors(name, "with residents as arguments, among residents of earlier calls"):
                    args = [echo.first.keep(value) for value in sample.args]
                    kwargs = {key: echo.first.keep(value) for key, value in sample.kwargs.items()}
                    residents.append(getattr(view, name).keep(*args, **kwargs))
                    residents[-1].spec  # noqa: B018 - waits, and raises what went wrong

    def test_save_and_restore(self, tmp_path: Path) -> None:
        """If a role has `save` and `restore`, a restored instance saves the same files again."""
        if not self._is_savable():
            return
        one, two = tmp_path / "one", tmp_path / "two"
        one.mkdir()
        two.mkdir()
        first, second = self._make_role(), self._make_role()
        for name, sample in self.calls().items():
            getattr(first, name)(*sample.args, **sample.kwargs)
        _save_role(first, one)
        second.restore(str(one))
        _save_role(second, two)
        assert _read_folder(two) == _read_folder(one)

    def test_save_and_restore_together(self, tmp_path: Path) -> None:
        """All ranks can save into one folder at the same time, and restore from there, also while calls run."""
        if not self._is_savable():
            return
        with self._spawn_group() as group:
            self._call_methods(group, "before saving")
            group.checkpoint(tmp_path / "one")
            group.restore(tmp_path / "one")
            group.checkpoint(tmp_path / "two")
            assert _read_folder(tmp_path / "two" / "role") == _read_folder(tmp_path / "one" / "role")
            saving = group.checkpoint(tmp_path / "three", wait=False)
            self._call_methods(group, "while it is saved")
            saving.result()
            assert _read_folder(tmp_path / "three" / "role") == _read_folder(tmp_path / "two" / "role")

    def _is_savable(self) -> bool:
        return all(find_hook(self._role_class(), name) is not None for name in _CHECKPOINT)

    def _call_methods(self, group: colocate.ColocatedGroup, where: str) -> None:
        view = group.role("role")
        for name in self.calls():
            with _name_call_in_errors(name, where):
                sample = self.calls()[name]
                getattr(view, name)(*sample.args, **sample.kwargs)
            with _name_call_in_errors(name, f"{where}, kept"):
                sample = self.calls()[name]
                with getattr(view, name).keep(*sample.args, **sample.kwargs) as resident:
                    resident.fetch()

    @contextlib.contextmanager
    def _spawn_group(self, **options: Any) -> Iterator[colocate.ColocatedGroup]:
        role, threads = self.role, find_executor("local").variant({})
        if lacks_processes("role", self._role_class(), role.default_group, role.env, self.ranks, threads):
            options["processes"] = True
        with colocate.connect("local", **options) as runtime, runtime.reserve(self.ranks) as pool:
            yield pool.spawn({"echo": colocate.role(Echo), "role": self.role})

    def _method_names(self) -> Mapping[str, MethodSpec]:
        return methods_of(self._role_class())

    def _role_class(self) -> type:
        target = self.role.target
        return find_role(target).load() if isinstance(target, str) else target

    def _make_role(self) -> Any:
        return self._role_class()(*self.role.args, **self.role.kwargs)


@contextlib.contextmanager
def _name_call_in_errors(method: str, where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in the call of {method!r}, {where}")
        raise


def _save_role(role: Any, folder: Path) -> None:
    """Call a role's `save`, and run all steps if `save` is a generator."""
    halves = role.save(str(folder))
    if inspect.isgenerator(halves):
        deque(halves, maxlen=0)


def _read_folder(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if not path.is_dir()}
