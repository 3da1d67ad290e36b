"""Keeps the process-wide state of libraries separate for each role of a worker.

The state is the default generators of `random`, NumPy and torch, and switches of torch. Roles share a process, but each
role finds this state as its own code has left it, so another role that seeds or draws changes nothing. At first, a
role's generators start from the role's seed, and the switches are as the modules of roles have left them.

State is exchanged when the lane switches to another role. Repeated calls of one role cost nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from _random import Random as _CRandom
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from colocate._role.context import derive_seed
from colocate._system.imported import imported
from colocate.gpus import in_use, number_of
from colocate.worker.switches import Switches


@attrs.define(eq=False)
class Own:
    """One role's process-wide state, by library. A library without an entry starts from the seed."""

    seed: int
    states: dict[str, Any] = attrs.field(factory=dict)


def own_of(seed: int, group: str, role: str | None, slot: int, generation: int) -> Own:
    """Return a role's initial state, with a seed derived from the runtime's `seed`."""
    return Own(derive_seed(seed, group, f"{role}\0default generators\0{generation}", slot))


class ProcessWide:
    """Swaps libraries' process-wide state when the main lane of a worker process switches between roles.

    For each library, `take` returns the present state (given the state that was put), and `put` restores a state.
    `begin` starts from a seed, and returns the resulting state, if known. `plain` turns a generator's state into JSON,
    and `from_plain` turns it back.
    """

    def __init__(self, device: str) -> None:
        """Args: device: The slot's device."""
        self.now: Own | None = None
        self._device, self._switches = _Device(device), Switches()
        self._generators = (_Random(), _NumPy(), _Torch(), self._device)
        self._all = (*self._generators, self._switches)

    def have(self, own: Own) -> None:
        """Save the present role's state, and apply another role's state."""
        before, self.now = self.now, own
        for library in self._all:
            if library.is_there():
                name = library.name
                if before is not None:
                    before.states[name] = library.take(before.states.get(name))
                _put(library, own)
        self._device.expect()

    def came(self) -> None:
        """Apply the present role's state to libraries that this role's code has just imported."""
        if self.now is not None:
            for library in self._all:
                if library.is_there() and library.name not in self.now.states:
                    _put(library, self.now)
            self._device.expect()

    def loaded(self) -> None:
        """Record the switches that a role's module has set at import as the initial switches of all roles."""
        if self._switches.is_there():
            self._switches.usual = self._switches.take(None)

    def saved(self, own: Own) -> Mapping[str, Any]:
        """Return a role's generator states for JSON. Switches aren't saved, because constructors set them again."""
        plain = {}
        for generator in self._generators:
            state = own.states.get(generator.name)
            if own is self.now and generator.is_there():
                state = generator.take(state)
            if state is not None:
                plain[generator.name] = generator.plain(state)
        return {"seed": own.seed, **plain}

    def restore(self, own: Own, saved: Mapping[str, Any]) -> None:
        """Restore a role's generators from their saved states."""
        own.seed = saved["seed"]
        for generator in self._generators:
            own.states.pop(generator.name, None)
            if generator.name in saved:
                own.states[generator.name] = generator.from_plain(saved[generator.name])
            if own is self.now and generator.is_there():
                _put(generator, own)


def _put(kept: _Random | _NumPy | _Torch | Switches, own: Own) -> None:
    if (state := own.states.get(kept.name)) is None:
        own.states[kept.name] = kept.begin(own.seed)
    else:
        kept.put(state)


def _memory_of(thing: object, of: type) -> Any:
    """Return an object's memory after the header. Reading it is far quicker than calling a method for the state."""
    head = object.__basicsize__
    return (ctypes.c_char * (of.__basicsize__ - head)).from_address(id(thing) + head)


class _Random:
    """The state of `random`: the generator's memory, and a normally distributed number drawn in advance.

    `random.getstate` and `setstate` convert 625 numbers. They would make every call a tenth longer, even for roles that
    never draw.
    """

    name = "random"

    def __init__(self) -> None:
        # The functions of the `random` module are methods of this object.
        self._own: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._memory = _memory_of(self._own, _CRandom)

    def is_there(self) -> bool:
        return True

    def take(self, state: Any) -> Any:
        return self._memory.raw, self._own.gauss_next

    def put(self, state: Any) -> None:
        self._memory.raw, self._own.gauss_next = state

    def begin(self, seed: int) -> None:
        random.seed(seed)

    def plain(self, state: Any) -> Any:
        with self._in_place(state):
            return random.getstate()

    def from_plain(self, plain: Any) -> Any:
        version, numbers, gauss = plain
        with self._in_place(self.take(None)):
            random.setstate((version, tuple(numbers), gauss))
            return self.take(None)

    @contextlib.contextmanager
    def _in_place(self, state: Any) -> Iterator[None]:
        before = self.take(None)
        self.put(state)
        try:
            yield
        finally:
            self.put(before)


