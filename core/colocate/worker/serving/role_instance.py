"""A role's object in a worker, with the state that is needed to run methods and hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs

from colocate._protocol.ledger import Purpose, counts_as
from colocate._role.context import Context, reset_current, set_current
from colocate._role.method_spec import MethodSpec
from colocate._role.role import own_method
from colocate._system.imported import imported
from colocate.worker.process_wide import Own
from colocate.worker.serving.over import wait_until_over
from colocate.worker.serving.signal_handlers import calls_role_code
from colocate.worker.settings import Setting, Settings

T = TypeVar("T")
_log = logging.getLogger("colocate")


@attrs.define(eq=False)
class RoleInstance:
    """A role's object with everything needed to run methods. The object that runs plain functions has no role name."""

    name: str | None
    instance: Any
    methods: Mapping[str, MethodSpec]
    ctx: Context
    setting: Setting  # Reads and sets torch's settings.
    settings: Settings | None = None  # The role's torch settings; None for the worker's common settings.
    own: Own | None = None  # The role's generators and switches; None if shared with the driver or another lane.
    stands_in: bool = False  # Whether the object is a feature's substitute for the role's own object.
    parts: dict[str, Any] = attrs.field(factory=dict, init=False)  # Features' state for this role, by feature.
    # Whether a warning is due if the role seeds a generator that other roles share.
    shares_numbers: bool = attrs.field(default=False, init=False)
    # Maps each method's name to the spec, and to a label for errors and stacks.
    routes: Mapping[str, tuple[MethodSpec, str]] = attrs.field(init=False)
    # Number of the last call, and the generator's state before that call; None for the seed's initial state.
    drawn: tuple[int, Any] = attrs.field(default=(-1, None), init=False)

    def __attrs_post_init__(self) -> None:
        named = self.name is not None
        self.routes = {name: (spec, f"{self.name}.{name}" if named else name) for name, spec in self.methods.items()}

    def take_back(self, failed: Collection[int]) -> None:
        """Restore the generator if the last call has failed on any rank, so that a retry draws the same numbers."""
        seq, state = self.drawn
        generator = self.ctx._generator
        if seq not in failed or generator is None:
            return
        if state is None:
            generator.manual_seed(self.ctx.seed)
        else:
            generator.set_state(state)

    def call_hook(self, name: str, *args: Any) -> None:
        """Call the role's hook of this name, if the role has one."""
        if (hook := self.hook(name)) is not None:
            self.run_hook(hook, *args, name=name)

    def hook(self, name: str) -> Any:
        """Return the role's hook of this name, or None. A method that callers can call isn't a hook."""
        return None if name in self.methods else own_method(self.instance, name)

    def close(self) -> None:
        """Call the role's `close` hook, if there is one, to end background work."""
        if (hook := self._asked("close")) is not None:
            self.run_hook(hook, name="close")

    def _asked(self, name: str) -> Any:
        """Return the role's hook of this name, which takes no arguments; None if the role has none."""
        return None if name in self.methods else own_method(self.instance, name, takes_nothing=True)

    def run_hook(
        self, hook: Callable[..., Any], *args: Any, name: str = "the hook", by: Callable[..., object] | None = None
    ) -> None:
        """Run a hook, and wait for the end of an async hook. If `by` is given, it runs the hook instead."""
        token = set_current(self.ctx)
        try:
            self.run(by or _run_to_its_end, name, hook, *args)
        finally:
            reset_current(token)

    @calls_role_code
    def declared(self) -> Sequence[Any]:
        """Return the value of the role's hook `device_state`, which names memory that a search can't find."""
        if (hook := self._asked("device_state")) is None:
            return ()
        token = set_current(self.ctx)
        try:
            return (hook(),)
        finally:
            reset_current(token)

    @calls_role_code
    def managed(self) -> Mapping[Purpose, int]:
        """Return the bytes of memory that the role moves by itself, from the hook `managed`.

        Raises:
            ConfigError: The hook returns something else.
        """
        if (hook := self._asked("managed")) is None:
            return {}
        token = set_current(self.ctx)
        try:
            sizes = hook()
        finally:
            reset_current(token)
        return counts_as(str(self.name), sizes, "managed()")

    @calls_role_code
    def apart(self) -> Sequence[object]:
        """Return the objects to exclude from the role's memory, from the hook `apart`."""
        if (hook := self._asked("apart")) is None:
            return ()
        token = set_current(self.ctx)
        try:
            return tuple(hook())
        finally:
            reset_current(token)

    def run(self, code: Callable[..., T], *args: Any) -> T:
        """Run role code with the role's torch settings."""
        setting = self.setting
        setting.have(self.settings or self._of_all())
        if self.shares_numbers:
            code = partial(self._unseeded, code)
        try:
            return code(*args)
        finally:
            setting.have(setting.base)

    def _unseeded(self, code: Callable[..., T], *args: Any) -> T:
        """Run code, and warn if the code has seeded torch's default generator, which other roles share."""
        torch = imported("torch")
        seed = None if torch is None else torch.initial_seed()
        try:
            return code(*args)
        finally:
            if torch is not None and torch.initial_seed() != seed:
                self.shares_numbers = False
                _log.warning(
                    "role %r of group %r has seeded torch's default generator, which all roles and the driver share on "
                    "threads: each time they go on with the same numbers. With connect(processes=True), on Ray and on "
                    "Dask each role has its own; here use a generator of your own, or ctx.generator",
                    self.name,
                    self.ctx.group,
                )

    def _of_all(self) -> Settings:
        self.settings = attrs.evolve(self.setting.base, own=self.own)
        return self.settings

    def label(self, method: str) -> str:
        """Return a method's label for errors and stacks."""
        return self.routes[method][1]


@calls_role_code
def _run_to_its_end(name: str, hook: Callable[..., Any], *args: Any) -> None:
    wait_until_over(name, hook(*args))
