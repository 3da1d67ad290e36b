"""Errors of wrong configs: path, line, message and nearest key, for all mistakes at once."""

import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from colocate import gpus
from colocate._plugins import needs
from colocate.config import PoolConfig, load_config
from colocate.errors import ConfigError, Mistake

Write = Callable[[str], Path]


def mistakes(source: Path | dict[str, Any], **options: Any) -> Sequence[Mistake]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, **options)
    return caught.value.mistakes


def only(source: Path | dict[str, Any], **options: Any) -> str:
    (mistake,) = mistakes(source, **options)
    return str(mistake)


def test_five_mistakes_are_shown_at_once_in_the_order_of_the_file(write: Write) -> None:
    path = write(
        """\
        executor: {use: local, with: {procesess: true}}
        pools:
          main: {slots: "2"}
          spare: {slots: 1, gpu: 1}
        groups:
          policy:
            pool: sparre
            roles:
              actor: {use: "config_roles:Actor", with: {hidden: 4, lr: fast}}
        """
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}: 5 mistakes\n"
        "  line 1: executor.with.procesess: executor 'local' has no parameter 'procesess' "
        "(did you mean 'processes'?)\n"
        "  line 3: pools.main.slots: must be an integer, not the text '2'; remove the quotes\n"
        "  line 4: pools.spare.gpu: unknown key 'gpu' (did you mean 'gpus'?)\n"
        "  line 7: groups.policy.pool: no pool is called 'sparre'; there are main, spare (did you mean 'spare'?)\n"
        "  line 9: groups.policy.roles.actor.with.lr: must be a number, not the text 'fast'"
    )
    assert caught.value.mistakes[2] == Mistake("pools.spare.gpu", 4, "unknown key 'gpu'", "gpus")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 1\npools: {main: {slots: 2}\n", "line 3: not YAML: while parsing a flow mapping: expected ',' or '}'"),
        ("seed: 1\nname: a\x07", "line 2: not YAML: unacceptable character #x0007"),
        ("pools:\n\tmain: {slots: 1}\n", "'\\t'"),
        ("# nothing\n", "a config is a mapping of keys to values"),
        ("- a\n- b\n", "a config is a mapping of keys to values"),
        ("seed: 1\n---\nseed: 2\n", "expected a single document"),
        (
            "seed: !python/name:os.system 1",
            "line 1: seed: the tag !python/name:os.system is not known; a config has plain values only",
        ),
        (f"name: a\nseed: {'9' * 5000}", "line 2: seed: '9999"),
        ("name: a\njob: " + "[" * 5000, "more than 100 lists and mappings inside each other"),
        ("a: " + "[" * 200 + "]" * 200, "line 1: a: more than 100 lists and mappings inside each other"),
        ("seed: !!int abc", "line 1: seed: 'abc' is no int"),
        ("seed: !!float abc", "line 1: seed: 'abc' is no float"),
        ("seed: !!bool maybe", "line 1: seed: 'maybe' is no bool"),
        ("seed: '2'", "seed: must be an integer, not the text '2'; remove the quotes"),
        ("seed: 1.5", "seed: must be an integer, not 1.5"),
        ("seed: true", "seed: must be an integer, not true"),
        ("seed:", "seed: must be an integer, not null"),
        ("name: 7", "name: must be text, not 7; put it in quotes"),
        ("name: ../up", "name: is '../up', but must be usable as a file name: use letters, digits, '-', '_' and '.'"),
        ("pools: [1]", "pools: must be a mapping, not a list"),
        ("pools: {a: {}}", "pools.a.slots: is missing"),
        ("pools: {a: {slots: 0}}", "pools.a.slots: must be a whole number from 1 to 1,000,000, not 0"),
        ("pools: {a: {slots: 1, env: {N: 1}}}", "pools.a.env.N: must be text, not 1; put it in quotes"),
        ("pools: {a: {slots: 1, host_memory: []}}", "must be an integer or text or null, not a list"),
        ("pools: {a: {slots: 1, strategy: packed}}", "not the text 'packed' (did you mean 'pack'?)"),
        ("pools: {a: {slots: 1, resources: {CPU: 1}}}", "pools.a.resources: has 'CPU', which cpus is for"),
        (
            "pools: {a: {slots: 1, labels: {kind: in()}}}",
            "pools.a.labels: has the value 'in()'; one is written as 'H100'",
        ),
        ("pools: {a: {slots: 1, labels: {kind: 5}}}", "pools.a.labels.kind: must be text, not 5; put it in quotes"),
        (
            "pools: {a: {slots: 1, together: rack}}",
            "pools.a.together: executor 'local' knows no labels of nodes, and no resources but CPUs, GPUs and memory",
        ),
        ("pools: {a: {slots: 1, grow: true}}", "executor 'local' has the nodes that it has: none are to come"),
        ("executor: [local]", "executor: must be a mapping, not a list"),
        (
            "executor: {use: local, with: {collective_timeout: 0}}",
            "executor.with.collective_timeout: must be a number of seconds, more than 0 (math.inf, in YAML .inf, "
            "for ever), not 0",
        ),
        (
            "executor: {use: local, with: {processes: true, spill_dir: scratch}}",
            "executor.with.spill_dir: must be an absolute path, since it is one on the workers' machines, not 'sc",
        ),
        (
            "executor: {use: ray, with: {ports: 20100}}",
            "executor.with.ports: must be the first and the last of some ports from 1024 to 65535, as "
            "'20000-20100', not 20100",
        ),
        ("executor: {use: ray, with: {cut_s: 0}}", "executor.with.cut_s: must be a number of seconds, more than 0"),
        ("executor: {use: ray, cpus: 2}", "unknown key 'cpus'; known here: use, with; options go under 'with'"),
        ("executor: {use: local, with: {seed: 1}}", "executor 'local' has no parameter 'seed'"),
        (
            "executor: locl",
            "line 1: executor.use: no executor is called 'locl' (installed: dask, local and ray); "
            "did you mean 'local'?",
        ),
        ("job: {with: {}}", "job.use: is missing"),
        ("job: {use: 'config_roles:bare', with: {steps: 1}}", "; it takes none"),
        ("job: config_roles:untyped", "line 1: job: job config_roles:untyped needs 'steps'"),
        (
            "job: config_roles:waits",
            "line 1: job.use: job 'config_roles:waits' is an async function, and a job is a plain one: have it call "
            "asyncio.run(...) on that",
        ),
        (
            "job: config_roles:yields",
            "job 'config_roles:yields' has a `yield`, so calling it runs nothing of it: a job is a plain function",
        ),
        (
            "job: config_roles:alone",
            "job 'config_roles:alone' has no first parameter for the run: a job is called as job(run, **options)",
        ),
        ("job: config_roles:named", "job 'config_roles:named' has no first parameter for the run"),
        ("poolz: {}", "poolz: unknown key 'poolz' (did you mean 'pools'?)"),
        ("zzz: {}", "unknown key 'zzz'; known here: name, seed, call_timeout, executor, pools, groups, job"),
        (
            "pools: {main: {slots: 1}}\ngroups: {g: {pool: main, roles: {}}}",
            "line 2: groups.g.roles: a group needs at least one role",
        ),
        (
            "pools: 3\ngroups: {g: {pool: main, roles: {a: 'config_roles:Open'}}}",
            "line 1: pools: must be a mapping, not 3",
        ),
    ],
)
def test_one(write: Write, text: str, told: str) -> None:
    assert told in only(write(text))


