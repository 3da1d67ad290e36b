"""The desk, which connects stopped ranks to terminals: the driver's own terminal, and terminals of `colocate debug`.

A terminal serves one rank at a time. The driver's own terminal, if there is one, takes the rank that stopped first.
Any other terminal follows the rank that it was attached to, and must belong to this process's user or to root.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from colocate import wire
from colocate._protocol.message import Message
from colocate._system.abstract import user_of
from colocate._system.jobs import JobThread, Timer, report_exception
from colocate._system.terminals import drawing
from colocate._system.threads import Thread
from colocate.features.debugging import terminal as client
from colocate.features.debugging.messages import DetachTerminal, TerminalInput
from colocate.features.debugging.terminal import PATIENCE_S, socket_address

_AGAIN_S = 0.5


@attrs.define(eq=False)
class Stop:
    """A rank that has stopped in a debugger.

    Attributes:
        notify_worker: Sends a message to the rank's worker.
        print_line: Prints a line for the driver's user.
        output: The debugger's output while no terminal is attached.
        needs_line: Whether the debugger waits for a line.
        resumed_at: The time at which the rank was resumed, in seconds of `time.time()`; 0 before.
        in_editor: Whether the stop is for an editor, and not for terminals.
    """

    group: str
    slot: int
    node: str
    number: int
    role: str | None
    label: str
    rank: int
    where: str
    error: str
    notify_worker: Callable[[Message], None]
    print_line: Callable[[str], None]
    since: float = attrs.field(factory=time.time)
    output: str = ""
    needs_line: bool = False
    in_editor: bool = False
    resumed_at: float = 0.0
    terminal: Terminal | None = None

    @property
    def name(self) -> str:
        """The argument of `colocate debug --rank` that selects this stop."""
        return f"{self.group}/{self.role or 'function'}/{self.rank}"

    def __str__(self) -> str:
        why = f" by {self.error}" if self.error else ""
        return f"{self.label} on rank {self.rank} of group {self.group!r} is stopped{why} at {self.where}"

    @property
    def is_over(self) -> bool:
        """Whether the rank has been resumed."""
        return self.resumed_at > 0.0

    @property
    def needs_terminal(self) -> bool:
        """Whether a terminal can be attached to the rank."""
        return self.terminal is None and not self.is_over

    def resume_rank(self, number: int | None = None) -> None:
        """Resume the rank. With `number=0`, resume all stops of the worker and prevent further stops."""
        self.resumed_at = self.resumed_at or time.time()
        self.notify_worker(DetachTerminal(self.number if number is None else number))

    def to_dict(self) -> dict[str, Any]:
        """Return the stop as plain data."""
        place = {"group": self.group, "role": self.role, "rank": self.rank, "slot": self.slot, "node": self.node}
        terminal_name = None if self.terminal is None else self.terminal.name
        more = {"call": self.label, "where": self.where, "error": self.error, "terminal": terminal_name}
        return {**place, **more, "since": self.since, "seconds": round(time.time() - self.since, 1)}


@attrs.define(eq=False)
class Terminal:
    """A terminal at the other end of a socket.

    Attributes:
        followed: The group and slot that this terminal serves.
    """

    sock: socket.socket
    name: str
    process: subprocess.Popen[bytes] | None = None  # The process of the driver's own terminal.
    stop: Stop | None = None
    followed: tuple[str, int] | None = None
    _writer: JobThread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        wire.track_socket(self.sock)
        self._writer = JobThread(f"colocate-terminal-{self.sock.fileno()}", lambda error: report_exception())

    @property
    def is_closed(self) -> bool:
        """Whether the other end is closed, even if the reading thread hasn't noticed yet."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_message(self, told: Mapping[str, Any]) -> None:
        """Queue a message for the terminal."""

        def send() -> None:
            with contextlib.suppress(OSError):  # If the terminal is gone, the reading thread reports this.
                client.send_message(self.sock, told)

        self._writer.call_soon(send)

    def start_reader(self, heard: Callable[[Mapping[str, Any] | None], None]) -> None:
        """Start a thread that calls `heard` with each message from the terminal, and with None at the end."""

        def read() -> None:
            with contextlib.suppress(OSError, ValueError), self.sock.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    heard(json.loads(line))
            heard(None)

        Thread(target=read, name="colocate-terminal").start()

    def close(self, why: str = "") -> None:
        """Close the terminal after all queued messages were sent. The user sees `why` if not empty."""

        def end() -> None:
            if self.process is not None:
                try:
                    self.process.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)  # The other end can still read everything sent before.
            self._writer.close()

        if why or self.process is not None:
            self.send_message({"over": why})
        self._writer.call_soon(end)


