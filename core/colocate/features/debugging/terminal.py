"""A terminal of ranks that are stopped: shows what their debuggers print, and sends what is typed.

Standard library only: the driver has this file run by itself, which takes a twentieth of a second.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

PATIENCE_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # of a process: pid, user, group


def address(pid: int | str) -> str:
    """Return where terminals of a driver's process come, a socket without a file."""
    return f"\0colocate-debug/{pid}"


def user_of(sock: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel says."""
    user: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return user


def talk(sock: socket.socket, lines: IO[str], first: Mapping[str, Any] | None, own: bool) -> int:
    """Be the terminal until nobody needs it, on the main thread; returns the process's exit code.

    Args:
        sock: The connection to the driver.
        lines: What comes from there.
        first: What has come already.
        own: Whether the terminal is the driver's, of which Ctrl-C is the driver's matter.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` has history and the arrow keys by it
    said: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
    main, asks, is_over = threading.main_thread().ident or 0, threading.Event(), threading.Event()

    def hear() -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                said.put(json.loads(line))
                if "over" in json.loads(line):
                    break
            else:
                said.put({"over": "the driver has ended"})
        is_over.set()
        if asks.is_set():
            signal.pthread_kill(main, signal.SIGINT)  # which ends the wait for a line, and mends the terminal

    if first is not None:
        said.put(first)
    threading.Thread(target=hear, name="hears", daemon=True).start()
    while True:
        try:
            told = said.get()
        except KeyboardInterrupt:
            if own:
                continue
            return 130
        if "over" in told:
            if told["over"]:
                print(told["over"], flush=True)
            return 0
        text = told["text"]
        shown, newline, prompt = text.rpartition("\n") if told["asks"] else (text, "", "")
        sys.stdout.write(shown + newline)
        sys.stdout.flush()
        if told["asks"] and not _answer(sock, prompt, asks, is_over) and not own:
            print("detached: the call goes on", flush=True)
            return 0


def _answer(sock: socket.socket, prompt: str, asks: threading.Event, is_over: threading.Event) -> bool:
    """Send what is typed at a prompt; False when nothing is any more."""
    line: str | None = None
    asks.set()
    while not is_over.is_set():
        try:
            line = input(prompt)
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
        break
    asks.clear()
    with contextlib.suppress(OSError):  # it is over
        send(sock, {"line": line})
    return line is not None or is_over.is_set()


def send(sock: socket.socket, told: Mapping[str, Any]) -> None:
    """Send something to the other side. Raises OSError when that is gone."""
    sock.sendall(json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        sys.exit(talk(given, given.makefile("r", encoding="utf-8", newline="\n"), None, own=True))
