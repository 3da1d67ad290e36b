"""Weights on their way from a role to a function that it has started as its child (`colocate.torch.send_weights`)."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Generator, Iterable
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from colocate._system.jobs import error_text
from colocate._system.numbers import parse_bytes
from colocate.errors import ChildDied, ColocateError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_ALIGNED = 64
_CLOSED = False
"""What the child answers in place of None when it has closed the iterator by which it takes the weights."""


def send_weights(
    connection: Connection, weights: Iterable[tuple[str, torch.Tensor]], bucket: str | int = "256MiB"
) -> None:
    """Hand weights on to a child, which takes them by `receive_weights`: for a role's `load_weights`.

    Those of the host go through shared memory, bucket by bucket; those of a GPU by CUDA IPC, as they are. It returns
    when the child has taken all, or has closed the iterator by which it takes them. What `weights` raises, the child
    hears of as well.

    Args:
        connection: The `connection` of the `Child`.
        weights: What `load_weights` has got, or any names and tensors.
        bucket: How much memory they go through: "256MiB", or bytes. A weight that is larger has as much as it needs.
    """
    try:
        _send(connection, weights, parse_bytes(bucket, "bucket"))
    except _Closed:
        return
    except ChildDied:
        raise
    except BaseException as error:  # whatever it is, the child waits for more
        connection.send(error_text(error))
        raise


class _Closed(Exception):
    """The child wants no more."""


def _hand_on(connection: Connection, message: Any) -> None:
    """Return when the child is done with it."""
    connection.send(message)
    if connection.recv() is _CLOSED:
        raise _Closed


def _send(connection: Connection, weights: Iterable[tuple[str, torch.Tensor]], size: int) -> None:
    area: mmap.mmap | None = None
    told: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
    used = 0

    def pass_on() -> None:
        nonlocal used
        if told:
            _hand_on(connection, told)
            told.clear()
        used = 0

    for name, weight in weights:
        tensor = weight.detach()
        if tensor.device.type != "cpu":
            # By torch.multiprocessing, which connections know of; it is the source's memory until then.
            _hand_on(connection, (name, tensor))
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if area is None or used + nbytes > len(area):
            pass_on()
            if area is None or nbytes > len(area):
                area = _offer(connection, max(size, nbytes, 1))
        if nbytes:
            there = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=used)
            there.view(tensor.shape).copy_(tensor)
            del there  # it keeps the area
        told.append((name, tensor.dtype, tuple(tensor.shape), used))
        used += -(-nbytes // _ALIGNED) * _ALIGNED
    pass_on()
    _hand_on(connection, None)


def receive_weights(connection: Connection) -> Generator[tuple[str, torch.Tensor]]:
    """Yield the names and weights that a role hands on (`send_weights`): in its child.

    A tensor is there until the next one is asked for: copy it, as `load_weights` of engines and of
    `colocate.torch` do, and keep none.

    Args:
        connection: What the child's function has got.

    Raises:
        ColocateError: The role has failed amid them; those that have come are not all.
    """
    area: mmap.mmap | None = None
    try:
        while (found := connection.recv()) is not None:
            if isinstance(found, str):
                raise ColocateError(f"not all weights have come: {found}")
            if isinstance(found, int):
                area = _taken(connection, found)
                continue
            if isinstance(found, tuple):
                yield found
            else:
                for name, dtype, shape, offset in found:
                    yield name, _at(area, dtype, shape, offset)
            del found  # of CUDA IPC it is the source's memory
            connection.send(None)
    except GeneratorExit:
        connection.send(_CLOSED)
        raise
    connection.send(None)


def _at(area: Any, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(area, dtype=dtype, count=count, offset=offset).view(shape)


def _offer(connection: Connection, size: int) -> mmap.mmap:
    """Return memory that the other end has, too."""
    fd = os.memfd_create("colocate-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        connection.send(size)
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            socket.send_fds(sock, [b"\0"], [fd])
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _taken(connection: Connection, size: int) -> mmap.mmap:
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    try:
        return mmap.mmap(fds[0], size)
    finally:
        os.close(fds[0])
