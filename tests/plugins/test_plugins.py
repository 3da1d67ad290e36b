"""Plugins by name, from distributions that pip has installed; messages as a user reads them."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from colocate._plugins.plugins import FoundRole, PluginInfo, find_executor, find_job, find_role, plugins, plugins_named
from colocate._system import installed
from colocate.errors import PluginError

Put = Callable[..., list[Path]]


def message(find: Callable[[], object]) -> str:
    with pytest.raises(PluginError) as caught:
        find()
    return str(caught.value)


def test_a_role_is_found_by_name_and_loaded_only_when_asked(with_distributions: Put) -> None:
    with_distributions("acme")
    found = find_role("acme.reward")
    assert found == FoundRole("acme.reward", "acme.reward:Reward", "acme", "1.0.0")
    assert found.origin == "acme 1.0.0"
    assert "acme.reward" not in sys.modules
    assert found.load().__qualname__ == "Reward"
    assert find_role("acme.reward").load() is found.load()


def test_a_job_is_found_by_name(with_distributions: Put) -> None:
    with_distributions("acme")
    found = find_job("acme.tally")
    assert (found.distribution, found.version) == ("acme", "1.0.0")
    assert found.load().__name__ == "tally"


def test_listing_imports_no_plugin(with_distributions: Put) -> None:
    folders = with_distributions("acme", "broken")
    code = (
        "import sys; from colocate._plugins.plugins import plugins; names = {p.name for p in plugins()}\n"
        "assert {'acme', 'raises', 'local', 'slow'} <= names, names\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('acme', 'broken', 'colocate_local', 'torch')])"
    )
    path = [str(folder) for folder in folders]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}\n{code}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_listing_says_where_each_plugin_comes_from(with_distributions: Put) -> None:
    with_distributions("acme", "acme_rival")
    (acme,) = [plugin for plugin in plugins() if plugin.name == "acme"]
    assert acme == PluginInfo("roles", "acme", "acme", "1.0.0", "acme.plugin", "acme 1.0.0", ("acme-rival 0.3",))


def test_only_the_plugin_that_a_name_needs_is_imported(with_distributions: Put) -> None:
    with_distributions("acme", "broken")  # every plugin of broken would raise
    find_role("acme.reward").load()
    assert not [name for name in sys.modules if name.startswith("broken")]
    assert "acme.judge" not in sys.modules


def test_a_reference_needs_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_roles.py").write_text(
        "import colocate\nclass Outer:\n    class Mine:\n        @colocate.method\n        def go(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_role("my_roles:Outer.Mine")
    assert (found.distribution, found.origin) == (None, "module my_roles")
    assert found.load().__name__ == "Mine"
    assert message(find_role("my_roles:Outr").load) == (
        "role 'my_roles:Outr': module my_roles has no 'Outr'; did you mean 'Outer'?"
    )
    assert message(find_role("my_rolls:Mine").load) == (
        "role 'my_rolls:Mine': module my_rolls can't be imported: ModuleNotFoundError: No module named 'my_rolls'"
    )


# The distribution, the search and the name; and the message.
MESSAGES = [
    (
        ("acme", find_role, "acme.rewrad"),
        "'acme' (acme 1.0.0) has no role 'rewrad': it has 'judge' and 'reward'; did you mean 'reward'?",
    ),
    (
        ("acme", find_job, "acme.tallly"),
        "'acme' (acme 1.0.0) has no job 'tallly': it has 'tally'; did you mean 'tally'?",
    ),
    (
        ("acme_newer", find_job, "acme.tally"),
        "the role plugin 'acme' (acme 2.0.0) has no jobs: no hook colocate_jobs()",
    ),
    (
        ("acme", find_executor, "locla"),
        "no executor is called 'locla' (installed: dask, local and ray); did you mean 'local'?",
    ),
    (("acme", find_role, "reward"), "'reward' is not a role's name: write plugin.role, or module:Name"),
    (
        ("acme", find_role, "acme.reward.Reward"),
        "'acme' (acme 1.0.0) has no role 'reward.Reward': it has 'judge' and 'reward'; "
        "a class of a module is named with a colon: acme.reward:Reward",
    ),
    (
        ("acme", find_role, "acme.judge"),
        "role 'acme.judge' (acme 1.0.0): module acme.judge can't be imported: "
        "ModuleNotFoundError: No module named 'acme_scoring_models' "
        "({folder}/acme/judge.py, line 1); install what it needs: pip install 'acme[acme]'",
    ),
    (
        ("acme", find_role, "acme/reward.py:Reward"),
        "role 'acme/reward.py:Reward' names a file; write its module: acme.reward:Reward",
    ),
    (
        ("acme", find_role, "./acme/reward.py:Reward"),
        "role './acme/reward.py:Reward' names a file; write its module: acme.reward:Reward",
    ),
    (
        ("broken", find_role, "gone.reward"),
        "the role plugin 'gone' (broken 0.1), entry point gone = broken.no_such_module, can't be imported: "
        "ModuleNotFoundError: No module named 'broken.no_such_module'",
    ),
    (
        ("broken", find_role, "misplaced.reward"),
        "no role plugin is called 'misplaced': broken 0.1 has it in the group 'colocate.role', which isn't read; "
        "it belongs in 'colocate.roles'",
    ),
    (
        ("broken", find_role, "names-class.reward"),
        "the role plugin 'names-class' (broken 0.1) implements no hook; it needs colocate_roles or colocate_jobs, "
        "marked with @colocate.hookimpl: its entry point names broken.roles:Methodless, where mostly the module "
        "stands, broken.roles",
    ),
    (
        ("broken", find_role, "ends.reward"),
        "the role plugin 'ends' (broken 0.1) can't be imported: SystemExit: the licence file is missing "
        "({folder}/broken/ends.py, line 1)",
    ),
    (
        ("broken", find_role, "misspelt.reward"),
        "the role plugin 'misspelt' (broken 0.1) has a hook 'colocate_rolls', which doesn't exist; "
        "did you mean 'colocate_roles'?",
    ),
    (
        ("broken", find_role, "unmarked.reward"),
        "the role plugin 'unmarked' (broken 0.1) has colocate_roles(), but it isn't marked with @colocate.hookimpl",
    ),
    (
        ("broken", find_role, "hookless.reward"),
        "the role plugin 'hookless' (broken 0.1) implements no hook; it needs colocate_roles or colocate_jobs, "
        "marked with @colocate.hookimpl",
    ),
    (
        ("broken", find_role, "raising-hook.reward"),
        "the role plugin 'raising-hook' (broken 0.1): its hook colocate_roles() raised: ValueError: no roles today "
        "({folder}/broken/raising_hook.py, line 6)",
    ),
    (
        ("broken", find_role, "wrong-return.reward"),
        "'wrong-return' (broken 0.1): its hook colocate_roles() returned ['reward'] (list), "
        'not a dict of names to objects or "module:Name"',
    ),
    (
        ("broken", find_role, "wrong-name.reward"),
        "'wrong-name' (broken 0.1): its hook colocate_roles() returned {'reward': 'broken.roles.Fine'} (dict), "
        'not "module:Name" where it gives text',
    ),
    (
        ("broken", find_role, "returns-nothing.reward"),
        "'returns-nothing' (broken 0.1): its hook colocate_roles() returned nothing, "
        'not a dict of names to objects or "module:Name"',
    ),
    (
        ("broken", find_executor, "slow"),
        "'slow' (broken 0.1): its hook colocate_executor() returned <class 'broken.executor.Slow'> (type), "
        "not a subclass of colocate.executor.Executor",
    ),
    (
        ("broken", find_executor, "nameless"),
        "the executor 'nameless' (broken 0.1): its class Nameless doesn't say what it is called: "
        "write name = 'nameless' in it",
    ),
    (
        ("broken", find_executor, "unfinished"),
        "the executor 'unfinished' (broken 0.1): its class Unfinished lacks close(), launch(), release(), "
        "reserve() and running(), which are duties of an executor",
    ),
    (
        ("broken", find_role, "roles.methodless"),
        "role 'roles.methodless' (broken 0.1): broken.roles.Methodless has no role methods; "
        "decorate at least one with @colocate.method",
    ),
    (
        ("broken", find_job, "roles.number"),
        "job 'roles.number' (broken 0.1) is 'broken.roles', which can't be called",
    ),
    (
        ("broken", find_role, "roles.absent"),
        "role 'roles.absent' (broken 0.1): module broken.roles has no 'Methodles'; did you mean 'Methodless'?",
    ),
]


@pytest.mark.parametrize(("looked_for", "told"), MESSAGES, ids=[looked_for[2] for looked_for, _ in MESSAGES])
def test_messages(with_distributions: Put, looked_for: tuple[str, Callable[[str], Any], str], told: str) -> None:
    distribution, find, name = looked_for
    (folder,) = with_distributions(distribution)
    assert message(lambda: find(name).load()) == told.replace("{folder}", str(folder))


def test_lookup_errors_name_installed_plugins(with_distributions: Put) -> None:
    with_distributions("acme", "broken")
    for find, name, begins, ends in (
        (find_role, "acmee.reward", "no role plugin is called 'acmee' (installed: acme", "; did you mean 'acme'?"),
        (
            find_role,
            "my_package.roles.Reward",
            "",
            "; a class of a module is named with a colon: my_package.roles:Reward",
        ),
        # `all` stands for any extra: the search for an executor of that name tells how to install it.
        (find_executor, "all", "", f"; install it: {installed.get_pip_line('all')}"),
        (
            find_role,
            "roles.function",
            "role 'roles.function' (broken 0.1) is <function function",
            "which is not a class",
        ),
        (find_role, "wrong-signature.reward", "the role plugin 'wrong-signature' (broken 0.1) is not valid: ", ""),
        (
            find_role,
            "broken.ends:Reward",
            "role 'broken.ends:Reward': module broken.ends can't be imported: SystemEx",
            "",
        ),
    ):
        text = message(lambda find=find, name=name: find(name).load())  # type: ignore[misc]
        assert text.startswith(begins)
        assert text.endswith(ends)
    (acme,) = plugins_named("acme")  # a plugin is at fault if one of its roles is
    fault = acme.fault()
    assert fault is not None
    assert fault.message.startswith("role 'acme.judge' (acme 1.0.0): module acme.judge can't be imported")


def test_plugin_error_has_attributes(with_distributions: Put) -> None:
    """A PluginError has its cause, the plugin's name and distribution, and a hint as attributes."""
    folder, *_ = with_distributions("broken", "acme", "acme_rival")
    with pytest.raises(PluginError) as caught:
        find_role("raises.reward")
    error = caught.value
    assert str(error) == (
        "the role plugin 'raises' (broken 0.1) can't be imported: RuntimeError: the licence file is missing "
        f"({folder}/broken/raises.py, line 1)"
    )
    assert (error.name, error.distribution) == ("raises", "broken")
    assert isinstance(error.__cause__, RuntimeError)
    for name, hint, ends in (
        ("needy", "pip install 'broken[needy]'", "; install what it needs: pip install 'broken[needy]'"),
        (
            "acme",
            "pip uninstall acme-rival",
            "1.0.0 and acme-rival 0.3; keep one, for example: pip uninstall acme-rival",
        ),
    ):
        with pytest.raises(PluginError) as caught:
            find_role(f"{name}.reward")
        assert caught.value.hint == hint
        assert str(caught.value).endswith(ends)


