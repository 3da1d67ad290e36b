"""`ColocatedGroup`: one worker per slot that holds every role of its slot, as users hold it."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, cast, overload

from colocate import features
from colocate._api.held import Held
from colocate._calls.sending import refuse_here
from colocate._calls.view import RoleView
from colocate._display import table
from colocate._role.call import Call, Underway
from colocate._role.context import Context
from colocate._role.method import Discardable, Tag
from colocate._role.role import RoleInfo, written_class
from colocate._signals.deferred import run_deferred
from colocate._signals.in_framework import refuse_to_wait
from colocate._system.deadline import Deadline
from colocate._system.limits import LEDGERS_WITHIN_S
from colocate._system.numbers import limit
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ConfigError

if TYPE_CHECKING:
    from colocate.features.memory.tables import GroupMemory

R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")


class ColocatedGroup(Held[WorkerGroup], node=WorkerGroup, by="pool.spawn"):
    """Several roles in one worker per slot. Made by `pool.spawn` or `colocate.spawn`; a context manager that closes it.

    Its `state` is "starting", "ready", "closing", "closed", "failed" or "restarting".
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        """Use `pool.spawn`."""
        super().__init__(worker_group)
        self._views: dict[str, RoleView] = {}

    @property
    def generation(self) -> int:
        """How often it has been restarted."""
        return self._node.generation

    @overload
    def role(self, name: str) -> Any: ...
    @overload
    def role(self, name: str, cls: Callable[..., R]) -> R: ...
    def role(self, name: str, cls: Any = None) -> Any:
        """The view of a role. With its class it is typed as that class, so type checkers check calls.

        Args:
            name: The role's name.
            cls: Its class.

        Raises:
            ConfigError: There is no such role, or it is of another class.
        """
        cls = written_class(cls)
        info = self._node.roles.get(name)
        if info is None:
            raise ConfigError(f"group {self.name!r} has no role {name!r}: it has {', '.join(self._node.roles)}")
        if cls is not None and cls is not info.cls and not issubclass(info.cls, cls) and not self._is_of(info, cls):
            found, wanted = (f"{each.__module__}:{each.__qualname__}" for each in (info.cls, cls))
            raise ConfigError(f"role {name!r} of group {self.name!r} is a {found}, and no {wanted} or subclass of it")
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
        return self._shown(table(roles))

    def _is_of(self, info: RoleInfo, cls: type) -> bool:
        """Whether a role's class is the one of that name here: that of an attached pool may have come by value."""
        names = [(each.__module__, each.__qualname__) for each in info.cls.__mro__]
        return self._node.home.attachment is not None and (cls.__module__, cls.__qualname__) in names

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: Callable[..., R]) -> R: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.role(key)
        key = written_class(key)
        if not isinstance(key, type):
            raise ConfigError(f"group {self.name!r} has a view for a role's name, or for its class, not for {key!r}")
        found = [name for name, info in self._node.roles.items() if issubclass(info.cls, key) or self._is_of(info, key)]
        if len(found) != 1:
            has = ", ".join(f"{name} ({info.cls.__qualname__})" for name, info in self._node.roles.items())
            raise ConfigError(
                f"group {self.name!r} has {len(found) or 'no'} roles of class {key.__qualname__}: it has {has}; "
                "use group.role(name, cls)"
            )
        return self.role(found[0])

    if not TYPE_CHECKING:  # who reads an attribute that there isn't is told by type checkers, too
        __iter__ = __contains__ = None  # Python would ask for the view of 0

        def __getattr__(self, name: str) -> NoReturn:
            node = self.__dict__.get("_node")
            hint = f"; for the view of that role use group.role({name!r})" if node and name in node.roles else ""
            raise AttributeError(f"a group has no attribute {name!r}{hint}")

    @property
    def roles(self) -> dict[str, RoleInfo]:
        """Return the roles of the group by name."""
        return dict(self._node.roles)

    # -- calls

    @overload
    def run(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...
    @overload
    def run(self, function: Callable[Concatenate[Context, P], T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a plain function on every worker, in the order of the group's calls, and wait.

        Args:
            function: Its first parameter is the worker's context: `role` is None, every slot is a rank. One from an
                installed distribution goes by name, any other by value. An async one is run to its end.
            *args: Its further arguments; residents arrive as their values.
            **kwargs: Its further arguments by name.

        Returns:
            What it returned, one item per worker.
        """
        results: list[Any] = features.module("functions.driver").run(self._node, function, args, kwargs).result()
        return results

    def scope(self) -> AbstractContextManager[None]:
        """Free what this thread or task keeps inside the block; raise the failures of kept calls that nobody has used.

        These are what was kept inside, and what was dropped before outside of any block that is open.
        """
        if self._node.forked:
            self._node.check()
        return self._node.residents.scope()

    def pipeline(self) -> AbstractContextManager[None]:
        """Send the `.submit` and `.keep` calls made inside the block as one message per worker, when it ends.

        They take their places in the group's order together. Residents kept inside can be used by later calls inside.
        Calls of other threads and tasks, and of other groups, go out at once as ever; pipelines of several groups may
        be nested, and are all sent when the outermost block ends. An exception in the block sends nothing.

        Raises:
            PipelineError: Inside the block, by what needs an answer: a plain call, `result()`, `fetch()`.
        """
        self._node.check()
        return cast("AbstractContextManager[None]", features.module("pipelines.driver").pipeline(self._node))

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
        """Have every role that has `save(dir)` and `restore(dir)` save itself, between the group's calls.

        Each role gets a folder of its own, the same for all of its ranks; the states of `ctx.generator` are kept too.
        What a `save` returns is waited for: a future, a coroutine, what `dcp.async_save` returns, a thread, a process,
        or a list of these. So is a future that it leaves in an attribute of the role. A restart goes on from the last
        checkpoint.

        A `save` may have two halves: it takes copies of its state, yields once, and writes them.

        Args:
            directory: Becomes the checkpoint's folder when all of it is written. An earlier checkpoint of the same
                roles, or an empty folder, is replaced then. The driver and all workers have to see it.
            tag: What `wait_ready` returns after a restart from it; None for the folder's name.
            wait: Whether it is all written when this returns. Otherwise roles have their states: second halves of
                `save`, and what it has returned, go on beside the calls that follow. The checkpoint counts when all
                ranks have written. The next one, a restore and `close` (within its grace) wait for it.

        Returns:
            With `wait=False` a call that is done when the checkpoint counts. What it has failed of is raised by the
            next checkpoint, or by `close`, unless its result was asked for.

        Raises:
            ConfigError: A role has only one of the two methods, or no role has them. Or something else lies there
                (other files, the working directory, a file, a link): nothing was touched.
            RoleError: A `save` raised, or what it has returned failed, or something isn't written when both are over;
                or a kept call has failed whose resident was dropped before anybody used it: what was in the directory
                stays.
        """
        refuse_here(self._node, "checkpoint")
        refuse_to_wait(f"the checkpoint of group {self.name!r}")
        checkpoints: Any = self._node.part("checkpoints")
        folder = Path(directory)
        tag = folder.name if tag is None else tag
        if wait:
            run_deferred(lambda: checkpoints.write(folder, tag))
            return None
        begun: Underway = run_deferred(lambda: checkpoints.begin(folder, tag))
        return Call(begun)

    def restore(self, directory: str | os.PathLike[str]) -> str | int | float | None:
        """Have every role that was saved in a checkpoint go on from it, between the group's calls.

        All ranks go on from the same checkpoint, or it is an error. Roles that have no `save` stay as they are. A
        restart goes on from that one too, as long as there is no newer one.

        Args:
            directory: The checkpoint's folder.

        Returns:
            Its tag, as `wait_ready` returns it from now on.

        Raises:
            ConfigError: There is no checkpoint, or it isn't of these roles and numbers of ranks, or a file of it is
                missing or has another size.
            RoleError: A `restore` raised, or another checkpoint has taken the place of this one meanwhile, or a file of
                it has other contents than were saved; some ranks may have been restored. Restore again, or close the
                group.
        """
        refuse_here(self._node, "restore")
        refuse_to_wait(f"the restore of group {self.name!r}")
        folder = Path(directory)
        tag: str | int | float | None
        tag = run_deferred(lambda: cast("Any", self._node.part("checkpoints")).restore(folder))
        return tag

    def memory(self, timeout: float | None = LEDGERS_WITHIN_S) -> GroupMemory:
        """Return what the memory of its workers is used for, by role and kind; each byte counts once.

        Found by looking at the roles' modules, optimizers and attributes, on a thread beside the one that runs role
        code, so that it may be asked at any time; gradients are those of between two calls. Of what a role holds
        otherwise (in C++, say) its method `device_state()`, if it has one, returns the tensors. It is called on that
        thread, also while a method runs, so that it must not read `.grad`.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Raises:
            RoleError: A `device_state` raised.
            TimeoutError: A worker hasn't answered in time.
        """
        self._node.check()
        limited = limit(timeout, "memory(timeout)")
        refuse_to_wait(f"the memory of group {self.name!r}")
        found: GroupMemory
        found = run_deferred(lambda: cast("Any", self._node.part("memory")).asked(Deadline(limited)))
        return found

    def sleep(
        self,
        role: str,
        tags: Sequence[Tag] | None = None,
        timeout: float | None = None,
        on_call: Literal["wake", "fail"] = "wake",
        discard: Sequence[Discardable] = (),
    ) -> int:
        """Put memory of a role to sleep: that of a device goes to pinned memory, the host's to a file on a disk.

        A call in the group's order. All ranks of the role do it, or none does. Tensors stay the same objects, the
        host's at the same addresses. A call on the role wakes what its method needs (`@method(awake=...)`; by default
        everything), and so does a checkpoint; `ctx.sibling` refuses a role of which memory sleeps. What another role,
        which is awake, holds as well stays, and so does what lies in residents. A role with methods `sleep(tags)` and
        `wake(tags)`, which aren't `@method`, has them called beside it: for what colocate can't find.

        Args:
            role: The role's name.
            tags: What of it: "weights" (and buffers), "grads", "optimizer", "cache" (other tensors, and what
                `device_state()` returns); None for all of it.
            timeout: Seconds until it is given up; None for never.
            on_call: What a call of the role does that needs it: "wake" it, or "fail", with a `SleepingError`, until
                `wake`. A checkpoint wakes it all the same.
            discard: Those tags whose contents nobody needs, "grads" and "cache": they aren't copied, and come back as
                zeros, also where they sleep already. What else leads to, by another tag, from another role or a
                resident, comes back as it was.

        Returns:
            How many bytes have left the memory of the workers.

        Raises:
            CapabilityError: Slots are threads of the driver's, which has the same memory: use processes.
            MemoryBudgetError: There is no room where it would go: nothing has changed.
            RoleError: It can't be done; nothing has changed.
        """
        limited = limit(timeout, "sleep(timeout)", positive=True)
        nbytes: int = cast("Any", self._node.part("memory")).sleep(role, tags, limited, on_call, discard)
        return nbytes

    def wake(self, role: str, tags: Sequence[Tag] | None = None, timeout: float | None = None) -> int:
        """Have memory of a role that sleeps be there again, on all of its ranks or on none.

        Args:
            role: The role's name.
            tags: What of it, as in `sleep`; None for all of it.
            timeout: Seconds until it is given up; None for never.

        Returns:
            How many bytes have come back.

        Raises:
            MemoryBudgetError: They don't fit: nothing has changed.
            RoleError: It can't be done, or the role's `wake` has raised.
        """
        limited = limit(timeout, "wake(timeout)", positive=True)
        nbytes: int = cast("Any", self._node.part("memory")).wake(role, tags, limited)
        return nbytes

    def pause(self, role: str, how: Literal["wait", "keep", "abort"] = "wait", timeout: float | None = None) -> None:
        """Have a background role begin no further call until `resume`, and wait until it does nothing.

        Meanwhile `sync_weights`, `sleep`, `wake`, `checkpoint` and `restore` come before its calls that wait. Without a
        pause they wait for all calls of the role that were made before them. Deadlines of calls go on. What calls of
        other roles use is made before the role pauses.

        Args:
            role: The role's name.
            how: What becomes of a call that runs: it is waited for ("wait"); it stops where its method calls
                `ctx.pause_point()`, and goes on from there ("keep"); or it is given up ("abort"), and its caller gets a
                `RoleError`.
            timeout: Seconds to wait; None for as long as it takes.

        Raises:
            ConfigError: There is no such background role.
            TimeoutError: A call still runs; the role goes on, or stays paused as it was before.
            ColocateError: Another thread has resumed the role, or paused it anew, before it did nothing.
        """
        limited = limit(timeout, "pause(timeout)", positive=True)
        cast("Any", self._node.part("pausing")).pause(role, how, limited)  # of features/pausing

    def resume(self, role: str) -> None:
        """Have a background role go on after `pause`; one that isn't paused does so anyway.

        Args:
            role: The role's name.

        Raises:
            ConfigError: There is no such background role.
        """
        cast("Any", self._node.part("pausing")).resume(role)

    def resize(self, timeout: float | None = None) -> int:
        """Go on with as many slots as there are now, where the pool may have fewer and had lost some.

        Where there are more than it has, it is restarted from its last checkpoint, and waited for: so call it right
        after `checkpoint`. Residents end as by any restart. Otherwise nothing happens.

        Args:
            timeout: Seconds to wait for it; None waits as long as it takes.

        Returns:
            How many slots it has now.

        Raises:
            ConfigError: It has `on_failure="fail"`, or no checkpoint to go on from.
            ColocateError: Calls are pending, or it has failed for good, or is closed.
            TimeoutError: It isn't ready yet.
        """
        node = self._node
        refuse_here(node, "resize")
        limited = limit(timeout, "resize(timeout)")
        refuse_to_wait(f"the resize of group {self.name!r}")
        size: int = run_deferred(lambda: cast("Any", node.part("checkpoints")).resize(limited))
        return size

    def wait_ready(self, timeout: float | None = None) -> str | int | float | None:
        """Wait until it can be called; after a restart calls are refused until somebody has.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Returns:
            The tag of the checkpoint that the roles were restored from; None when they are as constructed.

        Raises:
            TimeoutError: It isn't ready yet.
            ColocateError: It has failed for good, or is closed.
        """
        limited = limit(timeout, "wait_ready(timeout)")
        refuse_to_wait(f"wait_ready of group {self.name!r}")
        return run_deferred(lambda: self._node.restarts.wait(limited))

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close it: new calls are refused, running ones have `grace` seconds, then its workers are ended.

        One that `colocate.spawn` has made closes its pool and its runtime, too.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for them for ever.
            force: Close it although other groups use its residents; their calls fail with a clear error.

        Raises:
            BorrowedError: Another group uses one of its residents (without `force`).
            ExceptionGroup: What went wrong, after everything has been freed.
        """
        self._node.close_by_caller(grace, force)
