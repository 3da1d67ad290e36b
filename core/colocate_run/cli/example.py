"""`colocate example`: copy an example of the documentation from the installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.text import Text

from colocate import errors
from colocate.errors import ConfigError
from colocate.texts import did_you_mean
from colocate_run.cli.output import report_errors
from colocate_run.screen import console, show_table


@report_errors
def copy_example(name: str | None) -> int:
    """Copy an example into the working directory, or list all examples."""
    examples = _find_examples()
    if name is None:
        rows = [
            {"example": example, "files": ", ".join(path.name for path in paths)} for example, paths in examples.items()
        ]
        show_table("examples", rows, console())
        return 0
    if name not in examples:
        raise ConfigError(
            f"there is no example {name!r}: there are {', '.join(examples)}{did_you_mean(name, examples)}"
        )
    if existing := [path.name for path in examples[name] if Path(path.name).exists()]:
        raise ConfigError(f"{', '.join(existing)}: there already, and nothing was copied; use another folder")
    for path in examples[name]:
        if path.is_dir():
            shutil.copytree(path, path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, path.name)
        console().print(Text(path.name), soft_wrap=True)
    if config := next((path for path in examples[name] if path.suffix == ".yaml"), None):
        console().print(Text(f"run it: colocate run {config.name}"), soft_wrap=True)
    return 0


def _find_examples() -> dict[str, list[Path]]:
    """Return the paths of each example, by the example's name (the folder's or file's name without a suffix)."""
    package = Path(errors.__file__).parent
    inside = package / "examples"  # A wheel has the examples in the package.
    examples: dict[str, list[Path]] = {}
    for path in sorted((inside if inside.is_dir() else package.parents[1] / "docs" / "examples").iterdir()):
        if not path.name.startswith(("_", ".")):
            examples.setdefault(path.stem, []).append(path)
    return examples