def test_a_signal_while_a_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit that a signal handler raises during an import isn't reported as the plugin's fault."""
    (tmp_path / "signalled.py").write_text("import signal\nsignal.raise_signal(signal.SIGUSR1)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(SystemExit, match="143"):
            find_role("signalled:Reward").load()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_one_broken_plugin_does_not_break_the_next(with_distributions: Put) -> None:
    """A broken plugin doesn't stay registered: the next plugin loads, and the broken one keeps its error."""
    with_distributions("broken", "acme")
    for name in ("misspelt", "wrong-signature", "hookless"):
        with pytest.raises(PluginError):
            find_role(f"{name}.reward")
    assert find_role("acme.reward").load().__name__ == "Reward"
    with pytest.raises(PluginError, match="colocate_rolls"):
        find_role("misspelt.reward")


def test_needed_returns_versions_of_extra(with_distributions: Put) -> None:
    """`needed` returns the libraries of a plugin's extra with their installed version, or None."""
    with_distributions("broken", "acme")
    (needy,) = plugins_named("needy")
    assert needy.needed() == {"a-missing-library": None}
    (dask,) = plugins_named("dask")
    assert list(dask.needed()) == ["distributed"]
    assert dask.needed()["distributed"]
    assert plugins_named("local")[0].needed() == {}


