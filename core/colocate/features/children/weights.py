"""The transfer of weights from a role to a child process (`colocate.torch.send_weights`)."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Generator, Iterable
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from colocate._system.jobs import format_error
from colocate._system.numbers import parse_bytes
from colocate.errors import ChildDied, ColocateError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_ALIGNED = 64
_CLOSED = False
"""The child's answer if it has closed the iterator of weights; the usual answer is None."""


def send_weights(
    connection: Connection, weights: Iterable[tuple[str, torch.Tensor]], bucket: str | int = "256MiB"
) -> None:
    """Send weights to a child process, which calls `receive_weights`. Call this in a role's `load_weights`.

    Weights in host memory go through shared memory, one bucket at a time. Weights on a GPU go by CUDA IPC, without a
    copy. The call returns when the child has received all weights, or has closed its iterator. If iterating over
    `weights` raises, the child gets the error, too.

    Args:
        connection: The `connection` of the `Child`.
        weights: The argument of `load_weights`, or any names and tensors.
        bucket: The size of the shared memory, as "256MiB" or in bytes. A larger weight gets a larger bucket.
    """
    try:
        _send_buckets(connection, weights, parse_bytes(bucket, "bucket"))
    except _ReceiverClosed:
        return
    except ChildDied:
        raise
    except BaseException as error:  # Report every error, because the child waits for more weights.
        connection.send(format_error(error))
        raise


class _ReceiverClosed(Exception):
    """Raised when the child process has closed the iterator of weights."""


def _send_message(connection: Connection, message: Any) -> None:
    """Send a message, and wait until the child process no longer uses the message's memory."""
    connection.send(message)
    if connection.recv() is _CLOSED:
        raise _ReceiverClosed


def _send_buckets(connection: Connection, weights: Iterable[tuple[str, torch.Tensor]], size: int) -> None:
    area: mmap.mmap | None = None
    batch: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
    used = 0

    def pass_on() -> None:
        nonlocal used
        if batch:
            _send_message(connection, batch)
            batch.clear()
        used = 0

    for name, weight in weights:
        tensor = weight.detach()
        if tensor.device.type != "cpu":
            # The child reads this tensor's own memory (CUDA IPC), so `_send_message` waits until the child is done.
            _send_message(connection, (name, tensor))
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if area is None or used + nbytes > len(area):
            pass_on()
            if area is None or nbytes > len(area):
                area = _share_memory(connection, max(size, nbytes, 1))
        if nbytes:
            target = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=used)
            target.view(tensor.shape).copy_(tensor)
            del target  # A remaining view would keep the shared memory mapped.
        batch.append((name, tensor.dtype, tuple(tensor.shape), used))
        used += -(-nbytes // _ALIGNED) * _ALIGNED
    pass_on()
    _send_message(connection, None)


def receive_weights(connection: Connection) -> Generator[tuple[str, torch.Tensor]]:
    """Yield the names and weights that a role sends by `send_weights`. Call this in the role's child process.

    A tensor is only valid until the next one is requested, so copy it, as `load_weights` of engines and of
    `colocate.torch` do.

    Args:
        connection: The argument of the child's function.

    Raises:
        ColocateError: The role failed before all weights were sent.
    """
    area: mmap.mmap | None = None
    try:
        while (message := connection.recv()) is not None:
            if isinstance(message, str):
                raise ColocateError(f"not all weights have come: {message}")
            if isinstance(message, int):
                area = _map_memory(connection, message)
                continue
            if isinstance(message, tuple):
                yield message
            else:
                for name, dtype, shape, offset in message:
                    yield name, _view_tensor(area, dtype, shape, offset)
            del message  # With CUDA IPC, the message keeps the sender's memory in use.
            connection.send(None)
    except GeneratorExit:
        connection.send(_CLOSED)
        raise
    connection.send(None)


def _view_tensor(area: Any, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(area, dtype=dtype, count=count, offset=offset).view(shape)


def _share_memory(connection: Connection, size: int) -> mmap.mmap:
    fd = os.memfd_create("colocate-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        connection.send(size)
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            socket.send_fds(sock, [b"\0"], [fd])
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _map_memory(connection: Connection, size: int) -> mmap.mmap:
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    try:
        return mmap.mmap(fds[0], size)
    finally:
        os.close(fds[0])