class _NumPy:
    """The state of NumPy's default generator: each role's bit generator, and a number drawn in advance."""

    name = "numpy"

    def __init__(self) -> None:
        self._memory: Any = None  # Memory of the `RandomState` object that refers to the bit generator.
        self._placed = b""

    def is_there(self) -> bool:
        numbers = sys.modules.get("numpy.random")
        return numbers is not None and not getattr(numbers.__spec__, "_initializing", False)

    def take(self, state: Any) -> Any:
        numbers = _numpy_random()
        bits = numbers.get_bit_generator()
        if state is not None and bits is state[0] and self._memory.raw == self._placed:
            return state
        whole = numbers.get_state(legacy=False)
        # NumPy can restore a number drawn in advance only for the default kind of bit generator.
        return bits, whole["gauss"] if whole["has_gauss"] and isinstance(bits, numbers.MT19937) else None

    def put(self, state: Any) -> None:
        numbers = _numpy_random()
        bits, gauss = state
        numbers.set_bit_generator(bits)  # This call also discards the number drawn in advance.
        if gauss is not None:
            whole = numbers.get_state(legacy=False)
            numbers.set_state({**whole, "has_gauss": 1, "gauss": gauss})
        if self._memory is None:
            random_state = numbers.get_state.__self__  # The functions of `numpy.random` are methods of this object.
            self._memory = _memory_of(random_state, type(random_state))
        self._placed = self._memory.raw

    def begin(self, seed: int) -> Any:
        numbers = _numpy_random()
        # Making a `RandomState` takes a tenth of the time of making a bit generator alone.
        # Without the third word, numbers would equal the numbers of `random`, because both use the Mersenne Twister.
        random_state = numbers.RandomState([seed & 0xFFFFFFFF, seed >> 32, 1])
        state = random_state._bit_generator, None
        self.put(state)
        return state

    def plain(self, state: Any) -> Any:
        bits, gauss = state
        return {"bits": _jsonable(bits.state), "gauss": gauss}

    def from_plain(self, plain: Any) -> Any:
        import numpy.random

        bits_state = plain["bits"]
        bits = getattr(numpy.random, bits_state["bit_generator"])()
        bits.state = _with_arrays(bits_state)
        return bits, plain["gauss"]


def _numpy_random() -> Any:
    return sys.modules["numpy.random"]


def _jsonable(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _jsonable(value) for name, value in state.items()}
    return {"array": state.tolist(), "dtype": str(state.dtype)} if hasattr(state, "tolist") and state.shape else state


def _with_arrays(plain: Any) -> Any:
    import numpy

    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {"array", "dtype"}:
        return numpy.array(plain["array"], plain["dtype"])
    return {name: _with_arrays(value) for name, value in plain.items()}


class _Torch:
    """The state of torch's default CPU generator. Reading the state takes no longer than checking it for changes."""

    name = "torch"

    def is_there(self) -> bool:
        return imported("torch") is not None

    def take(self, state: Any) -> Any:
        return self._generator().get_state()

    def put(self, state: Any) -> None:
        self._generator().set_state(state)

    def begin(self, seed: int) -> Any:
        self._generator().manual_seed(seed)

    def plain(self, state: Any) -> Any:
        return state.numpy().tobytes().hex()

    def from_plain(self, plain: Any) -> Any:
        import torch

        return torch.frombuffer(bytearray.fromhex(plain), dtype=torch.uint8)

    def _generator(self) -> Any:
        return sys.modules["torch"].default_generator


class _Device(_Torch):
    """The state of the default generator of the slot's device, once the device is in use."""

    name = "device"

    def __init__(self, device: str) -> None:
        self._device = device

    def is_there(self) -> bool:
        return self._device != "cpu" and super().is_there() and in_use(self._device) is not None

    def begin(self, seed: int) -> Any:
        # Seeding torch seeds all devices, so a device that wasn't used yet has the host's initial seed.
        self._generator().manual_seed(sys.modules["torch"].initial_seed())

    def expect(self) -> None:
        """Queue a callback that seeds the device's generator at the first use, from the role that runs then."""
        if self._device == "cpu" or not super().is_there() or self.is_there():
            return
        module: Any = getattr(sys.modules["torch"], self._device.partition(":")[0], None)
        waiting = getattr(module, "_queued_calls", None)
        if waiting is not None and (not waiting or waiting[-1][0] != self._came):
            module._lazy_call(self._came)

    def _came(self) -> None:
        torch = sys.modules["torch"]
        getattr(torch, self._device.partition(":")[0]).default_generators[number_of(self._device)].manual_seed(
            torch.initial_seed()
        )

    def _generator(self) -> Any:
        module: Any = in_use(self._device)
        return module.default_generators[number_of(self._device)]
