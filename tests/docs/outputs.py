"""Comparison of a page's outputs with the real ones, without differences from run to run."""

from __future__ import annotations

import platform
import re

NODE = "laptop"  # the machine's name in pages

_VARIES = (
    (re.compile(r"^\[colocate\] group '[^']*' starts: .*\n", re.MULTILINE), ""),  # on slow machines only
    (re.compile(r"\bpid \d+"), "pid N"),
    (re.compile(r"\bdriver \d+"), "driver N"),  # a pid
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), "DATE"),
    (re.compile(rf"\b{NODE}-\d+-\d+\b"), f"{NODE}-N-N"),  # the id of a runtime
    (re.compile(r"(?<![\w./])/[^\s'\",:)\]]*/"), ""),  # paths on this machine
    (re.compile(r"(\.(?:py|yaml):)\d+"), r"\1N"),
    (re.compile(r'(", line )\d+'), r"\1N"),
    (re.compile(r"\b\d+(?:\.\d+)?(?:e-\d+)? ?(s|ms|GiB)\b"), r"N \1"),
    (re.compile(r"^(python|system|cpus|CPUs) .*$", re.MULTILINE), r"\1 N"),  # facts of the machine
    (re.compile(r" \[(?:not )?done on rank [^]]*\]"), " [the other ranks]"),  # a race
    (re.compile(r"\b0x[0-9a-f]+"), "0xN"),
    (re.compile(r" +"), " "),
    (re.compile(r" $", re.MULTILINE), ""),
)


def normal(text: str) -> str:
    """Return a text without the parts that differ from run to run."""
    text = re.sub(rf"\b{re.escape(platform.node())}\b", NODE, text)
    for pattern, instead in _VARIES:
        text = pattern.sub(instead, text)
    return text.strip("\n")


def matches(shown: str, real: str) -> bool:
    """Return whether a page shows the real output; `...` is any text, and as the first line also no line."""
    pattern = ".*".join(re.escape(part) for part in normal(shown).split("..."))
    pattern = re.sub(r"^\.\*\\\n", r"(?:.*\n)?", pattern)
    return re.fullmatch(pattern, normal(real), re.DOTALL) is not None
