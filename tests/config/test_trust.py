"""Imports by a config: plugins of its allow-list, and modules only if the caller permits them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.distributions.install import Installed

from colocate._plugins.plugins import find_executor
from colocate._signatures import options_of
from colocate.config import load_config
from colocate.errors import ConfigError
from colocate.executor import Executor

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


@pytest.fixture
def with_acme(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed("acme")))


def forget(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a package from the imported modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


def mistakes(path: Path, allow_import: bool = True) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, allow_import=allow_import)
    return [str(mistake) for mistake in caught.value.mistakes]


@pytest.mark.usefixtures("with_acme")
@pytest.mark.parametrize("allowed", ["", "    plugins: {allow: [acme]}", "    plugins: {allow: [other, acme]}"])
def test_allowed_plugin_is_used(write: Write, allowed: str) -> None:
    config = load_config(write(PLUGINS + allowed))
    assert config.groups["policy"].roles["reward"].use == "acme.reward"


@pytest.mark.usefixtures("with_acme")
def test_disallowed_plugin_is_not_imported(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that isn't allowed isn't imported; colocate's own always are allowed."""
    forget("acme", monkeypatch)
    (found,) = mistakes(write(PLUGINS + "    plugins: {allow: [other]}"))
    assert found.endswith(
        "roles.reward.use: plugin 'acme' (acme 1.0.0) isn't in plugins.allow: add it there if you trust it"
    )
    assert "acme" not in sys.modules


def test_executors_are_asked_for_too(write: Write, installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed("outpost")))
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


@pytest.mark.usefixtures("with_acme")
def test_engines_are_asked_for_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that an allowed role's option names has to be allowed, too."""
    forget("acme", monkeypatch)
    engine = PLUGINS.replace("acme.reward, with: {scale: 2.0}", "rollout.engine, with: {engine: dice}")
    (found,) = mistakes(write(engine + "    plugins: {allow: [rollout, acme]}"))
    assert found.endswith(
        "roles.reward.with.engine: plugin 'dice' (acme 1.0.0) isn't in plugins.allow: add it there if you trust it"
    )
    assert "acme" not in sys.modules
    load_config(write(engine + "    plugins: {allow: [dice]}"))
    load_config(write(engine))


def test_modules_can_be_refused(write: Write) -> None:
    load_config(write(MODULES))
    found = mistakes(write(MODULES), allow_import=False)
    assert [text.partition(": ")[2] for text in found] == [
        "groups.policy.roles.actor.use: 'config_roles:Actor' names a module, and this config may name plugins only",
        "job.use: 'config_roles:train' names a module, and this config may name plugins only",
    ]


def test_missing_plugin_is_reported_as_unknown(write: Write) -> None:
    (found,) = mistakes(write("    executor: nothing\n    plugins: {allow: []}\n"))
    assert "no executor is called 'nothing'" in found


PROCESSES = {"executor": {"use": "local", "with": {"processes": True}}}


