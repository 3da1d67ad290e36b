"""A demo that runs verl's own trainers with a tiny model on the CPU, through a shim.

`make`, `settings`, `of_v0` and `of_v1` are for scripts of your own, such as docs/examples/verl_own.py.
"""

from .config import make, settings
from .trainers import of_v0, of_v1

__all__ = ["ENVIRONMENT", "NAMES", "make", "of_v0", "of_v1", "settings"]

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "colocate_verl.demo.cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its training engines for this device name.
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Variables of the driver and all workers, set before the import of verl."""
NAMES = {
    "ppo": ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"),
    "sft": ("train/loss", "train/grad_norm"),
}
"""The metrics of each step by which runs are compared."""
