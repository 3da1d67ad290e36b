"""A role that reports how its process was started."""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import ssl
import sys
import tempfile
import uuid
from typing import Any

import numpy as np

from colocate import Role, method


class Born(Role):
    """A role that reports what its process has inherited from its starter, and what is new."""

    @method
    def made_up(self) -> list[str]:
        """Return values that must differ in every process: names, ids, keys, and random numbers without a seed."""
        return [
            uuid.uuid4().hex,
            next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
            secrets.token_hex(),
            ssl.RAND_bytes(16).hex(),
            bytes(multiprocessing.current_process().authkey).hex(),
            str(random.SystemRandom().random()),
            str(np.random.default_rng().random()),
        ]

    @method
    def threads(self) -> tuple[int, float]:
        """Return torch's number of threads on the lane, and a sum that torch computes with these threads."""
        import torch

        return torch.get_num_threads(), float(torch.ones(1 << 22).sum())

    @method
    def shown(self, name: str) -> tuple[str | None, bool, str]:
        """Return an environment variable, whether the kernel shows the same value, and the hash of a text."""
        value = os.environ.get(name)
        with open("/proc/self/environ", "rb") as file:
            is_shown = os.fsencode(f"{name}={value}") in file.read().split(b"\0")
        return value, is_shown, str(hash("colocate"))

    @method
    def process(self) -> dict[str, Any]:
        mask = os.umask(0)
        os.umask(mask)
        import resource

        return {
            "folder": os.stat(".").st_ino,
            "umask": mask,
            "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
            "cpus": os.sched_getaffinity(0),
            "pid": os.getpid(),
            "arguments": sys.argv,
            "descriptors": {int(name): os.readlink(f"/proc/self/fd/{name}") for name in _list_descriptors()},
        }


def _list_descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
