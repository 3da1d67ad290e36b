"""verl's own trainers with a tiny model on the CPU, and the shim that makes it a device: no part of the plugin.

`make`, `settings`, `of_v0` and `of_v1` are for a script of your own, as docs/examples/verl_own.py is one.
"""

from .config import make, settings
from .trainers import of_v0, of_v1

__all__ = ["ENVIRONMENT", "NAMES", "make", "of_v0", "of_v1", "settings"]

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "colocate_verl.demo.cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the name under which verl has its engines
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""What the driver and all workers have before they import verl."""
NAMES = {
    "ppo": ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"),
    "sft": ("train/loss", "train/grad_norm"),
}
"""What a trainer says of each step, and runs are compared by."""
