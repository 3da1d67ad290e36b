"""What a config may have imported: plugins of its allow-list, and modules only where the caller wants that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.distributions.install import Installed

from colocate.config import load_config
from colocate.errors import ConfigError

Write = Callable[[str], Path]

PLUGINS = """
    executor: local
    pools: {main: {slots: 1}}
    groups:
      policy:
        pool: main
        roles: {reward: {use: acme.reward, with: {scale: 2.0}}}
"""
MODULES = """
    pools: {main: {slots: 1}}
    groups: {policy: {pool: main, roles: {actor: {use: "config_roles:Actor", with: {hidden: 8}}}}}
    job: config_roles:train
"""


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Installed(tmp_path_factory.mktemp("installed"))("acme")


@pytest.fixture
def with_acme(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(acme))


def forget(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no test had imported it before, in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


def mistakes(path: Path, **options: bool) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, **options)
    return [str(mistake) for mistake in caught.value.mistakes]


@pytest.mark.usefixtures("with_acme")
@pytest.mark.parametrize("allowed", ["", "    plugins: {allow: [acme]}", "    plugins: {allow: [other, acme]}"])
def test_what_is_allowed_is_used(write: Write, allowed: str) -> None:
    config = load_config(write(PLUGINS + allowed))
    assert config.groups["policy"].roles["reward"].use == "acme.reward"


@pytest.mark.usefixtures("with_acme")
def test_what_is_not_allowed_is_not_imported(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """colocate's own may always be used."""
    forget("acme", monkeypatch)
    (found,) = mistakes(write(PLUGINS + "    plugins: {allow: [other]}"))
    assert found.endswith(
        "roles.reward.use: plugin 'acme' (acme 1.0.0) isn't in plugins.allow: add it there if you trust it"
    )
    assert "acme" not in sys.modules


def test_executors_are_asked_for_too(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Installed(tmp_path)("outpost")))
    forget("outpost", monkeypatch)
    (found,) = mistakes(write("    executor: outpost\n    plugins: {allow: [acme]}\n"))
    assert "executor.use: plugin 'outpost' (" in found
    assert "isn't in plugins.allow" in found
    assert "outpost" not in sys.modules
    (found,) = mistakes(write("    executor: {use: 'outpost.executor:Outposts'}\n"), allow_import=False)
    assert "names a module, and this config may name plugins only" in found


@pytest.mark.usefixtures("with_acme")
def test_jobs_are_asked_for_too(write: Write) -> None:
    (found,) = mistakes(write("    pools: {main: {slots: 1}}\n    job: acme.train\n    plugins: {allow: [other]}\n"))
    assert "job.use: plugin 'acme' (acme 1.0.0) isn't in plugins.allow" in found


def test_modules_can_be_refused(write: Write) -> None:
    load_config(write(MODULES))
    found = mistakes(write(MODULES), allow_import=False)
    assert [text.partition(": ")[2] for text in found] == [
        "groups.policy.roles.actor.use: 'config_roles:Actor' names a module, and this config may name plugins only",
        "job.use: 'config_roles:train' names a module, and this config may name plugins only",
    ]


def test_a_plugin_that_is_not_there_is_a_mistake_of_its_own(write: Write) -> None:
    (found,) = mistakes(write("    executor: nothing\n    plugins: {allow: []}\n"))
    assert "no executor is called 'nothing'" in found
