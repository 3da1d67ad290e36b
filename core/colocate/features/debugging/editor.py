"""An editor as a stopped rank's terminal: `PYTHONBREAKPOINT=debugpy.breakpoint`.

debugpy lets in whoever reaches its port: it listens on loopback only.
"""

from __future__ import annotations

import importlib
import os
import queue
import threading
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType
from typing import Any

from colocate import wire
from colocate._system.installed import pip_line
from colocate._system.threads import Thread
from colocate.errors import CapabilityError
from colocate.features.debugging.prompt import Terminal

_LOOKS_EVERY_S = 0.1


class Editor:
    """What debugpy listens for in this process, once it does."""

    def __init__(
        self, ports: tuple[int, int] | None, slot: int, lanes: Collection[threading.Thread], terminal: Terminal
    ) -> None:
        """Do nothing yet.

        Args:
            ports: The first and the last that may be taken; None for any.
            slot: Of whom: ranks of one machine begin to look at different ones, as they do so at once.
            lanes: The threads that run role code.
            terminal: What tells the driver of its stops.
        """
        if ports is not None:
            first, last = ports
            ports = first + slot % (last - first + 1), last
        self._ports, self._lanes, self._terminal = ports, lanes, terminal
        self._debugpy: Any = None
        self._address = ""

    def stops(self, frame: FrameType) -> Callable[[], object]:
        """Return what stops at a frame, when an editor is there: it is waited for, as long as somebody wants that.

        Raises:
            CapabilityError: debugpy isn't installed here.
            OSError: None of the ports is free.
        """
        terminal = self._terminal
        if not self._is_there():
            if not terminal.number:  # first: debugpy takes its time
                terminal.begin(f"{frame.f_code.co_filename}:{frame.f_lineno}", in_editor=True)
                try:
                    self._listen()
                except BaseException:
                    terminal.over()
                    raise
                terminal.write(f"{self._address}\n")
                terminal.flush()
                self._quiet(Thread(target=self._watch, name="colocate-editor")).start()
            self._debugpy.wait_for_client()
        if not self._is_there():
            return terminal.flush
        pydevd: Any = importlib.import_module("pydevd")  # debugpy's own
        options = {"suspend": True, "trace_only_current_thread": True, "patch_multiprocessing": False}
        return partial(pydevd.settrace, **options, stop_at_frame=frame)

    def _is_there(self) -> bool:
        """Return whether an editor is."""
        return self._debugpy is not None and bool(self._debugpy.is_client_connected())

    def _listen(self) -> None:
        """Have debugpy listen, if it doesn't."""
        if self._debugpy is not None:
            return
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # lines about frozen modules
        try:
            import debugpy
        except ImportError as error:
            raise CapabilityError(f"PYTHONBREAKPOINT=debugpy.breakpoint needs debugpy: {pip_line('debug')}") from error
        with wire.listening_within(wire.LOOPBACK, self._ports, "an editor that debugs a rank") as found:
            port = found.getsockname()[1]
        for thread in threading.enumerate():
            if isinstance(thread, Thread) and thread not in self._lanes:
                self._quiet(thread)
        host, port = debugpy.listen((wire.LOOPBACK, port))
        self._debugpy, self._address = debugpy, f"{host}:{port}"

    def _quiet(self, thread: Any) -> Any:
        """Have debugpy pass by a thread of the framework: it stops all others, and the worker is to hear the driver."""
        thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True
        return thread

    def _watch(self) -> None:
        """Have the stop last until the editor has gone: what it does there isn't told."""
        terminal, was_there = self._terminal, False
        while not was_there or self._is_there():
            was_there = was_there or self._is_there()
            try:
                terminal.lines.get(timeout=_LOOKS_EVERY_S)
            except queue.Empty:
                continue
            try:
                self._debugpy.wait_for_client.cancel()  # nobody waits for its call any more
            except RuntimeError:  # it is about to wait
                terminal.lines.put(None)
                continue
            if self._is_there():  # and has it stopped
                api: Any = importlib.import_module("_pydevd_bundle.pydevd_api")
                pydevd: Any = importlib.import_module("pydevd")
                api.PyDevdAPI().request_disconnect(pydevd.get_global_debugger(), resume_threads=True)
            break
        terminal.over()
