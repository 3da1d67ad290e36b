"""`${NAME}` in a config is filled in from the reader's environment, or is a mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.config.test_mistakes import mistakes, only

from colocate.config import load_config
from colocate_run.cli.check import describe_config, show_plan as check

Write = Callable[[str], Path]
TOP = """
    name: demo
    executor: {use: local, with: {processes: true}}
    pools: {main: {slots: 1}}
    groups:
      policy:
        pool: main
        roles:
          other:
            use: config_roles:Open
            with:
"""


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"JOB": "42", "PLACE": "/data/a b", "SIGNS": "{a: [b]} # c\\n- d", "NOTHING": "", "HF_TOKEN": "hf_secret"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)


def found(write: Write, *lines: str, **options: Any) -> dict[str, Any]:
    """Return the options of a role."""
    text = TOP + "".join(f"              {line}\n" for line in lines)
    return load_config(write(text), **options).groups["policy"].roles["other"].with_


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("${PLACE}/x", "/data/a b/x"),
        ("run-${JOB}-${JOB}", "run-42-42"),
        ("[a, '${JOB}']", ["a", "42"]),
        ("${JOB}", 42),  # unquoted: read as YAML
        ("${JOB}.5", 42.5),
        ("'${JOB}'", "42"),
        ("${NOTHING}", None),
        ("'${NOTHING}'", ""),
        ("${SIGNS}", "{a: [b]} # c\\n- d"),  # a value, and never more YAML
        ("$${JOB}", "${JOB}"),
        ("a $$${JOB} $", "a $${JOB} $"),
        ("$5 for $Nobody", "$5 for $Nobody"),
        ("{{ JOB }}", "{{ JOB }}"),
    ],
)
def test_variables_are_filled_in(write: Write, written: str, wanted: object) -> None:
    """A variable is filled in for a file and for a change, and the dumped config loads as the same config."""
    if written.startswith("{{"):
        written = f"'{written}'"
    options = found(write, f"x: {written}")
    assert options == {"x": wanted}
    assert type(options["x"]) is type(wanted)
    assert found(write, "x: 1", set=[f"groups.policy.roles.other.with.x={written}"]) == {"x": wanted}
    config = load_config(write(TOP + f"              x: {written}\n"))
    assert load_config(write(config.dump())) == config
    assert load_config(config.to_dict()) == config


def test_in_every_part(write: Write) -> None:
    lines = ["name: run-${JOB}", "executor: {use: local, with: {processes: true}}"]
    pool = ["pools:", "  main:", "    slots: ${JOB}", "    env: {A: '${PLACE}'}"]
    config = load_config(write("\n".join([*lines, *pool])))
    assert (config.name, config.pools["main"].slots, config.pools["main"].env) == ("run-42", 42, {"A": "/data/a b"})


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            "${PLACES}",
            "${PLACES}: there is no environment variable PLACES here; did you mean PLACE?; the text itself is written "
            "with another $: $${PLACES}",
        ),
        ("${oc.env:JOB}", "${oc.env:JOB} names no environment variable, as ${HOME} does; the text itself is written"),
        ("${JOB:-1}", "${JOB:-1} names no environment variable"),
        ("${}", "${} names no environment variable"),
        ("a ${ b", "${ names no environment variable"),
    ],
)
def test_invalid_variables_are_refused(write: Write, written: str, told: str) -> None:
    said = only(write(TOP + f"              x: {written}\n"))
    assert said.startswith(f"line 12: groups.policy.roles.other.with.x: {told}")
    assert told in only(write("name: a"), set=["+pools.p.slots=1", f"pools.p.strategy={written}"])


def test_inside_of_braces(write: Write) -> None:
    """A variable inside of braces is refused with advice."""
    assert only(write("pools: {main: {slots: ${JOB}}}")).endswith(
        "inside of {...} and [...] a value with ${NAME} stands in quotes"
    )


def test_shell_style_variable_stays_with_warning(write: Write) -> None:
    """`$NAME` as in a shell stays, with a warning if there is such a variable."""
    with pytest.warns(UserWarning, match=r"line 12: .*with\.x: \$PLACE isn't filled in; \$\{PLACE\} would be"):
        assert found(write, "x: $PLACE/x") == {"x": "$PLACE/x"}


def test_a_config_of_others_reads_none(write: Write) -> None:
    """A config of others can't read the environment; the caller's changes can."""
    path = write("name: n-${HF_TOKEN}\nobserve: ['${HF_TOKEN}']")
    told = [str(each) for each in mistakes(path, allow_import=False)]
    assert told[0] == (
        "line 1: name: ${HF_TOKEN}: a config that may name plugins only can't read your environment: give the value "
        "by --set, if you trust it"
    )
    assert "hf_secret" not in str(told)
    assert load_config(write("seed: 1"), set=["name=n-${JOB}"], allow_import=False).name == "n-42"


def test_secrets_are_written_as_variable_names(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """A run has the values of secrets, and a written or shown config has the variables' names."""
    lines = ["url: https://me:${HF_TOKEN}@host", "many: [a, '${HF_TOKEN}']", "place: ${PLACE}"]
    path = write(TOP + "".join(f"              {line}\n" for line in lines))
    changes = ["pools.main.env={HF: '${HF_TOKEN}'}"]
    config = load_config(path, set=changes)
    assert config.groups["policy"].roles["other"].with_["url"] == "https://me:hf_secret@host"
    assert config.pools["main"].env == {"HF": "hf_secret"}
    assert load_config(write(config.dump())) == config
    check(path, None, changes, json=False)
    shown = [config.dump(), repr(config.to_dict()), json.dumps(describe_config(config)), capsys.readouterr().out]
    for text in shown:
        assert "hf_secret" not in text
        assert "https://me:${HF_TOKEN}@host" in text
        assert "/data/a b" in text
