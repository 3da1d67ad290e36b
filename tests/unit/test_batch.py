"""Rows of values: kinds that tests/laws doesn't draw, values passed on uncopied, and errors with paths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass
from tests.unit.rows import split

import colocate
from colocate import wire
from colocate._values import batch
from colocate._values.codec import BY_VALUE
from colocate._values.leaving import detach_value
from colocate.errors import ConfigError, DispatchError, SerializationError


class Text:
    """A type whose rows only `register_batch` knows."""

    def __init__(self, lines: str) -> None:
        self.lines = lines

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Text) and other.lines == self.lines

    __hash__ = None  # type: ignore[assignment]


class LongText(Text):
    pass


def cut_text(value: Text, sizes: Sequence[int]) -> list[Text]:
    bounds = np.cumsum([0, *sizes])
    return [type(value)(value.lines[a:b]) for a, b in itertools.pairwise(bounds)]


def join_text(parts: Sequence[Text]) -> Text:
    return type(parts[0])("".join(part.lines for part in parts))


def text_length(value: Text) -> int:
    return len(value.lines)


colocate.register_batch(Text, length=text_length, split=cut_text, concat=join_text)


@tensorclass
class Sample:
    tokens: torch.Tensor
    name: str


def jagged(lengths: Sequence[int]) -> torch.Tensor:
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    values = torch.arange(int(offsets[-1]) * 2, dtype=torch.float32).view(-1, 2)
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)


def test_jagged_tensors_that_compute_together_still_do() -> None:
    """Jagged tensors with shared offsets still share them in all parts: torch adds no others."""
    a = jagged([2, 0, 3, 1])
    value = {"a": a, "td": TensorDict({"c": a + 1}, [4])}
    parts = split(value, [1, 3])
    for part in [*parts, batch.concat(parts, "value"), batch.pad_rows(value, 6), batch.slice_rows(value, 1, 3)]:
        assert torch.equal((part["a"] + part["td"]["c"]).values(), part["a"].values() * 2 + 1)


def test_jagged_tensors_with_holes_lose_the_holes_only() -> None:
    dense = torch.arange(30.0).view(3, 5, 2)
    value = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 4]), torch.tensor([2, 0, 1]), layout=torch.jagged)
    parts = split(value.transpose(1, 2), [1, 2])
    assert sum(part.values().numel() for part in parts) == 6
    pieces = zip(batch.concat(parts, "value").unbind(), value.transpose(1, 2).unbind(), strict=True)
    assert all(torch.equal(x, y) for x, y in pieces)


def test_tensordict_rows_of_other_kinds() -> None:
    mixed = TensorDict({"a": torch.arange(4), "n": NonTensorStack("p", "q", "r", "s")}, [4])
    parts = split(mixed, [1, 3])
    assert list(parts[1]["n"]) == ["q", "r", "s"]
    assert list(batch.concat(parts, "value")["n"]) == ["p", "q", "r", "s"]
    lazy = lazy_stack([TensorDict({"a": torch.zeros(n)}, []) for n in (1, 2, 3)])
    parts = split(lazy, [2, 1])
    assert [item["a"].shape[0] for item in batch.concat(parts, "value").unbind(0)] == [1, 2, 3]
    sample = Sample(tokens=torch.arange(4), name="x", batch_size=[4])  # type: ignore[call-arg]
    parts = split(sample, [1, 3])
    assert [type(part) for part in parts] == [Sample, Sample]
    assert torch.equal(batch.concat(parts, "value").tokens, sample.tokens)


def test_parts_of_several_devices() -> None:
    """Parts on several devices are joined on the first one's device. Only `meta` is here besides the host."""
    tensors = [torch.ones(2, device=device) for device in ("meta", "cpu")]
    assert batch.concat(tensors, "x").is_meta
    assert batch.concat([TensorDict({"a": tensor}, [2]) for tensor in tensors], "x")["a"].is_meta
    assert batch.concat([TensorDict({"a": x}, [2], device=x.device) for x in tensors], "x")["a"].is_meta


def test_single_rank_batches_are_not_copied() -> None:
    """A group of one rank passes its batches on without a copy."""
    value = {"a": torch.ones(3), "b": [1, 2, 3]}
    part = split(value, [3])[0]
    assert part["a"] is value["a"]
    assert part["b"] is value["b"]
    assert batch.concat([value], "value") is value
    assert batch.pad_rows(value, 3) is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"ids": torch.ones(4), "lr": 0.1}, "batch['lr'] (float) has no rows"),
        ({"x": (torch.ones(2), torch.tensor(1.0))}, "batch['x'][1] (0-d Tensor) has no rows"),
        ("prompts", "batch (str) has no rows"),
        ({"x": None}, "batch (dict) holds nothing but None"),
        (TensorDict({"a": torch.ones(3)}, []), "batch (0-d TensorDict) has no rows"),
        ({"a": [1, 2], "b": (torch.ones(3),)}, "batch['a'] has 2 rows but batch['b'][0] has 3"),
        (object(), "colocate.register_batch"),
    ],
)
def test_error_for_values_without_rows_has_path(value: Any, message: str) -> None:
    with pytest.raises(DispatchError) as caught:
        batch.get_row_count(value, "batch")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"a": [1]}, {"b": [1]}], "part 0 has the keys ['a'] and part 1 has the keys ['b']"),
        ([{"a": [1]}, [1]], "part 0 has the keys ['a'] and part 1 has a list"),
        ([{"a": [1]}, {"a": None}], "x['a']: that of part 0 is a list and that of part 1 is None"),
        ([[1], torch.ones(1)], "that of part 0 is a list and that of part 1 is Tensor"),
        ([torch.ones(2, 3), torch.ones(2, 4)], "their shapes are (2, 3), (2, 4); make them alike"),
        ([np.ones((2, 3)), np.ones((2, 4))], "can't be joined"),
        ([jagged([1]), torch.ones(1, 1, 2)], "some of them are jagged tensors and some are not"),
        ([jagged([1]), jagged([1]).transpose(1, 2)], "jagged in different dimensions"),
    ],
)
def test_parts_that_differ_are_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(DispatchError) as caught:
        batch.concat(parts, "x")
    assert message in str(caught.value)


