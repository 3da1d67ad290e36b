"""Rows of values: splitting and joining are inverses, padding changes nothing that was there, errors have paths."""

from __future__ import annotations

import collections
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, lazy_stack
from tests.unit.rows import (
    LongText,
    Pair,
    Sample,
    Text,
    cut_text,
    equal,
    jagged,
    join_text,
    split,
    text_length,
    values_and_sizes,
)

import colocate
from colocate._values import batch
from colocate._values.leaves import kind_of, map_leaves
from colocate.errors import ConfigError, DispatchError

LAWS = settings(deadline=None, max_examples=60)


@LAWS
@given(values_and_sizes())
def test_split_then_concat_is_the_identity(case: tuple[Any, list[int]]) -> None:
    value, sizes = case
    before = map_leaves(value, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
    parts = split(value, sizes)
    assert len(parts) == len(sizes)
    for part, size in zip(parts, sizes, strict=True):
        assert batch.count_rows(part, "part") in (size, None)
    assert equal(batch.concat(parts, "value"), before)
    assert equal(value, before)


@LAWS
@given(values_and_sizes(), st.integers(-2, 18), st.integers(-2, 18))
def test_slices_are_the_rows_in_between(case: tuple[Any, list[int]], start: int, stop: int) -> None:
    value, sizes = case
    total = sum(sizes)
    low = min(max(start, 0), total)
    high = min(max(stop, low), total)
    expected = split(value, [low, high - low, total - high])[1]
    assert equal(batch.slice_rows(value, start, stop), expected)


@LAWS
@given(values_and_sizes(), st.integers(0, 4))
def test_padding_repeats_the_last_row_and_leaves_the_rest(case: tuple[Any, list[int]], more: int) -> None:
    value, sizes = case
    total = sum(sizes)
    if not total or batch.count_rows(value, "value") is None:
        return
    padded = batch.pad(value, total + more)
    assert batch.rows(padded, "padded") == total + more
    assert equal(batch.slice_rows(padded, 0, total), value)
    last = batch.slice_rows(value, total - 1, total)
    for row in range(total, total + more):
        assert equal(batch.slice_rows(padded, row, row + 1), last)


def test_entries_of_a_tensordict_stay_in_their_order() -> None:
    """Jagged ones among them, also further inside."""
    inner = TensorDict({"ragged": jagged([1, 2]), "plain": torch.ones(2)}, [2])
    value = TensorDict({"ragged": jagged([2, 1]), "inner": inner, "plain": torch.ones(2)}, [2])
    parts = split(value, [1, 1])
    for each in (*parts, batch.concat(parts, "value")):
        assert list(each.keys()) == ["ragged", "inner", "plain"]
        assert list(each["inner"].keys()) == ["ragged", "plain"]


def test_jagged_tensors_that_compute_together_still_do() -> None:
    """Torch allows arithmetic of jagged tensors only when they hold the same offsets."""
    a = jagged([2, 0, 3, 1])
    value = {"a": a, "b": a * 2, "td": TensorDict({"c": a + 1}, [4])}
    parts = split(value, [1, 3])
    for part in [*parts, batch.concat(parts, "value"), batch.pad(value, 6), batch.slice_rows(value, 1, 3)]:
        assert equal((part["a"] + part["b"]).values(), part["a"].values() * 3)
        assert equal((part["a"] + part["td"]["c"]).values(), part["a"].values() * 2 + 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_jagged_tensors_with_holes_lose_the_holes_only(transposed: bool) -> None:
    dense = torch.arange(30.0).view(3, 5, 2)
    value = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 4]), torch.tensor([2, 0, 1]), layout=torch.jagged)
    value = value.transpose(1, 2) if transposed else value
    parts = split(value, [1, 2])
    assert sum(part.values().numel() for part in parts) == 6
    joined = batch.concat(parts, "value")
    assert all(torch.equal(x, y) for x, y in zip(joined.unbind(), value.unbind(), strict=True))


def test_gradients_flow_through_parts() -> None:
    value = torch.ones(4, requires_grad=True)
    batch.concat(split(value, [1, 3]), "value").sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [1, 1, 1, 1]


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


def test_what_is_whole_is_handed_on_as_it_is() -> None:
    """A group of one rank pays nothing for its batches."""
    value = {"a": torch.ones(3), "b": [1, 2, 3]}
    part = split(value, [3])[0]
    assert part["a"] is value["a"]
    assert part["b"] is value["b"]
    assert batch.concat([value], "value") is value
    assert batch.pad(value, 3) is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"ids": torch.ones(4), "lr": 0.1}, "batch['lr'] (float) has no rows"),
        ({"x": (torch.ones(2), torch.tensor(1.0))}, "batch['x'][1] (0-d Tensor) has no rows"),
        ({"x": np.array(1)}, "batch['x'] (0-d ndarray) has no rows"),
        ("prompts", "batch (str) has no rows"),
        (None, "batch is None, which has no rows"),
        ({"x": None}, "batch (dict) holds nothing but None"),
        (TensorDict({"a": torch.ones(3)}, []), "batch (0-d TensorDict) has no rows"),
        ({"a": [1, 2], "b": (torch.ones(3),)}, "batch['a'] has 2 rows but batch['b'][0] has 3"),
        (object(), "colocate.register_batch"),
    ],
)
def test_values_without_rows_are_refused_with_their_path(value: Any, message: str) -> None:
    with pytest.raises(DispatchError) as caught:
        batch.rows(value, "batch")
    assert message in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_refused() -> None:
    with pytest.raises(DispatchError, match="strided nested tensor"):
        batch.rows(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "batch")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"a": [1]}, {"b": [1]}], "part 0 has the keys ['a'] and part 1 has the keys ['b']"),
        ([{"a": [1]}, [1]], "part 0 has the keys ['a'] and part 1 has a list"),
        ([([1],), ([1], [2])], "part 0 has a tuple of 1 items and part 1 has one of 2"),
        ([None, [1]], "that of part 0 is None and that of part 1 is not"),
        ([{"a": [1]}, {"a": None}], "x['a']: that of part 0 is a list and that of part 1 is None"),
        ([[1], torch.ones(1)], "that of part 0 is a list and that of part 1 is Tensor"),
        ([{"a": 1.0}, {"a": 2.0}], "x['a'] (float) has no rows"),
        ([torch.tensor(1.0)] * 2, "x (0-d Tensor) has no rows"),
        ([torch.ones(2, 3), torch.ones(2, 4)], "their shapes are (2, 3), (2, 4); make them alike"),
        ([torch.ones(2, 3), torch.ones(0)], "their shapes are (2, 3), (0,)"),
        ([np.ones((2, 3)), np.ones((2, 4))], "can't be joined"),
        ([jagged([1]), torch.ones(1, 1, 2)], "some of them are jagged tensors and some are not"),
        ([jagged([1]), jagged([1]).transpose(1, 2)], "jagged in different dimensions"),
    ],
)
def test_parts_that_differ_are_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(DispatchError) as caught:
        batch.concat(parts, "x")
    assert message in str(caught.value)


