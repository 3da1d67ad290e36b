"""Weights with adapters equal PEFT's own `merge_and_unload`, bit by bit, or are refused by name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import colocate
from colocate import ConfigError, First, Role, RoleError, method

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of much
nn = torch.nn


class Experts(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 6, 8))
        self.flat = nn.Parameter(torch.randn(8, 6))


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """A module with a layer of each kind that LoRA knows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.linear, self.biasless = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.transposed = transformers.pytorch_utils.Conv1D(8, 8)
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv3d(8, 8, 2)
        self.point, self.grouped = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.experts, self.norm, self.counts = Experts(), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12)


LAYERS = [name for name, _ in Net().named_children() if name not in ("experts", "norm", "counts", "head")]
MOST = [name for name in LAYERS if name not in ("grouped", "attention")]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "bias of all": {"bias": "all"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def trained(model: Any, seed: int = 1) -> Any:
    """Change the trainable values of a model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.2).to(parameter.dtype))
    return model


def lora(net: Any = None, autocast: bool = True, **options: Any) -> Any:
    config = peft.LoraConfig(**{"r": 4, **options})
    return trained(peft.get_peft_model(Net() if net is None else net, config, autocast_adapter_dtype=autocast))


def other(net: Any = None, /, kind: str = "", **options: Any) -> Any:
    return trained(peft.get_peft_model(Net() if net is None else net, getattr(peft, f"{kind}Config")(**options)))


def state(model: Any) -> dict[str, Any]:
    found = model.state_dict().items()
    return {name: tensor.clone() for name, tensor in found if isinstance(tensor, torch.Tensor)}


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def assert_as_peft(model: Any, refuses: str | None = None) -> None:
    """Assert that weights equal PEFT's merge, or that both refuse, and that the model is unchanged."""
    before = state(model)
    try:
        wanted = None if refuses else state(copy.deepcopy(model).merge_and_unload())
    except Exception as error:
        refuses = f"adapters of base_model.model.*PEFT can't merge them: {type(error).__name__}"
    if refuses:
        with pytest.raises(ConfigError, match=refuses):
            colocate.torch.named_weights(model)
    else:
        weights = colocate.torch.named_weights(model)
        found = {name: tensor.clone() for name, tensor in weights}
        assert wanted is not None
        assert_alike(found, wanted)
        assert {name: (tuple(each.shape), each.dtype) for name, each in found.items()} == weights.specs
        assert_alike(dict(weights), wanted)  # The second iteration is equal.
    assert_alike(state(model), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_each_kind_of_layer(layer: str, option: str, dtype: Any) -> None:
    """Weights of each layer equal PEFT's merge for each option, with adapters in either dtype."""
    for autocast in (True, False):
        try:
            model = lora(Net().to(dtype), autocast, target_modules=[layer], **OPTIONS[option])
        except ValueError:  # PEFT knows no such adapter
            assert (layer, option) in (("embed", "lora_bias"), ("attention", "dora"))
        else:
            assert_as_peft(model)


def two(model: Any, active: tuple[str, ...] = ("default", "second"), **options: Any) -> Any:
    model.add_adapter("second", peft.LoraConfig(**{"r": 2, "target_modules": ["linear", "conv2"], **options}))
    model.base_model.set_adapter([*active])
    return trained(model, 2)


def after(model: Any, *done: Any) -> Any:
    return model


STATES: dict[str, Callable[..., Any]] = {
    "patterns": lambda net: lora(net, target_modules=MOST, rank_pattern={"linear": 2}, alpha_pattern={"conv2": 3}),
    "parameters": lambda net: lora(net, target_modules=[], target_parameters=["experts.up", "experts.flat"]),
    "parameters of all": lambda net: lora(
        net, target_modules=["linear"], target_parameters=["experts.up", "experts.down", "biasless.weight"]
    ),
    "modules_to_save": lambda net: lora(net, target_modules=["linear"], modules_to_save=["head", "norm", "counts"]),
    "tokens": lambda net: lora(net, target_modules=["linear"], trainable_token_indices={"embed": [1, 3]}),
    "two": lambda net: two(lora(net, target_modules=MOST)),
    "the second of two": lambda net: two(lora(net, target_modules=MOST), ("second",)),
    "two by dora": lambda net: two(lora(net, target_modules=["linear"], use_dora=True), use_dora=True),
    "one merged already": lambda net: after(m := lora(net, target_modules=[*MOST, "attention"]), m.merge_adapter()),
    "merged and back": lambda net: after(m := lora(net, target_modules=MOST), m.merge_adapter(), m.unmerge_adapter()),
    "scaled": lambda net: after(m := lora(net, target_modules=["linear"]), m.base_model.model.linear.scale_layer(3.0)),
    "one deleted": lambda net: after(
        m := two(lora(net, target_modules=MOST)), m.delete_adapter("default"), m.set_adapter("second")
    ),
    "LoHa": lambda net: other(net, kind="LoHa", target_modules=["linear", "conv2"]),
    "LoKr": lambda net: other(net, kind="LoKr", target_modules=["linear", "conv2"]),
    "AdaLora": lambda net: other(net, kind="AdaLora", init_r=4, total_step=9, target_modules=["linear"]),
    "IA3": lambda net: other(net, kind="IA3", target_modules=["linear", "conv2"], feedforward_modules=["linear"]),
    "OFT": lambda net: other(net, kind="OFT", oft_block_size=4, target_modules=["linear", "conv2"]),
    "VeRA": lambda net: other(net, kind="Vera", r=4, target_modules=["linear", "biasless"]),
    "LN": lambda net: other(net, kind="LNTuning", target_modules=["norm"]),
    "HRA": lambda net: other(net, kind="HRA", r=4, target_modules=["linear"]),
    "FourierFT": lambda net: other(net, kind="FourierFT", n_frequency=9, target_modules=["linear"]),
    "tokens alone": lambda net: other(net, kind="TrainableTokens", target_modules=["embed"], token_indices=[1, 4]),
    "VBLoRA, which looks at numbers": lambda net: other(
        net, kind="VBLoRA", r=4, num_vectors=16, vector_length=4, target_modules=["linear"]
    ),
    "SHiRA, which has sparse ones": lambda net: other(net, kind="Shira", r=2, target_modules=["linear"]),
    "Poly, which none can merge": lambda net: other(net, kind="Poly", n_tasks=2, target_modules=["linear"]),
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("what", STATES)
def test_each_state_and_kind(what: str, dtype: Any) -> None:
    """Weights equal PEFT's merge for several or merged adapters, other trained parts, and PEFT's other kinds."""
    assert_as_peft(STATES[what](Net().to(dtype)))


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2, **options))


QUERIES: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


def quantized() -> Any:
    model = lora(target_modules=["linear"])
    model.base_model.model.linear.base_layer.weight = nn.Parameter(
        torch.zeros(8, 8, dtype=torch.int8), requires_grad=False
    )
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "disabled": (
        lambda: after(m := lora(target_modules=["linear"]), m.base_model.disable_adapter_layers()),
        r"adapters of base_model\.model\.linear \(lora\.Linear\): they are disabled, .* enable them before the sync",
    ),
    "saved, disabled": (
        lambda: after(
            m := lora(target_modules=[], target_parameters=["experts.up"], modules_to_save=["head"]),
            m.base_model.model.head.enable_adapters(False),
        ),
        r"adapters of base_model\.model\.head \(ModulesToSaveWrapper\): they are disabled",
    ),
    "one of two merged": (
        lambda: after(m := two(lora(target_modules=["linear"])), m.merge_adapter(adapter_names=["default"])),
        r"linear \(lora\.Linear\): merged are default, and active are default, second: call unmerge_adapter",
    ),
    "quantized": (quantized, r"linear \(lora\.Linear\): base_layer\.weight is quantized \(Tensor of int8\)"),
    "aLoRA": (lambda: lora(llama(), **QUERIES, alora_invocation_tokens=[1]), "q_proj.*aLoRA does not support merging"),
    "layers twice": (
        lambda: lora(llama(), **QUERIES, layer_replication=[[0, 2], [0, 2]]),
        r"layers\.0\.self_attn\.q_proj\.weight and model\.layers\.2\.self_attn\.q_proj\.weight: these are one weight",
    ),
    "prompts": (
        lambda: other(llama(), kind="PromptTuning", task_type="CAUSAL_LM", num_virtual_tokens=2),
        r"adapters of the model: PROMPT_TUNING is nothing that weights can have; .*adapters='alone'",
    ),
    "prefixes": (
        lambda: other(llama(), kind="PrefixTuning", task_type="CAUSAL_LM", num_virtual_tokens=2),
        "PREFIX_TUNING is nothing that weights can have",
    ),
    "several kinds": (
        lambda: after(
            m := peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]), mixed=True),
            m.add_adapter("second", peft.LoHaConfig(target_modules=["q_proj"])),
            m.set_adapter(["default", "second"]),
        ),
        r"q_proj \(loha\.Linear\): there are adapters around adapters",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unmergeable_adapters_are_refused(what: str) -> None:
    """Adapters that the model doesn't use, or that weights can't contain, are refused by name."""
    make, words = REFUSED[what]
    assert_as_peft(make(), refuses=words)


