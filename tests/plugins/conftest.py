import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.distributions.install import Installed


@pytest.fixture
def with_distributions(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Put installed distributions on sys.path, as if they had been there when Python started."""

    def put(*names: str) -> list[Path]:
        folders = [installed(name) for name in names]
        for module in [name for name in sys.modules if name.partition(".")[0] in ("acme", "acme_rival", "broken")]:
            monkeypatch.delitem(sys.modules, module)
        for folder in reversed(folders):
            monkeypatch.syspath_prepend(str(folder))
        return folders

    return put
