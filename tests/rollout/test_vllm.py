"""The engine `vllm`: the suite of all engines, and behaviour of its own; `make engines` runs it with vLLM installed."""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from tests.rollout.ending import LENGTH, PLACES, Ending, check_ends, make_folder
from tests.rollout.long_rope import PHI

import colocate
from colocate import CallTimeout, ConfigError, RoleError, RoleStartError, method
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_rollout.child import ChildEngine
from colocate_rollout.contract import Prompt, Row, Sampling
from colocate_rollout.process import _read_names
from colocate_rollout.role import EngineRole
from colocate_rollout.testing import (
    _NEVER,
    LLAMA,
    MODELS,
    PROMPTS,
    ModelSuite,
    Trainer,
    assert_equal_rows,
    index_rows,
    log_probs,
    make_model,
    make_prompts,
    make_weights,
)
from colocate_rollout.vllm import VllmEngine

pytest.importorskip("vllm")

OPTIONS: dict[str, Any] = {"engine": "vllm", "kv_cache_memory_bytes": "4MiB", "max_num_seqs": 8}
SAMPLING = Sampling(max_tokens=12)
CACHE = 4 * 2**20
WEIGHTS = sum(each.numel() for each in make_model(LLAMA).parameters())
VECTORS = sum(each.numel() for each in make_model(LLAMA).parameters() if each.ndim == 1)
SEEDED = Sampling(max_tokens=12, seed=7)
ENDLESS = Sampling(max_tokens=100, stop_token_ids=())


