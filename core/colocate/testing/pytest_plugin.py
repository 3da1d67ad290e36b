"""The pytest plugin: fixtures with runtimes for tests, which fail a test that leaves resources behind.

The plugin does nothing until a fixture is used. Leaks are reported as errors of the test's teardown, because only then
other fixtures that use ours are closed. If the test has already failed, leaks are closed without a report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from colocate import Runtime
    from colocate.testing.leaks import LeakWatch
    from colocate.testing.runtimes import Runtimes

pytest.register_assert_rewrite("colocate.testing.executors", "colocate.testing.roles")

_failed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin's markers."""
    config.addinivalue_line(
        "markers", "colocate_executor(name, **options): what the fixture colocate_executor connects to"
    )
    config.addinivalue_line("markers", "long: a test of a suite that a quick run leaves out, by `-m 'not long'`")


class _Outcomes:
    """A pytest plugin that records which tests have failed."""

    @pytest.hookimpl
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Mark a test as failed if its setup, call or teardown has raised an error."""
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            item.stash[_failed] = True


@pytest.fixture(scope="session")
def _colocate_own_temp(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    from colocate.testing.leaks import use_temporary_folder

    outcomes = _Outcomes()
    request.config.pluginmanager.register(outcomes)
    with use_temporary_folder(tmp_path_factory.mktemp("temporary-files")) as folder:
        yield folder
    request.config.pluginmanager.unregister(outcomes)


@pytest.fixture
def _colocate_watch(request: pytest.FixtureRequest, _colocate_own_temp: str) -> Iterator[LeakWatch]:
    from colocate.testing.leaks import LeakWatch

    watch = LeakWatch()
    yield watch
    if request.node.stash.get(_failed, False):
        watch.close_quietly()
    else:
        _check_watch(watch)


def _check_watch(watch: LeakWatch) -> None:
    try:
        watch.check_leaks()
    except AssertionError as error:
        words = str(error)
    else:
        return
    pytest.fail(words, pytrace=False)


@pytest.fixture
def no_leaks(_colocate_watch: LeakWatch) -> None:
    """Fail a test that leaves a runtime, process, thread, file descriptor, shared memory or temporary file behind."""


@pytest.fixture(scope="class")
def no_leaks_of_class(_colocate_own_temp: str) -> Iterator[None]:
    """Fail a test class if the fixtures that its tests share leave resources behind."""
    from colocate.testing.leaks import LeakWatch

    watch = LeakWatch()
    yield
    _check_watch(watch)


@pytest.fixture(scope="session")
def colocate_runtimes(_colocate_own_temp: str) -> Iterator[Runtimes]:
    """The runtimes of the session, for fixtures with a wider scope than a test: `colocate_runtimes.get("ray")`."""
    from colocate.testing.runtimes import Runtimes

    runtimes = Runtimes()
    yield runtimes
    runtimes.close()


def _connect_own(watch: LeakWatch, executor: str, **options: Any) -> Iterator[Runtime]:
    from colocate.testing.runtimes import connect_or_skip

    runtime = connect_or_skip(executor, **options)
    yield runtime
    watch.close_own(runtime._node)
    runtime.close(force=True)


def _find_shared_runtime(watch: LeakWatch, runtimes: Runtimes, executor: str, **options: Any) -> Runtime:
    watch.shares_engines = True
    return runtimes.get(executor, **options)


@pytest.fixture
def colocate_local(_colocate_watch: LeakWatch) -> Iterator[Runtime]:
    """A runtime for one test, with threads as workers. Fails a test that leaves resources behind."""
    yield from _connect_own(_colocate_watch, "local")


@pytest.fixture
def colocate_processes(_colocate_watch: LeakWatch) -> Iterator[Runtime]:
    """A runtime for one test, with processes as workers. Fails a test that leaves resources behind."""
    yield from _connect_own(_colocate_watch, "local", processes=True)


@pytest.fixture
def colocate_ray(_colocate_watch: LeakWatch, colocate_runtimes: Runtimes) -> Runtime:
    """A runtime on a private Ray cluster that the session shares. Fails a test that leaves resources behind."""
    return _find_shared_runtime(_colocate_watch, colocate_runtimes, "ray")


@pytest.fixture
def colocate_dask(_colocate_watch: LeakWatch, colocate_runtimes: Runtimes) -> Runtime:
    """A runtime on a private Dask cluster that the session shares. Fails a test that leaves resources behind."""
    return _find_shared_runtime(_colocate_watch, colocate_runtimes, "dask")


@pytest.fixture
def colocate_executor(
    request: pytest.FixtureRequest, _colocate_watch: LeakWatch, colocate_runtimes: Runtimes
) -> Runtime:
    """A runtime that the session shares, on the executor that a marker or an indirect parameter names.

    Use `@pytest.mark.colocate_executor("mine", address="…")`, or parameters such as `"local"` or `("mine", {"x": 1})`.
    Fails a test that leaves resources behind.
    """
    name, options = _find_executor(request)
    return _find_shared_runtime(_colocate_watch, colocate_runtimes, name, **options)


def _find_executor(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    parameter = getattr(request, "param", None)
    if isinstance(parameter, str):
        return parameter, {}
    if parameter is not None:
        name, options = parameter
        return name, dict(options)
    marker = request.node.get_closest_marker("colocate_executor")
    if marker is None or len(marker.args) != 1:
        pytest.fail(
            'colocate_executor has to know which one: mark the test with @pytest.mark.colocate_executor("name", '
            '**options), or give the names as parameters: @pytest.mark.parametrize("colocate_executor", ["local", '
            '"ray"], indirect=True)',
            pytrace=False,
        )
    return marker.args[0], dict(marker.kwargs)