def test_registering() -> None:
    """The nearest registered class decides, and a split's wrong row counts are refused.

    The same functions may be registered again, since modules get imported again; other ones are refused.
    """

    class Odd(LongText):
        pass

    assert batch.get_row_count(Odd("abc"), "x") == 3
    colocate.register_batch(Odd, length=text_length, split=lambda value, sizes: [value], concat=join_text)  # type: ignore[arg-type]
    with pytest.raises(DispatchError, match=r"parts of \[3\] rows where \[1, 2\] were asked for"):
        split({"x": Odd("abc")}, [1, 2])
    again = {"length": text_length, "split": cut_text, "concat": join_text}
    colocate.register_batch(Text, **again)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="registered already with other functions"):
        colocate.register_batch(Text, length=lambda value: 0, split=cut_text, concat=join_text)
    for known in (list, dict, tuple, np.ndarray, torch.Tensor):
        with pytest.raises(ConfigError, match="colocate itself says"):
            colocate.register_batch(known, **again)  # type: ignore[arg-type]


class Leafy(Text):
    def __init__(self, lines: str, leaf: Any = None) -> None:
        super().__init__(lines)
        self.leaf = leaf


def register(kind: type, **changes: Any) -> None:
    given: dict[str, Any] = {"length": text_length, "split": cut_text, "concat": join_text}
    given |= {"leaves": lambda value: (value.lines, value.leaf), "rebuild": lambda cls, leaves: cls(*leaves)}
    colocate.register_batch(kind, **given | changes)


register(Leafy, concat=lambda parts: Leafy("".join(each.lines for each in parts), torch.cat([p.leaf for p in parts])))


def test_leaves_of_several_devices() -> None:
    """Leaves are moved to the device of the first part's before the type's own concat joins them."""
    parts = [Leafy("ab", torch.ones(2, device=device)) for device in ("meta", "cpu")]
    assert batch.concat(parts, "x").leaf.is_meta
    assert not parts[1].leaf.is_meta


def test_self_leaf_value_is_refused() -> None:
    """A value that is its own leaf can't be sent, and the error says so."""
    value = Leafy("ab")
    value.leaf = value
    with pytest.raises(SerializationError, match="x can't be sent: it contains itself"):
        BY_VALUE.pack_named(value, "x", "a call")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"leaves": lambda value: value.lines}, "Wrong: the leaves .* returned a str; they return a dict, a list or a"),
        ({"leaves": lambda value: value.line}, "Wrong: the leaves given to register_batch failed: .*has no attribute"),
        ({"rebuild": lambda cls, leaves: leaves}, "Wrong: the rebuild .* returned a tuple; it returns a value of the"),
        (
            {"rebuild": lambda cls, leaves: cls(1, 2, 3)},
            "Wrong: the rebuild given to register_batch failed: .*argument",
        ),
    ],
)
@pytest.mark.parametrize("use", [detach_value, lambda value: wire.unpack(wire.pack(value))])
def test_leaves_that_are_wrong(changes: Any, message: str, use: Any) -> None:
    """Wrong `leaves` or `rebuild` functions are refused wherever a value is looked into."""
    kind = type("Wrong", (Leafy,), {})
    register(kind, **changes)
    with pytest.raises(DispatchError, match=message):
        use(kind("ab", torch.ones(1, requires_grad=True)))


def test_registering_leaves() -> None:
    """`leaves` needs `rebuild`, is for types that colocate doesn't look into, and holds for subclasses, too."""
    kind = type("Below", (Leafy,), {})
    assert detach_value(kind("ab", torch.ones(1, requires_grad=True))).leaf.requires_grad is False
    for gone in ("leaves", "rebuild"):
        with pytest.raises(ConfigError, match=f"needs {gone}=, too: give both, or neither"):
            register(kind, **{gone: None})
    for known in (type("Own", (dict,), {}), type("Own", (torch.Tensor,), {}), Sample):
        with pytest.raises(ConfigError, match="colocate itself looks into"):
            register(known)
    register(kind, leaves=None, rebuild=None)
    assert detach_value(kind("ab", torch.ones(1, requires_grad=True))).leaf.requires_grad is True