class TestVllm(ModelSuite):
    """The suite of all engines, and vLLM's own failures, memory and options."""

    engine = "vllm"
    options: ClassVar[dict[str, Any]] = {"model": LLAMA, "kv_cache_memory_bytes": "4MiB", "max_num_seqs": 5}

    @pytest.fixture
    def leave_nothing(self) -> None:
        """Skip the leak check: the engine stays, and `test_the_process_is_as_before` has its own."""

    @pytest.fixture
    def unpacked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Keep matrices readable, as on a GPU."""
        with warnings.catch_warnings(action="ignore"):  # vLLM's imports warn.
            from vllm import _custom_ops
            from vllm.model_executor.layers import utils

        monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
        monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)

    @pytest.mark.usefixtures("without", "unpacked")
    @pytest.mark.parametrize("kind", MODELS)
    def test_weights_given_back(self, kind: str) -> None:
        """Merged projections and padded embeddings are given back in transformers' layout."""
        super().test_weights_given_back(kind)

    @pytest.mark.usefixtures("without")
    def test_packed_weights_given_back(self) -> None:
        """Matrices that vLLM has packed on a CPU can't be read, and the error says so."""
        role = self.ready()
        engine: Any = role._engine
        with pytest.raises(ConfigError, match=r"weight model\.layers\.0\..* back: on a CPU vLLM packs matrices"):
            engine.named_weights()
        role.close()

    @pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
    def test_failed_inside(
        self, role: EngineRole, rows: Mapping[tuple[int, int], Row], method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An exception in one of vLLM's steps leaves no request, and the next call has the usual rows."""
        engine: Any = role._engine
        before, count = getattr(engine._runner, method), [0]

        def fails(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == 3:
                raise ArithmeticError("in a step")
            return before(*args, **kwargs)

        monkeypatch.setattr(engine._runner, method, fails)
        with pytest.raises(ArithmeticError, match="in a step"):
            index_rows(role._generate_rows(make_prompts(), self.sampling, _NEVER))
        assert engine.requests == 0
        monkeypatch.undo()
        assert_equal_rows(index_rows(engine.rows(make_prompts(), self.sampling, _NEVER)), rows)

    @pytest.mark.usefixtures("without")
    def test_tied_weights_under_one_name(self) -> None:
        """A tied head gets new weights with the embedding, though vLLM packs the two separately."""
        fields = {**LLAMA, "tie_word_embeddings": True}
        model = make_model(fields)
        role = EngineRole("vllm", **{**self.options, "model": fields})
        weights = make_weights(model)
        del weights.specs["lm_head.weight"]
        weights._pairs = ((name, each) for name, each in model.state_dict().items() if name != "lm_head.weight")
        role.load_weights(weights, 1)
        self._assert_as_forward(role._engine, model, 1)
        role.close()

    def test_managed_memory_is_reported(self, role: EngineRole) -> None:
        """`managed` reports the bytes of weights and cache, and on a CPU only the cache can sleep."""
        engine = role._engine
        whole = {"weights": WEIGHTS * 4, "cache": CACHE}
        assert engine.managed() == whole
        engine.sleep(["weights"])
        assert engine.managed() == whole
        engine.sleep(["weights", "cache"])
        assert engine.managed() == {**whole, "cache": 0}
        engine.wake(["weights"])
        assert engine.managed() == {**whole, "cache": 0}
        engine.wake(["cache"])
        assert engine.managed() == whole

    @pytest.mark.usefixtures("without")
    def test_bfloat16(self) -> None:
        """An engine in bfloat16 agrees with a float32 trainer to 0.1, and its weights take half the bytes."""
        model = make_model(LLAMA)
        role = EngineRole("vllm", **self.options, dtype="bfloat16")
        assert role.managed() == {"weights": WEIGHTS * 2, "cache": CACHE}
        role.load_weights(make_weights(model), 1)
        for (index, _), row in index_rows(role._engine.rows(make_prompts(), self.sampling, _NEVER)).items():
            assert row.log_probs == pytest.approx(log_probs(model, PROMPTS[index], row), abs=0.1)
        role.close()

    @pytest.mark.usefixtures("without")
    def test_wrong_options_of_vllm(self) -> None:
        """A wrong option is refused: an unknown name, an option that loads code, or a value that vLLM refuses."""
        for options, said in (
            ({"max_num_seq": 3}, "vLLM has no option 'max_num_seq'; did you mean 'max_num_seqs'?"),
            ({"worker_extension_cls": "os.path"}, "'worker_extension_cls' of vLLM's isn't for users"),
            ({"trust_remote_code": True}, "'trust_remote_code' of vLLM's isn't for users"),
            ({"max_model_len": 4096}, "vLLM refuses the model or an option: .*max_model_len"),
            ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 doesn't divide the role's 1 slots"),
            ({"model": "/nowhere"}, "'/nowhere': there is no such folder on node"),
            ({"model": {**LLAMA, "model_type": "lama"}}, "has no model_type 'lama'; did you mean 'llama'"),
            ({"kv_cache_memory_bytes": "1KiB"}, "vLLM refuses the model or an option"),
            ({"model": {**LLAMA, "head_dim": 16}}, "heads have the size 16 .* kernels for the sizes 32, 64, .* only"),
        ):
            with pytest.raises(ConfigError, match=said):
                EngineRole("vllm", **{**self.options, **options})

    @pytest.mark.usefixtures("without")
    def test_another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An untried version of vLLM gives a warning."""
        monkeypatch.setattr(VllmEngine, "tested_versions", ("0.1", "0.2"))
        with pytest.warns(UserWarning, match=r"tried with vLLM 0\.1 and 0\.2, and .* is installed"):
            EngineRole("vllm", **self.options).close()


class TestInAChild(ModelSuite):
    """The suite in a child process, which takes seconds to start: only one of the models is tried."""

    engine = "vllm"
    options: ClassVar[dict[str, Any]] = {**TestVllm.options, "child": {"bucket": "4KiB"}}

    @pytest.fixture
    def leave_nothing(self) -> None:
        """Skip the leak check: the engine stays for the next test."""

    @pytest.mark.usefixtures("without")
    @pytest.mark.parametrize("kind", ["tied"])
    def test_updates(self, kind: str) -> None:
        """See `ModelSuite`."""
        super().test_updates(kind)

    @pytest.mark.parametrize("kind", ["untied"])
    def test_weights_given_back(self, role: EngineRole, kind: str) -> None:
        """A child that can't give weights back says why, and still generates."""
        engine: Any = role._engine
        for _ in range(2):
            with pytest.raises(ConfigError, match="on a CPU vLLM packs matrices"):
                engine.named_weights()
        assert index_rows(engine.rows(make_prompts(), self.sampling, _NEVER))


def state() -> dict[str, Any]:
    """Return the process-wide state that an engine might change."""
    return {
        "torch": _read_names(),
        "environ": dict(os.environ),
        "threads": torch.get_num_threads(),
        "random": torch.random.get_rng_state().tolist(),
        "groups": dist.is_initialized(),
        "files": sorted(each.name for folder in (tempfile.gettempdir(), "/dev/shm") for each in Path(folder).iterdir()),
    }


def test_the_process_is_as_before() -> None:
    """An engine leaves torch and environment alone between steps, and nothing after its end."""
    weights = make_weights(make_model(LLAMA))
    before, frozen = state(), gc.get_freeze_count()
    role = EngineRole(model=LLAMA, **OPTIONS)
    role.load_weights(weights, 1)
    for _ in role._engine.rows(make_prompts(), SAMPLING, _NEVER):
        now = state()
        for what in ("torch", "environ", "threads", "random"):
            assert now[what] == before[what], what
        assert gc.get_freeze_count() <= frozen  # Some frozen objects may be freed.
    with pytest.raises(ConfigError, match="this process has an engine 'vllm' already"):
        EngineRole(model=LLAMA, **OPTIONS)
    role.close()
    role.close()
    now = state()
    for what in before:
        assert now[what] == before[what], what


@pytest.fixture
def group() -> Iterator[colocate.ColocatedGroup]:
    """Spawn a trainer, and an engine with the same model, in each of two slots."""
    roles = {
        "engine": colocate.role("rollout.engine", model=LLAMA, **OPTIONS),
        "trainer": colocate.role(Trainer, LLAMA),
    }
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=2) as pool:
        yield pool.spawn(roles)


def check(trainer: Any, found: list[tuple[Row, ...]]) -> None:
    for rows in zip(*found, strict=True):
        for row, wanted in zip(rows, trainer.log_probs(PROMPTS, rows)[0], strict=True):
            assert row.log_probs == pytest.approx(wanted, abs=5e-5)


def test_in_a_group(group: colocate.ColocatedGroup) -> None:
    """Rows in a group agree with the trainer after a sync, a timeout and a sleep."""
    engine, trainer = group.role("engine"), group.role("trainer")
    with pytest.raises(colocate.RoleError, match=r"no whole weights: no sync was made yet"):
        engine.generate(PROMPTS)
    for version in (1, 2):
        trainer.step()
        assert colocate.sync_weights(trainer, engine).version == version
        found = engine.generate(PROMPTS, 2, sampling=SAMPLING)
        check(trainer, found)
        assert {row.versions for rows in found for row in rows if len(row.token_ids) == 12} == {((version, 12),)}
    seeded = engine.generate(PROMPTS, 2, sampling=SEEDED)
    with pytest.raises(CallTimeout):
        engine.generate.options(timeout=0.5)(PROMPTS * 200, 4, sampling=ENDLESS)
    trainer.step()
    colocate.sync_weights(trainer, engine)
    check(trainer, engine.generate(PROMPTS, sampling=SAMPLING))
    assert group.sleep("engine", ["cache"]) == 2 * 4 * 2**20
    check(trainer, engine.generate(PROMPTS, 2, sampling=SAMPLING))
    assert len(seeded) == len(PROMPTS)


class Failing(VllmEngine):
    """An engine that fails on demand, marks in a file that rows have begun, and checks for leftover requests."""

    def __init__(self, ctx: colocate.Context, begun: str, **options: Any) -> None:
        super().__init__(ctx, **options)
        self.begun, self.last_row = Path(begun), 0

    def fail_in(self, name: str) -> None:
        """Make the third call of one of vLLM's own methods fail, once."""
        before, count = getattr(self._runner, name), itertools.count(1)

        def fails(*args: Any, **kwargs: Any) -> Any:
            if next(count) == 3:
                setattr(self._runner, name, before)
                raise ArithmeticError(f"in {name}")
            return before(*args, **kwargs)

        setattr(self._runner, name, fails)

    def fail_at(self, row: int) -> None:
        """Make a row fail; 0 for none."""
        self.last_row = row

    def left_nothing(self) -> None:
        assert self.requests == 0

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        steps = itertools.count()

        def stops() -> bool:
            if next(steps) == 3:
                self.begun.touch()
            return stop()

        for number, row in enumerate(super().rows(prompts, sampling, stops), 1):
            if number == self.last_row:
                raise ArithmeticError(f"at row {number}")
            yield row


class FailingRole(EngineRole):
    """A role that calls any method of its engine, in the worker or in a child."""

    @method
    def tell(self, name: str, *what: Any) -> None:
        """Call a method of the engine."""
        engine = self._engine
        engine._call_engine(name, *what) if isinstance(engine, ChildEngine) else getattr(engine, name)(*what)


@pytest.mark.parametrize("child", [False, True], ids=["here", "child"])
def test_after_a_failure(child: bool, tmp_path: Path) -> None:
    """After any failure of a call no request is left, and the next rows equal a fresh engine's."""
    begun = tmp_path / "begun"
    options: Any = {**OPTIONS, "begun": str(begun), "child": child}
    del options["engine"]
    roles = {
        "trainer": colocate.role(Trainer, LLAMA),
        "engine": colocate.role(FailingRole, Failing, model=LLAMA, **options),
    }
    with colocate.spawn(roles, processes=True) as group:
        trainer, engine = group.role("trainer", Trainer), group.role("engine", FailingRole)
        colocate.sync_weights(trainer, engine)
        fresh = engine.generate(PROMPTS, 2, sampling=SEEDED)
        check(trainer, fresh)
        endless = PROMPTS * 50, 4, ENDLESS

        def amid() -> Any:
            begun.unlink(missing_ok=True)
            call = engine.generate.submit(*endless)
            wait_until(begun.exists, "the engine is amid rows")
            return call

        def in_a_step(name: str) -> None:
            engine.tell("fail_in", name)
            with pytest.raises(RoleError, match=f"in {name}"):
                engine.generate(*endless)

        def at_a_row() -> None:
            engine.tell("fail_at", 2)
            with pytest.raises(RoleError, match="at row 2"):
                engine.generate(PROMPTS * 4, 4, SAMPLING)
            engine.tell("fail_at", 0)

        def closed() -> None:
            with engine.generate.stream(PROMPTS * 50, 4, SAMPLING) as rows:
                next(rows)

        def cancelled() -> None:
            (call := amid()).cancel()
            assert "aborted" in {row.finish_reason for rows in call.result(PATIENCE_S) for row in rows}

        def timed_out() -> None:
            with pytest.raises(CallTimeout):
                engine.generate.options(timeout=0.5)(*endless)

        for fails in (
            *(partial(in_a_step, name) for name in ("execute_model", "sample_tokens")),
            at_a_row,
            closed,
            cancelled,
            timed_out,
        ):
            fails()
            engine.tell("left_nothing")
            assert_equal_rows(numbered(engine.generate(PROMPTS, 2, sampling=SEEDED)), numbered(fresh))
        assert group.generation == 0


def numbered(found: list[tuple[Row, ...]]) -> dict[tuple[int, int], Row]:
    return index_rows(row for rows in found for row in rows)


def test_wrong_places() -> None:
    """Tensor parallelism without a mesh, and an engine on a part of its group's slots, are refused."""
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=2) as pool:
        role = colocate.role("rollout.engine", model=LLAMA, tensor_parallel_size=2, **OPTIONS)
        with pytest.raises(RoleStartError, match=r"say \.on\(mesh=\{'dp': 1, 'tp': 2\}\)"):
            pool.spawn({"engine": role})
        role = colocate.role("rollout.engine", model=LLAMA, **OPTIONS)
        with pytest.raises(RoleStartError, match=r"the role is on 1 of its group's 2 slots"):
            pool.spawn({"trainer": colocate.role(Trainer, LLAMA).on(default_group=True), "engine": role.on(slots=[0])})


