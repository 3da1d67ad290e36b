"""Weights on their way from one role to another: what the target's `load_weights` gets, and what it says to them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from colocate._system.nearest import did_you_mean
from colocate._system.numbers import size_text
from colocate.errors import ConfigError, StaleWeightsError
from colocate.features.weights.messages import Digest

if TYPE_CHECKING:
    import torch

    from colocate._values.leaving import Watch

_TOLD = 8
"""Mistakes of one kind that an error names."""
_WRITTEN = "the role whose tensors it shares has written into them since then"


class WeightSpec(NamedTuple):
    """What is known of a weight before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class Weights(Iterator[tuple[str, "torch.Tensor"]]):
    """The weights of a source, by name, one at a time: what a target's `load_weights` gets.

    Each tensor is the source's or one of transport's: the target copies what it needs before it asks for the next one,
    and keeps none, unless they are `shared`.

    Attributes:
        specs: All names that will come, in order, with shape and dtype.
        shared: Whether the target is to have these very tensors.
        loaded: How many have come.
        skipped: Whether the target takes none of them.
        mismatch: What `check` has found.
    """

    def __init__(
        self, source: str, given: Iterator[tuple[str, torch.Tensor]], specs: Mapping[str, WeightSpec], shared: bool
    ) -> None:
        """Made by `colocate.sync_weights`. `source`: whose they are, as errors say it."""
        self.source = source
        self.specs = specs
        self.shared = shared
        self.loaded = 0
        self.skipped = False
        self.mismatch: ConfigError | None = None
        self._given = given

    @classmethod
    def of(cls, given: Iterable[tuple[str, torch.Tensor]], source: str = "the caller") -> Weights:
        """Return weights for a `load_weights` that is called by hand, as in a test.

        Args:
            given: Pairs of a name and a tensor. They are gone through at once, unless `specs` of it says what they are.
            source: Whose they are, as errors say it.

        Raises:
            ConfigError: They are no such pairs, a name comes twice, or there are none.
        """
        specs = getattr(given, "specs", None)
        if specs is None:
            given = [*given]
            specs = described(given, source)
        return cls(source, iter(given), specs, shared=False)

    def __next__(self) -> tuple[str, torch.Tensor]:
        found = next(self._given)
        self.loaded += 1
        return found

    def skip(self) -> None:
        """Take none of them, as a target that computes by the source's own module, on all of its ranks.

        Nothing is gathered then, and the version counts.
        """
        self.skipped = True

    def check(self, wanted: Mapping[str, torch.Tensor], whose: str = "the target") -> None:
        """Compare what will come with what there is, before anything is written.

        Args:
            wanted: The target's tensors by name. Of several names of one tensor it is enough that one comes.
            whose: What has them, as the error says it.

        Raises:
            ConfigError: All names, shapes and dtypes that don't match, with the nearest names.
        """
        given = self.specs
        unknown = [name for name in given if name not in wanted]
        comes = {id(wanted[name]) for name in given if name in wanted}
        missing = [name for name, tensor in wanted.items() if id(tensor) not in comes]
        odd = [
            f"{name} is {spec} in {self.source} and {_spec(wanted[name])} in {whose}"
            for name, spec in given.items()
            if name in wanted and not _fits(spec, wanted[name], self.shared)
        ]
        near = {name: did_you_mean(name, missing or wanted) for name in unknown}
        said = [
            *few(f"{whose} has no {name}{hint}" for name, hint in near.items()),
            *few(f"{name} doesn't come" for name in missing),
            *few(odd),
        ]
        if said:
            advice = ". Map names by sync_weights(names={'of the source': 'of the target'})" if unknown else ""
            self.mismatch = ConfigError(
                f"the weights of {self.source} don't fit {whose}, and nothing was written: {'; '.join(said)}{advice}"
            )
            raise self.mismatch


def few(said: Iterable[str]) -> list[str]:
    """Return the first mistakes of a kind, and how many others there are."""
    found = [*said]
    return found if len(found) <= _TOLD else [*found[:_TOLD], f"... and {len(found) - _TOLD} more"]


def _spec(tensor: torch.Tensor) -> WeightSpec:
    return WeightSpec(tuple(tensor.shape), tensor.dtype)


def _fits(spec: WeightSpec, tensor: torch.Tensor, shared: bool) -> bool:
    """Whether a weight can be a tensor's. Floating-point numbers are converted where they are copied."""
    floats = spec.dtype.is_floating_point and tensor.dtype.is_floating_point
    alike = spec.dtype == tensor.dtype or (floats and not shared)
    return alike and spec.shape == tuple(tensor.shape)


