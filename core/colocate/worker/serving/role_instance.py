"""A role's object in a worker, with the state that is needed to run methods and hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs

from colocate._protocol.ledger import Purpose, count_by_purpose
from colocate._role.context import Context, reset_current, set_current
from colocate._role.method_spec import MethodSpec
from colocate._role.role import find_own_method
from colocate._system.imported import find_imported
from colocate.worker.process_wide import RoleState
from colocate.worker.serving.over import wait_for_outcome
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
    # The role's generators and switches; None if shared with the driver or another lane.
    role_state: RoleState | None = None
    is_substitute: bool = False  # Whether the object is a feature's substitute for the role's own object.
    parts: dict[str, Any] = attrs.field(factory=dict, init=False)  # Features' state for this role, by feature.
    # Whether a warning is due if the role seeds a generator that other roles share.
    shares_numbers: bool = attrs.field(default=False, init=False)
    # Maps each method's name to the spec, and to a label for errors and stacks.
    routes: Mapping[str, tuple[MethodSpec, str]] = attrs.field(init=False)
    # Number of the last call, and the generator's state before that call; None for the seed's initial state.
    last_draw: tuple[int, Any] = attrs.field(default=(-1, None), init=False)

    def __attrs_post_init__(self) -> None:
        named = self.name is not None
        self.routes = {name: (spec, f"{self.name}.{name}" if named else name) for name, spec in self.methods.items()}

    def rewind_generator(self, failed: Collection[int]) -> None:
        """Restore `ctx.generator` if the last call has failed on any rank, so that a retry draws the same numbers."""
        seq, state = self.last_draw
        generator = self.ctx._generator
        if seq not in failed or generator is None:
            return
        if state is None:
            generator.manual_seed(self.ctx.seed)
        else:
            generator.set_state(state)

    def call_hook(self, name: str, *args: Any) -> None:
        """Call the role's hook of this name, if the role has one."""
        if (hook := self.find_hook(name)) is not None:
            self.run_hook(hook, *args, name=name)

    def find_hook(self, name: str) -> Any:
        """Return the role's hook of this name, or None. A method that the driver can call isn't a hook."""
        return None if name in self.methods else find_own_method(self.instance, name)

    def close(self) -> None:
        """Call the role's `close` hook, if there is one, to end background work."""
        if (hook := self._find_plain_hook("close")) is not None:
            self.run_hook(hook, name="close")

    def _find_plain_hook(self, name: str) -> Any:
        """Return the role's hook of this name, which takes no arguments; None if the role has none."""
        return None if name in self.methods else find_own_method(self.instance, name, takes_nothing=True)

    def run_hook(
        self, hook: Callable[..., Any], *args: Any, name: str = "the hook", by: Callable[..., object] | None = None
    ) -> None:
        """Run a hook, and wait for the end of an async hook. If `by` is given, it runs the hook instead."""
        token = set_current(self.ctx)
        try:
            self.run_code(by or _run_to_end, name, hook, *args)
        finally:
            reset_current(token)

    @calls_role_code
    def list_declared(self) -> Sequence[Any]:
        """Return the value of the role's hook `device_state`, which lists memory that `find_holdings` can't find."""
        if (hook := self._find_plain_hook("device_state")) is None:
            return ()
        token = set_current(self.ctx)
        try:
            return (hook(),)
        finally:
            reset_current(token)

    @calls_role_code
    def get_managed_bytes(self) -> Mapping[Purpose, int]:
        """Return the sizes, in bytes, of memory that the role moves by itself, as reported by the hook `managed`.

        Raises:
            ConfigError: The hook returns something else.
        """
        if (hook := self._find_plain_hook("managed")) is None:
            return {}
        token = set_current(self.ctx)
        try:
            sizes = hook()
        finally:
            reset_current(token)
        return count_by_purpose(str(self.name), sizes, "managed()")

    @calls_role_code
    def list_excluded(self) -> Sequence[object]:
        """Return the objects that don't count as the role's memory, as listed by the hook `apart`."""
        if (hook := self._find_plain_hook("apart")) is None:
            return ()
        token = set_current(self.ctx)
        try:
            return tuple(hook())
        finally:
            reset_current(token)

    def run_code(self, code: Callable[..., T], *args: Any) -> T:
        """Run role code with the role's torch settings."""
        setting = self.setting
        setting.apply_settings(self.settings or self._get_default_settings())
        if self.shares_numbers:
            code = partial(self._run_checking_seed, code)
        try:
            return code(*args)
        finally:
            setting.apply_settings(setting.base)

    def _run_checking_seed(self, code: Callable[..., T], *args: Any) -> T:
        """Run code, and warn if the code has seeded torch's default generator, which other roles share."""
        torch = find_imported("torch")
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

    def _get_default_settings(self) -> Settings:
        self.settings = attrs.evolve(self.setting.base, role_state=self.role_state)
        return self.settings

    def label(self, method: str) -> str:
        """Return a method's label for errors and stacks."""
        return self.routes[method][1]


@calls_role_code
def _run_to_end(name: str, hook: Callable[..., Any], *args: Any) -> None:
    wait_for_outcome(name, hook(*args))
