"""The worker's half of debugging: a debugger in role code, with a terminal on the driver's side."""

from __future__ import annotations

import bdb
import inspect
import itertools
import os
import pdb
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from colocate._protocol.consequence import Consequence
from colocate._protocol.message import Message
from colocate._role.context import RowState, current, running_call
from colocate._system.jobs import format_error
from colocate._system.tracebacks import format_user_frames
from colocate.features.debugging.editor import Editor
from colocate.features.debugging.messages import (
    DetachTerminal,
    SessionResumed,
    SessionStarted,
    TerminalInput,
    TerminalOutput,
)
from colocate.features.debugging.prompt import Terminal
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature
from colocate.worker.serving.signal_handlers import is_role_code

_PYTHONS_OWN = ("", "pdb.set_trace")
_EDITOR = "debugpy.breakpoint"


class DebuggingOfWorker(WorkerFeature):
    """The worker's half of debugging: handles `breakpoint()` and, if requested, stops at errors in role code."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._context = worker_context
        self._numbers = itertools.count(1)
        self._thread_state = threading.local()  # Each thread has a debugger, which keeps breakpoints for the next stop.
        self._stops: dict[int, Terminal] = {}
        self._post_mortem = self._is_closing = False
        self._editor: Editor | None = None
        self._hook: str | None = None  # The value of the driver's PYTHONBREAKPOINT.
        worker_context.scope.add_ender(lambda concerns, reason: self._run_post_mortem())

    def configure(self, plain: Any) -> None:
        """Store the driver's options for debugging."""
        self._post_mortem, self._hook = plain

    # -- in role code

    def breakpoint(self, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
        """Return a function that stops in `frame`. The breakpoint hook calls that function right before returning."""
        # Ignore this process's own variable, because Ray sets its own debugger there, which doesn't know colocate.
        hook = self._context.boot.env.get("PYTHONBREAKPOINT") or self._hook or ""
        if hook == "0" or self._is_unattended():
            return _do_nothing
        if hook == _EDITOR:
            if self._editor is None:
                boot = self._context.boot
                lanes = [lane.thread for lane in self._context.lanes]
                self._editor = Editor(boot.ports, boot.slot, lanes, Terminal(self))
            return self._editor.make_stop(frame)
        if hook not in _PYTHONS_OWN:
            os.environ["PYTHONBREAKPOINT"] = hook
            return lambda: sys.__breakpointhook__(*args, **kwargs)
        debugger: _Debugger | None = getattr(self._thread_state, "debugger", None)
        if debugger is None:
            debugger = self._thread_state.debugger = _Debugger(Terminal(self))
        return lambda: debugger.set_trace(frame)

    def explain_failure(self, error: BaseException, role: str | None, row: RowState | None = None) -> BaseException:
        """Stop in the debugger at an error of role code, if this was requested. Return `error` unchanged."""
        trace = error.__traceback__
        if self._post_mortem and trace is not None and format_user_frames(error) and not self._is_followup(error):
            _Debugger(Terminal(self, format_error(error))).inspect_error(trace)
        return error

    def _is_followup(self, error: BaseException) -> bool:
        """Return whether an error only results from another rank's error, or from the end of the call or the group."""
        given_up = self._context.get_wait_refusal() is not None or isinstance(error, Consequence | bdb.BdbQuit)
        return given_up or self._is_unattended() or self._context.is_consequence()

    # -- on the receiving thread

    def on_message(self, message: Message, body: Any) -> None:
        """Pass a typed line to a stop's debugger, or resume one stop or all stops."""
        assert isinstance(message, TerminalInput | DetachTerminal)
        if not message.number:
            self.on_group_closing()
        elif (stop := self._stops.get(message.number)) is not None:  # The stop may just have ended.
            stop.lines.put(message.line if isinstance(message, TerminalInput) else None)

    def on_group_closing(self) -> None:
        """Resume all stops and prevent further ones, because the group or the job is about to end."""
        self._is_closing = True
        self._run_post_mortem()

    def on_driver_changed(self) -> None:
        """Allow stops again, because the group has a new driver."""
        self._is_closing = False

    def after_call(self, seq: int) -> None:
        """End the user's stepping when a call ends."""
        debugger: _Debugger | None = getattr(self._thread_state, "debugger", None)
        if debugger is not None and debugger.terminal.seq == seq:
            debugger.end_stepping()

    def _is_unattended(self) -> bool:
        """Return whether stops are disabled, because the group is closing or the call was cancelled."""
        scope, seq = self._context.scope, self._context.get_current_seq()
        return self._is_closing or scope.closed is not None or (seq is not None and scope.is_of_former_driver(seq))

    def _run_post_mortem(self) -> None:
        for stop in list(self._stops.values()):
            if (
                self._is_closing
                or self._context.scope.closed is not None
                or self._context.scope.is_of_former_driver(stop.seq)
            ):
                stop.lines.put(None)

    # -- for terminals

    def on_stop(self, terminal: Terminal, where: str, in_editor: bool) -> None:
        """Report a new stop to the driver, or a new position while the user steps."""
        state, ctx = running_call.get(), current()
        work = state.call if isinstance(state, RowState) else state or self._context.lane.get_last_work()
        terminal.seq = 0 if work is None else work.seq
        terminal.label = getattr(work, "label", "role code")
        terminal.rank = self._context.boot.slot if ctx is None else ctx.rank
        terminal.number = terminal.number or next(self._numbers)
        self._stops[terminal.number] = terminal
        self._context.lane.on_waiting()
        role = None if ctx is None else ctx.role
        arguments = terminal.number, role, terminal.label, terminal.rank, where, terminal.error, in_editor
        self._context.send_message(SessionStarted(*arguments))
        if self._is_unattended():  # The group may have begun to close since the first check.
            terminal.lines.put(None)

    def on_stop_ended(self, terminal: Terminal) -> None:
        """Report the end of a stop to the driver."""
        self._stops.pop(terminal.number, None)
        self._context.send_message(SessionResumed(terminal.number))

    def show_text(self, terminal: Terminal, text: str, asks: bool) -> None:
        """Send a debugger's output to the driver."""
        self._context.lane.on_waiting()
        self._context.send_message(TerminalOutput(terminal.number, text, asks))


class _Debugger(pdb.Pdb):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True)  # type: ignore[arg-type]
        self.terminal = terminal

    def inspect_error(self, trace: TracebackType) -> None:
        self.reset()
        self.interaction(None, trace)

    def interaction(self, frame: FrameType | None, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - its name is another one since 3.13
        """Stop at a frame, or at the place of an exception, until the user resumes or steps."""
        at, line = (frame, frame.f_lineno) if frame is not None else [*traceback.walk_tb(args[0])][-1]
        self.terminal.start_stop(f"{at.f_code.co_filename}:{line}")
        self.prompt = f"({self.terminal.label} rank {self.terminal.rank}) "
        if self.terminal.error and frame is None:
            self.message(self.terminal.error)
        try:
            super().interaction(frame, *args)
        finally:
            # The stop is over unless the user steps. After `continue`, `bdb` sets `stoplineno` to -1.
            if frame is None or self.quitting or self.stoplineno == -1:
                self.terminal.end_stop()

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the frames from the first frame of role code on, and the index of the current frame."""
        stack, current = super().get_stack(f, t)
        are_roles = [is_role_code(frame) for frame, _ in stack]
        first = next((k for k in range(1, current + 1) if are_roles[k] and not are_roles[k - 1]), 0)
        return stack[first:], current - first

    def forget(self) -> None:
        """Drop the last stop's frames, and the variables that `pdb` would keep until the next stop."""
        super().forget()
        vars(self).pop("curframe_locals", None)

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether a step may end in `frame`, which must be a frame of role code."""
        return is_role_code(frame) and super().stop_here(frame)

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Handle a function's return, and end the user's stepping if the caller is no role code."""
        result = super().dispatch_return(frame, arg)
        outer = frame.f_back
        # A coroutine also returns here at each `await`, so `after_call` handles the end of the call.
        awaits = frame.f_code.co_flags & inspect.CO_COROUTINE
        if not awaits and (outer is None or not is_role_code(outer)) and is_role_code(frame):
            self.end_stepping()
        return result

    def dispatch_exception(self, frame: FrameType, arg: Any) -> Any:
        """Handle an exception in a frame of role code, and ignore exceptions in other frames."""
        return super().dispatch_exception(frame, arg) if is_role_code(frame) else self.trace_dispatch

    def end_stepping(self) -> None:
        """End the stop if the user is still stepping."""
        if self.terminal.number:
            self.set_continue()
            self.terminal.end_stop()

    def do_EOF(self, arg: str) -> bool:
        """Clear all breakpoints and resume, because the input has ended."""
        self.message("")
        self.clear_all_breaks()
        self.set_continue()
        return True

    def do_run(self, arg: str) -> None:
        """Refuse the commands `run`, `restart` and `interact`."""
        self.error("a role's call isn't run anew from here, and a prompt within this one has no terminal")

    do_restart = do_interact = do_run


def _do_nothing() -> None:
    return
