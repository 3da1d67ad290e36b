"""Run verl's own trainers with a tiny model on the CPU, to compare verl's worker groups with colocate's.

    python -m colocate_verl.demo --trainer v1|v0|sft --executor ray|dask|local|verl --steps 3

Model, tokenizer and data are made at run time. Trainers, engines (FSDP2), losses and data sets are verl's. `rollout`
replaces verl's sampling and rewards, which need vLLM and Ray actors.
"""

# Types are checked without verl installed.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil

import colocate_verl
from colocate import ConfigError
from colocate.plugins import get_pip_line
from colocate_verl.demo import ENVIRONMENT, NAMES
from colocate_verl.demo.config import RANKS, make, settings
from colocate_verl.demo.trainers import make_answers, of_v0, of_v1


@attrs.define
class Run:
    """The measurements of a trainer's run: the start-up time in seconds, and the metrics of each step."""

    start_s: float
    steps: list[dict[str, float]]
    asleep_bytes: int = 0
    """Bytes that left the memory of all ranks in each sleep of the critic."""
    left_bytes: int = 0
    """Bytes of the sleeping critic that stayed in memory."""


def train(trainer: str, folder: Path, options: argparse.Namespace, resume: int = 0) -> Run:
    """Run a trainer from the start, or from the checkpoint of step `resume`."""
    log = folder / f"log-{resume}.jsonl"
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    config = settings(trainer, folder, options.steps, options.set)
    run, began = Run(0.0, []), time.perf_counter()
    if trainer == "sft":
        from verl.trainer.sft_trainer_ray import SFTTrainer

        if resume:
            path = folder / "checkpoints" / f"global_step_{resume}"
            config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(path)
        fitted = SFTTrainer(config)
        run.start_s = time.perf_counter() - began
        fitted.fit()
    else:
        fitted = of_v0(config) if trainer == "v0" else of_v1(config)
        began = time.perf_counter()
        fitted.init_workers() if trainer == "v0" else fitted.init()
        run.start_s = time.perf_counter() - began
        if options.sleep:
            put_critic_to_sleep(fitted, run)
        fitted.fit() if trainer == "v0" else fitted.fit(make_answers(config))
    # Drop this reference, because verl stores import errors whose tracebacks would keep the trainer alive.
    del fitted
    run.steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    return run


def put_critic_to_sleep(trainer: Any, run: Run) -> None:
    """Put the critic to sleep while the actor trains. The critic's next call wakes the critic."""
    group, update = colocate_verl.group_of(trainer.critic_wg), trainer._update_actor

    def with_critic_asleep(*args: Any, **kwargs: Any) -> Any:
        run.asleep_bytes = group.sleep("critic")
        roles = [role for slot in group.memory().slots for role in slot.roles if role.role == "critic"]
        run.left_bytes = sum(sum(role.device.values()) + sum(role.host.values()) for role in roles)
        return update(*args, **kwargs)

    trainer._update_actor = with_critic_asleep


@contextlib.contextmanager
def start_ray() -> Iterator[None]:
    """A context manager that runs Ray on this machine, as verl's `main_ppo` does."""
    import ray

    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Otherwise Ray writes a token to the home directory.
    # Use a short path, because the paths of Ray's sockets are limited in length.
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        # Offer more resources than there are, because verl's pools request ten CPUs per process.
        pretended: dict[str, Any] = {"num_cpus": 64, "num_gpus": 2 * RANKS}
        ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=folder, **pretended)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def start_transfer_queue(folder: Path) -> Iterator[None]:
    """A context manager that runs the TransferQueue of verl's V1 trainer, as `TaskRunnerV1` does."""
    import transfer_queue

    transfer_queue.init(settings("v1", folder, 1).transfer_queue)
    try:
        yield
    finally:
        transfer_queue.close()


def list_ray_processes() -> list[str]:
    """Return the names of Ray's own processes below this process."""
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    return sorted({name for name in names if name in ("raylet", "gcs_server")})