def differences(arrived: Mapping[str, Digest], has: Mapping[str, Digest]) -> dict[str, str]:
    """Return which weights aren't what has arrived, by the target's names, and how; both ends under these names.

    What a target has under several names is right under each of them when it is under one that has come.
    """
    found: dict[str, str] = {}
    for name, digest in arrived.items():
        own = has.get(name)
        if own is None:
            found[name] = "isn't among those that it gives back"
        elif own.content != digest.content:
            found[name] = "has other bits" if own[:2] == digest[:2] else f"is {own}, and {digest} was to arrive"
    comes = {has[name].tied for name in arrived if name in has}
    for name, own in has.items():
        if name not in arrived and own.tied not in comes:
            found[name] = "hasn't come"
    return found


def awake_for(cls: type, name: str) -> Sequence[str]:
    """Return what of a role's memory its method needs in a sync: what it is declared with.

    Otherwise the weights, and tensors that no module has: they may be weights, too, or be computed on.
    """
    spec = getattr(getattr(cls, name, None), "spec", None)
    return ("weights", "cache") if spec is None or spec.awake is None else spec.awake


def pairs(weights: Iterable[Any], source: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, which are such.

    Raises:
        ConfigError: They are no pairs of a name and a tensor, a name comes twice, or there are none.
    """
    import torch

    came = set[str]()
    for pair in weights:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ConfigError(f"named_weights of {source} yields {type(pair).__name__}: it yields (name, tensor)")
        name, tensor = pair
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"named_weights of {source}: {name!r} is {type(tensor).__name__}, and no tensor")
        if name in came:
            raise ConfigError(f"named_weights of {source} yields {name!r} twice")
        came.add(name)
        yield name, tensor
        del pair, tensor
    if not came:
        raise ConfigError(f"named_weights of {source} yields nothing")


def described(weights: Iterable[Any], source: str) -> dict[str, WeightSpec]:
    """Return the names, shapes and dtypes of weights, in order. Raises: as `pairs`."""
    return {name: _spec(tensor) for name, tensor in pairs(weights, source)}


@attrs.define(eq=False)
class Received:
    """The weights that a role has got from another one.

    Attributes:
        version: How often it has got them; 0 for those that its constructor has made.
        stale: Why they can't be used; None where they can.
        since: When that was known, in seconds of time.time().
        whole: Whether stale ones are whole all the same, as they were once: another role may get them.
        watch: Notices that the source has written into them, where both roles have the very tensors.
        shared: These, by name.
    """

    version: int = 0
    stale: str | None = None
    since: float = 0.0
    whole: bool = False
    watch: Watch | None = None
    shared: Mapping[str, torch.Tensor] = attrs.field(factory=dict)

    @property
    def torn(self) -> str | None:
        """Why no other role may get them; None where it may, as far as is known by now."""
        return None if self.whole else self.stale

    def fail(self, why: str, whole: bool = False) -> None:
        """Note that the weights can't be used from now on; `whole`: see there."""
        if self.stale is None:
            self.since = time.time()
        self.stale, self.whole, self.watch, self.shared = why, whole, None, {}

    def came(self, shared: Mapping[str, torch.Tensor], watch: Watch | None) -> None:
        """Note that all weights have come, on all ranks."""
        self.stale, self.since, self.whole, self.watch, self.shared = None, time.time(), False, watch, shared
        self.version += 1

    def known(self) -> tuple[int, str | None]:
        """Return the weights' version, and why they can't be used if so. On any thread; changes nothing."""
        version, stale, watch = self.version, self.stale, self.watch  # in this order: `came` has the other one
        return version, _WRITTEN if stale is None and watch is not None and watch.touched() else stale

    def check(self, role: str, label: str) -> None:
        """Refuse a call that would use stale weights.

        Raises:
            StaleWeightsError: They are stale.
        """
        if self.stale is None and self.watch is not None and self.watch.written():
            self.stale, self.since = _WRITTEN, time.time()  # a sync only has to look at what is shared
        if self.stale is not None:
            at = time.strftime("%H:%M:%S", time.localtime(self.since))
            last = f"version {self.version} was the last whole one" if self.version else "no sync has brought them yet"
            raise StaleWeightsError(
                f"{label} can't run: the weights of role {role!r} are stale since {at} ({last}): {self.stale}. "
                "colocate.sync_weights(source, target) brings them"
            )


@attrs.frozen
class WeightSync:
    """What `sync_weights` has done.

    Attributes:
        version: Of the target's weights now: how often it has got them.
        nbytes: The bytes of the weights, once, as they came.
        seconds: How long the slowest rank took.
        by: "shared" (the same tensors), "reference" (the source's tensors, copied by the target), "peers" (from worker
            to worker); several, in this order, where ranks differ.
        checked: How many weights of the target were compared with the source's, and are right, with `check=True`; else
            None.
    """

    version: int
    nbytes: int
    seconds: float
    by: tuple[str, ...]
    checked: int | None = None

    def __str__(self) -> str:
        how = " and ".join(self.by) + ("" if self.checked is None else f", {self.checked} of them checked")
        return f"weights version {self.version}: {size_text(self.nbytes)} in {self.seconds:.3g} s by {how}"