TIES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"target_modules": "all-linear"}, True),
    ({"trainable_token_indices": [1, 2]}, True),
    *(
        ({**options, "ensure_weight_tying": ensured}, ensured)
        for options, ensured in itertools.product(
            (
                {"target_modules": ["embed_tokens"]},
                {"target_modules": ["embed_tokens", "lm_head"]},
                {"modules_to_save": ["embed_tokens"]},
                {"modules_to_save": ["embed_tokens", "lm_head"]},
            ),
            (True, False),
        )
    ),
    ({"modules_to_save": ["lm_head"]}, False),
    ({"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}}, False),
]


@pytest.mark.parametrize(("options", "fits"), TIES, ids=str)
def test_tied_weights(options: dict[str, Any], fits: bool) -> None:
    """A tied weight is equal under both names and agrees with PEFT's model, or is refused."""
    model, plain = lora(llama(tie_word_embeddings=True), **{**QUERIES, **options}), llama(tie_word_embeddings=True)
    if not fits:
        with pytest.raises(
            ConfigError, match=r"adapters of model\.embed_tokens\.weight and lm_head\.weight: these are"
        ):
            colocate.torch.named_weights(model)
        return
    plain.load_state_dict({name: tensor.clone() for name, tensor in colocate.torch.named_weights(model)})
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model.eval()(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


class Around(nn.Module):  # type: ignore[misc, name-defined]
    """A module around a model, with a head for values."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.pretrained_model, self.v_head = inner, nn.Linear(16, 1)


def checkpointed() -> Any:
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = lora(llama(), **QUERIES)
    kinds = ("LlamaDecoderLayer", "Linear")
    wrapper.apply_activation_checkpointing(model, check_fn=lambda each: type(each).__name__ in kinds)
    return model


AROUND: dict[str, Callable[[], Any]] = {
    "in another module": lambda: Around(lora(llama(), **QUERIES)),
    "compiled": lambda: torch.compile(lora(llama(), **QUERIES), backend="eager"),
    "checkpointed": checkpointed,
    "injected": lambda: trained(peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q_proj"]), llama())),
    "added by transformers": lambda: trained(
        after(m := llama(), m.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"])))
    ),
}


@pytest.mark.parametrize("what", AROUND)
def test_names_match_original_model(what: str) -> None:
    """Names are the original model's, whatever wraps the model and however adapters were added."""
    prefix = "pretrained_model." if what == "in another module" else ""
    wanted = {f"{prefix}{name}": each for name, each in state(lora(llama(), **QUERIES).merge_and_unload()).items()}
    found = {name: tensor.clone() for name, tensor in colocate.torch.named_weights(AROUND[what]())}
    assert_alike({name: each for name, each in found.items() if not name.startswith("v_head.")}, wanted)


def test_alone_of_another() -> None:
    """Adapters alone are refused for a model without adapters."""
    with pytest.raises(ConfigError, match=r"named_weights\(adapters='alone'\): Net is no model of PEFT's"):
        colocate.torch.named_weights(Net(), adapters="alone")


class Actor(Role):
    """A model with adapters, whole or in shards."""

    def __init__(self, dtype: str, shards: bool, options: dict[str, Any]) -> None:
        self.model = lora(llama().to(getattr(torch, dtype)), not shards, **{**QUERIES, **options}).eval()
        self.wanted = state(copy.deepcopy(self.model).merge_and_unload())
        if shards:
            layers = self.model.base_model.model.model.layers
            for each in (*layers, self.model.base_model.model.lm_head, self.model):
                torch.distributed.fsdp.fully_shard(each, mesh=self.ctx.device_mesh())

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        return colocate.torch.named_weights(self.model)

    @method
    def disable(self) -> None:
        self.model.base_model.disable_adapter_layers()

    @method(collect=First())
    def merged(self) -> dict[str, Any]:
        """Return PEFT's merge of the model, made before sharding."""
        return self.wanted


class Rollout(Role):
    def __init__(self, dtype: str) -> None:
        self.model = llama().to(getattr(torch, dtype))

    def load_weights(self, weights: colocate.Weights, version: int) -> None:
        colocate.torch.load_weights(self.model, weights)

    @method
    def weights(self) -> dict[str, Any]:
        return state(self.model)


SYNCS: list[tuple[str, bool, dict[str, Any]]] = [
    ("bfloat16", False, {"target_modules": ["q_proj", "embed_tokens"]}),
    ("float32", True, {"target_modules": ["q_proj", "lm_head"], "use_dora": True}),
    ("bfloat16", True, {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
    ("float32", True, {"target_modules": [], "target_parameters": ["lm_head.weight"]}),
]


def test_syncs() -> None:
    """Synced weights equal PEFT's merge, also from shards, and a refused sync writes nothing."""
    roles: dict[str, Any] = {}
    for number, (dtype, shards, options) in enumerate(SYNCS):
        roles[f"actor{number}"] = colocate.role(Actor, dtype, shards, options)
        roles[f"rollout{number}"] = colocate.role(Rollout, dtype)
    with colocate.spawn(roles, slots=2, processes=True) as group:
        for number in range(len(SYNCS)):
            actor, rollout = group.role(f"actor{number}", Actor), group.role(f"rollout{number}", Rollout)
            colocate.sync_weights(actor, rollout)
            for found in rollout.weights():
                assert_alike(found, actor.merged())
            actor.disable()
            with pytest.raises((ConfigError, RoleError), match=r"adapters of base_model\.model\..*: they are disabled"):
                colocate.sync_weights(actor, rollout)
            assert_alike(rollout.weights()[0], actor.merged())
