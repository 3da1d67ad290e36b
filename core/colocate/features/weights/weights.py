"""The weights that a target's `load_weights` receives in a sync, and the state of a role's received weights."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from colocate._system.nearest import did_you_mean
from colocate._system.numbers import format_size
from colocate.errors import ConfigError, StaleWeightsError
from colocate.features.weights.messages import Digest

if TYPE_CHECKING:
    import torch

    from colocate._values.leaving import Watch

_MOST_NAMED = 8
"""The number of mistakes of one kind in an error text."""
_WRITTEN = "the role whose tensors it shares has written into them since then"


class WeightSpec(NamedTuple):
    """The shape and dtype of a weight, known before the weight arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class Weights(Iterator[tuple[str, "torch.Tensor"]]):
    """An iterator over a source's weights by name, which is the argument of a target's `load_weights`.

    Each tensor is the source's or the transport's: the target copies it before the next one is requested,
    and keeps none, unless they are `shared`.

    Attributes:
        specs: All names to come, in order, with shape and dtype.
        shared: Whether the target keeps these very tensors.
        loaded: The number of weights so far.
        skipped: Whether the target takes none of the weights.
        mismatch: The error of `check`.
    """

    def __init__(
        self, source: str, given: Iterator[tuple[str, torch.Tensor]], specs: Mapping[str, WeightSpec], shared: bool
    ) -> None:
        """Create the iterator for `colocate.sync_weights`; `source` is the source's name in error texts."""
        self.source = source
        self.specs = specs
        self.shared = shared
        self.loaded = 0
        self.skipped = False
        self.mismatch: ConfigError | None = None
        self._pairs = given

    @classmethod
    def of(cls, given: Iterable[tuple[str, torch.Tensor]], source: str = "the caller") -> Weights:
        """Return weights for a direct call of `load_weights`, such as in a test.

        Args:
            given: Pairs of a name and a tensor. All are iterated at once, unless `given.specs` exists.
            source: The source's name in error texts.

        Raises:
            ConfigError: An item is no such pair, a name is repeated, or there are no items.
        """
        specs = getattr(given, "specs", None)
        if specs is None:
            given = [*given]
            specs = describe_weights(given, source)
        return cls(source, iter(given), specs, shared=False)

    def __next__(self) -> tuple[str, torch.Tensor]:
        pair = next(self._pairs)
        self.loaded += 1
        return pair

    def skip(self) -> None:
        """Take no weights in this sync, for example in a target that computes with the source's own module.

        All ranks must do the same. Nothing is gathered then, and the version still increases.
        """
        self.skipped = True

    def check(self, wanted: Mapping[str, torch.Tensor], whose: str = "the target") -> None:
        """Compare the names, shapes and dtypes of the weights with a target's tensors, before anything is written.

        Args:
            wanted: The target's tensors by name. For a tensor with several names, one of them is enough.
            whose: The target's name in the error text.

        Raises:
            ConfigError: All names, shapes and dtypes that don't match, with the nearest names.
        """
        incoming = self.specs
        unknown = [name for name in incoming if name not in wanted]
        comes = {id(wanted[name]) for name in incoming if name in wanted}
        missing = [name for name, tensor in wanted.items() if id(tensor) not in comes]
        odd = [
            f"{name} is {spec} in {self.source} and {_weight_spec(wanted[name])} in {whose}"
            for name, spec in incoming.items()
            if name in wanted and not _fits_tensor(spec, wanted[name], self.shared)
        ]
        near = {name: did_you_mean(name, missing or wanted) for name in unknown}
        mistakes = [
            *limit_messages(f"{whose} has no {name}{hint}" for name, hint in near.items()),
            *limit_messages(f"{name} doesn't come" for name in missing),
            *limit_messages(odd),
        ]
        if mistakes:
            advice = ". Map names by sync_weights(names={'of the source': 'of the target'})" if unknown else ""
            self.mismatch = ConfigError(
                f"the weights of {self.source} don't fit {whose}, and nothing was written: "
                f"{'; '.join(mistakes)}{advice}"
            )
            raise self.mismatch


def limit_messages(said: Iterable[str]) -> list[str]:
    """Return the first mistakes; if there are more, add a line with the number of the remaining mistakes."""
    texts = [*said]
    return texts if len(texts) <= _MOST_NAMED else [*texts[:_MOST_NAMED], f"... and {len(texts) - _MOST_NAMED} more"]


def _weight_spec(tensor: torch.Tensor) -> WeightSpec:
    return WeightSpec(tuple(tensor.shape), tensor.dtype)


def _fits_tensor(spec: WeightSpec, tensor: torch.Tensor, shared: bool) -> bool:
    """Return whether a weight fits a tensor. Floating-point dtypes may differ, unless the tensor is shared."""
    floats = spec.dtype.is_floating_point and tensor.dtype.is_floating_point
    alike = spec.dtype == tensor.dtype or (floats and not shared)
    return alike and spec.shape == tuple(tensor.shape)


