"""A global that can't travel: the error names it, and no frames of colocate or cloudpickle follow.

Modes: processes, ray, dask.
"""

import threading
import traceback

from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, SerializationError, method

LOCK = threading.Lock()


class Locks(Role):
    @method(collect=First())
    def go(self):
        with LOCK:
            return 1


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        for number in range(5):
            error = attempt(pool.spawn, {"locks": colocate.role(Locks)}, name=f"group-{number}")
            verdict("it is refused", isinstance(error, SerializationError), error)
            text = "".join(traceback.format_exception(error))
            verdict("by its name", "LOCK" in text, text)
            verdict("it is the group's only trouble", "did not end" not in text, text)
            cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
            verdict("its cause is told without frames", "cloudpickle" not in cause, cause)
    end()