class TestCodeThatIsNotNamed:
    """`allow_import=False` refuses a config that could run code without naming it."""

    def test_the_environment_of_a_pool_runs_nothing(self, write: Write, tmp_path: Path) -> None:
        """A pool's variables are refused unless listed: `PYTHONPATH` would run a `sitecustomize.py` in the worker."""
        (tmp_path / "sitecustomize.py").write_text("raise SystemExit('ran')")
        config = write(
            f"""\
            executor: {{use: local, with: {{processes: true}}}}
            pools:
              main:
                slots: 1
                env:
                  OMP_NUM_THREADS: "2"
                  PYTHONPATH: {tmp_path}
                  NCCL_DEBUG: INFO
                  LD_PRELOAD: /tmp/theirs.so
              broken: {{slots: 0, timeout: soon, env: {{NCCL_CONF_FILE: theirs}}}}
            """
        )
        assert len(mistakes(config)) == 2  # the mistakes of the pool 'broken'
        found = mistakes(config, allow_import=False)
        refused = [text.partition(": it isn't")[0] for text in found if "can't set" in text]
        assert refused == [
            "line 7: pools.main.env.PYTHONPATH: a config that may name plugins only can't set 'PYTHONPATH'",
            "line 9: pools.main.env.LD_PRELOAD: a config that may name plugins only can't set 'LD_PRELOAD'",
            "line 10: pools.broken.env.NCCL_CONF_FILE: a config that may name plugins only can't set 'NCCL_CONF_FILE'",
        ]
        assert len(found) == 5  # all of them at once

    @pytest.mark.parametrize("name", ["LD_AUDIT", "NCCL_DEBUG_FILE", "omp_num_threads", "OMP_NUM_THREADS "])
    def test_a_variable_that_is_not_on_the_list_is_not_set(self, name: str) -> None:
        config = {**PROCESSES, "pools": {"main": {"slots": 1, "env": {name: "x"}}}}
        load_config(config)
        with pytest.raises(ConfigError, match="can't set") as caught:
            load_config(config, allow_import=False)
        assert len(caught.value.mistakes) == 1

    def test_a_group_can_not_set_one_either(self) -> None:
        group = {"pool": "main", "env": {"LD_PRELOAD": "x"}, "roles": {"a": "ppo.reward"}}
        config = {**PROCESSES, "pools": {"main": {"slots": 1}}, "groups": {"group": group}}
        with pytest.raises(ConfigError, match=r"groups\.group\.env\.LD_PRELOAD: .*can't set 'LD_PRELOAD'"):
            load_config(config, allow_import=False)

    def test_an_option_can_not_set_one_either(self, write: Write) -> None:
        config = write("executor: {use: local, with: {processes: true}}\npools: {main: {slots: 1}}")
        with pytest.raises(ConfigError, match=r"can't set 'PYTHONPATH'.*from --set \+pools.main.env.PYTHONPATH=x"):
            load_config(config, set=["+pools.main.env.PYTHONPATH=x"], allow_import=False)

    def test_a_child_runs_no_program_of_theirs(self, write: Write) -> None:
        """A config can't set a child's program or environment; the caller's changes can."""
        role = "{use: rollout.engine, with: {engine: transformers, model: here/model, child: %s}}"
        config = "pools: {main: {slots: 1}}\ngroups: {policy: {pool: main, roles: {rollout: %s}}}"
        for child in ("{python: /tmp/theirs}", "{env: {LD_PRELOAD: /tmp/theirs.so}}"):
            load_config(write(config % role % child))
            (found,) = mistakes(write(config % role % child), allow_import=False)
            assert "roles.rollout.with.child: a config that may name plugins only can't say which program" in found
        harmless = write(config % role % "{within: 3}")
        load_config(harmless, allow_import=False)
        said = "groups.policy.roles.rollout.with.child={python: /mine}"
        load_config(harmless, set=[said], allow_import=False)

    def test_listed_variables_are_set(self) -> None:
        env = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        config = load_config({**PROCESSES, "pools": {"main": {"slots": 1, "env": env}}}, allow_import=False)
        assert config.pools["main"].env == env

    @pytest.mark.parametrize(
        ("engine", "use", "harmless", "harmful"),
        [
            (None, "local", {"processes": True, "cpus": 2, "gpus": 0, "strict": True}, {}),
            (
                *("ray", "ray", {"cpus": 2, "gpus": 0, "address": "auto", "strict": True}),
                {
                    "runtime_env": {"working_dir": "."},
                    "address": "theirs.example:6379",
                    "token_file": "token",
                },
            ),
            (
                *("distributed", "dask", {"cpus": 2, "gpus": 0, "share": True, "timeout": 5.0, "address": None}),
                {"address": "tcp://theirs.example:8786", "security": {"tls_ca_file": "ca.pem"}, "client": "theirs"},
            ),
        ],
    )
    def test_options_of_executors_run_nothing(
        self, write: Write, engine: str | None, use: str, harmless: dict[str, object], harmful: dict[str, object]
    ) -> None:
        """Each option of an executor is harmless or refused; only the caller sets refused ones."""
        if engine is not None:
            pytest.importorskip(engine)
        assert set(options_of(find_executor(use)).parameters) - {"strict"} == ({*harmless} | {*harmful}) - {"strict"}
        load_config({"executor": {"use": use, "with": harmless}}, allow_import=False)
        if not harmful:
            return
        load_config({"executor": {"use": use, "with": harmful}})
        with pytest.raises(ConfigError) as caught:
            load_config({"executor": {"use": use, "with": harmful}}, allow_import=False)
        assert {mistake.path for mistake in caught.value.mistakes} == {f"executor.with.{name}" for name in harmful}
        # The caller's changes may set harmful options.
        changes = [f"executor.with.{name}={json.dumps(value)}" for name, value in harmful.items()]
        load_config(write(f"executor: {use}"), set=changes, allow_import=False)

    def test_an_executor_that_does_not_answer_gets_no_options(self, tmp_path: Path) -> None:
        class Silent(Executor):
            name = "silent"

            def __init__(self, *, library: str = "") -> None: ...

        assert "doesn't say" in (Silent.objection("library", "theirs.so") or "")

    def test_a_job_imports_no_questions_of_theirs(self) -> None:
        """A config's task can't be a function of a module; a task in the caller's changes can."""
        actor = {"use": "grpo.actor", "with": {"hidden": 16}}
        groups = {"policy": {"pool": "main", "roles": {"actor": actor, "reward": "ppo.reward"}}}
        config: dict[str, Any] = {"pools": {"main": {"slots": 1}}, "groups": groups}
        config["job"] = {"use": "grpo.train", "with": {"task": "os:getcwd"}}
        load_config(config)
        with pytest.raises(ConfigError, match=r"job\.with\.task: 'os:getcwd' names a module, and this config may name"):
            load_config(config, allow_import=False)
        load_config(config, set=["job.with.task=os:getcwd"], allow_import=False)
