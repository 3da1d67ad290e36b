"""What an engine is: seven methods, what these are given, and what they yield."""

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
"""Why a response has ended."""


_ENDLESS = sys.float_info.max  # infinity is no number to draw tokens by


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, value))


def _number(least: float, most: float, whole: bool = False) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return what refuses a value outside of a range, which `least` isn't in unless it is a whole number's."""

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
    """How tokens are drawn.

    Attributes:
        max_tokens: The longest response, with the token that ends it.
        temperature: Divides the logits; 0 takes the likeliest token each time.
        top_p: Only the likeliest tokens with so much probability in all are drawn.
        top_k: Only so many of the likeliest tokens are drawn; 0 for all.
        seed: From which the seeds of rows are derived, in place of the runtime's seed and the number of the call: two
            calls with equal ones draw equal rows.
        stop_token_ids: The tokens that end a response; None for those at which the model's `generate` ends it, as its
            generation config says, and () for none.
    """

    max_tokens: int = attrs.field(default=128, validator=_number(1, _ENDLESS, whole=True))
    temperature: float = attrs.field(default=1.0, validator=_number(0, _ENDLESS))
    top_p: float = attrs.field(default=1.0, validator=_number(0, 1))
    top_k: int = attrs.field(default=0, validator=_number(0, _ENDLESS, whole=True))
    seed: int | None = attrs.field(default=None, validator=attrs.validators.optional(_number(0, 2**63 - 1, whole=True)))
    stop_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_ids))


@attrs.frozen
class Prompt:
    """One prompt and the samples that are wanted of it.

    Attributes:
        index: The prompt's number in the whole list that the driver has given, which its rows carry.
        token_ids: What the model is to go on with; at least one.
        seeds: One for each sample.
    """

    index: int
    token_ids: tuple[int, ...] = attrs.field(converter=_ids)
    seeds: tuple[int, ...] = (0,)


@attrs.frozen
class Row:
    """One response.

    Attributes:
        index: The number of its prompt.
        sample: Which one of the prompt's samples it is.
        token_ids: The response, with the token that ended it.
        log_probs: Of each token, in nats, as it was drawn: of the logits divided by the temperature, among the tokens
            that `top_k` and `top_p` have left. At temperature 0 of the logits as they are.
        finish_reason: "stop": by a token that ends it. "length": `max_tokens` are there, or the engine has no room
            for a longer one, or for any, if the prompt has filled it. "aborted": it wasn't waited for to the end.
        versions: The versions of the weights that have drawn it, each with the number of tokens, in order.
    """

    index: int
    sample: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Finish
    versions: tuple[tuple[int, int], ...]


class Engine(Protocol):
    """What generates in a role's worker.

    Its class is named by an entry point in the group `colocate.engines`, and called as `Class(ctx, **options)`: with
    the role's context, and with the options that the role was declared with (`with:` of a config), which are checked
    against its signature. All methods are called on the lane of the worker, one at a time, but while `rows` is gone
    through others may be called: `update` and `sleep` between two rows.

    One that keeps process groups has a method `renew()` as well, which does without (see `colocate.torch.renew`). One
    that can give its weights back has `named_weights()`: whole ones under the names under which `update` takes them,
    as a source's `named_weights` (see `colocate.sync_weights`), for `check=True` and `colocate.compare_weights`.
    """

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        """Generate, and yield each row as it ends.

        A row depends on its prompt, its seed, `sampling` and the weights only, and on what is generated beside it by
        no more than the rounding of floating-point numbers. The row with the numbers i and k is of the prompt with
        `index` i, and drawn by its `seeds[k]`; each comes once.

        The iterator may be closed at any row, and what it does may raise: either way nothing of its rows is left in
        the engine, and the next `rows` gives what it would give of an engine that was just made.

        Args:
            prompts: What to go on with.
            sampling: How.
            stop: Whether to end, asked between any two steps of the engine. Rows that haven't ended are yielded as
                they are then, as "aborted". While it is asked, the engine may get other weights, sleep and be woken:
                rows go on afterwards, by the weights that are there.

        Raises:
            ConfigError: A prompt is empty, or has tokens that the model hasn't; nothing has begun.
        """
        ...

    def update(self, weights: Weights, version: int) -> None:
        """Take other weights, which come under the names that transformers has for them.

        The engine goes through `weights` to its end, copies what it needs and forgets what it has computed by the
        former weights. What it can't use is refused before anything is written (`weights.check`). An engine that was
        left in the middle refuses to generate until a later update has come to its end.

        Args:
            weights: The iterator of names and tensors, with `weights.specs` for what will come.
            version: What `Row.versions` say from now on; it is 0 before the first update.
        """
        ...

    def sleep(self, tags: Sequence[str]) -> None:
        """Free memory, of "weights" and "cache" what is named; what is asleep already stays so.

        What a cache held need not come back. Weights do, unless the engine leaves them to colocate, which moves what
        the engine holds in tensors and doesn't tell by `managed`.
        """
        ...

    def wake(self, tags: Sequence[str]) -> None:
        """Take back what `sleep` has freed of these."""
        ...

    def managed(self) -> Mapping[str, int]:
        """Return the bytes of memory that `sleep` frees, and of what colocate can't find, by tag, as they are now.

        What sleeps has none. colocate doesn't look into what an attribute `apart` of the engine's has, a sequence.
        """
        ...

    def abort(self) -> None:
        """Forget all requests. It is called after a failure, and does nothing where there are none."""
        ...

    def close(self) -> None:
        """End the engine: what it has begun, written or changed outside of itself is as before."""
        ...


def engine_with(engine: str | type[Any], options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return an engine of which all is known but its context.

    Raises:
        PluginError: There is no such engine, or it can't be imported.
        ConfigError: It doesn't take them.
    """
    found: Callable[..., Any] = engine_named(engine) if isinstance(engine, str) else engine
    name = engine if isinstance(engine, str) else engine.__qualname__
    return partial(found, **fitting(found, f"engine {name!r}", options, skip=1))


def engine_named(engine: str) -> type[Any]:
    """Return the class of an installed engine; raise as `engine_with`."""
    if ":" in engine:
        raise ConfigError(
            f"engine={engine!r}: an engine is named by its entry point in the group colocate.engines; in Python its "
            "class does as well"
        )
    found: Any = find_engine(engine).load()
    cls: type[Any] = found
    return cls


def fitting(target: Callable[..., Any], name: str, options: Mapping[str, Any], skip: int = 0) -> dict[str, Any]:
    """Return options as a class wants them; `name` is what errors call it, `skip` the arguments that aren't options.

    Raises:
        ConfigError: It doesn't: all of them, with the nearest names.
    """
    arguments = arguments_of(target, name, skip=skip)
    said = [
        f"{f'{path_text(each.place)}: ' if each.message.startswith('must') else ''}{each.message}"
        + (f"; did you mean {each.nearest!r}?" if each.nearest else "")
        for each in arguments.problems(options)
    ]
    if said:
        raise ConfigError("; ".join(said))
    return arguments.built(options)
