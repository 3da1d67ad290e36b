"""Programs that the suite's roles start as children; this module imports nothing slow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

SERVER = """
import http.server, os, socket, sys

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

    def log_message(self, *args):
        pass

made = http.server.HTTPServer(("127.0.0.1", 0), Answers, bind_and_activate=False)
made.socket.close()
if sys.argv[1] == "fd":
    made.socket = socket.socket(fileno=int(sys.argv[2]))
else:
    made.socket = socket.create_server(("127.0.0.1", int(sys.argv[2])))
print("it listens", flush=True)
while True:
    made.handle_request()
"""
NOTES = """
import signal, sys, threading

def note(*_):
    with open(sys.argv[1], "a") as file:
        file.write(sys.argv[2])
    sys.exit()

signal.signal(signal.SIGTERM, note)
print("on", flush=True)
threading.Event().wait()
"""
QUITS = """
import signal, sys

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("the last words", flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(3)
"""
FOREVER = "import threading; print('the last words', flush=True); threading.Event().wait()"


def says_up(child: Any) -> bool:
    """Return whether a child's first message is "up" or not."""
    is_up: bool = child.connection.recv() == "up"
    return is_up


def fail_to_start(connection: Any) -> None:
    """Fail before the first message."""
    raise ValueError("no engine here")


def stay_silent(connection: Any) -> None:
    """Send no message."""
    threading.Event().wait()


def serve(connection: Any, first: str = "") -> None:
    """Answer messages, and execute commands."""
    while True:
        match connection.recv():
            case "exit":
                print("it has had enough", flush=True)
                os._exit(7)
            case "spawn":
                below = subprocess.Popen([sys.executable, "-c", FOREVER], start_new_session=True)
                connection.send(below.pid)
            case "hang":
                threading.Event().wait()
            case ("take", size):
                payload = bytearray(os.urandom(1)) * size
                connection.send(len(payload))
            case asked:
                connection.send((first, asked))