def test_tensor_parallel() -> None:
    """Two tensor-parallel slots are one engine: rows agree with the trainer after a sync, a sleep and a timeout."""
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=2) as pool:
        role = colocate.role("rollout.engine", model=LLAMA, **OPTIONS).on(mesh={"dp": 1, "tp": 2})
        group = pool.spawn({"engine": role, "trainer": colocate.role(Trainer, LLAMA)})
        engine, trainer = group.role("engine"), group.role("trainer")
        for _ in range(2):
            trainer.step()
            colocate.sync_weights(trainer, engine)
            check(trainer, engine.generate(PROMPTS, 2, sampling=SAMPLING))
        half = 4 * ((WEIGHTS - VECTORS) // 2 + VECTORS)
        found = [slot.roles[0].device for slot in group.memory().slots]
        assert [(each["parameters"], each["tensors"]) for each in found] == [(half, CACHE)] * 2
        assert group.sleep("engine", ["cache"]) == 2 * CACHE
        check(trainer, engine.generate(PROMPTS, 2, sampling=SAMPLING))
        with pytest.raises(CallTimeout):
            engine.generate.options(timeout=0.5)(PROMPTS * 100, 4, sampling=ENDLESS)
        colocate.sync_weights(trainer, engine)
        check(trainer, engine.generate(PROMPTS, 2, sampling=SAMPLING))


class Unpacked(EngineRole):
    """An engine with readable matrices, as on a GPU, which can spoil a shard on one rank."""

    def __init__(self, **options: Any) -> None:
        with warnings.catch_warnings(action="ignore"):
            from vllm import _custom_ops
            from vllm.model_executor.layers import utils

        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *_: False
        self.forgets = False
        super().__init__(**options)

    @method
    def forget(self, rank: int) -> None:
        self.forgets = self.ctx.rank == rank

    @method(awake=("weights",))
    def load_weights(self, weights: Any, version: int) -> None:
        super().load_weights(weights, version)
        if self.forgets:
            engine: Any = self._engine
            (model,) = engine._engine.apply_model(lambda model: model)
            model.model.layers[1].mlp.gate_up_proj.weight.data[-1, -1] += 1  # This is up_proj in the source.


def test_weights_of_ranks_that_are_one_engine() -> None:
    """Tensor-parallel weights are compared whole, and a wrong shard is named as in the source."""
    fields = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=2) as pool:
        role = colocate.role(Unpacked, model=fields, **OPTIONS).on(mesh={"dp": 1, "tp": 2})
        group = pool.spawn({"engine": role, "trainer": colocate.role(Trainer, fields)})
        engine, trainer = group.role("engine", Unpacked), group.role("trainer", Trainer)
        for _ in range(2):
            trainer.step()
            assert colocate.sync_weights(trainer, engine, check=True).checked == len(make_model(fields).state_dict())
        check(trainer, engine.generate(PROMPTS, 2, sampling=SAMPLING))
        assert colocate.compare_weights(trainer, engine).same
        engine.forget(1)
        with pytest.raises(colocate.WeightsDifferError) as caught:
            colocate.sync_weights(trainer, engine, check=True)
        assert caught.value.names == ("model.layers.1.mlp.up_proj.weight",)


