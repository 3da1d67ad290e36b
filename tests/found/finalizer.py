"""Finalizers (`__del__`) that call a role. The garbage collector runs them anywhere, also in the middle of a send.

Wanted: nothing hangs; what is submitted comes in one order on all slots; what would wait is done, or a ColocateError.
Modes: threads, processes, ray, dask.
"""

import gc
import itertools
import threading

from hx import connect, end, verdict

import colocate
from colocate import First, Role, method


class Echo(Role):
    def __init__(self):
        self.seen = []

    @method(collect=First())
    def echo(self, x):
        return x

    @method
    def note(self, x):
        self.seen.append(x)

    @method
    def noted(self):
        return self.seen


class Dropped:
    numbers = itertools.count()
    odd = []

    def __init__(self, echo):
        self.echo, self.itself = echo, self

    def __del__(self):
        number = next(self.numbers)
        try:
            self.echo.note.submit(number)
            self.echo.echo(number)
        except colocate.ColocateError as error:
            if "would wait for an answer" not in str(error) and "from inside a worker" not in str(error):
                self.odd.append(error)


def work(echo):
    for number in range(700):
        Dropped(echo)
        echo.echo.submit(number)
        assert echo.echo(number) == number


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        echo = pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        for often in (3, 11, 29):
            gc.set_threshold(often, 1, 1)
            thread = threading.Thread(target=work, args=(echo,))
            thread.start()
            work(echo)
            thread.join()
        gc.set_threshold(700, 10, 10)
        first, second = echo.noted()
    verdict("one order on all slots", first == second, (first, second))
    verdict("nothing else is raised", not Dropped.odd, Dropped.odd)
    end()
