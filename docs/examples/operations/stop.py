"""Ask the runs of this container to end, and wait until they have: the preStop hook of a pod with a driver."""

import psutil


def drivers() -> list[psutil.Process]:
    """Those that somebody has started as `colocate run ...`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "run" in words[2:3] and words[1].rpartition("/")[2] == "colocate":  # python, the script, its first word
            found.append(process)
    return found


if __name__ == "__main__":
    asked = drivers()
    for each in asked:
        each.terminate()
    psutil.wait_procs(asked)
