"""What installs colocate, as messages say it: from a checkout, as its name on the public index is another project's."""

from __future__ import annotations

SAME_LINE = "pip install . in checkouts of colocate of the same commit"
"""What makes two sides the same."""


def pip_line(extra: str | None = None) -> str:
    """What installs colocate, with an extra."""
    what = "." if extra is None else f"'.[{extra}]'"
    return f"pip install {what} in a checkout of colocate"


def distribution_line(distribution: str, extra: str | None) -> str:
    """What installs any distribution, with an extra."""
    if distribution == "colocate":
        return pip_line(extra)
    return f"pip install '{distribution}[{extra}]'" if extra else f"pip install {distribution}"


def version_line(distribution: str, version: str | None) -> str:
    """What installs any distribution in one version."""
    return SAME_LINE if distribution == "colocate" else f"pip install '{distribution}=={version}'"
