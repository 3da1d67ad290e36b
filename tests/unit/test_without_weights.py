"""Models of `colocate plan`: they are what they would be, and nobody has read their weights."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from colocate._job.meta_device import meta_device  # noqa: E402
from colocate._job.without_weights import without_weights  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, saved as those of a hub are."""
    found = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    model.generation_config.pad_token_id = 7
    model.bfloat16().save_pretrained(found)
    return found


@pytest.fixture
def on_meta() -> Iterator[None]:
    with meta_device(), without_weights():
        yield


def parts(model: Any) -> dict[str, tuple[Any, ...]]:
    """What a model has, but not where."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (type(each), each.shape, each.dtype, each.requires_grad) for name, each in tensors}


MADE: dict[str, Callable[[str], Any]] = {
    "by a class": lambda name: transformers.LlamaForCausalLM.from_pretrained(name),
    "by an auto class": lambda name: transformers.AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False),
    "backbone": lambda name: transformers.AutoModel.from_pretrained(name, dtype=torch.float32),
    "another head": lambda name: transformers.AutoModelForTokenClassification.from_pretrained(name, num_labels=5),
    "dtype": lambda name: transformers.AutoModelForCausalLM.from_pretrained(name, dtype="float16"),
    "auto": lambda name: transformers.AutoModelForCausalLM.from_pretrained(name, torch_dtype="auto"),
    "config": lambda name: transformers.LlamaForCausalLM.from_pretrained(
        name, config=transformers.AutoConfig.from_pretrained(name, num_hidden_layers=1)
    ),
    "fewer layers": lambda name: transformers.AutoModelForCausalLM.from_pretrained(name, num_hidden_layers=1),
    "attention": lambda name: transformers.AutoModelForCausalLM.from_pretrained(
        name, attn_implementation="eager", use_safetensors=True, low_cpu_mem_usage=True, local_files_only=True
    ),
    "information": lambda name: transformers.AutoModelForCausalLM.from_pretrained(name, output_loading_info=True)[0],
}


@pytest.mark.parametrize("how", MADE)
def test_from_pretrained(folder: Path, tmp_path: Path, how: str) -> None:
    """Tensors of the same names, shapes and dtypes, tied where they are; the file with the weights isn't wanted."""
    real = MADE[how](str(folder))
    for each in folder.glob("*.json"):
        (tmp_path / each.name).write_bytes(each.read_bytes())
    with meta_device(), without_weights():
        made = MADE[how](str(tmp_path))
    assert parts(made) == parts(real)
    assert {each.device.type for each in made.parameters()} == {"meta"}
    assert len(list(made.parameters())) == len(list(real.parameters()))
    assert not made.training
    assert made.config._attn_implementation == real.config._attn_implementation
    if made.can_generate():
        assert made.generation_config.pad_token_id == real.generation_config.pad_token_id == 7


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True)}, "of quantized weights"),
        ({"config": transformers.LlamaConfig(dtype="float32"), "state_dict": {"x": 1}}, "of weights in another form"),
        ({"config": transformers.LlamaConfig()}, r"without a dtype in its config \(give one\)"),
    ],
)
def test_what_a_config_does_not_tell(folder: Path, on_meta: None, options: dict[str, Any], what: str) -> None:
    """It is said, rather than guessed."""
    with pytest.raises(ValueError, match=f"how much LlamaForCausalLM holds {what} isn't known without its weights"):
        transformers.LlamaForCausalLM.from_pretrained(str(folder), **options)


def test_options_that_there_are_not(folder: Path, on_meta: None) -> None:
    """They are refused as they will be."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        transformers.LlamaForCausalLM.from_pretrained(str(folder), foo=3)


def test_parts_that_stay_precise(tmp_path: Path) -> None:
    """Some of a T5 is as float32 as it was, whatever one asks for."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path)
    real = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    with meta_device(), without_weights():
        made = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    assert parts(made) == parts(real)
    assert {each.dtype for each in made.parameters()} == {torch.float16, torch.float32}


def test_as_before(folder: Path) -> None:
    """Afterwards models have their weights."""
    plain = inspect.getattr_static(transformers.PreTrainedModel, "from_pretrained"), torch.load
    with pytest.raises(LookupError), meta_device(), without_weights():
        raise LookupError
    assert (inspect.getattr_static(transformers.PreTrainedModel, "from_pretrained"), torch.load) == plain
    assert not transformers.AutoModelForCausalLM.from_pretrained(str(folder)).lm_head.weight.is_meta


def test_files_of_torch(tmp_path: Path, on_meta: None) -> None:
    """They are mapped, where they can be: what nobody looks at is never read, and what somebody does is right."""
    net = torch.nn.Linear(100, 100, device="cpu")
    torch.save(net.state_dict(), tmp_path / "net.pt")
    torch.save(net.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    read = torch.load(tmp_path / "net.pt")
    assert str(tmp_path / "net.pt") in Path("/proc/self/maps").read_text()
    for found in (
        read,
        torch.load(tmp_path / "old.pt"),
        torch.load(io.BytesIO((tmp_path / "net.pt").read_bytes())),
        torch.load(str(tmp_path / "net.pt"), mmap=False),
    ):
        assert torch.equal(found["weight"], net.weight)
    assert torch.load(tmp_path / "net.pt", map_location="meta")["weight"].is_meta
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there = torch.nn.Linear(100, 100)
    there.load_state_dict(read)
    assert there.weight.is_meta
