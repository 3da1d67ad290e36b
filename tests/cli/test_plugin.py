"""`colocate plugins NAME`: one plugin in detail."""

import json
from typing import Any

from tests.cli.conftest import CommandLine


def shown(colocate: CommandLine, name: str, *distributions: str, status: int = 0) -> dict[str, Any]:
    done = colocate("plugins", name, "--json", distributions=distributions)
    assert (done.returncode, done.stderr) == (status, "")
    (plugin,) = json.loads(done.stdout)
    return dict(plugin)


def test_roles_with_options_and_methods_and_jobs(colocate: CommandLine) -> None:
    done = colocate("plugins", "ppo")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ppo: roles, jobs, from colocate ")
    about = "The value model: the actor's backbone with one output, set by `load`."
    at = lines.index(f"role ppo.critic: {about} (colocate_ppo.critic:Critic)")
    assert lines[at + 1 : at + 6] == [
        "needs process_group",
        "  load(weights: Weights) -> None",
        "      Broadcast(), Gather(): Copy the backbone of a language model; all values are 0 at first.",
        "  values(rollout: Rollout) -> Tensor",
        "      Scatter('rollout'), Concat(): Return the value of the state before each response token, `[B, R]`.",
    ]
    at = lines.index("options of ppo.actor")
    assert lines[at + 1].split() == ["option", "type", "default", "what", "it", "is"]
    assert " ".join(lines[at + 2].split()) == (
        "model str | None None A hub id or a local folder with a causal language model and its tokenizer; None makes a "
        "small Llama with random weights that reads characters. A model with code of its own (`auto_map`) fails to "
        "load."
    )
    assert " ".join(lines[at + 3].split()) == "layers int 2 Layers of the small Llama."
    assert any(line.startswith("job ppo.train: Train an actor with PPO") for line in lines)
    assert any(line.split()[:3] == ["steps", "int", "100"] for line in lines)


def test_options_that_are_inherited_are_described(colocate: CommandLine) -> None:
    """A role that inherits its constructor shows the descriptions of the inherited options, too."""
    (role,) = shown(colocate, "grpo")["roles"].values()
    assert all(option["about"] for option in role["options"].values())


def test_extra_options_are_shown_last(colocate: CommandLine) -> None:
    """Options that a docstring describes as `**options` are shown as `**`, after the named ones."""
    options = shown(colocate, "rollout")["roles"]["rollout.engine"]["options"]
    assert list(options) == ["engine", "sampling", "child", "**"]
    assert options["child"]["about"].endswith("a `ChildOptions` configures the process.")
    assert options["**"]["about"] == "The engine's options."


def test_executors(colocate: CommandLine) -> None:
    local = shown(colocate, "local")
    assert local["capabilities"] == {"OwnProcess": "local with processes=True", "SharedSlots": "local"}
    assert list(local["options"]) == ["processes", "cpus", "gpus", "strict"]
    assert local["options"]["cpus"]["about"] == "Number of CPUs for slots; None doesn't count CPUs."
    dask = shown(colocate, "dask")
    assert dask["capabilities"] == {
        **dict.fromkeys(("Detachable", "Watchable", "Labelled", "Growing"), "dask with address=…"),
        **dict.fromkeys(("OwnProcess", "MultiNode", "SharedSlots"), "dask"),
    }
    assert (
        "capabilities: Detachable (dask with address=…), Watchable (dask with address=…), "
        "Labelled (dask with address=…), Growing (dask with address=…), OwnProcess, MultiNode, "
        "SharedSlots" in colocate("plugins", "dask").stdout
    )


def test_any_plugin_that_is_listed(colocate: CommandLine) -> None:
    """A third-party plugin is shown; each broken plugin is an error that names it."""
    installed = "acme", "broken", "outpost"
    listed = json.loads(colocate("plugins", "--json", distributions=installed).stdout)
    working = {"dask", "local", "ray", "ppo", "grpo", "outpost", "scribe", "dice"}
    working |= {"rollout", "transformers", "vllm", "tensorboard", "wandb", "mlflow", "prometheus", "opentelemetry"}
    for name in sorted({each["name"] for each in listed} - working):
        done = colocate("plugins", name, distributions=installed)
        assert done.stdout.startswith(f"{name}: ")
        assert done.returncode == 1, name
        assert done.stderr.startswith("error: "), name
        assert "Traceback" not in done.stderr
        assert repr(name) in done.stderr or f"'{name}." in done.stderr
    assert colocate("plugins", "outpost", distributions=installed).returncode == 0


def test_importable_roles_are_shown_beside_broken_roles(colocate: CommandLine) -> None:
    done = colocate("plugins", "acme", distributions=("acme",))
    assert done.returncode == 1
    assert "role acme.judge: broken, see below" in done.stdout
    assert "  score(texts: list[str]) -> list[float]\n      Scatter('texts'), Concat()\n" in done.stdout
    assert "install what it needs: pip install 'acme[acme]'" in done.stderr
    acme = shown(colocate, "acme", "acme", status=1)
    assert acme["roles"]["acme.judge"]["error"]["type"] == "PluginError"
    assert acme["roles"]["acme.reward"]["options"]["wanted"]["default"] == "10"


def test_an_unknown_name(colocate: CommandLine) -> None:
    done = colocate("plugins", "pop")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: no plugin is called 'pop' (installed: dask, grpo, local, mlflow, opentelemetry, ppo, prometheus, "
        "ray, rollout, tensorboard, transformers, vllm and wandb); did you mean 'ppo'?\n"
    )
    (error,) = json.loads(colocate("plugins", "pop", "--json").stdout)["errors"]
    assert error["type"] == "PluginError"


def test_a_name_that_two_claim(colocate: CommandLine) -> None:
    done = colocate("plugins", "acme", distributions=("acme", "acme_rival"))
    assert done.returncode == 1
    assert "is claimed by acme 1.0.0 and acme-rival 0.3" in done.stderr
