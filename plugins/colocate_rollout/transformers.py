"""The engine `transformers`, which generates with a transformers model and continuous batching.

Each row has a place in one cache. The used places come first, without gaps, and a step computes all of them. A finished
row's place is taken by the last row. The prompts of new rows go through the model in one pass, and take the next
places. Each draw depends on one number of the row's own generator, and not on other rows.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
import torch
from torch import Tensor

import colocate
from colocate import ConfigError, Context, Weights, hookimpl
from colocate.signatures import Checked, find_amount_problem
from colocate_rollout.contract import Finish, Prompt, Row, Sampling
from colocate_rollout.lent import check_adapters, gather_module, is_sharded, is_tensor_parallel
from colocate_rollout.models import (
    borrow_role,
    check_model_options,
    check_prompts,
    check_rope,
    describe_model,
    find_model,
    find_stop_ids,
    import_transformers,
    load_config,
    loading_options,
    split_by_room,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from colocate.torch import NamedWeights

Count = Annotated[int, Checked(partial(find_amount_problem, whole=True, least=1))]


@hookimpl
def colocate_engine() -> type[TransformersEngine]:
    """Return the class of the engine `transformers`; see `EngineHooks`."""
    return TransformersEngine


class TransformersEngine:
    """An engine that generates with another role's model, which needs no sync, or with a separate model.

    Args:
        ctx: The role's context.
        model: A folder or a hub id, or the fields of a config (`model_type` among them), with random weights until the
            first sync. A model's own code isn't run.
        role: Instead of a model, the role of the group whose model generates; declared before this role. In a
            background role the engine has a model of its own with that role's config and dtype, and gets weights by
            `colocate.sync_weights`.
        dtype: The dtype of the engine's own model.
        max_rows: Rows that are generated at once.
        max_length: Tokens of prompt and response together; None for the model's limit, at most 2048.
        max_batch_tokens: Tokens of prompts that go through the model at once.
    """

    def __init__(
        self,
        ctx: Context,
        model: str | Mapping[str, Any] | None = None,
        role: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        max_rows: Count = 64,
        max_length: Count | None = None,
        max_batch_tokens: Count = 4096,
    ) -> None:
        check_model_options("transformers", model, role)
        self._missing: str | None = None  # The reason why the weights can't be used.
        kind: str = dtype
        # A background role gets a separate model, because the other role may be in a call while this role generates.
        if role is not None and ctx.background:
            model, kind = describe_model(ctx, role)
            role, self._missing = None, "no sync was made yet; call colocate.sync_weights first"
        self._ctx, self._role, self._max_batch_tokens = ctx, role, max_batch_tokens
        self._own_module = None if model is None else _make_own_model(model, getattr(torch, kind), ctx.device)
        self._version = 0
        with self._open_module() as module:
            config: Any = module.config.get_text_config()
            longest = getattr(config, "max_position_embeddings", 2048)
            if max_length is not None and max_length > longest:
                raise ConfigError(f"max_length={max_length}: the model takes {longest} tokens")
            length: int = max_length or min(longest, 2048)
            _check_attention(config, length)
            check_rope(config, length, "max_length")
            find_stop_ids(module.generation_config)  # Refuse stop strings now, and not only at the first row.
            self._vocabulary, self._longest = config.vocab_size, length
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            shape = max_rows, heads, length + 1, size  # The last position takes padding, which is never read.
            self._cache = _KeyValueCache(config.num_hidden_layers, shape, next(module.parameters()).dtype, ctx.device)
            if role is not None:
                self._check_ranks(module, role)
        self.apart = (self._cache,)  # colocate mustn't search the cache, which `managed` reports.

    def _check_ranks(self, module: PreTrainedModel, name: str) -> None:
        """Refuse a sharded model if this role isn't on all ranks that compute the model together."""
        if not is_sharded(module):
            return
        if is_tensor_parallel(module):
            raise ConfigError(
                f"engine 'transformers': role {name!r} shards its model by tensor parallelism, so that its ranks "
                "compute each token together, and rows would wait for those of other ranks: give the engine a model of "
                "its own (`model`), and colocate.sync_weights brings the weights"
            )
        with self._ctx.borrow(name, object, awake=()) as role:  # The borrowed role may be of any class.
            theirs = getattr(getattr(role, "ctx", self._ctx), "world_size", self._ctx.world_size)
        if theirs != self._ctx.world_size:
            raise ConfigError(
                f"engine 'transformers': role {name!r} shards its model over its {theirs} slots, which compute it "
                f"together, and role {self._ctx.role!r} is on {self._ctx.world_size} of them: give it the same slots"
            )

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        """Generate rows; see `Engine.rows`."""
        if self._missing is not None:
            raise ConfigError(f"the engine has no whole weights: {self._missing}")
        check_prompts(prompts, self._vocabulary)
        prompts, full = split_by_room(prompts, self._longest)
        yield from full
        waiting = deque(
            _RunningRow(prompt, sample, random.Random(seed), self._longest - len(prompt.token_ids))
            for prompt in prompts
            for sample, seed in enumerate(prompt.seeds)
        )
        for sequence in waiting:
            sequence.max_tokens = min(sequence.max_tokens, sampling.max_tokens)
        cache = self._cache
        running: list[_RunningRow] = []
        with self._open_module() as module, gather_module(module):
            stops: Collection[int] | None = sampling.stop_token_ids
            if stops is None:
                stops = find_stop_ids(module.generation_config)
            cache.clear_rows()
            emptied = cache.emptied
            while waiting or running:
                if stop():
                    yield from (sequence.to_row("aborted") for sequence in (*running, *waiting))
                    return
                if cache.emptied != emptied:  # The cache was emptied during `stop`, so all rows start again.
                    cache.allocate()
                    waiting.extendleft(reversed(running))
                    running, emptied = [], cache.emptied
                logits = [self._decode(module, running)] if running else []
                if (room := cache.rows - len(running)) and waiting:
                    new, theirs = self._prefill(module, self._take_groups(waiting, room), len(running))
                    running += new
                    logits.append(theirs)
                tokens, log_probs = _draw_tokens(torch.cat(logits), sampling, running)
                ended = []
                for place, (sequence, token, log_prob) in enumerate(zip(running, tokens, log_probs, strict=True)):
                    if sequence.add_token(token, log_prob, self._version, stops):
                        ended.append(place)
                rows = [running[place].to_row() for place in ended]
                for place in reversed(ended):
                    last = running.pop()
                    if place < len(running):
                        cache.copy_row(len(running), place, last.length)
                        running[place] = last
                yield from rows

    def _take_groups(self, waiting: deque[_RunningRow], room: int) -> list[list[_RunningRow]]:
        """Remove the rows that start now from the queue; return groups of rows with the same prompt."""
        groups: dict[tuple[int, ...], list[_RunningRow]] = {}
        widest = 0
        while waiting and room:
            ids = waiting[0].all_ids
            widest = max(widest, len(ids))
            if groups and ids not in groups and (len(groups) + 1) * widest > self._max_batch_tokens:
                break
            groups.setdefault(ids, []).append(waiting.popleft())
            room -= 1
        return [*groups.values()]

    def _prefill(
        self, module: PreTrainedModel, groups: list[list[_RunningRow]], first: int
    ) -> tuple[list[_RunningRow], Tensor]:
        """Send each group's common prompt through the model; store keys and values in the cache from row `first` on.

        Returns:
            The rows in the order of the cache's rows, and the logits of their first tokens, `[rows, vocabulary]`.
        """
        cache, ids = self._cache, [group[0].all_ids for group in groups]
        width = max(map(len, ids))
        tokens = torch.tensor(
            [[*[0] * (width - len(candidate)), *candidate] for candidate in ids], device=self._ctx.device
        )
        at = torch.tensor([range(len(candidate) - width, len(candidate)) for candidate in ids], device=self._ctx.device)
        place = slice(first, first + len(ids))
        logits = tokens  # A placeholder, which the loop replaces.
        for begin in range(0, width, step := max(1, self._max_batch_tokens // len(ids))):
            part = slice(begin, begin + step)
            logits = _run_forward(module, cache, place, tokens[:, part], at[:, part])
        rows, source = [group[0] for group in groups], [*range(len(groups))]
        for number, group in enumerate(groups):
            for candidate in group[1:]:
                cache.copy_row(first + number, first + len(rows), candidate.length)
                rows.append(candidate)
                source.append(number)
        return rows, logits[source]

    def _decode(self, module: PreTrainedModel, running: Sequence[_RunningRow]) -> Tensor:
        """Send the last token of each row through the model; return the next token's logits, `[rows, vocabulary]`."""
        tokens = torch.tensor([sequence.token_ids[-1:] for sequence in running], device=self._ctx.device)
        at = torch.tensor([[sequence.length - 1] for sequence in running], device=self._ctx.device)
        return _run_forward(module, self._cache, slice(0, len(running)), tokens, at)

    def update(self, weights: Weights, version: int) -> None:
        """Copy new weights into the engine's own model; see `Engine.update`."""
        if self._own_module is None:
            if weights.source != self._role:
                raise ConfigError(
                    f"the engine generates by the model of role {self._role!r}, whose weights it has, and takes none "
                    f"of {weights.source}"
                )
            weights.skip()
        else:
            before, self._missing = self._missing, "an update failed halfway; call colocate.sync_weights again"
            try:
                colocate.torch.load_weights(self._own_module, weights)
            except BaseException:
                if not weights.loaded:
                    self._missing = before
                raise
            self._missing = None
        self._cache.emptied += 1
        self._version = version

    def named_weights(self) -> NamedWeights | _BorrowedWeights:
        """Return the weights of the model that generates, which may be another role's model."""
        return (
            _BorrowedWeights(self._open_module)
            if self._own_module is None
            else colocate.torch.named_weights(self._own_module)
        )

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the cache; see `Engine.sleep`. colocate moves the weights of the engine's own model."""
        if "cache" in tags:
            self._cache.free()

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the cache again; see `Engine.wake`."""
        if "cache" in tags:
            self._cache.allocate()

    def managed(self) -> Mapping[str, int]:
        """Return the bytes of the cache; see `Engine.managed`."""
        return {"cache": self._cache.nbytes}

    def abort(self) -> None:
        """Do nothing, because the end of a `rows` iterator already drops all rows."""

    def close(self) -> None:
        """Free the cache; see `Engine.close`."""
        self._cache.free()

    @contextlib.contextmanager
    def _open_module(self) -> Iterator[PreTrainedModel]:
        """A context manager that returns the model that generates, and keeps another role's model awake."""
        if self._role is None:
            assert self._own_module is not None
            yield self._own_module
        else:
            with borrow_role(self._ctx, self._role, ("weights",)) as role:
                module = find_model(role, self._role)
                check_adapters(module, self._role)
                yield module


@attrs.frozen(eq=False)
class _BorrowedWeights:
    """The weights of another role's model, which is borrowed for each access."""

    module: Callable[[], contextlib.AbstractContextManager[PreTrainedModel]]

    @property
    def specs(self) -> Mapping[str, Any]:
        with self.module() as module:
            return colocate.torch.named_weights(module).specs

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with self.module() as module:
            yield from colocate.torch.named_weights(module)


@attrs.define(eq=False)
class _RunningRow:
    """A row that is being generated."""

    prompt: Prompt
    sample: int
    generator: random.Random
    max_tokens: int
    token_ids: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    versions: list[tuple[int, int]] = attrs.field(factory=list)
    finish: Finish = "length"

    @property
    def all_ids(self) -> tuple[int, ...]:
        return (*self.prompt.token_ids, *self.token_ids)

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.token_ids)

    def add_token(self, token: int, log_prob: float, version: int, stops: Collection[int]) -> bool:
        """Append a token; return whether the row is finished."""
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = version, self.versions[-1][1] + 1
        else:
            self.versions.append((version, 1))
        if token in stops:
            self.finish = "stop"
        return token in stops or len(self.token_ids) == self.max_tokens

    def to_row(self, finish: Finish | None = None) -> Row:
        tokens, log_probs, versions = tuple(self.token_ids), tuple(self.log_probs), tuple(self.versions)
        return Row(self.prompt.index, self.sample, tokens, log_probs, finish or self.finish, versions)


class _KeyValueCache:
    """A key-value cache with a place for each row, allocated once.

    Attributes:
        rows: Number of places.
        emptied: How often the contents were lost, so that rows must be computed again.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the cache; `shape` is rows, heads, tokens and the size of a head."""
        self.rows, self.emptied = shape[0], 0
        self._shape, self._dtype, self._device, self._layers = shape, dtype, device, layers
        self._tensors: list[Tensor] = []
        self._used = (0, 0)  # The number of written rows, and of written tokens.
        self._place, self._at, self._width = slice(0, 0), torch.empty(0), 0
        self.allocate()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def allocate(self) -> None:
        if not self._tensors:
            self._tensors = [
                torch.zeros(self._shape, dtype=self._dtype, device=self._device) for _ in range(2 * self._layers)
            ]

    def free(self) -> None:
        self._tensors, self._used = [], (0, 0)
        self.emptied += 1

    def clear_rows(self) -> None:
        """Set all used parts of the cache to zero, because old values may be NaN, which no mask can hide."""
        self.allocate()
        rows, tokens = self._used
        for tensor in self._tensors:
            tensor[:rows, :, :tokens].zero_()
            tensor[:rows, :, -1].zero_()
        self._used = 0, 0

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        for tensor in self._tensors:
            tensor[target, :, :tokens] = tensor[source, :, :tokens]
        self._mark_used(target + 1, tokens)

    def set_window(self, place: slice, at: Tensor, width: int) -> None:
        """Set the rows and positions that the next forward pass writes, and the number of positions that it reads."""
        # Padding is written to the last position, which is never read.
        self._place, self._at, self._width = place, torch.where(at < 0, self._shape[2] - 1, at), width
        self._mark_used(place.stop, width)

    def _mark_used(self, rows: int, tokens: int) -> None:
        self._used = max(self._used[0], rows), max(self._used[1], tokens)

    # -- what models call

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all keys and values for attention."""
        views = []
        for number, new in ((2 * layer_idx, keys), (2 * layer_idx + 1, values)):
            if (
                self._tensors[number].dtype != new.dtype
            ):  # A model's computations may have another dtype than the weights.
                self._tensors[number] = self._tensors[number].to(new.dtype)
            tensor = self._tensors[number][self._place]
            tensor[torch.arange(len(tensor), device=tensor.device)[:, None], :, self._at] = new.transpose(1, 2)
            views.append(tensor[:, :, : self._width])
        return views[0], views[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because each forward pass gets positions and a mask as arguments."""
        return 0


def _run_forward(module: PreTrainedModel, cache: _KeyValueCache, place: slice, tokens: Tensor, at: Tensor) -> Tensor:
    """Send tokens through a model; return the logits after each row's last token, `[rows, vocabulary]`, float32.

    Args:
        module: The model.
        cache: Keys and values to attend to.
        place: The rows' places in the cache.
        tokens: `[rows, n]`, padded on the left.
        at: Positions of the tokens, `[rows, n]`; negative for padding.
    """
    width = int(at.max()) + 1
    cache.set_window(place, at, width)
    at = at.clamp(min=0)
    mask = torch.arange(width, device=at.device) <= at[:, None, :, None]
    if module.config._attn_implementation == "eager":  # Eager attention adds the mask to the scores.
        dtype = next(module.parameters()).dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=at.device).masked_fill(~mask, torch.finfo(dtype).min)
    with torch.no_grad():
        model: Any = module
        output: Tensor = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=at,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
    return output[:, -1].float()


