"""Correct configs, and the objects that they become."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from colocate.config import Config, ExecutorConfig, GroupConfig, JobConfig, PoolConfig, RoleConfig, load_config
from colocate.errors import ConfigError

Write = Callable[[str], Path]

DEMO = """
    executor: local
    pools:
      main: {slots: 2, strategy: spread}
    groups:
      policy:
        pool: main
        roles:
          actor: {use: "config_roles:Actor", with: {hidden: 8, lr: 1e-4}}
          other: config_roles:Open
    job: config_roles:train
"""


def test_short_forms_are_written_out(write: Write) -> None:
    assert load_config(write(DEMO)) == Config(
        name="demo",
        seed=0,
        executor=ExecutorConfig("local"),
        pools={"main": PoolConfig(slots=2, strategy="spread")},
        groups={
            "policy": GroupConfig(
                pool="main",
                roles={
                    "actor": RoleConfig("config_roles:Actor", {"hidden": 8, "lr": 0.0001}),
                    "other": RoleConfig("config_roles:Open"),
                },
            )
        },
        job=JobConfig("config_roles:train"),
    )


def test_a_dict_is_a_config_too_and_is_left_alone(write: Write) -> None:
    write("")
    roles: dict[str, Any] = {"actor": {"use": "config_roles:Actor", "with": {"hidden": 8, "sizes": (1, 2)}}}
    given = {"pools": {"main": {"slots": 1}}, "groups": {"g": {"pool": "main", "roles": roles}}}
    config = load_config(given, set=["pools.main.slots=2"])
    assert (config.name, config.pools["main"].slots) == ("run", 2)
    assert config.groups["g"].roles["actor"].with_ == {"hidden": 8, "sizes": [1, 2]}
    assert given["pools"] == {"main": {"slots": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-4", 1e-4), ("1.0e-4", 1e-4), ("010", 10), ("0o10", 8), (".inf", float("inf")), ("~", None)],
        *[("yes", "yes"), ("on", "on"), ("12:30:45", "12:30:45"), ("2024-01-01", "2024-01-01")],
        *[("True", True), ("'2'", "2")],
    ],
)
def test_scalars_follow_yaml_1_2(write: Write, text: str, value: object) -> None:
    config = load_config(write(DEMO), set=[f"+groups.policy.roles.other.with.x={text}"])
    found = config.groups["policy"].roles["other"].with_["x"]
    assert found == value
    assert type(found) is type(value)


def test_anchors_become_copies(write: Write) -> None:
    text = """
        executor: {use: local, with: {processes: true}}
        pools: {a: &pool {slots: 1, env: {A: b}}, b: *pool, c: {<<: *pool, slots: 3}}
    """
    config = load_config(write(text), set=["pools.a.slots=2", "pools.a.env.A=c"])
    assert [config.pools[name].slots for name in "abc"] == [2, 1, 3]
    assert [config.pools[name].env for name in "abc"] == [{"A": "c"}, {"A": "b"}, {"A": "b"}]


class TestChanges:
    def test_executor_override_replaces_options(self, write: Write) -> None:
        config = load_config(write("executor: {use: other, with: {unknown: 1}}"), executor="local")
        assert config.executor == ExecutorConfig("local", {})

    def test_set_makes_missing_keys_and_reads_yaml(self, write: Write) -> None:
        changes = ["+pools.new.slots=3", "pools.new.env={A: b}", "job=config_roles:train", "job.with.steps=7"]
        config = load_config(write("executor: {use: local, with: {processes: true}}"), set=changes)
        assert config.pools == {"new": PoolConfig(slots=3, env={"A": "b"})}
        assert config.job == JobConfig("config_roles:train", {"steps": 7})

    def test_set_says_where(self, write: Write) -> None:
        pytest.importorskip("distributed")
        text = "executor: {use: dask, with: {address: 'tcp://10.0.0.1:8786'}}\npools: {main: {slots: 2}}"
        changes = ["labels={name: 'in(a,b)'}", "resources={disk: 1.5}", "strategy=strict_spread", "together=host"]
        config = load_config(write(text), set=[f"pools.main.{change}" for change in changes])
        where: dict[str, Any] = {"labels": {"name": "in(a,b)"}, "resources": {"disk": 1.5}, "together": "host"}
        assert config.pools == {"main": PoolConfig(slots=2, strategy="strict_spread", **where)}

    def test_set_reaches_into_short_forms_and_lists(self, write: Write) -> None:
        changes = ["groups.policy.roles.other.slots=[0]", "groups.policy.roles.other.slots[0]=1", "job.with.steps=1"]
        config = load_config(write(DEMO), set=changes)
        assert config.groups["policy"].roles["other"].slots == [1]
        assert config.job == JobConfig("config_roles:train", {"steps": 1})


def plain_values() -> st.SearchStrategy[Any]:
    text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=8
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
@given(options=st.dictionaries(st.text("abcxyz_", min_size=1).filter(str.isidentifier), plain_values(), max_size=4))
def test_a_dump_loads_as_the_same(write: Write, options: dict[str, Any]) -> None:
    roles = {"role": {"use": "config_roles:Open", "with": options, "slots": [0], "mesh": {"dp": 1}}}
    config = load_config(
        {
            "name": "demo",
            "seed": 3,
            "pools": {"main": {"slots": 2, "timeout": 1.5}},
            "groups": {"group": {"pool": "main", "roles": roles}},
            "job": {"use": "config_roles:train", "with": {"steps": 3}},
        }
    )
    assert load_config(write(config.dump())) == config


def test_a_dump_says_everything(write: Write) -> None:
    assert load_config(write("pools: {main: {slots: 1}}")).dump() == (
        "name: demo\nseed: 0\ncall_timeout: null\nexecutor:\n  use: local\n  with: {}\n"
        "pools:\n  main:\n    slots: 1\n    gpus: 0\n    cpus: 1\n    host_memory: null\n"
        "    device_memory: null\n    strategy: pack\n    timeout: 60\n    env: {}\n    groups: 1\n"
        "    regrow_timeout: 600\n    spares: 0\n    at_least: null\n"
        "    labels: {}\n    resources: {}\n    together: null\n    grow: null\n"
        "groups: {}\njob: null\nplugins:\n  allow: null\nobserve: []\ntrace: false\n"
        "record: []\nrecord_limit: null\nreplay: {}\nreplay_from: null\n"
        "replay_loose: false\ncompare: {}\ntolerance: 0.0\ncheckpoints: null\n"
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read the config .*nope\.yaml: No such file or directory"):
        load_config(tmp_path / "nope.yaml")