class Desk:
    """All stopped ranks and terminals of this process. Methods may be called from any thread, and don't block."""

    def __init__(self) -> None:
        self._jobs = JobThread("colocate-debug", lambda error: report_exception())
        self._stops: list[Stop] = []
        self._terminals: list[Terminal] = []
        self._driver_terminal: Terminal | None = None
        self._retry_timer = Timer(None)
        self._display_pause = contextlib.ExitStack()  # Hides progress bars on the driver's terminal during stops.
        self._listener: socket.socket | None = None
        self._accept_thread: threading.Thread | None = None  # The thread that accepts terminals' connections.

    def add_stop(self, stop: Stop) -> None:
        """Schedule the registration of a new stop."""
        self._jobs.call_soon(partial(self._add_stop, stop))

    def show_text(self, stop: Stop, text: str, asks: bool) -> None:
        """Schedule the output of a debugger's text."""
        self._jobs.call_soon(partial(self._show_text, stop, text, asks))

    def end_stop(self, stop: Stop, why: str) -> None:
        """Schedule the end of a stop."""
        self._jobs.call_soon(partial(self._end_stop, stop, why))

    def remove_group(self, group: str, why: str) -> None:
        """Schedule the removal of a group: its stops end, and no terminal follows its ranks any more."""
        self._jobs.call_soon(partial(self._remove_group, group, why))

    def close(self) -> None:
        """Close all terminals and the desk's thread after the queued jobs, which have ended all stops."""
        self._jobs.call_soon(self._dismiss_terminals)
        self._jobs.close()

    # -- on the desk's thread

    def _add_stop(self, stop: Stop) -> None:
        self._stops.append(stop)
        self._serve_stops()
        if stop.terminal is None and self._driver_terminal is None:
            stop.print_line(f"[colocate] {stop}; its prompt: colocate debug {os.getpid()} --rank {stop.name}")

    def _serve_stops(self) -> None:
        for stop in [item for item in self._stops if item.needs_terminal]:
            followers = (item for item in self._terminals if item.followed == (stop.group, stop.slot))
            if (
                free := next((item for item in followers if item.stop is None and not item.is_closed), None)
            ) is not None:
                self._attach(stop, free)
        try:
            self._serve_driver()
            self._open_socket()
        except OSError:  # No descriptor is free, or another container in this network uses the address.
            self._retry_timer.cancel()
            self._retry_timer = self._jobs.call_later(_AGAIN_S, self._serve_stops)

    def _show_text(self, stop: Stop, text: str, asks: bool) -> None:
        if stop.terminal is None:
            stop.output, stop.needs_line = stop.output + text, asks
        else:
            stop.terminal.send_message({"text": text, "asks": asks})

    def _end_stop(self, stop: Stop, why: str) -> None:
        if stop not in self._stops:
            return
        self._stops.remove(stop)
        terminal, stop.terminal = stop.terminal, None
        if terminal is not None:
            terminal.stop = None
            terminal.send_message({"text": f"[colocate] {stop.label} on rank {stop.rank} {why}\n", "asks": False})
        self._serve_stops()
        self._close_if_idle()

    def _remove_group(self, group: str, why: str) -> None:
        for stop in [item for item in self._stops if item.group == group]:
            self._end_stop(stop, why)
        for terminal in [item for item in self._terminals if item.followed and item.followed[0] == group]:
            self._end_terminal(terminal, f"[colocate] group {group!r}: {why}")
        self._close_if_idle()

    def _dismiss_terminals(self) -> None:
        for terminal in list(self._terminals):
            self._end_terminal(terminal)
        self._close_if_idle()

    def _end_terminal(self, terminal: Terminal, why: str = "") -> None:
        self._terminals.remove(terminal)
        terminal.close(why)

    def _attach(self, stop: Stop, terminal: Terminal) -> None:
        stop.terminal, terminal.stop = terminal, stop
        waiting = sum(other_stop.needs_terminal for other_stop in self._stops)
        more = f" ({waiting} more wait for a terminal)" if waiting else ""
        head, stop.output = f"[colocate] {stop}{more}\n{stop.output}", ""
        terminal.send_message({"text": head, "asks": stop.needs_line})

    def _on_message(self, terminal: Terminal, told: Mapping[str, Any] | None) -> None:
        """Handle a message from a terminal, or the end of the connection if `told` is None."""
        stop = terminal.stop
        if told is None:
            self._on_terminal_closed(terminal)
        elif "attach" in told:
            self._attach_requested(terminal, told["attach"])
        elif stop is not None:
            line = told["line"]
            if line is None:
                stop.resume_rank()
                if terminal is not self._driver_terminal:  # The user has detached, but `colocate debug` may still run.
                    stop.terminal = terminal.stop = None
                    self._end_terminal(terminal, f"[colocate] {stop.label} on rank {stop.rank} goes on")
            else:
                stop.notify_worker(TerminalInput(stop.number, f"{line}\n"))

    def _on_terminal_closed(self, terminal: Terminal) -> None:
        if (stop := terminal.stop) is not None:
            stop.terminal, terminal.stop = None, None
            stop.resume_rank()
        if terminal in self._terminals:
            self._end_terminal(terminal)
        terminal.sock.close()
        if terminal is self._driver_terminal:
            self._driver_terminal = None
            self._display_pause.close()
        self._serve_stops()
        self._close_if_idle()

    def _attach_requested(self, terminal: Terminal, which: str | None) -> None:
        words = [] if which is None else which.split("/")
        stops = [candidate for candidate in self._stops if not candidate.is_over]
        named = [candidate for candidate in stops if not words or candidate.name.split("/")[-len(words) :] == words]
        free = [candidate for candidate in named if candidate.needs_terminal]
        if len(free) == 1 and (which is not None or len(named) == 1):
            terminal.followed = free[0].group, free[0].slot
            self._attach(free[0], terminal)
            return
        terminal.send_message(
            {"stops": [candidate.to_dict() for candidate in stops], "named": len(named), "free": len(free)}
        )
        self._end_terminal(terminal)
        self._close_if_idle()

    # -- the driver's own terminal

    def _serve_driver(self) -> None:
        stop = next((waiting_stop for waiting_stop in self._stops if waiting_stop.needs_terminal), None)
        if self._driver_terminal is not None and self._driver_terminal.stop is not None:
            return
        if stop is None:
            if self._driver_terminal in self._terminals:
                self._end_terminal(self._driver_terminal)
            return
        if self._driver_terminal is None or self._driver_terminal not in self._terminals:
            if (screen := _find_screen()) is None:
                return
            self._driver_terminal = self._start_terminal(screen)
        self._attach(stop, self._driver_terminal)

    def _start_terminal(self, screen: int) -> Terminal:
        for undrawn in list(drawing):
            self._display_pause.enter_context(undrawn())
        own_end, terminal_end = socket.socketpair()
        with terminal_end:
            command = [sys.executable, "-I", "-S", client.__file__, str(terminal_end.fileno())]
            process = subprocess.Popen(command, stdout=screen, stderr=screen, pass_fds=[terminal_end.fileno()])
        return self._add_terminal(Terminal(own_end, "the driver's", process))

    def _add_terminal(self, terminal: Terminal) -> Terminal:
        self._terminals.append(terminal)
        terminal.start_reader(lambda told: self._jobs.call_soon(partial(self._on_message, terminal, told)))
        return terminal

    # -- terminals of `colocate debug`

    def _open_socket(self) -> None:
        """Start to accept terminals if a rank is stopped and the socket isn't open yet.

        Raises:
            OSError: No descriptor is free, or the address is taken.
        """
        if self._listener is not None or not self._stops:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(socket_address(os.getpid()))
            listener.listen(8)
        except OSError:
            listener.close()
            raise
        self._listener = wire.track_socket(listener)
        self._accept_thread = Thread(target=self._accept, args=(listener,), name="colocate-debug-door")
        self._accept_thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._listener is not listener:  # `_close_if_idle` has closed the listener.
                    return
                time.sleep(_AGAIN_S)  # No descriptor is free, so new terminals have to wait.
                continue
            if user_of(sock) in (os.getuid(), 0):
                self._jobs.call_soon(partial(self._add_terminal, Terminal(sock, "colocate debug")))
            else:
                sock.close()

    def _close_if_idle(self) -> None:
        if self._stops or self._terminals or self._listener is None:
            return
        listener, self._listener = self._listener, None
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        if self._accept_thread is not None:
            self._accept_thread.join()  # A thread in `accept` would keep the address, which the next stop needs.
        listener.close()


def _find_screen() -> int | None:
    """Return the file descriptor of the driver's terminal, or None if there is no terminal that is free to use."""
    if hasattr(sys, "ps1"):  # Python's interactive prompt uses the terminal.
        return None
    try:
        if not os.isatty(0) or os.tcgetpgrp(0) != os.getpgrp():
            return None
    except OSError:
        return None
    return next((fd for fd in (1, 2) if os.isatty(fd)), None)


_lock = threading.Lock()
_users: dict[object, Desk] = {}


def get_desk(user: object) -> Desk:
    """Register a group at this process's desk, and return the desk."""
    with _lock:
        return _users.setdefault(user, next(iter(_users.values()), None) or Desk())


def leave_desk(user: object, group: str, why: str) -> None:
    """Remove a group from the desk, and close the desk if this was the last group."""
    with _lock:
        if (desk := _users.pop(user, None)) is not None:
            desk.remove_group(group, why)
            if not _users:
                desk.close()