@torch.no_grad()
def _draw_tokens(logits: Tensor, sampling: Sampling, rows: Sequence[_RunningRow]) -> tuple[list[int], list[float]]:
    """Draw a token for each row from the row's logits; return the tokens and the tokens' log-probabilities."""
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        logits = _mask_unlikely(logits / sampling.temperature, sampling.top_k, sampling.top_p)
        # One random number per row selects the token by the cumulative sums of probabilities.
        sums = logits.softmax(dim=-1).double().cumsum(dim=-1)
        chance = torch.tensor([[row.generator.random()] for row in rows], dtype=sums.dtype, device=sums.device)
        tokens = torch.searchsorted(sums, chance * sums[:, -1:], right=True).squeeze(1).clamp(max=sums.shape[1] - 1)
    log_probs = logits.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
    return tokens.tolist(), log_probs.tolist()


def _mask_unlikely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    if 0 < top_k < logits.shape[1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        out = (before >= top_p).index_fill(1, torch.tensor([0], device=logits.device), False)
        logits = logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
    return logits


def _make_own_model(model: str | Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build an engine's own model. Random weights are the same on all ranks."""
    auto = import_transformers().AutoModelForCausalLM
    how = loading_options(model) if isinstance(model, str) else None
    config = load_config(model, how)
    if how is not None:
        built: PreTrainedModel = auto.from_pretrained(model, dtype=dtype, **how)
    else:
        built = auto.from_config(config, dtype=dtype, trust_remote_code=False)
        generator = torch.Generator(device=device).manual_seed(0) if device.type != "meta" else None
        with torch.no_grad():
            for parameter in built.parameters() if generator is not None else ():
                if parameter.ndim > 1:  # One-dimensional: norms (all ones) and biases (all zeros).
                    parameter.normal_(0, getattr(config, "initializer_range", 0.02), generator=generator)
    torch.nn.Module.to(built, device)
    torch.nn.Module.train(built, False)
    built.requires_grad_(False)
    return built


def _check_attention(config: Any, length: int) -> None:
    """Refuse a model with layers that attend to only some of the earlier tokens."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if window is not None and (not kinds or "sliding_attention" in kinds) and length <= window:
        kinds.discard("sliding_attention")
        window = None
    if kinds - {"full_attention"} or (window is not None and not kinds):
        kinds_text = ", ".join(sorted(kinds - {"full_attention"})) or f"a sliding window of {window}"
        raise ConfigError(
            f"the model has {kinds_text}, and the engine 'transformers' can do full attention only"
            + (f": max_length={window} is as long as its window" if window is not None else "")
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ConfigError(
            f"the model computes attention by {config._attn_implementation!r}, and the engine 'transformers' needs "
            "attn_implementation='sdpa' or 'eager'"
        )