class Measured(np.ndarray[Any, Any]):
    """An array with something besides."""

    unit: str | None

    def __array_finalize__(self, other: Any) -> None:
        self.unit = getattr(other, "unit", None)


def test_arrays_of_a_subclass_stay_so() -> None:
    """Joined as they were split, on any number of ranks, with what their class keeps besides."""
    measured = np.arange(3.0).view(Measured)
    measured.unit = "m"
    joined = batch.concat(split(measured, [1, 2]), "x")
    assert (type(joined), joined.unit, joined.tolist()) == (Measured, "m", [0.0, 1.0, 2.0])
    records = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])
    assert batch.concat(split(records, [1, 1]), "x").a.tolist() == [1, 3]
    assert type(batch.concat([measured, np.zeros(1)], "x")) is np.ndarray


def test_registering_twice() -> None:
    """The same again is allowed, since modules get imported again; anything else is not."""
    again = {"length": text_length, "split": cut_text, "concat": join_text}
    colocate.register_batch(Text, **again)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="registered already with other functions"):
        colocate.register_batch(Text, length=lambda value: 0, split=cut_text, concat=join_text)
    for known in (list, dict, tuple, np.ndarray, torch.Tensor):
        with pytest.raises(ConfigError, match="colocate itself says"):
            colocate.register_batch(known, **again)  # type: ignore[arg-type]


def test_the_nearest_registered_class_decides() -> None:
    class Shout(LongText):
        pass

    assert kind_of(Shout) is kind_of(Text)
    colocate.register_batch(Shout, length=lambda value: 7, split=cut_text, concat=join_text)  # type: ignore[arg-type]
    assert batch.rows(Shout("abc"), "x") == 7
    assert batch.rows(LongText("abc"), "x") == 3


def test_a_registered_split_that_miscounts_is_found_out() -> None:
    class Odd(Text):
        pass

    colocate.register_batch(Odd, length=text_length, split=lambda value, sizes: [value], concat=join_text)  # type: ignore[arg-type]
    with pytest.raises(DispatchError, match=r"parts of \[3\] rows where \[1, 2\] were asked for"):
        split({"x": Odd("abc")}, [1, 2])


def test_mapping_leaves_keeps_what_did_not_change() -> None:
    unchanged = {"list": [1, 2], "pair": Pair(1, (2,))}
    value = {"same": unchanged, "new": Pair("5", 1), "ordered": collections.OrderedDict(a="6", b=2)}
    mapped = map_leaves(value, lambda leaf: [leaf] if isinstance(leaf, str) else leaf)
    assert mapped["same"] is unchanged
    assert mapped["new"] == Pair(["5"], 1)
    assert mapped["ordered"] == collections.OrderedDict(a=["6"], b=2)
    assert type(mapped["ordered"]) is collections.OrderedDict
    assert map_leaves(value, lambda leaf: leaf) is value


def test_lists_and_numpy_need_no_torch_and_nothing_is_imported_unasked() -> None:
    code = """
        import sys
        sys.modules["torch"] = sys.modules["tensordict"] = None  # importing either fails

        from colocate._values import batch
        from colocate._values.collect import Concat, Reduce
        from colocate._values.dispatch import Scatter, plan
        from colocate._values.mesh import Ranks

        ranks = Ranks(2)
        made = plan(Scatter("x", pad=True), {"x": {"a": [1, 2, 3], "b": None}}, ranks)
        assert [part["x"]["a"] for part in made.arguments] == [[1, 2], [3, 3]], made
        parts = [part["x"] for part in made.arguments]
        joined = Concat().join(parts, Ranks(2, rows=made.valid, padded=made.padded))
        assert joined == {"a": [1, 2, 3], "b": None}
        assert Reduce("mean").join([1, 2], Ranks(2, rows=[3, 1])) == 1.25
        assert "numpy" not in sys.modules
        import numpy
        parts = [part["x"] for part in plan(Scatter("x"), {"x": numpy.arange(5)}, ranks).arguments]
        assert batch.concat(parts, "x").tolist() == [0, 1, 2, 3, 4]
        assert Reduce("sum").join([numpy.ones(2)] * 2, ranks).tolist() == [2, 2]
        try:
            batch.rows(1.0, "x")
        except ValueError as error:
            assert "has no rows" in str(error)
        else:
            raise AssertionError("a number has no rows")
    """
    core = Path(batch.__file__).parents[1]
    program = f"import sys; sys.path.insert(0, {str(core)!r})\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
