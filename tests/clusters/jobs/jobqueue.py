"""A pool waits for Dask workers of an adaptive SLURMCluster (dask-jobqueue), and a cancelled one is replaced."""

import subprocess
import time

from dask_jobqueue import SLURMCluster

import colocate
from colocate import Role, method


class Where(Role):
    @method
    def where(self) -> str:
        import os

        return os.environ["SLURM_JOB_ID"]

    @method
    def sleep(self) -> None:
        time.sleep(300)

    def save(self, directory: str) -> None:
        open(f"{directory}/saved", "w").close()

    def restore(self, directory: str) -> None:
        pass


def main() -> None:
    cluster = SLURMCluster(
        cores=2,
        processes=1,
        memory="500MB",
        interface="eth0",
        scheduler_options={"interface": "eth0", "dashboard_address": ":0"},
        walltime="00:20:00",
        local_directory="/tmp",
    )
    cluster.adapt(minimum=0, maximum=3, interval="1s")
    with (
        cluster,
        colocate.connect("dask", address=cluster.scheduler_address) as runtime,
        runtime.reserve(slots=2, timeout=120) as pool,
    ):
        group = pool.spawn({"where": colocate.role(Where)}, on_failure="restart")
        view = group.role("where", Where)
        before = view.where()
        print("jobs", *sorted(before), flush=True)
        call = view.sleep.submit()
        subprocess.run(["scancel", before[0]], check=True)
        try:
            call.result(120)
        except colocate.GroupRestarted:
            print("restarted", flush=True)
        group.wait_ready(timeout=180)
        after = view.where()
        assert before[0] not in after, (before, after)
        assert len(set(after)) == 2, after
        print("replaced", flush=True)


if __name__ == "__main__":
    main()
