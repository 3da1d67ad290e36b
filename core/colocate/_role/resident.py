"""`Resident`: a result that stays in the workers, as users know it; and as a role object outside any worker has it."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar, cast

import attrs

from colocate._role.on_driver import OnDriver
from colocate._system.numbers import limit
from colocate._values.leaving import describe, tensor_bytes
from colocate.errors import ClosedError

INSTEAD_OF_RESIDENT = "Give the constructor the value (.fetch()), or pass this to a method of the role"
T_co = TypeVar("T_co", covariant=True)


@attrs.frozen
class ResidentSpec:
    """What a resident holds, without its contents.

    Attributes:
        structure: The value of the first rank whose result counts, with shapes and dtypes in place of tensors.
        bytes_per_rank: Bytes of tensors and arrays on each rank.
        rows_per_rank: Rows that the call worked on, on each rank; None where nothing was scattered.
    """

    structure: Any
    bytes_per_rank: tuple[int, ...]
    rows_per_rank: tuple[int | None, ...]


class Resident(OnDriver, abc.ABC, Generic[T_co]):
    """A kept result. Pass `.ref` (or the resident) as an argument; a context manager that frees it at the end."""

    _instead = INSTEAD_OF_RESIDENT

    @property
    @abc.abstractmethod
    def ref(self) -> T_co:
        """Stands for the value as an argument of any role's method."""

    @property
    @abc.abstractmethod
    def spec(self) -> ResidentSpec:
        """Its structure, shapes, dtypes and bytes; waits until it is there."""

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is there, in the workers.

        Args:
            timeout: Seconds to wait at most; None for the runtime's `call_timeout`.

        Raises:
            TimeoutError: It isn't there yet; the resident stays.
            RoleError: The call that was to make it has failed; so do other errors that calls raise.
        """

    @abc.abstractmethod
    def fetch(self, timeout: float | None = None) -> T_co:
        """The collected value, on the driver.

        Args:
            timeout: Seconds to wait at most; None for the runtime's `call_timeout`.

        Raises:
            TimeoutError: It isn't there yet; the resident stays.
        """

    @abc.abstractmethod
    def free(self) -> None:
        """Let go of it. Idempotent; using it afterwards raises ClosedError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} lives on the driver and can't be sent; pass it (or its .ref) as a call's argument")


class LocalResident(Resident[T_co]):
    """The resident of a role object outside any worker: it is the value."""

    def __init__(self, value: T_co) -> None:
        self._value: T_co | None = value
        self._freed = False

    @property
    def ref(self) -> T_co:
        """The value itself."""
        return self.fetch()

    @property
    def spec(self) -> ResidentSpec:
        """Its structure, shapes, dtypes and bytes."""
        return ResidentSpec(describe(self._value), (tensor_bytes(self._value),), (None,))

    def wait(self, timeout: float | None = None) -> None:
        """It is there."""
        limit(timeout, "wait(timeout)")
        self.fetch()

    def fetch(self, timeout: float | None = None) -> T_co:
        """The value itself."""
        limit(timeout, "fetch(timeout)")
        if self._freed:
            raise ClosedError("this resident was freed")
        return cast("T_co", self._value)

    def free(self) -> None:
        """Let go of it."""
        self._value, self._freed = None, True
