"""The role `rollout.engine`, which generates responses with any engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from colocate import ConfigError, DispatchError, PluginError, Role, RoleSpec, Scatter, Weights, checks, method
from colocate.signatures import arguments_of
from colocate.texts import did_you_mean
from colocate_rollout.child import ChildEngine, ChildOptions
from colocate_rollout.contract import Engine, Prompt, Row, Sampling, find_engine_class, make_engine


class _ScatterNumbered(Scatter):
    """A `Scatter` that numbers prompts by their places in the driver's list, because the number decides the seeds.

    Prompts that are residents on workers are numbered per rank.
    """

    accepts_deferred = True

    def split(self, arguments: Mapping[str, Any], ranks: Any) -> Sequence[Mapping[str, Any]]:
        if (prompts := arguments["prompts"]) is None or isinstance(prompts, str | bytes | Mapping):
            raise DispatchError(
                f"generate(prompts=...) is {_describe_prompt(prompts)}, and no list of prompts, each a list of "
                "token ids",
                parameter="prompts",
            )
        if isinstance(prompts, list | tuple):
            arguments = {**arguments, "prompts": _number_prompts(prompts)}
        return super().split(arguments, ranks)


def _option_problems(
    options: Mapping[str, Any], own: RoleSpec[Any], before: Mapping[str, RoleSpec[Any]]
) -> Iterator[tuple[str | Sequence[str | int], str | PluginError]]:
    engine, child = options["engine"], options["child"]
    engine_options = {name: value for name, value in options.items() if name not in ("engine", "sampling", "child")}
    if not isinstance(child, ChildOptions) or child.python is None:  # A child's own Python may have other engines.
        try:
            cls = find_engine_class(engine)
        except PluginError as error:
            yield "engine", error
        except ConfigError as error:
            yield "engine", error.message
        else:
            for problem in arguments_of(cls, f"engine {engine!r}", skip=1).problems(engine_options):
                near = f"; did you mean {problem.nearest!r}?" if problem.nearest else ""
                yield problem.place or ("engine",), problem.message + near
    role = engine_options.get("role")
    if isinstance(role, str) and role not in before:
        roles_before = ", ".join(before) or "none"
        yield (
            "role",
            f"no role {role!r} is declared before this one; there are {roles_before}{did_you_mean(role, before)}",
        )


@checks(_option_problems)
class EngineRole(Role):
    """A role that generates responses with an engine.

    Args:
        engine: The name of an installed engine ("transformers", "vllm"); in Python also a class.
        sampling: Default parameters of sampling.
        child: Whether the engine has a process of its own, which the slot owns; a `ChildOptions` configures the
            process.
        **options: The engine's options.

    Raises:
        PluginError: There is no such engine, or it isn't installed.
        ConfigError: The engine has no such option, or can't be in a child.
        ChildDied: The child ended before its engine was ready, or took too long.
    """

    def __init__(
        self,
        engine: str | type[Any],
        sampling: Sampling | None = None,
        child: bool | ChildOptions = False,
        **options: Any,
    ) -> None:
        self.sampling = Sampling()
        self.sampling = self._make_sampling(sampling)  # A role declared in Python may pass a mapping.
        # Set this attribute first, because `managed` may be called while the engine is constructed.
        self.engine: Engine | None = None
        if child is False or self.ctx.device.type == "meta":  # A role that is only planned must not start a process.
            self.engine = make_engine(engine, options)(self.ctx)
        else:
            self.engine = ChildEngine(self.ctx, engine, options, child)

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """Return the reason why an untrusted config can't set an option, else None. See `Executor.objection`."""
        if option != "child" or not isinstance(value, Mapping) or value.keys().isdisjoint(("python", "env")):
            return None
        return (
            "a config that may name plugins only can't say which program a child runs, nor its variables: give "
            "`child` by --set, if you trust it"
        )

    @method(dispatch=_ScatterNumbered("prompts", empty="run"), awake=("weights", "cache"))
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int = 1,
        sampling: Sampling | Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[int, tuple[Row, ...]]]:
        """Generate responses to each prompt.

        Args:
            prompts: The token ids of each prompt.
            samples: Responses to each prompt.
            sampling: Parameters of sampling, instead of the role's; a mapping changes only some of the role's.

        Yields:
            The index of a prompt and its samples, once all of these are finished.
        """
        if not isinstance(samples, int) or samples < 1:
            raise ConfigError(f"generate(samples={samples!r}): a whole number, at least 1")
        options = self._make_sampling(sampling)
        base = self._derive_seed(options)
        before = 0 if len(prompts) and isinstance(prompts[0], Prompt) else self.ctx.mesh.rank("dp") << 32
        numbered = [
            attrs.evolve(
                each, seeds=tuple(_derive_row_seed(base, before + each.index, sample) for sample in range(samples))
            )
            for each in _number_prompts(prompts)
        ]
        places = {each.index: place for place, each in enumerate(numbered)}
        rows_by_prompt: dict[int, list[Row]] = {}
        for row in self._generate_rows(numbered, options, self._should_stop):
            ended = rows_by_prompt.setdefault(row.index, [])
            ended.append(row)
            if len(ended) == samples:
                yield places[row.index], tuple(sorted(rows_by_prompt.pop(row.index), key=lambda each: each.sample))

    def _generate_rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        """Yield the engine's rows, and drop all requests on any error.

        Raises:
            FloatingPointError: A log-probability isn't finite.
        """
        engine = self._engine
        try:
            for row in engine.rows(prompts, sampling, stop):
                if not math.isfinite(sum(row.log_probs)):
                    raise FloatingPointError(
                        f"the engine has drawn a token of prompt {row.index}, sample {row.sample}, whose "
                        "log-probability is no number, as its logits are none: the weights that it has, or what it "
                        "computes in its dtype, aren't finite"
                    )
                yield row
        except BaseException:
            engine.abort()
            raise

    def _should_stop(self) -> bool:
        """Wait while the role is paused; return whether the call is cancelled."""
        self.ctx.pause_point()
        return self.ctx.cancelled

    def _make_sampling(self, sampling: Sampling | Mapping[str, Any] | None) -> Sampling:
        """Return a call's sampling parameters, with the role's parameters as defaults."""
        if sampling is None or isinstance(sampling, Sampling):
            return sampling or self.sampling
        if not isinstance(sampling, Mapping):
            raise ConfigError(f"sampling={sampling!r}: a Sampling, or a mapping with some of what it has")
        fields = [field.name for field in attrs.fields(Sampling)]
        if unknown := [name for name in sampling if name not in fields]:
            raise ConfigError(f"sampling= has {unknown[0]!r}; there are {', '.join(fields)}")
        return attrs.evolve(self.sampling, **sampling)

    def _derive_seed(self, sampling: Sampling) -> int:
        if sampling.seed is not None:
            return sampling.seed
        if self.ctx.hosted:
            return self.ctx.call_seed
        import torch

        generator = self.ctx.generator
        return int(torch.randint(2**62, (), generator=generator, device=generator.device))

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    @method(awake=("weights",))
    def load_weights(self, weights: Weights | Iterable[tuple[str, Any]], version: int) -> None:
        """Update the engine's weights from another role.

        Args:
            weights: The weights of a sync; outside a worker also pairs of name and tensor, from a module's
                `state_dict().items()` or `colocate.torch.named_weights`.
            version: The version that rows report.
        """
        self._engine.update(weights if isinstance(weights, Weights) else Weights.of(weights), version)

    @method(awake=("weights",))
    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Return the engine's weights, for `sync_weights(check=True)` and `colocate.compare_weights`.

        Raises:
            ConfigError: The engine can't return weights.
        """
        give = getattr(self._engine, "named_weights", None)
        if give is None:
            raise ConfigError(
                f"the engine {type(self._engine).__name__} has no method named_weights(self), which gives its weights "
                "back under the names by which it takes them: without one they can't be compared; leave `check` out"
            )
        weights: Iterable[tuple[str, Any]] = give()
        return weights

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the engine's memory with these tags."""
        self._engine.sleep(tags)

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the engine's freed memory with these tags again."""
        self._engine.wake(tags)

    def save(self, directory: str) -> None:
        """Write nothing, because weights come by a sync, and colocate itself saves the count of calls for the seeds."""

    def restore(self, directory: str) -> None:
        """Restore nothing, because weights come by a sync."""

    def managed(self) -> Mapping[str, int]:
        """Return the bytes that the engine itself frees in `sleep`, by tag."""
        return {} if self.engine is None else self.engine.managed()

    def apart(self) -> Sequence[object]:
        """Return the engine's attribute `apart`: objects that colocate must not search for memory."""
        parts: Sequence[object] = getattr(self.engine, "apart", ())
        return parts

    def renew(self) -> None:
        """Call the engine's method `renew`, if there is one, to stop using old process groups."""
        if (hook := getattr(self.engine, "renew", None)) is not None:
            hook()

    def close(self) -> None:
        """Close the engine."""
        if self.engine is not None:
            self.engine.close()


def _describe_prompt(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _number_prompts(prompts: Sequence[Any]) -> list[Prompt]:
    numbered = []
    for index, prompt in enumerate(prompts):
        try:
            numbered.append(prompt if isinstance(prompt, Prompt) else Prompt(index, prompt))
        except (TypeError, ValueError) as error:
            raise DispatchError(
                f"generate(prompts=...): prompt {index} is {_describe_prompt(prompt)}, and no list of token ids "
                f"({error})",
                parameter="prompts",
            ) from None
    return numbered


def _derive_row_seed(base: int, index: int, sample: int) -> int:
    """Return a seed that differs between all rows of all calls."""
    text = f"{base}\0{index}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