def test_no_line_installs_foreign_colocate() -> None:
    """No line says `pip install colocate`: on the public index the name is another project's."""
    root = Path(__file__).parents[2]
    said = [path for top in ("core", "executors", "plugins", "docs") for path in (root / top).rglob("*")]
    texts = {path: path.read_text() for path in [*said, root / "README.md"] if path.suffix in (".py", ".md")}
    assert [path for path, text in texts.items() if re.search(r"pip install ['\"]?colocate\b", text)] == []
    assert installed.get_version_line("colocate", "1.0") == installed.get_same_line()
    assert installed.get_distribution_line("colocate", "ppo") == installed.get_pip_line("ppo")
    assert installed.get_distribution_line("acme", None) == "pip install acme"


@pytest.mark.parametrize("from_checkout", [True, False])
def test_the_line_for_an_extra_holds_for_wheels_too(monkeypatch: pytest.MonkeyPatch, from_checkout: bool) -> None:
    """The install line of an extra names its libraries, from a checkout and from a wheel alike."""
    monkeypatch.setattr(installed, "_is_from_checkout", lambda: from_checkout)
    assert re.fullmatch(r"pip install 'ray>=[\d.]+'", installed.get_pip_line("ray"))
    assert ("checkout" in installed.get_pip_line()) == from_checkout