def test_beside_other_work() -> None:
    """A background engine that is paused in a call continues with the weights of a sync in the pause."""
    roles = {
        "trainer": colocate.role(Trainer, LLAMA),
        "engine": colocate.role("rollout.engine", model=LLAMA, **OPTIONS).on(background=True, weights="from sync"),
    }
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=2) as pool:
        group = pool.spawn(roles)
        trainer, engine = group.role("trainer"), group.role("engine")
        colocate.sync_weights(trainer, engine)
        call = engine.generate.submit(PROMPTS * 4, 2, sampling=ENDLESS)
        group.pause("engine", how="keep")
        group.sleep("engine", ["cache"])
        trainer.step()
        colocate.sync_weights(trainer, engine)
        group.resume("engine")
        found = {version for rows in call.result() for row in rows for version, _ in row.versions}
        assert 2 in found
        assert found <= {1, 2}


@pytest.mark.parametrize("child", [False, {"env": {"OMP_NUM_THREADS": "1"}}], ids=["here", "child"])
@pytest.mark.parametrize("executor", ["threads", "processes", "ray", "dask"])
def test_on_each_executor(executor: str, child: Any, rows_elsewhere: dict[str, Any]) -> None:
    """The same seed draws the same rows on every executor, and a closed group leaves the process as before."""
    options = {"processes": True} if executor == "processes" else {}
    roles = {
        "trainer": colocate.role(Trainer, LLAMA),
        "engine": colocate.role("rollout.engine", role="trainer", child=child, **OPTIONS),
    }
    before = state()
    name = executor if executor in ("ray", "dask") else "local"
    with colocate.connect(name, seed=3, **options) as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn(roles, name="policy")
        trainer, engine = group.role("trainer"), group.role("engine")
        trainer.step()
        colocate.sync_weights(trainer, engine)
        found = engine.generate(PROMPTS, 2, sampling=SAMPLING)
        assert dict(engine.generate.stream(PROMPTS, 2, sampling=SEEDED)) == dict(
            enumerate(engine.generate(PROMPTS, 2, sampling=SEEDED))
        )
        check(trainer, found)
    for what in ("torch", "environ", "threads", "groups"):
        assert state()[what] == before[what], what
    drawn = [[row.token_ids for row in rows] for rows in found]
    rows_elsewhere[f"{executor} {child}"] = drawn
    assert all(rows == drawn for rows in rows_elsewhere.values())


