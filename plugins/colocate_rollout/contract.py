"""The contract of an engine: seven methods, and the types of their arguments and results."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import attrs

from colocate import ConfigError, Weights
from colocate.plugins import find_engine
from colocate.signatures import arguments_of, path_text

Finish = Literal["stop", "length", "aborted"]
"""The reason for the end of a response."""


_ENDLESS = sys.float_info.max  # Infinity is no valid sampling parameter.


def _check_ids(value: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, value))


def _make_number_check(
    least: float, most: float, whole: bool = False
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        kinds = int if whole else (int, float)
        fits = isinstance(value, kinds) and not isinstance(value, bool) and (least <= value <= most)
        if not fits:
            kind = "a whole number" if whole else "a number"
            upper = f" to {most:g}" if most < _ENDLESS else "" if whole else ", finite"
            raise ConfigError(f"Sampling({field.name}={value!r}): {kind} from {least:g}{upper}")

    return check


@attrs.frozen
class Sampling:
    """Parameters that control the sampling of tokens.

    Attributes:
        max_tokens: The longest response, with the token that ends it.
        temperature: Divides the logits; 0 takes the likeliest token each time.
        top_p: Draw only among the likeliest tokens that together have this probability.
        top_k: Draw only among this many of the likeliest tokens; 0 for all.
        seed: The base of the rows' seeds, instead of the runtime's seed and the call's number. Two calls with equal
            seeds draw equal rows.
        stop_token_ids: The tokens that end a response; None for the end tokens of the model's generation config, and ()
            for none.
    """

    max_tokens: int = attrs.field(default=128, validator=_make_number_check(1, _ENDLESS, whole=True))
    temperature: float = attrs.field(default=1.0, validator=_make_number_check(0, _ENDLESS))
    top_p: float = attrs.field(default=1.0, validator=_make_number_check(0, 1))
    top_k: int = attrs.field(default=0, validator=_make_number_check(0, _ENDLESS, whole=True))
    seed: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_make_number_check(0, 2**63 - 1, whole=True))
    )
    stop_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_check_ids))


@attrs.frozen
class Prompt:
    """One prompt, with a seed for each sample.

    Attributes:
        index: The prompt's number in the driver's whole list; rows carry this number.
        token_ids: The prompt's tokens; at least one.
        seeds: One for each sample.
    """

    index: int
    token_ids: tuple[int, ...] = attrs.field(converter=_check_ids)
    seeds: tuple[int, ...] = (0,)


@attrs.frozen
class Row:
    """One response to a prompt.

    Attributes:
        index: The prompt's number.
        sample: The sample's number within the prompt.
        token_ids: The response, with the token that ended it.
        log_probs: The log-probability of each token, in nats, as drawn: under the logits divided by the temperature,
            among the tokens left by `top_k` and `top_p`. At temperature 0, under the plain logits.
        finish_reason: "stop": a token ended the response. "length": `max_tokens` are reached, or the engine has no room
            for a longer response, or for any. "aborted": the call was cancelled before the end.
        versions: The versions of the weights that drew the response, each with the number of tokens, in order.
    """

    index: int
    sample: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Finish
    versions: tuple[tuple[int, int], ...]


class Engine(Protocol):
    """The interface of an engine, which generates responses in a role's worker.

    An entry point in the group `colocate.engines` names the class, which is called as `Class(ctx, **options)`: with the
    role's context, and with the role's options (`with:` of a config), checked against the class's signature. All
    methods are called on the worker's lane, one at a time. While a caller iterates over `rows`, `update` and `sleep`
    may be called between two rows.

    An engine with process groups also has a method `renew()`, which stops using these groups (see
    `colocate.torch.renew`). An engine that can return its weights has `named_weights()`, which returns unsharded
    tensors under the names that `update` takes, for `colocate.sync_weights(check=True)` and
    `colocate.compare_weights`.
    """

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        """Generate responses, and yield each finished response as a row.

        A row depends only on its prompt, its seed, `sampling` and the weights; other rows in the batch change no more
        than the rounding of floating-point numbers. The row with numbers i and k belongs to the prompt with `index` i,
        and is drawn with `seeds[k]`; each row comes once.

        The iterator may be closed at any row, and any step may raise. Either way no part of the rows is left in the
        engine, and the next `rows` gives the same result as on a new engine.

        Args:
            prompts: The prompts to continue.
            sampling: The parameters of sampling.
            stop: Returns whether to stop; called between any two steps of the engine. On True, yield unfinished rows as
                "aborted". During this call the engine may get other weights, sleep and wake. Generation then continues
                with the new weights.

        Raises:
            ConfigError: A prompt is empty, or has tokens unknown to the model; nothing has begun.
        """
        ...

    def update(self, weights: Weights, version: int) -> None:
        """Copy new weights, named as in transformers, into the engine.

        The engine iterates over `weights` to the end, copies what it needs, and discards results of the former weights.
        It refuses unsuitable weights before any write (`weights.check`). After an incomplete update, the engine refuses
        to generate until a later update is complete.

        Args:
            weights: An iterator of names and tensors, with `weights.specs` for what will come.
            version: The new version for `Row.versions`; 0 before the first update.
        """
        ...

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the memory of these tags, "weights" or "cache"; ignore tags that already sleep.

        `wake` must restore weights, but not a cache's contents. An engine may leave weights to colocate, which moves
        all of the engine's tensors except the memory reported by `managed`.
        """
        ...

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory again that `sleep` has freed for these tags."""
        ...

    def managed(self) -> Mapping[str, int]:
        """Return the bytes by tag: memory that `sleep` would free now, or that colocate can't find by itself.

        A sleeping tag has no bytes. colocate doesn't search objects in the engine's attribute `apart`, a sequence.
        """
        ...

    def abort(self) -> None:
        """Drop all requests after a failure; do nothing if there are no requests."""
        ...

    def close(self) -> None:
        """Close the engine, and undo all effects outside of the engine, such as processes, files and settings."""
        ...


def make_engine(engine: str | type[Any], options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return a function that builds an engine with these options from a context.

    Raises:
        PluginError: There is no such engine, or it can't be imported.
        ConfigError: The engine refuses the options.
    """
    factory: Callable[..., Any] = find_engine_class(engine) if isinstance(engine, str) else engine
    name = engine if isinstance(engine, str) else engine.__qualname__
    return partial(factory, **check_options(factory, f"engine {name!r}", options, skip=1))


def find_engine_class(engine: str) -> type[Any]:
    """Return the class of an installed engine. Errors are as for `make_engine`."""
    if ":" in engine:
        raise ConfigError(
            f"engine={engine!r}: an engine is named by its entry point in the group colocate.engines; in Python its "
            "class does as well"
        )
    engine_class: Any = find_engine(engine).load()
    cls: type[Any] = engine_class
    return cls


def check_options(target: Callable[..., Any], name: str, options: Mapping[str, Any], skip: int = 0) -> dict[str, Any]:
    """Convert options to keyword arguments for a class's constructor, without the first `skip` parameters.

    Raises:
        ConfigError: Options don't fit. The error names all of them, with the nearest names, and the class as `name`.
    """
    arguments = arguments_of(target, name, skip=skip)
    problems = [
        f"{f'{path_text(problem.place)}: ' if problem.message.startswith('must') else ''}{problem.message}"
        + (f"; did you mean {problem.nearest!r}?" if problem.nearest else "")
        for problem in arguments.problems(options)
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    return arguments.convert(options)
