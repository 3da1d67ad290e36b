"""Debugging of a stopped rank in an editor, by debugpy (`PYTHONBREAKPOINT=debugpy.breakpoint`).

debugpy admits anybody who can connect, so it listens on the loopback address only.
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
from colocate._system.installed import get_pip_line
from colocate._system.threads import Thread
from colocate.errors import CapabilityError
from colocate.features.debugging.prompt import Terminal

_LOOKS_EVERY_S = 0.1


class Editor:
    """The debugpy server of this process, which starts at the first stop."""

    def __init__(
        self, ports: tuple[int, int] | None, slot: int, lanes: Collection[threading.Thread], terminal: Terminal
    ) -> None:
        """Store the settings without opening a port yet.

        Args:
            ports: The first and the last allowed port; None for any port.
            slot: The worker's slot, so that ranks on one machine start to search at different ports.
            lanes: The threads that run role code.
            terminal: Reports the stops to the driver.
        """
        if ports is not None:
            first, last = ports
            ports = first + slot % (last - first + 1), last
        self._ports, self._lanes, self._terminal = ports, lanes, terminal
        self._debugpy: Any = None
        self._address = ""

    def make_stop(self, frame: FrameType) -> Callable[[], object]:
        """Wait for an editor, and return the function that stops at a frame.

        Raises:
            CapabilityError: debugpy isn't installed here.
            OSError: None of the ports is free.
        """
        terminal = self._terminal
        if not self._is_attached():
            if not terminal.number:  # Report the stop first, because importing debugpy takes time.
                terminal.start_stop(f"{frame.f_code.co_filename}:{frame.f_lineno}", in_editor=True)
                try:
                    self._listen()
                except BaseException:
                    terminal.end_stop()
                    raise
                terminal.write(f"{self._address}\n")
                terminal.flush()
                self._ignore_thread(Thread(target=self._watch_editor, name="colocate-editor")).start()
            self._debugpy.wait_for_client()
        if not self._is_attached():
            return terminal.flush
        pydevd: Any = importlib.import_module("pydevd")  # This is a part of debugpy.
        options = {"suspend": True, "trace_only_current_thread": True, "patch_multiprocessing": False}
        return partial(pydevd.settrace, **options, stop_at_frame=frame)

    def _is_attached(self) -> bool:
        return self._debugpy is not None and bool(self._debugpy.is_client_connected())

    def _listen(self) -> None:
        if self._debugpy is not None:
            return
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # This silences warnings about frozen modules.
        try:
            import debugpy
        except ImportError as error:
            raise CapabilityError(
                f"PYTHONBREAKPOINT=debugpy.breakpoint needs debugpy: {get_pip_line('debug')}"
            ) from error
        with wire.listen_in_range(wire.LOOPBACK, self._ports, "an editor that debugs a rank") as sock:
            port = sock.getsockname()[1]
        for thread in threading.enumerate():
            if isinstance(thread, Thread) and thread not in self._lanes:
                self._ignore_thread(thread)
        host, port = debugpy.listen((wire.LOOPBACK, port))
        self._debugpy, self._address = debugpy, f"{host}:{port}"

    def _ignore_thread(self, thread: Any) -> Any:
        """Exempt a framework thread from suspension by debugpy, because the worker must still receive messages."""
        thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True
        return thread

    def _watch_editor(self) -> None:
        """End the stop once the editor has disconnected or the driver resumes the rank. Steps aren't reported."""
        terminal, was_there = self._terminal, False
        while not was_there or self._is_attached():
            was_there = was_there or self._is_attached()
            try:
                terminal.lines.get(timeout=_LOOKS_EVERY_S)
            except queue.Empty:
                continue
            try:
                self._debugpy.wait_for_client.cancel()  # The driver has resumed the rank.
            except RuntimeError:  # The role's thread isn't waiting for an editor yet, so try again.
                terminal.lines.put(None)
                continue
            if self._is_attached():  # The editor keeps the rank stopped, so disconnect the editor.
                api: Any = importlib.import_module("_pydevd_bundle.pydevd_api")
                pydevd: Any = importlib.import_module("pydevd")
                api.PyDevdAPI().request_disconnect(pydevd.get_global_debugger(), resume_threads=True)
            break
        terminal.end_stop()