def test_a_key_that_is_there_twice(write: Write) -> None:
    path = write("seed: 1\npools:\n  a: {slots: 1}\n  a: {slots: 2}\nseed: 2\n")
    assert [str(mistake) for mistake in mistakes(path)] == [
        "line 4: pools.a: the key 'a' is there twice: first in line 3",
        "line 5: seed: the key 'seed' is there twice: first in line 1",
    ]


def test_aliases_are_bounded(write: Write) -> None:
    """The size of aliases is bounded: nine lines of ten aliases each would be a thousand million values."""
    names = "abcdefghij"
    lines = [f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in itertools.pairwise(names)]
    found = mistakes(write("\n".join(["a: &a [lol]", *lines])))
    (told,) = [str(mistake) for mistake in found if "alias" in mistake.message]
    assert told == "line 7: g: with what its aliases stand for it is more than a config can hold"
    long = only({}, set=["name=[&a " + "x" * 2000 + ", " + ", ".join(["*a"] * 1200) + "]"])
    assert "its aliases stand for" in long
    assert "contains it" in str(mistakes(write("pools: &p {main: *p}"))[0])
    pools = "".join(f"  p{i}: *main\n" for i in range(500))  # As many aliases as a config has are fine.
    assert len(load_config(write("pools:\n  main: &main {slots: 1, host_memory: 1GiB}\n" + pools)).pools) == 501


