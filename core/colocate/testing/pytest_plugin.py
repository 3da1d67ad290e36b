"""The pytest plugin: the fixture `no_leaks`, and readable assertions in the suites. Does nothing until it is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("colocate.testing.executors", "colocate.testing.roles")


@pytest.fixture(scope="session")
def _colocate_own_temp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from colocate.testing.leaks import own_temporary_folder

    with own_temporary_folder(tmp_path_factory.mktemp("temporary-files")) as folder:
        yield folder


@pytest.fixture
def no_leaks(_colocate_own_temp: str) -> Iterator[None]:
    """Fail the test if it leaves a process, a thread, a file descriptor, shared memory or a temporary file."""
    from colocate.testing.leaks import Watch

    watch = Watch()
    yield
    watch.check()


@pytest.fixture(scope="class")
def no_leaks_of_class(_colocate_own_temp: str) -> Iterator[None]:
    """As `no_leaks`, for what the tests of a class share."""
    from colocate.testing.leaks import Watch

    watch = Watch()
    yield
    watch.check()
