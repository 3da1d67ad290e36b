"""`ColocatedGroup`: the users' handle of a group. One worker per slot holds all roles of the slot."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, cast, overload

from colocate import features
from colocate._api.held import NodeHandle
from colocate._calls.sending import refuse_here
from colocate._calls.view import RoleView
from colocate._display import table
from colocate._role.call import Call, CallFuture
from colocate._role.context import Context
from colocate._role.method import Discardable, Tag
from colocate._role.role import RoleInfo, strip_type_arguments
from colocate._signals.deferred import run_deferred
from colocate._signals.in_framework import check_may_wait
from colocate._system.deadline import Deadline
from colocate._system.limits import LEDGERS_WITHIN_S
from colocate._system.numbers import parse_limit
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ConfigError

if TYPE_CHECKING:
    from colocate.features.memory.tables import GroupMemory

R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")


class ColocatedGroup(NodeHandle[WorkerGroup], node=WorkerGroup, by="pool.spawn"):
    """Several roles in one worker per slot, made by `pool.spawn` or `colocate.spawn`. A `with` block closes the group.

    Its `state` is "starting", "ready", "closing", "closed", "failed" or "restarting".
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        """Use `pool.spawn` instead of this constructor."""
        super().__init__(worker_group)
        self._views: dict[str, RoleView] = {}

    @property
    def generation(self) -> int:
        """How often the group has been restarted."""
        return self._node.generation

    @overload
    def role(self, name: str) -> Any: ...
    @overload
    def role(self, name: str, cls: Callable[..., R]) -> R: ...
    def role(self, name: str, cls: Any = None) -> Any:
        """Return the view of a role. If the class is given, type checkers check calls of the view.

        Args:
            name: The role's name.
            cls: The role's class, as which the view is typed.

        Raises:
            ConfigError: There is no such role, or it is of another class.
        """
        cls = strip_type_arguments(cls)
        info = self._node.roles.get(name)
        if info is None:
            raise ConfigError(f"group {self.name!r} has no role {name!r}: it has {', '.join(self._node.roles)}")
        if cls is not None and cls is not info.cls and not issubclass(info.cls, cls) and not self._has_class(info, cls):
            actual, target = (f"{role_class.__module__}:{role_class.__qualname__}" for role_class in (info.cls, cls))
            raise ConfigError(f"role {name!r} of group {self.name!r} is a {actual}, and no {target} or subclass of it")
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = RoleView(self._node, info)
        return view

    def _repr_html_(self) -> str:
        roles = [
            {
                "role": info.name,
                "class": info.cls.__qualname__,
                "ranks": len(info.slots),
                "mesh": ", ".join(
                    " ".join(f"{axis}={size}" for axis, size in mesh.axes) for mesh in info.meshes.values()
                ),
                "methods": ", ".join(info.methods),
            }
            for info in self._node.roles.values()
        ]
        return self._render(table(roles))

    def _has_class(self, info: RoleInfo, cls: type) -> bool:
        """Compare a role's class with `cls` by name, because classes of an attached pool may be copies."""
        names = [(base.__module__, base.__qualname__) for base in info.cls.__mro__]
        return self._node.home.attachment is not None and (cls.__module__, cls.__qualname__) in names

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: Callable[..., R]) -> R: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.role(key)
        key = strip_type_arguments(key)
        if not isinstance(key, type):
            raise ConfigError(f"group {self.name!r} has a view for a role's name, or for its class, not for {key!r}")
        role_names = [
            name for name, info in self._node.roles.items() if issubclass(info.cls, key) or self._has_class(info, key)
        ]
        if len(role_names) != 1:
            has = ", ".join(f"{name} ({info.cls.__qualname__})" for name, info in self._node.roles.items())
            raise ConfigError(
                f"group {self.name!r} has {len(role_names) or 'no'} roles of class {key.__qualname__}: it has {has}; "
                "use group.role(name, cls)"
            )
        return self.role(role_names[0])

    if not TYPE_CHECKING:  # Type checkers must not see a `__getattr__`, which accepts all attributes.
        __iter__ = __contains__ = None  # Otherwise Python would iterate by calling `group[0]`.

        def __getattr__(self, name: str) -> NoReturn:
            node = self.__dict__.get("_node")
            hint = f"; for the view of that role use group.role({name!r})" if node and name in node.roles else ""
            raise AttributeError(f"a group has no attribute {name!r}{hint}")

    @property
    def roles(self) -> dict[str, RoleInfo]:
        """The roles of the group, by name."""
        return dict(self._node.roles)

    # -- calls

    @overload
    def run(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...
    @overload
    def run(self, function: Callable[Concatenate[Context, P], T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a plain function on every worker, in the order of the group's calls, and wait for the results.

        Args:
            function: The first parameter is the worker's context: `role` is None, every slot is a rank. A function
                from an installed distribution is sent by name, any other by value. An async function runs to its
                end.
            *args: Further arguments; residents arrive as values.
            **kwargs: Further arguments by name.

        Returns:
            The results, one item per worker.
        """
        results: list[Any] = (
            features.import_module_of("functions.driver").submit_function(self._node, function, args, kwargs).result()
        )
        return results

    def scope(self) -> AbstractContextManager[None]:
        """Free residents kept in a `with` block when the block ends, and raise the calls' unreported failures.

        This is for residents of this thread or task. The failures are those of calls kept inside, and of residents
        dropped before, outside of any open block.
        """
        if self._node.is_forked:
            self._node.check_usable()
        return self._node.residents.scope()

    def pipeline(self) -> AbstractContextManager[None]:
        """Send the `.submit` and `.keep` calls of a `with` block when the block ends, as one message per worker.

        The calls take consecutive places in the group's order. Residents kept inside can be used by later calls
        inside. Calls of other threads and tasks, and of other groups, are sent at once as usual; pipelines of
        several groups may be nested, and are all sent at the end of the outermost block. An exception in the block
        sends nothing.

        Raises:
            PipelineError: Inside the block, by an operation that needs an answer: a plain call, `result()`,
                `fetch()`.
        """
        self._node.check_usable()
        return cast("AbstractContextManager[None]", features.import_module_of("pipelines.driver").pipeline(self._node))

    @overload
    def checkpoint(
        self, directory: str | os.PathLike[str], tag: str | int | float | None = None, wait: Literal[True] = True
    ) -> None: ...

    @overload
    def checkpoint(
        self, directory: str | os.PathLike[str], tag: str | int | float | None = None, *, wait: Literal[False]
    ) -> Call[None]: ...

    @overload
    def checkpoint(
        self, directory: str | os.PathLike[str], tag: str | int | float | None = None, wait: bool = True
    ) -> Call[None] | None: ...

    def checkpoint(
        self, directory: str | os.PathLike[str], tag: str | int | float | None = None, wait: bool = True
    ) -> Call[None] | None:
        """Save every role that has `save(dir)` and `restore(dir)`, between the group's calls.

        Each role gets a folder of its own, the same for all of its ranks; the states of `ctx.generator` are saved,
        too. The result of a `save` is waited for: a future, a coroutine, the result of `dcp.async_save`, a thread, a
        process, or a list of these; so is a future in an attribute of the role. A restart begins from the last
        checkpoint.

        A `save` may have two halves: it copies its state, yields once, and writes the copies.

        Args:
            directory: The checkpoint's folder, once all is written. An earlier checkpoint of the same roles, or an
                empty folder, is replaced then. The driver and all workers must see the same folder.
            tag: The result of `wait_ready` after a restart from this checkpoint; None for the folder's name.
            wait: Whether to return only after everything is written. Otherwise roles have copied their states:
                second halves of `save`, and its results, run on beside later calls. The checkpoint counts once all
                ranks have written. The next checkpoint, a restore and `close` (within its grace) wait for it.

        Returns:
            With `wait=False`, a call that is done when the checkpoint counts. The next checkpoint, or `close`,
                raises its failure, unless the result was asked for.

        Raises:
            ConfigError: A role has only one of the two methods, or no role has them. Or the directory is in use
                otherwise (other files, the working directory, a file, a link): nothing was touched.
            RoleError: A `save` or its result failed, or a file is missing after both; or a kept call failed whose
                resident was dropped unused. The directory's old contents stay.
        """
        refuse_here(self._node, "checkpoint")
        check_may_wait(f"the checkpoint of group {self.name!r}")
        checkpoints: Any = self._node.get_part("checkpoints")
        folder = Path(directory)
        tag = folder.name if tag is None else tag
        if wait:
            run_deferred(lambda: checkpoints.write_checkpoint(folder, tag))
            return None
        underway: CallFuture = run_deferred(lambda: checkpoints.start_checkpoint(folder, tag))
        return Call(underway)

    def restore(self, directory: str | os.PathLike[str]) -> str | int | float | None:
        """Restore every role that is saved in a checkpoint, between the group's calls.

        All ranks restore the same checkpoint, or fail. Roles without a `save` stay unchanged. Restarts begin from
        this checkpoint, too, until there is a newer one.

        Args:
            directory: The checkpoint's folder.

        Returns:
            The checkpoint's tag, from now on the result of `wait_ready`.

        Raises:
            ConfigError: There is no checkpoint, its roles or numbers of ranks differ, or a file is missing or has
                another size.
            RoleError: A `restore` raised, or another checkpoint has replaced this one meanwhile, or a file's
                contents differ from the saved ones; some ranks may have been restored. Restore again, or close the
                group.
        """
        refuse_here(self._node, "restore")
        check_may_wait(f"the restore of group {self.name!r}")
        folder = Path(directory)
        tag: str | int | float | None
        tag = run_deferred(lambda: cast("Any", self._node.get_part("checkpoints")).restore_checkpoint(folder))
        return tag

    def memory(self, timeout: float | None = LEDGERS_WITHIN_S) -> GroupMemory:
        """Return how much memory the workers use, by role and kind. Each byte counts once.

        The roles' modules, optimizers and attributes are inspected on a thread beside the lane, so this may be
        called at any time; gradients are those between two calls. For memory that a role holds elsewhere (in C++,
        say), the role's method `device_state()`, if there is one, returns the tensors. It is called on that thread,
        also while a method runs, so it must not read `.grad`.

        Args:
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            RoleError: A `device_state` raised.
            TimeoutError: A worker hasn't answered in time.
        """
        self._node.check_usable()
        limited = parse_limit(timeout, "memory(timeout)")
        check_may_wait(f"the memory of group {self.name!r}")
        usage: GroupMemory
        usage = run_deferred(lambda: cast("Any", self._node.get_part("memory")).ask_memory(Deadline(limited)))
        return usage

    def sleep(
        self,
        role: str,
        tags: Sequence[Tag] | None = None,
        timeout: float | None = None,
        on_call: Literal["wake", "fail"] = "wake",
        discard: Sequence[Discardable] = (),
    ) -> int:
        """Put memory of a role to sleep: move device memory to pinned memory, and host memory to a file on a disk.

        Sleeping is a call in the group's order. All ranks of the role sleep, or none does. Tensors stay the same
        objects, those on the host at the same addresses. A call on the role wakes the memory that its method needs
        (`@method(awake=...)`; by default all), and so does a checkpoint; `ctx.sibling` refuses a role with sleeping
        memory. Memory that an awake role shares stays, and so do residents. A role's plain methods `sleep(tags)` and
        `wake(tags)`, if there are any, are called in addition: for memory that colocate can't find.

        Args:
            role: The role's name.
            tags: Kinds of memory: "weights" (and buffers), "grads", "optimizer", "cache" (other tensors, and the
                results of `device_state()`); None for all.
            timeout: Seconds until the sleep is given up; None for never.
            on_call: What a call that needs the memory does: "wake" it, or "fail", with a `SleepingError`, until
                `wake`. A checkpoint wakes it in either case.
            discard: Tags with disposable contents, "grads" and "cache": they aren't copied, and come back as zeros,
                also if already asleep. Memory that another tag, another role or a resident also refers to comes back
                unchanged.

        Returns:
            Number of bytes that have left the memory of the workers.

        Raises:
            CapabilityError: Slots are threads of the driver, with the same memory: use processes.
            MemoryBudgetError: There is no room at the destination: nothing has changed.
            RoleError: The sleep is impossible; nothing has changed.
        """
        limited = parse_limit(timeout, "sleep(timeout)", positive=True)
        nbytes: int = cast("Any", self._node.get_part("memory")).sleep_role(role, tags, limited, on_call, discard)
        return nbytes

    def wake(self, role: str, tags: Sequence[Tag] | None = None, timeout: float | None = None) -> int:
        """Wake sleeping memory of a role, on all ranks or on none.

        Args:
            role: The role's name.
            tags: Kinds of memory, as in `sleep`; None for all.
            timeout: Seconds until the wake is given up; None for never.

        Returns:
            Number of bytes that were restored.

        Raises:
            MemoryBudgetError: The bytes don't fit: nothing has changed.
            RoleError: The wake is impossible, or the role's `wake` has raised.
        """
        limited = parse_limit(timeout, "wake(timeout)", positive=True)
        nbytes: int = cast("Any", self._node.get_part("memory")).wake_role(role, tags, limited)
        return nbytes

    def pause(self, role: str, how: Literal["wait", "keep", "abort"] = "wait", timeout: float | None = None) -> None:
        """Pause a background role until `resume`, and wait until the role is idle. No further call of the role begins.

        Meanwhile `sync_weights`, `sleep`, `wake`, `checkpoint` and `restore` overtake the role's waiting calls.
        Without a pause these wait for all earlier calls of the role. Deadlines of calls go on. Residents for calls
        of other roles are made before the role pauses.

        Args:
            role: The role's name.
            how: The fate of a running call: wait for its end ("wait"); stop at `ctx.pause_point()`, and continue
                there later ("keep"); or abort the call ("abort"), whose caller gets a `RoleError`.
            timeout: Seconds to wait; None for no limit.

        Raises:
            ConfigError: There is no such background role.
            TimeoutError: A call still runs; the role goes on, or stays paused as before.
            ColocateError: Another thread has resumed the role, or paused it again, before it was idle.
        """
        limited = parse_limit(timeout, "pause(timeout)", positive=True)
        cast("Any", self._node.get_part("pausing")).pause_role(role, how, limited)

    def resume(self, role: str) -> None:
        """Resume a background role after `pause`; no effect on a role that isn't paused.

        Args:
            role: The role's name.

        Raises:
            ConfigError: There is no such background role.
        """
        cast("Any", self._node.get_part("pausing")).resume_role(role)

    def resize(self, timeout: float | None = None) -> int:
        """Restart a group on all available slots, if the group has lost slots and more are available again.

        This is for a pool with a range of slots. If there are more slots than the group has, the group restarts from
        its last checkpoint, and this waits: so call it right after `checkpoint`. Residents end as by any restart.
        Otherwise nothing happens.

        Args:
            timeout: Seconds to wait for the restart; None for no limit.

        Returns:
            The group's number of slots now.

        Raises:
            ConfigError: The group has `on_failure="fail"`, or no checkpoint to continue from.
            ColocateError: Calls are pending, or the group has failed for good, or is closed.
            TimeoutError: The group isn't ready yet.
        """
        node = self._node
        refuse_here(node, "resize")
        limited = parse_limit(timeout, "resize(timeout)")
        check_may_wait(f"the resize of group {self.name!r}")
        size: int = run_deferred(lambda: cast("Any", node.get_part("checkpoints")).resize_group(limited))
        return size

    def wait_ready(self, timeout: float | None = None) -> str | int | float | None:
        """Wait until the group can be called. After a restart, calls are refused until this method was called.

        Args:
            timeout: Seconds to wait at most; None for no limit.

        Returns:
            The tag of the checkpoint that the roles were restored from; None for roles as constructed.

        Raises:
            TimeoutError: The group isn't ready yet.
            ColocateError: The group has failed for good, or is closed.
        """
        limited = parse_limit(timeout, "wait_ready(timeout)")
        check_may_wait(f"wait_ready of group {self.name!r}")
        return run_deferred(lambda: self._node.restarts.wait_ready(limited))

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close the group. New calls are refused, running calls get `grace` seconds, and then the workers are ended.

        A group made by `colocate.spawn` closes its pool and its runtime, too.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for ever.
            force: Close the group although other groups use its residents; their calls fail with a clear error.

        Raises:
            BorrowedError: Another group uses one of the group's residents (without `force`).
            ExceptionGroup: The errors, after everything has been freed.
        """
        self._node.close_by_caller(grace, force)
