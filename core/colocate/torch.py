"""Helpers for roles with torch: renew models after a failed call, load weights, and save states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colocate import features

if TYPE_CHECKING:
    from colocate.features.checkpoints.state import host_copy as host_copy, save_state as save_state
    from colocate.features.children.weights import receive_weights as receive_weights, send_weights as send_weights
    from colocate.features.process_groups.renewal import renew as renew
    from colocate.features.weights.modules import (
        NamedWeights as NamedWeights,
        load_weights as load_weights,
        named_weights as named_weights,
    )

_OF_FEATURES = {
    "NamedWeights": "weights.modules",
    "host_copy": "checkpoints.state",
    "save_state": "checkpoints.state",
    "load_weights": "weights.modules",
    "named_weights": "weights.modules",
    "receive_weights": "children.weights",
    "renew": "process_groups.renewal",
    "send_weights": "children.weights",
}
__getattr__ = features.make_getattr(__name__, _OF_FEATURES)
