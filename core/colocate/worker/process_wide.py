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
from colocate._system.imported import find_imported
from colocate.gpus import in_use, number_of
from colocate.worker.switches import Switches


@attrs.define(eq=False)
class RoleState:
    """One role's process-wide state, by library. A library without an entry starts from the seed."""

    seed: int
    states: dict[str, Any] = attrs.field(factory=dict)


def create_role_state(seed: int, group: str, role: str | None, slot: int, generation: int) -> RoleState:
    """Return a role's initial state, with a seed derived from the runtime's `seed`."""
    return RoleState(derive_seed(seed, group, f"{role}\0default generators\0{generation}", slot))


class ProcessState:
    """Swaps libraries' process-wide state when the main lane of a worker process switches between roles.

    For each library, `read_state` returns the present state (given the state written last), and `write_state` restores
    a state. `seed_state` starts from a seed, and returns the resulting state, if known. `to_plain` turns a generator's
    state into JSON, and `from_plain` turns it back.
    """

    def __init__(self, device: str) -> None:
        """Args: device: The slot's device."""
        self.current: RoleState | None = None
        self._device, self._switches = _Device(device), Switches()
        self._generators = (_Random(), _NumPy(), _Torch(), self._device)
        self._libraries = (*self._generators, self._switches)

    def switch_to(self, own: RoleState) -> None:
        """Save the present role's state, and apply another role's state."""
        before, self.current = self.current, own
        for library in self._libraries:
            if library.is_available():
                name = library.name
                if before is not None:
                    before.states[name] = library.read_state(before.states.get(name))
                _put_in_place(library, own)
        self._device.queue_seed()

    def on_library_imported(self) -> None:
        """Apply the present role's state to libraries that this role's code has just imported."""
        if self.current is not None:
            for library in self._libraries:
                if library.is_available() and library.name not in self.current.states:
                    _put_in_place(library, self.current)
            self._device.queue_seed()

    def on_module_loaded(self) -> None:
        """Record the switches that a role's module has set at import as the initial switches of all roles."""
        if self._switches.is_available():
            self._switches.usual = self._switches.read_state(None)

    def save_generators(self, own: RoleState) -> Mapping[str, Any]:
        """Return a role's generator states for JSON. Switches aren't saved, because constructors set them again."""
        plain = {}
        for generator in self._generators:
            state = own.states.get(generator.name)
            if own is self.current and generator.is_available():
                state = generator.read_state(state)
            if state is not None:
                plain[generator.name] = generator.to_plain(state)
        return {"seed": own.seed, **plain}

    def restore_generators(self, own: RoleState, saved: Mapping[str, Any]) -> None:
        """Restore a role's generators from their saved states."""
        own.seed = saved["seed"]
        for generator in self._generators:
            own.states.pop(generator.name, None)
            if generator.name in saved:
                own.states[generator.name] = generator.from_plain(saved[generator.name])
            if own is self.current and generator.is_available():
                _put_in_place(generator, own)


def _put_in_place(kept: _Random | _NumPy | _Torch | Switches, own: RoleState) -> None:
    if (state := own.states.get(kept.name)) is None:
        own.states[kept.name] = kept.seed_state(own.seed)
    else:
        kept.write_state(state)


def _get_memory(thing: object, of: type) -> Any:
    """Return a view of an object's bytes after the header, which is far quicker than calling a method for the state."""
    head = object.__basicsize__
    return (ctypes.c_char * (of.__basicsize__ - head)).from_address(id(thing) + head)


class _Random:
    """The state of `random`: the generator's raw bytes, and a normally distributed number drawn in advance.

    `random.getstate` and `setstate` convert 625 numbers. They would make every call a tenth longer, even for roles that
    never draw.
    """

    name = "random"

    def __init__(self) -> None:
        # The functions of the `random` module are methods of this object.
        self._object: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._memory = _get_memory(self._object, _CRandom)

    def is_available(self) -> bool:
        return True

    def read_state(self, state: Any) -> Any:
        return self._memory.raw, self._object.gauss_next

    def write_state(self, state: Any) -> None:
        self._memory.raw, self._object.gauss_next = state

    def seed_state(self, seed: int) -> None:
        random.seed(seed)

    def to_plain(self, state: Any) -> Any:
        with self._in_place(state):
            return random.getstate()

    def from_plain(self, plain: Any) -> Any:
        version, numbers, gauss = plain
        with self._in_place(self.read_state(None)):
            random.setstate((version, tuple(numbers), gauss))
            return self.read_state(None)

    @contextlib.contextmanager
    def _in_place(self, state: Any) -> Iterator[None]:
        before = self.read_state(None)
        self.write_state(state)
        try:
            yield
        finally:
            self.write_state(before)


