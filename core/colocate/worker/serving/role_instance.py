"""A role as its worker has it."""

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
    """A role instance and what is needed to run its methods; without a name it is what functions run in."""

    name: str | None
    instance: Any
    methods: Mapping[str, MethodSpec]
    ctx: Context
    setting: Setting  # what makes torch's settings
    settings: Settings | None = None  # which the role has of its own; None for those of all, and what is `own`
    own: Own | None = None  # its default generators and switches; None where these are the driver's, or of another lane
    stands_in: bool = False  # whether its object only stands in for one of its class
    parts: dict[str, Any] = attrs.field(factory=dict, init=False)  # what features keep of it, by their names
    # whether its process is the driver's, and others have roles of it, until somebody was told that it seeds for all
    shares_numbers: bool = attrs.field(default=False, init=False)
    # its methods by name, each with what errors and stacks call it
    routes: Mapping[str, tuple[MethodSpec, str]] = attrs.field(init=False)
    # its last call, and where its random numbers were when that began; None for their beginning
    drawn: tuple[int, Any] = attrs.field(default=(-1, None), init=False)

    def __attrs_post_init__(self) -> None:
        named = self.name is not None
        self.routes = {name: (spec, f"{self.name}.{name}" if named else name) for name, spec in self.methods.items()}

    def take_back(self, failed: Collection[int]) -> None:
        """Some calls have failed, here or on another rank: if it has begun nothing since, it draws the same again."""
        seq, state = self.drawn
        generator = self.ctx._generator
        if seq not in failed or generator is None:
            return
        if state is None:
            generator.manual_seed(self.ctx.seed)
        else:
            generator.set_state(state)

    def call_hook(self, name: str, *args: Any) -> None:
        """Call what its class has for a purpose of colocate's, if it has it."""
        if (hook := self.hook(name)) is not None:
            self.run_hook(hook, *args, name=name)

    def hook(self, name: str) -> Any:
        """Return the role's attribute for a purpose of colocate's; a method for its callers is none."""
        return None if name in self.methods else own_method(self.instance, name)

    def close(self) -> None:
        """Have it end what it has begun: it has a method `close` for that, or has begun nothing."""
        if (hook := self._asked("close")) is not None:
            self.run_hook(hook, name="close")

    def _asked(self, name: str) -> Any:
        """Return what the role says for a purpose of colocate's that needs no argument."""
        return None if name in self.methods else own_method(self.instance, name, takes_nothing=True)

    def run_hook(
        self, hook: Callable[..., Any], *args: Any, name: str = "the hook", by: Callable[..., object] | None = None
    ) -> None:
        """Run a method that isn't one for its callers, to its end where it is async; or as far as `by` runs it."""
        token = set_current(self.ctx)
        try:
            self.run(by or _run_to_its_end, name, hook, *args)
        finally:
            reset_current(token)

    @calls_role_code
    def declared(self) -> Sequence[Any]:
        """Return what the role says that it holds, by a hook `device_state`: for memory that nobody can find."""
        if (hook := self._asked("device_state")) is None:
            return ()
        token = set_current(self.ctx)
        try:
            return (hook(),)
        finally:
            reset_current(token)

    @calls_role_code
    def managed(self) -> Mapping[Purpose, int]:
        """Return the bytes of memory that it moves itself, by its hook `managed`.

        Raises:
            ConfigError: It says something else.
        """
        if (hook := self._asked("managed")) is None:
            return {}
        token = set_current(self.ctx)
        try:
            found = hook()
        finally:
            reset_current(token)
        return counts_as(str(self.name), found, "managed()")

    @calls_role_code
    def apart(self) -> Sequence[object]:
        """Return the objects that nobody looks into for what it holds, by its hook `apart`."""
        if (hook := self._asked("apart")) is None:
            return ()
        token = set_current(self.ctx)
        try:
            return tuple(hook())
        finally:
            reset_current(token)

    def run(self, code: Callable[..., T], *args: Any) -> T:
        """Run code of the role's, with torch set as it is for the role."""
        setting = self.setting
        setting.have(self.settings or self._of_all())
        if self.shares_numbers:
            code = partial(self._unseeded, code)
        try:
            return code(*args)
        finally:
            setting.have(setting.base)

    def _unseeded(self, code: Callable[..., T], *args: Any) -> T:
        """Run code, and say so if it has seeded torch's default generator, which others use as well."""
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
        """Return what a method is called in errors and stacks."""
        return self.routes[method][1]


@calls_role_code
def _run_to_its_end(name: str, hook: Callable[..., Any], *args: Any) -> None:
    wait_until_over(name, hook(*args))
