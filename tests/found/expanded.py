"""Tensors with less in memory than there is to look at (expanded ones, windows that overlap): as little is sent.

Modes: strict, processes, ray, dask.
"""

import torch
from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


class Echo(Role):
    @method(collect=First())
    def look(self, x):
        return tuple(x.shape), x.stride(), x.untyped_storage().nbytes()

    @method(collect=First())
    def make(self):
        return torch.zeros(1).expand(100_000_000)


def main():
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        echo = pool.spawn({"e": colocate.role(Echo)}).role("e", Echo)
        for what, x, nbytes in (
            ("expanded", torch.zeros(1).expand(100_000_000), 4),
            ("expanded rows", torch.arange(3.0)[:, None].expand(3, 10_000_000), 12),
            ("windows", torch.arange(10_000.0).unfold(0, 5_000, 1), 40_000),
        ):
            got = attempt(echo.look, x)
            verdict(what, got == (tuple(x.shape), x.stride(), nbytes), got)
        made = attempt(echo.make)
        verdict("a result", isinstance(made, torch.Tensor) and made.untyped_storage().nbytes() == 4, type(made))
    end()


if __name__ == "__main__":
    main()
