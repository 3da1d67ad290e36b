"""The GPUs that a process may hand out, and their names for its workers."""

from __future__ import annotations

import pydoc
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import gpus
from colocate.errors import ConfigError

UUIDS = ("GPU-11aa", "GPU-22bb", "GPU-33cc", "GPU-33dd")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("3,1", ("3", "1")),
        ("01,+2", ("1", "2")),
        ("1gpu2,2ampere", ("1", "2")),
        ("0,-1,1", ("0",)),
        ("0,1,0", ()),
        (" GPU-22, GPU-33c ", ("GPU-22", "GPU-33c")),
        ("GPU-22bb,GPU-99,GPU-11aa", ("GPU-22bb",)),
        ("GPU-,GPU-11aa", ()),
        ("0,GPU-11aa", ("0",)),
        ("MIG-1-2,MIG-GPU-11aa/3/0,GPU-11aa", ("MIG-1-2", "MIG-GPU-11aa/3/0")),
    ],
)
def test_variable_names_gpus_like_cuda(text: str | None, names: tuple[str, ...] | None) -> None:
    """The variable names the GPUs that CUDA would read from it, on a machine with four GPUs."""
    environ = {} if text is None else {gpus.VARIABLE: text}
    assert gpus.list_visible_gpus(environ, UUIDS) == names


def test_of_an_unknown_machine() -> None:
    """Entries are taken at their word if the machine's GPUs, or their UUIDs, aren't known."""
    assert gpus.list_visible_gpus({gpus.VARIABLE: "0,9"}) == ("0", "9")
    assert gpus.list_visible_gpus({gpus.VARIABLE: "GPU-99,GPU-98"}) == ("GPU-99", "GPU-98")
    assert gpus.list_visible_gpus({gpus.VARIABLE: "GPU-99"}, ("", "")) == ("GPU-99",)
    assert gpus.list_visible_gpus({gpus.VARIABLE: "0,1,2"}, ("", "")) == ("0", "1")


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices are of the inherited list; more GPUs than it shows, and numbers that aren't whole, are refused."""
    monkeypatch.setattr(gpus, "machine_gpus", lambda: ())
    assert gpus.names(2, {}) == ("0", "1")
    assert gpus.names(2, {gpus.VARIABLE: "5,3,1"}) == ("5", "3")
    assert gpus.names(0, {gpus.VARIABLE: ""}) == ()
    assert gpus.visibility_variables(("5", "3", "1"), (0, 2)) == {gpus.VARIABLE: "5,1"}
    assert gpus.visibility_variables(("5", "3", "1"), ()) == {}
    assert gpus.indices(("3", "5"), ("5", "3", "1")) == (1, 0)
    assert gpus.indices(("GPU-b",), ("GPU-b", "GPU-a")) == (0,)
    assert gpus.indices(("7", "3")) == (7, 3)
    assert gpus.indices(("GPU-a", "GPU-b")) == (0, 1)
    with pytest.raises(ConfigError, match="gpus=1: CUDA_VISIBLE_DEVICES='-1' shows this process none"):
        gpus.names(1, {gpus.VARIABLE: "-1"})
    fraction: Any = 0.5
    for senseless in (-1, fraction):
        with pytest.raises(ConfigError, match=f"gpus={senseless}: an executor hands out whole GPUs"):
            gpus.names(senseless, {})


def test_help_shows_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`help`, which shows defaults, shows nothing of os.environ."""
    monkeypatch.setenv("COLOCATE_TEST_SECRET", "hidden")
    assert "hidden" not in pydoc.render_doc(gpus)


def test_threads_of_a_job_with_some_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads the GPUs of a job are numbered from 0, as CUDA does in the job's process."""
    monkeypatch.setattr(gpus, "machine_gpus", lambda: ("",) * 8)
    monkeypatch.setenv(gpus.VARIABLE, "6,3")
    with colocate.connect("local") as runtime:
        assert [node.gpus for node in runtime._node.services.executor.nodes()] == [2]
        assert [slot.devices for slot in runtime.reserve(2, 1).slots] == [(0,), (1,)]


def test_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVIDIA's library the files of a container's own devices are counted."""

    def missing(name: str) -> Any:
        raise OSError(name)

    assert gpus._by_nvml(missing) is None
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert gpus._by_device_files(tmp_path) == 2
    monkeypatch.setattr(gpus, "_by_nvml", lambda: ())
    assert gpus.machine_gpus() == ()  # a driver without GPUs, whatever its files are


def test_kinds(tmp_path: Path) -> None:
    """The kind of GPUs is recognised by the kernel's files."""
    devices, classes = tmp_path / "dev", tmp_path / "class"
    devices.mkdir()
    assert gpus.kind_in(devices, classes) is gpus.KINDS["NVIDIA"]
    for number, maker in ((128, "0x8086"), (129, "0x1a03")):
        vendor = classes / "drm" / f"renderD{number}" / "device" / "vendor"
        vendor.parent.mkdir(parents=True)
        vendor.write_text(f"{maker}\n")
        assert gpus.kind_in(devices, classes) is gpus.KINDS["Intel" if number == 128 else "NVIDIA"]
    (devices / "kfd").touch()
    assert gpus.kind_in(devices, classes) is gpus.KINDS["AMD"]
    (devices / "nvidia0").touch()
    assert gpus.kind_in(devices, classes) is gpus.KINDS["NVIDIA"]