def find_differences(arrived: Mapping[str, Digest], has: Mapping[str, Digest]) -> dict[str, str]:
    """Return a description of the difference for each of the target's weights that differs from the arrived weight.

    A tensor with several names in the target is right if one of these names has arrived.
    """
    problems: dict[str, str] = {}
    for name, digest in arrived.items():
        digest_here = has.get(name)
        if digest_here is None:
            problems[name] = "isn't among those that it gives back"
        elif digest_here.content != digest.content:
            problems[name] = (
                "has other bits" if digest_here[:2] == digest[:2] else f"is {digest_here}, and {digest} was to arrive"
            )
    comes = {has[name].tied for name in arrived if name in has}
    for name, digest_here in has.items():
        if name not in arrived and digest_here.tied not in comes:
            problems[name] = "hasn't come"
    return problems


def needed_tags(cls: type, name: str) -> Sequence[str]:
    """Return the tags of memory that a role's method needs in a sync, from `@method(awake=...)`.

    The default is the weights and the tensors outside modules, which may be weights, too, or be used in computations.
    """
    spec = getattr(getattr(cls, name, None), "spec", None)
    return ("weights", "cache") if spec is None or spec.awake is None else spec.awake


def check_pairs(weights: Iterable[Any], source: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Check each item of a role's weights, and yield pairs of name and tensor.

    Raises:
        ConfigError: An item is no such pair, a name is repeated, or there are no items.
    """
    import torch

    names = set[str]()
    for pair in weights:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ConfigError(f"named_weights of {source} yields {type(pair).__name__}: it yields (name, tensor)")
        name, tensor = pair
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"named_weights of {source}: {name!r} is {type(tensor).__name__}, and no tensor")
        if name in names:
            raise ConfigError(f"named_weights of {source} yields {name!r} twice")
        names.add(name)
        yield name, tensor
        del pair, tensor
    if not names:
        raise ConfigError(f"named_weights of {source} yields nothing")


def describe_weights(weights: Iterable[Any], source: str) -> dict[str, WeightSpec]:
    """Return the shapes and dtypes of weights by name, in order; raise the errors of `check_pairs`."""
    return {name: _weight_spec(tensor) for name, tensor in check_pairs(weights, source)}


@attrs.define(eq=False)
class ReceivedWeights:
    """The state of the weights that a role has received from another role.

    Attributes:
        version: The number of syncs; 0 for the constructor's weights.
        stale: The reason why the weights can't be used; None if they can.
        since: The time of the last change, in seconds of time.time().
        is_whole: Whether stale weights are nevertheless complete, so that another role may copy them.
        watch: Notices writes of the source into shared tensors.
        shared: The shared tensors, by name.
    """

    version: int = 0
    stale: str | None = None
    since: float = 0.0
    is_whole: bool = False
    watch: Watch | None = None
    shared: Mapping[str, torch.Tensor] = attrs.field(factory=dict)

    @property
    def failure_reason(self) -> str | None:
        """The reason why no other role may get the weights; None if none is known."""
        return None if self.is_whole else self.stale

    def mark_unusable(self, why: str, whole: bool = False) -> None:
        """Mark the weights as stale; `whole` says whether the stale weights are complete."""
        if self.stale is None:
            self.since = time.time()
        self.stale, self.is_whole, self.watch, self.shared = why, whole, None, {}

    def mark_complete(self, shared: Mapping[str, torch.Tensor], watch: Watch | None) -> None:
        """Mark the weights as complete after a sync that has succeeded on all ranks."""
        self.stale, self.since, self.is_whole, self.watch, self.shared = None, time.time(), False, watch, shared
        self.version += 1

    def current_state(self) -> tuple[int, str | None]:
        """Return the weights' version, and a reason if unusable (else None). May be called on any thread."""
        # The version is read first, because `mark_complete` writes the version last.
        version, stale, watch = self.version, self.stale, self.watch
        return version, _WRITTEN if stale is None and watch is not None and watch.was_touched() else stale

    def check_usable(self, role: str, label: str) -> None:
        """Refuse a call that would use stale weights.

        Raises:
            StaleWeightsError: The weights are stale.
        """
        if self.stale is None and self.watch is not None and self.watch.was_written():
            self.stale, self.since = _WRITTEN, time.time()  # `shared` is kept for the next sync.
        if self.stale is not None:
            at = time.strftime("%H:%M:%S", time.localtime(self.since))
            last = f"the last complete version is {self.version}" if self.version else "there was no sync yet"
            raise StaleWeightsError(
                f"{label} can't run: the weights of role {role!r} are stale since {at} ({last}): {self.stale}. "
                "Call colocate.sync_weights(source, target) first"
            )


@attrs.frozen
class WeightSync:
    """The result of `sync_weights`.

    Attributes:
        version: The version of the target's weights: the number of syncs.
        nbytes: The bytes of the weights, counted once, as sent.
        seconds: The duration on the slowest rank.
        by: "shared" (the same tensors), "reference" (the source's tensors, copied by the target), "peers" (from worker
            to worker); several, in this order, if ranks differ.
        checked: The number of the target's weights compared with the source's, all of them right, with `check=True`;
            else None.
    """

    version: int
    nbytes: int
    seconds: float
    by: tuple[str, ...]
    checked: int | None = None

    def __str__(self) -> str:
        how = " and ".join(self.by) + ("" if self.checked is None else f", {self.checked} of them checked")
        return f"weights version {self.version}: {format_size(self.nbytes)} in {self.seconds:.3g} s by {how}"