class _NumPy:
    """The state of NumPy's default generator: each role's bit generator, and a number drawn in advance."""

    name = "numpy"

    def __init__(self) -> None:
        self._memory: Any = None  # Raw bytes of the `RandomState` object that refers to the bit generator.
        self._placed = b""

    def is_available(self) -> bool:
        numbers = sys.modules.get("numpy.random")
        return numbers is not None and not getattr(numbers.__spec__, "_initializing", False)

    def read_state(self, state: Any) -> Any:
        numbers = _get_numpy_random()
        bits = numbers.get_bit_generator()
        if state is not None and bits is state[0] and self._memory.raw == self._placed:
            return state
        whole = numbers.get_state(legacy=False)
        # NumPy can restore a number drawn in advance only for the default kind of bit generator.
        return bits, whole["gauss"] if whole["has_gauss"] and isinstance(bits, numbers.MT19937) else None

    def write_state(self, state: Any) -> None:
        numbers = _get_numpy_random()
        bits, gauss = state
        numbers.set_bit_generator(bits)  # This call also discards the number drawn in advance.
        if gauss is not None:
            whole = numbers.get_state(legacy=False)
            numbers.set_state({**whole, "has_gauss": 1, "gauss": gauss})
        if self._memory is None:
            random_state = numbers.get_state.__self__  # The functions of `numpy.random` are methods of this object.
            self._memory = _get_memory(random_state, type(random_state))
        self._placed = self._memory.raw

    def seed_state(self, seed: int) -> Any:
        numbers = _get_numpy_random()
        # Making a `RandomState` takes a tenth of the time of making a bit generator alone.
        # Without the third seed word, NumPy would draw the numbers of `random`: both use the Mersenne Twister.
        random_state = numbers.RandomState([seed & 0xFFFFFFFF, seed >> 32, 1])
        state = random_state._bit_generator, None
        self.write_state(state)
        return state

    def to_plain(self, state: Any) -> Any:
        bits, gauss = state
        return {"bits": _to_jsonable(bits.state), "gauss": gauss}

    def from_plain(self, plain: Any) -> Any:
        import numpy.random

        bits_state = plain["bits"]
        bits = getattr(numpy.random, bits_state["bit_generator"])()
        bits.state = _from_jsonable(bits_state)
        return bits, plain["gauss"]


def _get_numpy_random() -> Any:
    return sys.modules["numpy.random"]


def _to_jsonable(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _to_jsonable(value) for name, value in state.items()}
    return {"array": state.tolist(), "dtype": str(state.dtype)} if hasattr(state, "tolist") and state.shape else state


def _from_jsonable(plain: Any) -> Any:
    import numpy

    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {"array", "dtype"}:
        return numpy.array(plain["array"], plain["dtype"])
    return {name: _from_jsonable(value) for name, value in plain.items()}


class _Torch:
    """The state of torch's default CPU generator. Reading the state takes no longer than checking it for changes."""

    name = "torch"

    def is_available(self) -> bool:
        return find_imported("torch") is not None

    def read_state(self, state: Any) -> Any:
        return self._get_generator().get_state()

    def write_state(self, state: Any) -> None:
        self._get_generator().set_state(state)

    def seed_state(self, seed: int) -> Any:
        self._get_generator().manual_seed(seed)

    def to_plain(self, state: Any) -> Any:
        return state.numpy().tobytes().hex()

    def from_plain(self, plain: Any) -> Any:
        import torch

        return torch.frombuffer(bytearray.fromhex(plain), dtype=torch.uint8)

    def _get_generator(self) -> Any:
        return sys.modules["torch"].default_generator


class _Device(_Torch):
    """The state of the default generator of the slot's device, once the device is in use."""

    name = "device"

    def __init__(self, device: str) -> None:
        self._device = device

    def is_available(self) -> bool:
        return self._device != "cpu" and super().is_available() and in_use(self._device) is not None

    def seed_state(self, seed: int) -> Any:
        # Seeding torch seeds all devices, so a device that wasn't used yet has the host's initial seed.
        self._get_generator().manual_seed(sys.modules["torch"].initial_seed())

    def queue_seed(self) -> None:
        """Queue a callback that seeds the device's generator at its first use, with the running role's seed."""
        if self._device == "cpu" or not super().is_available() or self.is_available():
            return
        module: Any = getattr(sys.modules["torch"], self._device.partition(":")[0], None)
        waiting = getattr(module, "_queued_calls", None)
        if waiting is not None and (not waiting or waiting[-1][0] != self._seed_device):
            module._lazy_call(self._seed_device)

    def _seed_device(self) -> None:
        torch = sys.modules["torch"]
        getattr(torch, self._device.partition(":")[0]).default_generators[number_of(self._device)].manual_seed(
            torch.initial_seed()
        )

    def _get_generator(self) -> Any:
        module: Any = in_use(self._device)
        return module.default_generators[number_of(self._device)]