@pytest.fixture(scope="module")
def rows_elsewhere() -> dict[str, Any]:
    """Return the rows that executors have drawn so far."""
    return {}


def test_the_first_config_of_the_readme(tmp_path: Path) -> None:
    """The README's first config is valid with the executor `local`."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").partition("```yaml\n")[2]
    config = text.partition("```")[0].replace("executor: ray", "executor: {use: local, with: {processes: true}}", 1)
    (tmp_path / "config.yaml").write_text(config)
    found = colocate.load_config(tmp_path / "config.yaml")
    assert [*found.groups["policy"].roles] == ["actor", "rollout", "reward"]


@pytest.mark.parametrize("place", PLACES)
def test_ends(tmp_path: Path, place: str) -> None:
    """Responses end where transformers' `generate` ends them, wherever a folder names the end tokens."""
    folder = make_folder(tmp_path, place)
    role = EngineRole("vllm", model=folder, dtype="float32", kv_cache_memory_bytes="4MiB")
    check_ends(role, folder)
    role.close()


def test_ends_of_another_roles_model() -> None:
    """An engine with a trainer's weights ends responses where the trainer's `generate` does."""
    roles = {"trainer": colocate.role(Ending), "engine": colocate.role("rollout.engine", role="trainer", **OPTIONS)}
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn(roles)
        trainer, engine = group.role("trainer", Ending), group.role("engine", EngineRole)
        colocate.sync_weights(trainer, engine)
        (expected,) = trainer.generated()
        rows = engine.generate(PROMPTS, sampling={"temperature": 0, "max_tokens": LENGTH})
        assert [row.token_ids for (row,) in rows] == expected


def test_long_rope() -> None:
    """A `max_model_len` beyond the model's short range is refused; shorter rows have the model's log-probabilities."""
    options = {**OPTIONS, "model": PHI}
    with pytest.raises(ConfigError, match=r"long-rope.* more than 16 tokens .* may have 64: max_model_len=16"):
        EngineRole(**options, max_model_len=64)
    role, model = EngineRole(**options), make_model(PHI)  # vLLM's default takes no longer rows.
    role.load_weights(make_weights(model), 1)
    for index, (row,) in enumerate(role.generate([[1, 2, 3], [*range(4, 12)]], sampling={"max_tokens": 8})):
        assert row.log_probs == pytest.approx(log_probs(model, [[1, 2, 3], [*range(4, 12)]][index], row), abs=5e-5)
    role.close()
