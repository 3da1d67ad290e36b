"""`sleep="vmm"` checks the machine; tests/gpu has its work beside a role's constructor."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

import colocate
from colocate import Role, gpus, method
from colocate._plugins import needs
from colocate.errors import CapabilityError
from colocate.features.memory.vmm import Vmm, compile_library


class Plain(Role):
    """A role without memory."""

    @method
    def look(self) -> int:
        return 1


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CapabilityError, match=r"needs a C compiler .* install one"):
        compile_library(tmp_path)


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a GPU gets the reason, and no file is left behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(Vmm, "_instance", None)
    load = Vmm.__init__
    monkeypatch.setattr(Vmm, "__init__", lambda self, path: load(self, path, "libnone.so"))
    with pytest.raises(CapabilityError, match=r'sleep="vmm" can\'t be had here: libnone\.so'):
        Vmm.get_allocator()
    assert list(folder.iterdir()) == []
    assert Vmm.get_active() is None


@pytest.mark.parametrize("maker", ["AMD", "Intel"])
def test_gpus_of_others(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    """GPUs of other makers are refused when a role is spawned; slots without a GPU accept the option."""
    monkeypatch.setattr(needs, "KIND", gpus.KINDS[maker])
    with colocate.connect("local", gpus=1) as runtime:
        with runtime.reserve(gpus=1) as pool, pytest.raises(CapabilityError, match=f"those of {maker} .* Leave it"):
            pool.spawn({"one": colocate.role(Plain).on(sleep="vmm")})
        with runtime.reserve() as pool:
            assert pool.spawn({"one": colocate.role(Plain).on(sleep="vmm")}).role("one", Plain).look() == [1]
