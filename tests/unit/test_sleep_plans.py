"""Sleep plans: the pieces of memory that are moved, kept or discarded, without a worker."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

torch = pytest.importorskip("torch")

from colocate._protocol.ledger import TAGS, Purpose  # noqa: E402
from colocate.features.memory.sleep import find_discardable, group_by_tag, plan_eviction  # noqa: E402
from colocate.worker.holdings import Objects, find_holdings  # noqa: E402

DEVICE = "other:0"
PLACES = ("cpu", DEVICE, "other:1")
PURPOSES = [purpose for purposes in TAGS.values() for purpose in purposes]
KEYS = st.sets(st.integers(0, 9))


def objects(*pieces: Any) -> Objects:
    """Make objects of keys, or of keys with a place and a size."""
    found = Objects()
    for piece in pieces:
        key, place, size = piece if isinstance(piece, tuple) else (piece, "cpu", 1)
        found.setdefault(place, {})[key] = size
        found.storages[key] = torch.UntypedStorage(size)
    return found


@given(
    tags=st.lists(st.sampled_from([*TAGS]), min_size=10, max_size=10),
    places=st.lists(st.sampled_from(PLACES), min_size=10, max_size=10),
    sizes=st.lists(st.sampled_from([0, 1, 5000]), min_size=10, max_size=10),
    device=st.sampled_from(["cpu", DEVICE]),
    away=KEYS,
    users=st.dictionaries(st.sampled_from(["role 'other'", "residents"]), KEYS),
    immovable=KEYS,
    lost=KEYS,
)
def test_pieces_move_or_stay_with_reason(
    tags: Any, places: Any, sizes: Any, device: str, away: Any, users: Any, immovable: Any, lost: Any
) -> None:
    """Each piece is moved or stays for a reason; pieces in use stay, and discarded pieces aren't copied."""
    by_tag = {tag: objects(*[(key, places[key], sizes[key]) for key in range(10) if tags[key] == tag]) for tag in TAGS}
    going = plan_eviction(by_tag, away, users, dict.fromkeys(immovable, "pinned"), lost, device)
    kept = {key: (tag, why) for tag, pieces in going.retained.items() for key, (_, why, _) in pieces.items()}
    small = {key for key in range(10) if not sizes[key] or (places[key] == "cpu" != device and sizes[key] == 1)}
    goes, used = going.pieces.keys(), set[int]().union(*users.values())
    assert goes | kept.keys() | away | small == set(range(10))
    assert not goes & kept.keys()
    assert not (goes | kept.keys()) & (away | small)
    assert not goes & (used | immovable)
    assert {places[key] for key in goes} <= {"cpu", device}
    assert going.storages.keys() == goes - lost
    assert going.emptied.keys() == (goes | away) & lost
    assert going.size == sum(sizes[key] for key in goes)
    assert going.to_host == sum(sizes[key] for key in goes - lost if places[key] != "cpu")
    for key, (tag, why) in kept.items():
        assert tag == tags[key]
        assert why.startswith("used by") == (key in used)


@given(
    found=st.dictionaries(st.sampled_from(PURPOSES), KEYS),
    others=st.lists(KEYS, max_size=2),
    discard=st.sets(st.sampled_from(["grads", "cache"])),
    trained=KEYS,
)
def test_unneeded_pieces_are_discarded(found: Any, others: Any, discard: Any, trained: Any) -> None:
    """A piece is discarded if this role alone holds it, for discarded purposes, untrained; each has one tag."""
    holdings = {purpose: objects(*keys) for purpose, keys in found.items()}
    for pieces in holdings.values():
        pieces.trained |= trained & pieces.storages.keys()
    lost = find_discardable(holdings, discard, [objects(*keys) for keys in others])
    for key in range(10):
        held = {purpose for purpose, keys in found.items() if key in keys}
        gone = {purpose for tag in discard for purpose in TAGS[tag]}
        assert (key in lost) == (bool(held) and held <= gone and key not in trained.union(*others))
    first = {key: tag for tag, pieces in group_by_tag(holdings).items() for key in pieces.storages}
    for key in set().union(*found.values()):
        purposes = [purpose for purpose in Purpose if key in found.get(purpose, ())]
        assert purposes[0] in TAGS[first[key]]
    assert sum(len(pieces.storages) for pieces in group_by_tag(holdings).values()) == len(first)


@pytest.mark.parametrize("kind", ["frozen", "optimized", "differentiated", "sparse"])
def test_weights_are_no_cache(kind: str) -> None:
    """Frozen, optimized or differentiable weights are no cache, in whatever attribute; nor are sparse indices."""

    class Role:
        def __init__(self) -> None:
            self.weights, self.cache = torch.ones(1000), torch.ones(1000)

    role = Role()
    if kind == "frozen":
        role.weights = torch.nn.Parameter(role.weights, requires_grad=False)
    elif kind == "optimized":
        role.optimizer = torch.optim.SGD([role.weights], lr=0.1)  # type: ignore[attr-defined]
    elif kind == "differentiated":
        role.weights.requires_grad_()
    else:
        role.weights = torch.eye(30).to_sparse()
    found, _ = find_holdings(role, storages=Objects)
    lost = find_discardable(found, ("grads", "cache"), ())
    values = {role.weights._values().untyped_storage()._cdata} if kind == "sparse" else set()
    assert lost == {role.cache.untyped_storage()._cdata} | values
