"""The terminal program for stopped ranks: prints output of debuggers, and sends typed lines to the driver.

The driver runs this file as a script. It imports only the standard library, and so starts within 0.05 seconds.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

PATIENCE_S = 5.0
_AGAIN_S = 0.05


def socket_address(pid: int | str) -> str:
    """Return the abstract socket address (without a file) at which a driver accepts terminals."""
    return f"\0colocate-debug/{pid}"


def run_terminal(sock: socket.socket, lines: IO[str], first: Mapping[str, Any] | None, own: bool) -> int:
    """Run the terminal on the main thread until the session ends, and return the process's exit code.

    Args:
        sock: The connection to the driver.
        lines: The same connection, for reading lines.
        first: The first message, if received already.
        own: Whether the terminal is the driver's own: the driver handles Ctrl-C there.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and the arrow keys
    terminal = _Terminal(sock, lines)
    if first is not None:
        terminal.messages.put(first)
    threading.Thread(target=terminal.receive_messages, name="hears", daemon=True).start()
    while True:
        try:
            entry = terminal.messages.get()
        except KeyboardInterrupt:
            if own:
                continue
            return 130
        if "over" in entry:
            if entry["over"]:
                print(entry["over"], flush=True)
            return 0
        text = entry["text"]
        shown, newline, prompt = text.rpartition("\n") if entry["asks"] else (text, "", "")
        sys.stdout.write(shown + newline)
        sys.stdout.flush()
        if entry["asks"] and not terminal.send_answer(prompt) and not own:
            print("detached: the call goes on", flush=True)
            return 0


class _PromptOver(Exception):
    """Raised to interrupt a prompt, because the awaited line isn't needed any more."""


class _Terminal:
    def __init__(self, sock: socket.socket, lines: IO[str]) -> None:
        self.messages: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._sock, self._lines = sock, lines
        self._is_prompting = self._is_over = False
        signal.signal(signal.SIGUSR1, self._wake)

    def receive_messages(self) -> None:
        """Queue the driver's messages until the session ends, then interrupt the main thread's prompt."""
        message: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                self.messages.put(message := json.loads(line))
                if "over" in message:
                    break
        if "over" not in message:
            self.messages.put({"over": "the driver has ended"})
        self._is_over = True
        while self._is_prompting:  # Repeat the signal, because the main thread may have been about to wait.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(_AGAIN_S)

    def send_answer(self, prompt: str) -> bool:
        """Show a prompt, send the typed line, and return False if the user pressed Ctrl-D."""
        line: str | None = None
        detached = False
        try:
            self._is_prompting = True
            while not self._is_over:
                try:
                    line = input(prompt)
                except KeyboardInterrupt:
                    print()
                    continue
                except EOFError:
                    detached = True
                    print()
                break
            self._is_prompting = False
        except _PromptOver:
            print()
        with contextlib.suppress(OSError):  # The connection may be closed.
            send_message(self._sock, {"line": line})
        return not detached

    def _wake(self, number: int, frame: object) -> None:
        if self._is_prompting:
            self._is_prompting = False
            raise _PromptOver


def send_message(sock: socket.socket, told: Mapping[str, Any]) -> None:
    """Send a message as a line of JSON. Raises OSError if the connection is closed."""
    sock.sendall(json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as terminal_socket:
        sys.exit(
            run_terminal(terminal_socket, terminal_socket.makefile("r", encoding="utf-8", newline="\n"), None, own=True)
        )