def parse_options() -> argparse.Namespace:
    """Parse the command line and set this process's environment; exit on a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m colocate_verl.demo", description="verl's own trainers with a tiny model on the CPU."
    )
    parser.add_argument("--trainer", choices=["v1", "v0", "sft"], required=True)
    parser.add_argument(
        "--executor", choices=["ray", "dask", "local", "verl"], required=True, help="verl: its own groups"
    )
    parser.add_argument("--steps", type=int, default=3, help="at least 2 (default: 3)")
    parser.add_argument("--sleep", action="store_true", help="the critic sleeps while the actor trains")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of verl's config; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="a file for all metrics, as JSON")
    options = parser.parse_args()
    if importlib.util.find_spec("verl") is None:
        parser.error(f"verl isn't installed: {get_pip_line('verl')}")
    if options.steps < 2:
        parser.error("--steps: the first step warms up, so give at least 2")
    if options.trainer == "v1" and options.executor not in ("ray", "verl"):
        parser.error("--trainer v1: its data is in the TransferQueue, which is Ray actors: --executor ray or verl")
    if options.sleep and (options.trainer == "sft" or options.executor == "verl"):
        parser.error("--sleep: for v0 and v1, which have a critic, and not on verl's own worker groups, which can't")
    os.environ.update(ENVIRONMENT)
    os.environ.pop("COLOCATE_VERL", None)
    if wrong := [change for change in options.set if "=" not in change]:
        parser.error(f"--set {wrong[0]}: say KEY=VALUE, as in --set data.train_batch_size=16")
    options.set = dict(change.split("=", 1) for change in options.set)
    try:
        settings(options.trainer, Path(), options.steps, options.set)
    except ConfigError as error:
        parser.error(f"--set: {error}")
    return options


def main() -> None:
    """Train, and print the losses and norms of each step."""
    options = parse_options()
    if options.executor != "verl":
        # COLOCATE_VERL would do the same, but without `cpus`, by which Dask offers room for all ranks.
        colocate_verl.install(options.executor, **{"cpus": RANKS} if options.executor == "dask" else {})
    import torch

    torch.set_num_threads(1)  # One thread, because the driver and all workers share a machine.
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # Keep verl's output out of the results.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verl-demo-")))
        make(folder, options.steps)
        if options.executor in ("ray", "verl"):
            stack.enter_context(start_ray())
        if options.trainer == "v1":
            stack.enter_context(start_transfer_queue(folder))
        run = train(options.trainer, folder, options)
        again = train("sft", folder, options, resume=options.steps - 1) if options.trainer == "sft" else None
        ray_has = list_ray_processes()
    names = NAMES["sft" if again else "ppo"]
    print(format_table(names, run.steps))
    if again:
        print(
            f"\nfrom the checkpoint after step {options.steps - 1} "
            f"on:\n{format_table(names, again.steps, options.steps)}"
        )
    if options.sleep:
        memory = f"{run.asleep_bytes:,} bytes were gone, {run.left_bytes:,} left"
        print(f"\nWhile the actor trained the critic slept: {memory}.")
    print(f"\nStarted in {run.start_s:.1f} s. Processes of Ray: {', '.join(ray_has) or 'none'}.")
    if options.out:
        options.out.write_text(json.dumps(attrs.asdict(run) | {"again": again and again.steps, "ray": ray_has}))
    if again and any(again.steps[-1][name] != run.steps[-1][name] for name in names):
        sys.exit("The run that was resumed isn't equal.")


def format_table(names: Sequence[str], steps: Sequence[Mapping[str, float]], first: int = 1) -> str:
    """Format the steps' losses and norms as a table, with all compared digits."""
    timed = "timing_s/step" in steps[0]
    lines = ["step" + "".join(f"{name:>18}" for name in names) + "  seconds" * timed]
    for number, step in enumerate(steps, first):
        seconds = f"{step['timing_s/step']:9.2f}" if timed else ""
        lines.append(f"{number:4}" + "".join(f"{step[name]:18.8f}" for name in names) + seconds)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
