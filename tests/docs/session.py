"""Run the blocks of a page in order, as a reader would: `python session.py STEPS RESULTS`, in an empty folder.

Python blocks share the namespace of `__main__`, as if all were one script called page.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import re
import subprocess
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from tests.forked import beside

SCRIPT = "page.py"
PATIENCE_S = 280  # no measure of speed: a page that hangs has to end, with its stacks


def main() -> None:
    sys.dont_write_bytecode = True  # The environment says so to child processes.
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    steps, results = map(Path, sys.argv[1:])
    module = types.ModuleType("__main__")
    module.__file__ = str(Path(SCRIPT).absolute())
    sys.modules["__main__"] = module
    sys.path.insert(0, str(Path.cwd()))
    sys.argv = [SCRIPT]
    done: list[dict[str, Any]] = []
    for step in json.loads(steps.read_text()):
        output, error = _DO[step["do"]](step, module)
        done.append({"output": output, "error": error})
        if error is not None:
            break
    results.write_text(json.dumps(done))


def _python(step: dict[str, Any], module: types.ModuleType) -> tuple[str, str | None]:
    script = Path(SCRIPT)
    before = script.read_text() if script.exists() else ""
    script.write_text(before + step["text"] + "\n")
    printed = io.StringIO()
    try:
        code = compile("\n" * before.count("\n") + step["text"], module.__file__ or SCRIPT, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, vars(module))
    except BaseException:
        return printed.getvalue(), traceback.format_exc()
    return printed.getvalue(), None


def _write(step: dict[str, Any], module: types.ModuleType) -> tuple[str, str | None]:
    path = Path(step["file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(step["text"])
    return "", None


def _config(step: dict[str, Any], module: types.ModuleType) -> tuple[str, str | None]:
    from colocate import ConfigError, load_config

    path = Path(step["file"] or "config.yaml")
    path.write_text(step["text"])
    try:
        load_config(path)
    except ConfigError as error:
        return "", None if step["wrong"] else str(error)
    return "", "it was to be refused, and isn't" if step["wrong"] else None


def _command(step: dict[str, Any], module: types.ModuleType) -> tuple[str, str | None]:
    if re.fullmatch(r"colocate [\w ./=\[\]:+-]+", step["text"]):  # no need for a shell
        done = beside(step["text"].split()[1:])
    else:
        done = subprocess.run(
            ["bash", "-c", step["text"]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    return done.stdout, f"exit status {done.returncode}\n{done.stdout}" if done.returncode else None


_DO = {"python": _python, "write": _write, "config": _config, "command": _command}

if __name__ == "__main__":
    main()
