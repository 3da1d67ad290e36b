"""A worker on another machine imports the driver's source, under the driver's path if no other file is there."""

from __future__ import annotations

import _imp
import importlib
import importlib.resources
import inspect
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colocate import features
from colocate._definitions.sources import Source
from colocate._protocol.from_worker import Failure
from colocate.worker.birth.imports import DriverModuleFinder
from colocate.worker.serving import failure

TEXT = """
import pathlib, importlib.resources, pkgutil

def fails():
    raise ValueError("here")

READS = (
    lambda: pathlib.Path(__file__).with_name("data.txt").read_text(),
    lambda: importlib.resources.files(__name__).joinpath("data.txt").read_text(),
    lambda: pkgutil.get_data(__name__, "data.txt"),
)
"""
NAME = "of_the_driver_only"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the module's path on the driver's machine."""
    (tmp_path / NAME).mkdir()
    return tmp_path / NAME / "__init__.py"


@pytest.fixture
def driver(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverModuleFinder]:
    """Install the finder of a driver that has one package."""
    modules = {NAME: Source(TEXT.encode(), str(file), True)}
    finder = DriverModuleFinder(lambda name: modules if name == NAME else {})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.setattr(finder, "_can_ask", lambda: True)  # this is the main thread
    yield finder
    sys.modules.pop(NAME, None)


def imported() -> Any:
    return importlib.import_module(NAME)


def told_of(error: BaseException) -> Failure:
    codec: Any = SimpleNamespace(name="reference")
    return failure.describe_failure(error, codec, None, None, False)[0]  # type: ignore[arg-type]  # nothing is sent


@pytest.mark.parametrize("there", [None, "x = 1\n", TEXT])
def test_path(driver: DriverModuleFinder, file: Path, there: str | None) -> None:
    """`__file__` is the driver's path unless another file lies there; the source is shown in any case."""
    if there is not None:
        file.write_text(there)
    module = imported()
    assert module.__file__ == (f"driver:{file}" if there == "x = 1\n" else str(file))
    assert inspect.getsource(module.fails) == 'def fails():\n    raise ValueError("here")\n'
    with pytest.raises(ValueError, match="here") as caught:
        module.fails()
    assert '    raise ValueError("here")\n' in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("there", [None, "x = 1\n"])
def test_missing_data_file_error_is_explained(driver: DriverModuleFinder, file: Path, there: str | None) -> None:
    """The error for a data file that wasn't sent says so, however it is read; other errors stay as they are."""
    if there is not None:
        file.write_text(there)
        file.with_name("data.txt").write_text("another package's")
    for read in imported().READS:
        with pytest.raises(FileNotFoundError) as caught:
            read()
        told = told_of(caught.value)
        assert str(file.with_name("data.txt")) in told.text
        assert "came here as source, without the files beside them: install the package where" in told.traceback
    with pytest.raises(FileNotFoundError) as caught:
        (file.parents[1] / "elsewhere.txt").read_text()
    assert "came here as source" not in told_of(caught.value).traceback


def test_the_receiver_may_need_importlibs_lock(driver: DriverModuleFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that needs importlib's lock, as the receiver may, isn't blocked while an import asks the driver."""
    told = driver._ask

    def ask(name: str) -> Any:
        receiver = threading.Thread(target=lambda: (_imp.acquire_lock(), _imp.release_lock()), daemon=True)
        receiver.start()
        receiver.join(10)
        assert not receiver.is_alive(), "it would have received the answer"
        return told(name)

    monkeypatch.setattr(driver, "_ask", ask)
    assert len(imported().READS) == 3
    assert driver.find_spec(NAME, None) is not None  # The finder alone doesn't take the lock.


def test_feature_imports_skip_driver() -> None:
    """A thread that imports a feature doesn't ask the driver: a lane that receives would wait for its own answer."""
    asked: list[str] = []
    finder = DriverModuleFinder(lambda name: asked.append(name) or {})  # type: ignore[func-returns-value]
    features.importing_threads.add(threading.get_ident())
    try:
        assert finder.find_spec("pytest", None) is not None
        assert asked == []
    finally:
        features.importing_threads.discard(threading.get_ident())
    assert finder.find_spec("pytest", None) is not None
    assert asked == ["pytest"]
