"""A role in a worker."""

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
    """Role's object with everything to run its methods; without a name, the runner of functions."""

    name: str | None
    instance: Any
    methods: Mapping[str, MethodSpec]
    ctx: Context
    setting: Setting  # reads and sets torch's settings
    settings: Settings | None = None  # the role's settings; None for the common ones, with `own`
    own: Own | None = None  # default generators and switches; None if these are the driver's, or belong to another lane
    stands_in: bool = False  # whether the object is a substitute for the role's class
    parts: dict[str, Any] = attrs.field(factory=dict, init=False)  # features' state of this role, by feature
    # whether the driver's process has several roles, and no warning about shared random numbers was given yet
    shares_numbers: bool = attrs.field(default=False, init=False)
    # methods by name, each with a label for errors and stacks
    routes: Mapping[str, tuple[MethodSpec, str]] = attrs.field(init=False)
    # number of the last call, and the generator's state before it; None for the seed's initial state
    drawn: tuple[int, Any] = attrs.field(default=(-1, None), init=False)

    def __attrs_post_init__(self) -> None:
        named = self.name is not None
        self.routes = {name: (spec, f"{self.name}.{name}" if named else name) for name, spec in self.methods.items()}

    def take_back(self, failed: Collection[int]) -> None:
        """Restore the generator if the last call has failed, here or on another rank: a retry draws the same."""
        seq, state = self.drawn
        generator = self.ctx._generator
        if seq not in failed or generator is None:
            return
        if state is None:
            generator.manual_seed(self.ctx.seed)
        else:
            generator.set_state(state)

    def call_hook(self, name: str, *args: Any) -> None:
        """Call the role's hook for a purpose of colocate, if there is one."""
        if (hook := self.hook(name)) is not None:
            self.run_hook(hook, *args, name=name)

    def hook(self, name: str) -> Any:
        """Return the role's hook for a purpose of colocate; methods for callers don't count."""
        return None if name in self.methods else own_method(self.instance, name)

    def close(self) -> None:
        """Call the role's `close` hook, if there is one, to end background work."""
        if (hook := self._asked("close")) is not None:
            self.run_hook(hook, name="close")

    def _asked(self, name: str) -> Any:
        """Return the role's hook of a name, to be called without arguments; None if there is none."""
        return None if name in self.methods else own_method(self.instance, name, takes_nothing=True)

    def run_hook(
        self, hook: Callable[..., Any], *args: Any, name: str = "the hook", by: Callable[..., object] | None = None
    ) -> None:
        """Run a hook, async ones to the end; or leave the run to `by`."""
        token = set_current(self.ctx)
        try:
            self.run(by or _run_to_its_end, name, hook, *args)
        finally:
            reset_current(token)

    @calls_role_code
    def declared(self) -> Sequence[Any]:
        """Return the value of the role's hook `device_state`: memory that a search can't find."""
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
        """Run role code, with torch's settings of the role."""
        setting = self.setting
        setting.have(self.settings or self._of_all())
        if self.shares_numbers:
            code = partial(self._unseeded, code)
        try:
            return code(*args)
        finally:
            setting.have(setting.base)

    def _unseeded(self, code: Callable[..., T], *args: Any) -> T:
        """Run code, and warn after a new seed of torch's default generator, which other roles share."""
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