def test_non_yaml_values_are_refused(write: Write, tmp_path: Path) -> None:
    """Values that YAML can't express are refused, and so is a file that isn't UTF-8 text."""
    assert "is no int" in only(write("name: a"), set=[f"seed={'9' * 5000}"])
    assert only({"pools": {"a": {"slots": 1, "env": {"A": b"x"}}}}).startswith(
        "pools.a.env.A: a config has plain values only (text, numbers, lists, dicts), not bytes"
    )
    assert str(mistakes({"pools": {1: {"slots": 1}}})[0]) == "pools: a key must be text, not 1"
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"seed: \xff\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(path)
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert only({"pools": deep}) == "pools: more than 100 lists and mappings inside each other"


def test_endless_and_huge_files_are_refused(tmp_path: Path) -> None:
    """Endless files, too large files and folders are refused; a pipe is read like a file."""
    for path in ("/dev/zero", "/dev/urandom"):
        with pytest.raises(ConfigError, match=f"{path} is no config: it has more than 1,000,000 bytes"):
            load_config(path)
    (tmp_path / "large.yaml").write_text("name: a\n" + "# not much\n" * 10**6)
    with pytest.raises(ConfigError, match=r"large\.yaml is no config"):
        load_config(tmp_path / "large.yaml")
    with pytest.raises(ConfigError, match=r"can't read the config .*: Is a directory"):
        load_config(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as beside:
        beside.submit((tmp_path / "pipe").write_text, "name: piped\r\nseed: 3\r\n")
        assert load_config(tmp_path / "pipe").seed == 3


@pytest.mark.parametrize("place", ["name", "pools.{}", "groups.{}", "groups.g.roles.{}"])
def test_a_name_that_no_file_can_have(write: Write, place: str) -> None:
    """A name too long for a file is refused: folders have these names."""
    for name, fits in (("a" * 100, True), ("a" * 300, False), ("ä" * 60, False)):
        roles = {name if "roles" in place else "r": "config_roles:Open"}
        config = {
            "name": name if place == "name" else "n",
            "pools": {(pool := name if "pools" in place else "p"): {"slots": 1}},
            "groups": {(name if place == "groups.{}" else "g"): {"pool": pool, "roles": roles}},
        }
        write("")
        if fits:
            assert load_config(config)
        else:
            assert only(config) == (
                f"{place.format(name)}: must be a name of at most 100 bytes, because it is used as a file name; "
                f"this has {len(name)} letters"
            )


def test_a_pool_of_no_slots(write: Write) -> None:
    """A pool without slots has its other mistakes reported, too."""
    found = mistakes(write("pools: {a: {slots: 0, gpus: 0.5, timeout: -1, host_memory: much}}\n"))
    assert sorted(each.path for each in found) == [
        f"pools.a.{it}" for it in ("gpus", "host_memory", "slots", "timeout")
    ]


def test_a_pool_that_may_have_fewer_slots(write: Write) -> None:
    """A role that can't run on fewer slots is reported at the key that prevents it."""
    text = """
        pools: {main: {slots: 3, at_least: AT_LEAST, spares: SPARES}}
        groups:
          g:
            pool: main
            on_failure: restart
            roles:
              a: {use: config_roles:Open, mesh: {dp: 3}}
              b: {use: config_roles:Open, slots: [0, 2]}
              c: {use: config_roles:Open, slots: [1], mesh: {dp: 1}}
              d: {use: config_roles:Open}
    """

    def found(at_least: int, spares: int = 0) -> list[str]:
        given = text.replace("AT_LEAST", str(at_least)).replace("SPARES", str(spares))
        return [each.path for each in mistakes(write(textwrap.dedent(given)))]

    assert found(2) == ["groups.g.roles.a.mesh", "groups.g.roles.b.slots"]
    assert found(4) == ["pools.main.at_least"]
    assert found(0, -1)[:2] == ["pools.main.spares", "pools.main.at_least"]
    assert load_config(write(textwrap.dedent(text.replace("AT_LEAST", "3").replace("SPARES", "1"))))


GROUP = """\
pools: {main: {slots: 2}}
groups:
  policy:
    pool: main
    roles:
      actor:
        use: config_roles:Actor
"""


def role(write: Write, lines: str) -> list[str]:
    text = GROUP + "".join(f"        {line}\n" for line in lines.splitlines())
    return [str(mistake) for mistake in mistakes(write(text))]


class TestRoles:
    @pytest.mark.parametrize(
        ("lines", "told"),
        [
            ("with: {lr: 1e-4}", "line 6: groups.policy.roles.actor: config_roles:Actor needs 'hidden' (int)"),
            ("with: {hiden: 1}", "with.hiden: config_roles:Actor has no parameter 'hiden' (did you mean 'hidden'?)"),
            ("with: {hidden: 1, lrr: 1}", "with.lrr: config_roles:Actor has no parameter 'lrr' (did you mean 'lr'?)"),
            ("with: {hidden: '1'}", "with.hidden: must be an integer, not the text '1'; remove the quotes"),
            ("with: {hidden: 1.0}", "with.hidden: must be an integer, not 1.0"),
            ("with: {hidden: 1, lr: '1e-4'}", "with.lr: must be a number, not the text '1e-4'; remove the quotes"),
            (
                "with: {hidden: 1, kind: polcy}",
                "must be 'policy' or 'value', not the text 'polcy' (did you mean 'policy'?)",
            ),
            ("with: {hidden: 1, sizes: 3}", "with.sizes: must be a list, not 3"),
            ("with: {hidden: 1, sizes: [1, x]}", "with.sizes[1]: must be an integer, not the text 'x'"),
            ("with: {hidden: 1, names: {a: 1}}", "with.names.a: must be text, not 1; put it in quotes"),
            ("with: {hidden: 1, frozen: 1}", "with.frozen: must be true or false, not 1"),
            ("slots: [0, 2]", "actor.slots[1]: there is no slot 2: the pool has 2, counted from 0"),
            ("slots: [-1]", "actor.slots[0]: there is no slot -1: the pool has 2, counted from 0"),
            ("slots: []", "actor.slots: name at least one slot, or leave the key out for all"),
            ("slots: [1, 1]", "actor.slots: [1, 1] names a slot twice"),
            ("slots: 0", "actor.slots: must be a list, not 0"),
            ("default_group: 1", "actor.default_group: must be true or false, not 1"),
            ("sleep: vnm", "actor.sleep: must be 'vmm', not the text 'vnm' (did you mean 'vmm'?)"),
        ],
    )
    def test_one(self, write: Write, lines: str, told: str) -> None:
        (found,) = role(write, lines if lines.startswith("with") else f"with: {{hidden: 1}}\n{lines}")
        assert found.endswith(told)

    @pytest.mark.parametrize(
        "given",
        ["lr: 1", "sizes: null", "sizes: []", "anything: {a: [b]}", "unknown: 3", "kind: value", "names: {a: b}"],
    )
    def test_valid_or_unknown_values_are_accepted(self, write: Write, given: str) -> None:
        load_config(write(f"{GROUP}        with: {{hidden: 1, {given}}}\n"))

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="such statements are Python 3.12's")
    def test_names_of_types(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An option annotated with an alias (`type Size = int`) is checked by the alias's type."""
        code = """
            from colocate import Role, method
            type Size = int
            type Named[K, V] = dict[K, V]
            type Tree = list[Tree] | Size
            type Later = nothing_like_this
            class Actor[T](Role):
                def __init__(self, size: Size, named: Named[str, Size], tree: Tree, later: Later) -> None: ...
                @method
                def act(self) -> T: ...
            """
        (tmp_path / "new_roles.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(tmp_path)
        fits: dict[str, Any] = {"size": 1, "named": {"a": 1}, "tree": [1, [2]], "later": "x"}

        def config(**options: Any) -> dict[str, Any]:
            actor = {"use": "new_roles:Actor", "with": {**fits, **options}}
            return {"pools": {"main": {"slots": 1}}, "groups": {"g": {"pool": "main", "roles": {"actor": actor}}}}

        load_config(config())
        wrong = {"size": "1", "named": {"a": "x"}, "tree": [1, ["x"]]}
        assert [str(mistake).partition("actor.with.")[2] for mistake in mistakes(config(**wrong))] == [
            "size: must be an integer, not the text '1'; remove the quotes",
            "named.a: must be an integer, not the text 'x'",
            "tree[1][0]: must be a list or an integer, not the text 'x'",
        ]

    def test_a_way_to_sleep_that_the_gpus_lack(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        text = GROUP + "        with: {hidden: 1}\n        sleep: vmm\n"
        on_gpus = text.replace("slots: 2", "slots: 2, gpus: 1")
        load_config(write(on_gpus), set=["executor.with.processes=true"])
        monkeypatch.setattr(needs, "KIND", gpus.KINDS["AMD"])
        load_config(write(text))  # These slots have no GPU.
        assert "actor.sleep: role 'actor' says sleep=\"vmm\", which is for GPUs of NVIDIA" in only(write(on_gpus))

    def test_mesh_unfit_for_slots_is_refused(self, write: Write) -> None:
        (found,) = role(write, "with: {hidden: 1}\nmesh: {dp: 3}")
        assert found.startswith("line 9: groups.policy.roles.actor.mesh: ")
        assert "3" in found
        assert "2" in found

    def test_plugin_errors_are_mistakes_like_the_others(self, write: Write) -> None:
        text = GROUP.replace("config_roles:Actor", "config_roles:Actr") + "      judge: nowhere.judge\n"
        assert [str(mistake).partition("(installed")[0] for mistake in mistakes(write(text))] == [
            "line 7: groups.policy.roles.actor.use: role 'config_roles:Actr': module config_roles has no 'Actr'; "
            "did you mean 'Actor'?",
            "line 8: groups.policy.roles.judge.use: no role plugin is called 'nowhere' ",
        ]

    @pytest.mark.parametrize("variable", ["'A=B': x", "'': x", 'A: "a\\0b"'])
    def test_a_variable_that_no_environment_can_have(self, write: Write, variable: str) -> None:
        path = write(
            f"executor: {{use: local, with: {{processes: true}}}}\npools: {{main: {{slots: 1, env: {{{variable}}}}}}}"
        )
        text = only(path)
        assert "line 2: pools.main.env." in text
        assert "no environment can have such a variable" in text

    def test_a_number_of_restarts_that_is_none(self, write: Write) -> None:
        path = write(GROUP.replace("    roles:", "    restarts: 0\n    roles:") + "        with: {hidden: 1}\n")
        assert "line 5: groups.policy.restarts: must be a whole number from 1 to 1,000,000, not 0" in only(path)

    def test_an_environment_of_a_group(self, write: Write) -> None:
        text = GROUP.replace("    roles:", "    env: {'A=B': x}\n    roles:") + "        with: {hidden: 1}\n"
        processes = write("executor: {use: local, with: {processes: true}}\n" + text)
        assert "groups.policy.env.A=B: is 'x'; no environment can have such a variable" in only(processes)
        threads = [str(mistake) for mistake in mistakes(write(text.replace("'A=B'", "A")))]
        assert len(threads) == 1
        assert "groups.policy.env: slots of 'local' are threads of this process" in threads[0]


class TestWhole:
    def test_a_pool_takes_one_group(self, write: Write) -> None:
        text = GROUP + "        with: {hidden: 1}\n  second: {pool: main, roles: {a: 'config_roles:Open'}}\n"
        assert only(write(text)) == (
            "line 9: groups.second.pool: pool 'main' has group 'policy' already: a slot takes one group at a time; "
            "pools.main.groups says how many"
        )

    def test_a_pool_that_groups_share(self, write: Write) -> None:
        two = GROUP.replace("slots: 2", "slots: 2, groups: 2") + "        with: {hidden: 1}\n"
        two += "  second: {pool: main, roles: {a: 'config_roles:Open'}}\n"
        assert set(load_config(write(two)).groups) == {"policy", "second"}
        assert only(write(two + "  third: {pool: main, roles: {a: 'config_roles:Open'}}\n")) == (
            "line 10: groups.third.pool: pool 'main' has groups 'policy' and 'second' already: a slot takes 2 groups "
            "at a time; pools.main.groups says how many"
        )
        assert only(write(two.replace("groups: 2", "groups: 0"))).endswith(
            "pools.main.groups: must be a whole number from 1 to 1,000,000, not 0"
        )
        text = only(write(two.replace("groups: 2", "groups: 2, device_memory: 1GiB")))
        assert "pools.main.groups: slots of 'local' are threads of this process, whose memory groups share" in text

    def test_roles_names(self, write: Write) -> None:
        roles = (
            "{a-b: {use: 'config_roles:Open', default_group: true}, c: {use: 'config_roles:Open', default_group: true}}"
        )
        path = write(f"pools: {{main: {{slots: 1}}}}\ngroups: {{g: {{pool: main, roles: {roles}}}}}")
        assert [mistake.message for mistake in mistakes(path)] == [
            "'a-b' can't be a role's name: use letters, digits and _",
        ]

    def test_invalid_pool_keeps_name_for_groups(self, write: Write) -> None:
        text = GROUP.replace("slots: 2", "slots: two") + "        with: {hidden: 1}\n        slots: [7]\n"
        assert only(write(text)) == "line 1: pools.main.slots: must be an integer, not the text 'two'"

    def test_job_options(self, write: Write) -> None:
        path = write("job: {use: 'config_roles:train', with: {step: 1, shuffle: 'no'}}")
        assert [str(mistake) for mistake in mistakes(path)] == [
            "line 1: job.with.step: job config_roles:train has no parameter 'step' (did you mean 'steps'?)",
            "line 1: job.with.shuffle: must be true or false, not the text 'no'",
        ]


class TestChanges:
    def test_mistake_names_source_option(self, write: Write) -> None:
        assert only(write(GROUP + "        with: {hidden: 1}"), set=["groups.policy.roles.actor.with.lr=fast"]) == (
            "groups.policy.roles.actor.with.lr: must be a number, not the text 'fast' "
            "(from --set groups.policy.roles.actor.with.lr=fast)"
        )
        assert "(from --executor locl)" in only(write("seed: 1"), executor="locl")

    @pytest.mark.parametrize(
        ("change", "at", "near"),
        [
            ("pools.man.slots=2", "pools.man: pools has no 'man'", "main"),
            ("pools.man={slots: 2}", "pools.man: pools has no 'man'", "main"),
            ("groups.polcy.on_failure=restart", "groups.polcy: groups has no 'polcy'", "policy"),
            ("groups.policy.roles.actr.slots=[0]", "groups.policy.roles.actr: groups.policy.roles has no", "actor"),
            ("pools.main.env.LEVL=warn", "pools.main.env.LEVL: pools.main.env has no 'LEVL'", "LEVEL"),
            ("groups.policy.roles.actor.with.names.on=x", "with.names.on: groups.policy.roles.actor.with.names", "one"),
            ("groups.policy.roles.open.with.siz=3", "roles.open.with.siz: config_roles:Open takes any name", "size"),
        ],
    )
    def test_a_name_that_the_file_lacks(self, write: Write, change: str, at: str, near: str) -> None:
        """A change to a missing name is refused, with the nearest name and the + that would make a new one."""
        path = write("""\
            pools: {main: {slots: 2, env: {LEVEL: info}}}
            executor: {use: local, with: {processes: true}}
            groups:
              policy:
                pool: main
                roles:
                  actor: {use: "config_roles:Actor", with: {hidden: 1, names: {one: a}}}
                  open: {use: "config_roles:Open", with: {size: 1}}
            """)
        told = only(path, set=[change])
        assert at in told
        assert f"--set +{change.partition('=')[0]}" in told
        assert f"(did you mean {near!r}?)" in told

    def test_a_plus_makes_a_name(self, write: Write) -> None:
        changes = ["+pools.second.slots=3", "pools.second.gpus=1", "+pools.main.env.B=c", "+pools.main.slots=2"]
        changes.append("+executor.with.processes=true")
        with pytest.warns(UserWarning, match=r"pools\.second: no group uses this pool"):
            config = load_config(write(GROUP + "        with: {hidden: 1}"), set=changes)
        assert config.pools["second"] == PoolConfig(slots=3, gpus=1)
        assert config.pools["main"] == PoolConfig(slots=2, env={"B": "c"})

    def test_known_keys_are_set_without_plus(self, write: Write) -> None:
        text = GROUP + "        with: {hidden: 1}\n" + "job: config_roles:train"
        changes = ["pools.main.gpus=1", "groups.policy.roles.actor.with.lr=1e-3", "job.with.shuffle=true"]
        config = load_config(write(text), set=[*changes, "executor.with.processes=true", "call_timeout=5"])
        assert config.job is not None
        assert config.job.with_ == {"shuffle": True}
        assert "did you mean 'gpus'" in only(write(text), set=["pools.main.gpu=1"])
        assert "did you mean 'shuffle'" in only(write(text), set=["job.with.shufle=1"])

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ("seed", "write --set path=value, as in --set pools.main.slots=2"),
            ("=1", "write --set path=value"),
            ("pools..slots=1", "write --set path=value"),
            ("seed=[1", "the value '[1': not YAML: "),
            ("seed.x=1", "seed is 1, which has no keys"),
            ("pools.main[0]=1", "pools.main is not a list"),
            ("pols.main.slots=1", "unknown key 'pols'"),
        ],
    )
    def test_a_change_that_cannot_be_made(self, write: Write, change: str, told: str) -> None:
        text = only(write("seed: 1\npools: {main: {slots: 1}}"), set=[change])
        assert told in text
        assert f"(from --set {change})" in text

    @pytest.mark.parametrize("change", ["seed=", "seed=x", "seed=[", "nothing.seed="])
    def test_long_value_is_shortened(self, write: Write, change: str) -> None:
        text = only(write("seed: 1\npools: {main: {slots: 1}}"), set=[change + 5000 * "9"])
        assert f"(from --set {change}999" in text
        assert "… (5,0" in text
        assert len(text) < 600

    def test_an_index_beyond_a_list(self, write: Write) -> None:
        path = write(GROUP + "        with: {hidden: 1}\n        slots: [0]")
        assert "is a list of 1" in only(path, set=["groups.policy.roles.actor.slots[1]=1"])


class TestNeeds:
    """A config is refused if its executor can't provide what its roles and pools need."""

    def test_process_groups_of_threads(self, write: Write) -> None:
        text = GROUP.replace("Actor", "Together")
        assert only(write(text)) == (
            "line 6: groups.policy.roles.actor: role 'actor' makes process groups of its 2 ranks, which need a process "
            "each, but slots of 'local' are threads of one: use connect('local', processes=True), in a config "
            "executor.with.processes=true"
        )
        load_config(write(text), set=["executor.with.processes=true"])
        load_config(write(text), set=["pools.main.slots=1"])
        load_config(write(text), set=["groups.policy.roles.actor.slots=[1]"])

    def test_an_environment_of_threads(self, write: Write) -> None:
        path = write(GROUP + "        with: {hidden: 1}")
        assert only(path, set=["+pools.main.env.A=b"]) == (
            "pools.main.env: slots of 'local' are threads of this process, whose environment they share: set it where "
            "that is started, or use executor.with.processes=true (from --set +pools.main.env.A=b)"
        )
        load_config(path, set=["+pools.main.env.A=b", "+executor.with.processes=true"])

    def test_roles_of_threads_that_sleep(self, write: Write) -> None:
        path = write(GROUP + "        with: {hidden: 1}")
        swap = ["groups.policy.residency=swap", "groups.policy.device_memory=1GiB"]
        why = "slots of 'local' are threads of this process, whose roles can't sleep: use executor.with.processes=true"
        assert only(path, set=swap).startswith(f"groups.policy.residency: {why}")
        spills = "executor.with.spill_dir=/scratch"
        assert only(path, set=[spills]).startswith(f"executor.with.spill_dir: {why}")
        load_config(path, set=[*swap, spills, "executor.with.processes=true"])
        kept = ["pools.main.gpus=1", "groups.policy.roles.actor.sleep=vmm"]
        assert "slots of 'local' are threads of the driver's, where no role sleeps" in only(path, set=kept)
        load_config(path, set=kept[1:])  # ignored without a GPU

    def test_the_default_group(self, write: Write) -> None:
        told = only(write(GROUP + "        with: {hidden: 1}\n        default_group: true"))
        assert "role 'actor' makes process groups of its 2 ranks" in told


class TestWarnings:
    def test_a_pool_that_no_group_uses(self, write: Write) -> None:
        text = "pools:\n  main: {slots: 1}\n  spare: {slots: 1}\n" + GROUP.partition("\n")[2]
        with pytest.warns(UserWarning, match=r"^line 3: pools\.spare: no group uses this pool") as caught:
            load_config(write(text + "        with: {hidden: 1}"))
        assert caught[0].filename == __file__

    def test_config_with_only_pools_is_accepted(self, write: Write) -> None:
        assert list(load_config(write("pools: {main: {slots: 1}}")).pools) == ["main"]


def test_role_and_job_checks_report_lines(write: Write) -> None:
    """Mistakes that roles and jobs find have a line; after a wrong signature no check runs."""
    path = write(
        """\
        pools: {main: {slots: 1}}
        groups:
          policy:
            pool: main
            roles:
              first: {use: "config_roles:Checked", with: {size: 2, names: [a]}}
              actor: {use: "config_roles:Open"}
              second:
                use: config_roles:Below
              third: {use: "config_roles:Checked", with: {size: wide}}
              fourth: {use: "config_roles:Checked", with: {size: 100}}
        job: {use: "config_roles:judged"}
        """
    )
    assert [str(each) for each in mistakes(path)] == [
        "line 6: groups.policy.roles.first.with.names[0]: config_roles:Checked comes after none",
        "line 8: groups.policy.roles.second.with.size: must be even",
        "line 10: groups.policy.roles.third.with.size: must be an integer, not the text 'wide'",
        "line 11: groups.policy.roles.fourth.use: what checks its options raised ArithmeticError: no idea",
        "line 12: job.with.steps: more than policy (5)",
    ]


_NAMES_AN_ENGINE = """
import colocate
from colocate.errors import PluginError

def wrong(options, own, before):
    try:
        import nothing_like_torch
    except ModuleNotFoundError as error:
        found = PluginError("the engine can't be imported: No module named 'nothing_like_torch'")
        found.__cause__ = error
        yield "engine", found
    yield "engine", PluginError("no engine is called so")

@colocate.checks(wrong)
class Engine(colocate.Role):
    def __init__(self, engine="one"): ...
    @colocate.method
    def step(self): ...
"""


def test_a_module_that_is_not_installed(write: Write, tmp_path: Path) -> None:
    """A missing module is one mistake, however many roles and jobs need it; each misspelt module is one."""
    (tmp_path / "needing.py").write_text("import nothing_like_torch\n")
    (tmp_path / "named.py").write_text(_NAMES_AN_ENGINE)
    roles = {name: {"use": f"needing:{name}"} for name in "abc"} | {"d": {"use": "named:Engine"}}
    config: dict[str, Any] = {
        "pools": {"main": {"slots": 1}},
        "groups": {"g": {"pool": "main", "roles": roles}},
        "job": "needing:train",
    }
    write("")
    missing, unknown = mistakes(config)
    assert "No module named 'nothing_like_torch'" in missing.message
    assert (unknown.path, unknown.message) == ("groups.g.roles.d.with.engine", "no engine is called so")
    config["groups"]["g"]["roles"] = {name: {"use": f"neding:{name}"} for name in "abc"}
    assert len(mistakes(config)) == 4
