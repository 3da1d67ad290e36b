"""The commands of the pods in the page's manifests run on a machine in the place of a cluster, as the image's user."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.clusters.machines import ROOT, Machine, Machines
from tests.docs.test_kubernetes import FILES, USER, manifest, pods

from colocate.testing.waiting import PATIENCE_S, wait_until

# A job that runs until a stop is requested, and prints the step after which it began.
COUNTING = """
import time
from pathlib import Path

def job(run):
    step = 0 if run.resumed is None else int((run.resumed / "step").read_text())
    print("begins after", step, flush=True)
    while not run.stopping:
        step += 1
        time.sleep(0.01)
    with run.checkpoint(step) as directory:
        (directory / "step").write_text(str(step))
"""
TRAIN = """
pools: {main: {slots: 1}}
groups:
  group: {pool: main, roles: {echo: {use: "colocate.testing.probes.plain:Echo"}}}
job: {use: "counting:job"}
"""


class Image:
    """Nearly the Dockerfile's image: a virtual environment with its packages, and a folder that its user owns."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine, self.folder, self.job = machine, folder, folder / "job"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "fresh")], check=True)
        lines = (FILES / "Dockerfile").read_text().splitlines()
        (install,) = (line.removeprefix("RUN ") for line in lines if line.startswith("RUN pip install "))
        (copied,) = (line.split()[1:-1] for line in lines if line.startswith("COPY docs/"))
        path = f"{folder / 'fresh' / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", install.replace("/src", str(ROOT))],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        self.job.mkdir()
        for each in copied:
            shutil.copy(ROOT / each, self.job)
        (self.job / "counting.py").write_text(COUNTING)
        (self.job / "train.yaml").write_text(TRAIN)
        for own in (self.job, *self.job.iterdir()):
            os.chown(own, USER, USER)
        if sys.base_prefix.startswith(
            "/root/"
        ):  # the image's user can't read /root; in an image the interpreter isn't there
            words = "mkdir /tmp/own; mount --bind {0} /tmp/own; mount -t tmpfs -o mode=755 tmpfs /root; mkdir -p {0}; "
            machine.run("sh", "-c", f"set -e; {words} mount --bind /tmp/own {{0}}".format(sys.base_prefix))

    def start(self, command: str, **env: str) -> subprocess.Popen[str]:
        """Start a container's command as the image's user, in the image's folder and environment."""
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        path = f"PATH={self.folder / 'fresh' / 'bin'}:/usr/bin:/bin"
        all_env = [f"{name}={value}" for name, value in env.items()]
        words = [*user, "env", "-i", path, f"HOME={self.job}", "LANG=C.UTF-8", *all_env]
        # stderr is part of the output
        return self.machine.start_driver(*words, "sh", "-c", f"exec {command} 2>&1", cwd=self.job)

    def run(self, command: str, **env: str) -> str:
        """Run a container's command to its end; return its output."""
        process = self.start(command, **env)
        out, _ = process.communicate(timeout=10 * PATIENCE_S)
        assert process.returncode == 0, out
        return out

    def healthy(self, url: str) -> bool:
        """Return whether an HTTP probe, like a kubelet's, succeeds."""
        text = f"import urllib.request; assert urllib.request.urlopen('{url}', timeout=1).status == 200"
        return self.machine.run(sys.executable, "-c", text, check=False).returncode == 0


@pytest.fixture
def image(machines: Callable[[int], Machines]) -> Image:
    all_machines = machines(1)
    folder = all_machines.shared / "image"
    folder.mkdir()
    return Image(all_machines[0], folder)


def begins(process: subprocess.Popen[str], said: list[str]) -> int | None:
    """Wait until a job begins; return the step before the first, or None after an exit. `said` gets the output."""
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"begins after (\d+)", line):
            return int(found[1])
    return None


@pytest.mark.timeout(900)
def test_ray(image: Image) -> None:
    """The RayJob's driver stops when its pod ends, and the next try resumes and saves again."""
    job = manifest("rayjob.yaml")["spec"]
    (container,) = pods("rayjob.yaml")["head"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]} | {"PYTHONUNBUFFERED": "1"}
    parameters = job["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].items()
    image.start("ray start --head --block " + " ".join(f"--{key}={value}" for key, value in parameters), **env)
    wait_until(lambda: image.healthy("http://127.0.0.1:8265/api/gcs_healthz"), "the head is healthy")
    image.start("ray start --address=127.0.0.1:6379 --num-cpus=2 --block", **env)
    wait_until(lambda: image.healthy("http://127.0.0.1:52365/api/local_raylet_healthz"), "its raylet is")
    wait_until(lambda: "/2.0 CPU" in image.run("ray status", **env), "the worker has joined, as KubeRay waits for it")
    submit = f"ray job submit --address=http://127.0.0.1:8265 --submission-id=%s -- {job['entrypoint']}"
    first = image.start(submit % "first", **env)
    said: list[str] = []
    assert begins(first, said) == 0, "".join(said)
    image.run(shlex.join(container["lifecycle"]["preStop"]["exec"]["command"]).replace("/job", str(image.job)))
    out, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode
    assert f"it has {env['COLOCATE_GRACE_S']} s" in out
    assert "go on with --resume" in out
    second = image.start(submit % "second", **env)
    assert begins(second, said), "".join(said)
    image.run("ray job stop --address=http://127.0.0.1:8265 second", **env)
    out, _ = second.communicate(timeout=PATIENCE_S)
    assert "SIGTERM: stopping after a checkpoint" in out  # Ray doesn't show later output
    saved = image.job / "runs" / "train" / "checkpoints"
    wait_until(lambda: len(list(saved.glob("step-*"))) == 2, "it has saved")


@pytest.mark.timeout(900)
def test_dask(image: Image) -> None:
    """The DaskJob's driver writes a checkpoint on SIGTERM, and the next try resumes after the saved step."""
    args = {what: shlex.join(pod["containers"][0]["args"]) for what, pod in pods("daskjob.yaml").items()}
    address = "tcp://127.0.0.1:8786"
    image.start(args["scheduler"])
    image.start(args["worker"].replace("'$(DASK_WORKER_NAME)'", "worker-0"), DASK_SCHEDULER_ADDRESS=address)
    begun: list[int] = []
    until = time.monotonic() + 10 * PATIENCE_S
    while len(begun) < 2:
        driver = image.start(args["driver"].replace("tcp://train-scheduler:8786", address))
        at = begins(driver, [])
        if at is not None:
            image.machine.signal(driver, signal.SIGTERM)
            begun.append(at)
        out, _ = driver.communicate(timeout=PATIENCE_S)
        assert time.monotonic() < until, out  # the operator, too, retries until the cluster is up
        if at is not None:
            assert driver.returncode == 128 + signal.SIGTERM, out
    assert begun[0] == 0
    assert begun[1] > 0
