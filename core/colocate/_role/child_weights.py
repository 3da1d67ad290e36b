"""Weights on their way from a role to a function that it has started as its child (`colocate.torch.send_weights`)."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from colocate._system.numbers import parse_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_ALIGNED = 64


def send_weights(
    connection: Connection, weights: Iterable[tuple[str, torch.Tensor]], bucket: str | int = "256MiB"
) -> None:
    """Hand weights on to a child, which takes them by `receive_weights`: for a role's `load_weights`.

    Those of the host go through shared memory, bucket by bucket; those of a GPU by CUDA IPC, as they are. It returns
    when the child has taken all.

    Args:
        connection: The `connection` of the `Child`.
        weights: What `load_weights` has got, or any names and tensors.
        bucket: How much memory they go through: "256MiB", or bytes. A weight that is larger has as much as it needs.
    """
    size = parse_bytes(bucket, "bucket")
    area: mmap.mmap | None = None
    told: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
    used = 0

    def pass_on() -> None:
        nonlocal used
        if told:
            connection.send(told)
            connection.recv()
            told.clear()
        used = 0

    for name, weight in weights:
        tensor = weight.detach()
        if tensor.device.type != "cpu":
            connection.send((name, tensor))  # by torch.multiprocessing, which connections know of
            connection.recv()  # it is the source's memory until then
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
    connection.send(None)
    connection.recv()


def receive_weights(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and weights that a role hands on (`send_weights`): in its child.

    A tensor is there until the next one is asked for: copy it, as `load_weights` of engines and of
    `colocate.torch` do, and keep none.

    Args:
        connection: What the child's function has got.
    """
    area: mmap.mmap | None = None
    while (found := connection.recv()) is not None:
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
