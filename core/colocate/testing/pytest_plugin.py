"""The pytest plugin: runtimes for tests, which find what a test leaves behind. Does nothing until a fixture is used.

What is left is told when the test is torn down, as an error of that: only then are the fixtures closed that stand on
ours. A test that has failed already is only cleaned up after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from colocate import Runtime
    from colocate.testing.leaks import Watch
    from colocate.testing.runtimes import Runtimes

pytest.register_assert_rewrite("colocate.testing.executors", "colocate.testing.roles")

_failed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    config.addinivalue_line(
        "markers", "colocate_executor(name, **options): what the fixture colocate_executor connects to"
    )
    config.addinivalue_line("markers", "long: a test of a suite that a quick run leaves out, by `-m 'not long'`")


class _Outcomes:
    """Takes note of tests that fail."""

    @pytest.hookimpl
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """A phase of a test is over."""
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            item.stash[_failed] = True


@pytest.fixture(scope="session")
def _colocate_own_temp(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    from colocate.testing.leaks import own_temporary_folder

    outcomes = _Outcomes()
    request.config.pluginmanager.register(outcomes)
    with own_temporary_folder(tmp_path_factory.mktemp("temporary-files")) as folder:
        yield folder
    request.config.pluginmanager.unregister(outcomes)


@pytest.fixture
def _colocate_watch(request: pytest.FixtureRequest, _colocate_own_temp: str) -> Iterator[Watch]:
    from colocate.testing.leaks import Watch

    watch = Watch()
    yield watch
    if request.node.stash.get(_failed, False):
        watch.dismiss()
    else:
        _check(watch)


def _check(watch: Watch) -> None:
    try:
        watch.check()
    except AssertionError as error:
        words = str(error)
    else:
        return
    pytest.fail(words, pytrace=False)


@pytest.fixture
def no_leaks(_colocate_watch: Watch) -> None:
    """Fail the test if it leaves a runtime, a process, a thread, a file descriptor, shared memory, a temporary file."""


@pytest.fixture(scope="class")
def no_leaks_of_class(_colocate_own_temp: str) -> Iterator[None]:
    """As `no_leaks`, for what the tests of a class share."""
    from colocate.testing.leaks import Watch

    watch = Watch()
    yield
    _check(watch)


@pytest.fixture(scope="session")
def colocate_runtimes(_colocate_own_temp: str) -> Iterator[Runtimes]:
    """Runtimes of the session: `colocate_runtimes.get("ray")`, for fixtures of a wider scope than a test."""
    from colocate.testing.runtimes import Runtimes

    runtimes = Runtimes()
    yield runtimes
    runtimes.close()


def _own_runtime(watch: Watch, executor: str, **options: Any) -> Iterator[Runtime]:
    """A runtime of the test's own."""
    from colocate.testing.runtimes import connected

    runtime = connected(executor, **options)
    yield runtime
    watch.settle(runtime._node)
    runtime.close(force=True)


def _shared_runtime(watch: Watch, runtimes: Runtimes, executor: str, **options: Any) -> Runtime:
    """Return the session's runtime of an executor."""
    watch.shares_engines = True
    return runtimes.get(executor, **options)


@pytest.fixture
def colocate_local(_colocate_watch: Watch) -> Iterator[Runtime]:
    """A runtime whose slots are threads, of the test's own. Fails the test if it leaves something behind."""
    yield from _own_runtime(_colocate_watch, "local")


@pytest.fixture
def colocate_processes(_colocate_watch: Watch) -> Iterator[Runtime]:
    """A runtime whose slots are processes, of the test's own. Fails the test if it leaves something behind."""
    yield from _own_runtime(_colocate_watch, "local", processes=True)


@pytest.fixture
def colocate_ray(_colocate_watch: Watch, colocate_runtimes: Runtimes) -> Runtime:
    """A runtime on a private Ray of the session's. Fails the test if it leaves something behind."""
    return _shared_runtime(_colocate_watch, colocate_runtimes, "ray")


@pytest.fixture
def colocate_dask(_colocate_watch: Watch, colocate_runtimes: Runtimes) -> Runtime:
    """A runtime on a private Dask of the session's. Fails the test if it leaves something behind."""
    return _shared_runtime(_colocate_watch, colocate_runtimes, "dask")


@pytest.fixture
def colocate_executor(request: pytest.FixtureRequest, _colocate_watch: Watch, colocate_runtimes: Runtimes) -> Runtime:
    """A runtime of the session's, on the executor that the marker or an indirect parameter names.

    `@pytest.mark.colocate_executor("mine", address="…")`, or parameters such as `"local"` and `("mine", {"x": 1})`.
    Fails the test if it leaves something behind.
    """
    name, options = _wanted(request)
    return _shared_runtime(_colocate_watch, colocate_runtimes, name, **options)


def _wanted(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
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
