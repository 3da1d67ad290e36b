"""Fill in `${NAME}` in a config's values from the environment of the reading process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import attrs

from colocate.texts import find_nearest
from colocate_run.config.secrets import is_secret

_OPENING = "${"
_WRITTEN = re.compile(r"\$?\$\{(?:([^{}]*)\})?")  # Matches a variable, an escaped `${`, or a malformed variable.
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHELLS = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)


@attrs.define
class FilledText:
    """A text with filled-in variables, together with mistakes and a warning."""

    text: str
    mistakes: list[str] = attrs.field(factory=list)  # The mistakes, as texts.
    difference: str | None = None  # A warning about shell syntax ($NAME), which isn't filled in.
    has_secret: bool = False  # Whether a variable's name looks like the name of a secret.


@attrs.frozen
class Variables:
    """The environment variables that a config may use.

    Attributes:
        values: Values by name; None if the config may use no variables.
    """

    values: Mapping[str, str] | None

    @classmethod
    def from_environment(cls, allowed: bool = True) -> Variables:
        """Return this process's variables, or no variables for an untrusted config, which could leak secrets."""
        return cls(os.environ if allowed else None)

    def fill(self, text: str) -> FilledText:
        """Return a text with variables replaced by their values; `$${` is a literal `${`."""
        result = FilledText(text)
        if _OPENING in text:
            result.text = _WRITTEN.sub(lambda each: self._replace_variable(each, result), text)
        elif (name := _SHELLS.search(text)) is not None and name[1] in (self.values or ()):
            result.difference = f"{name[0]} isn't filled in; ${{{name[1]}}} would be"
        return result

    def _replace_variable(self, written: re.Match[str], found: FilledText) -> str:
        if written[0].startswith("$$"):
            return written[0][1:]
        name, text = written[1], f"; the text itself is written with another $: $${written[0][1:]}"
        if name is None or not _NAME.fullmatch(name):
            found.mistakes.append(f"{written[0]} names no environment variable, as ${{HOME}} does{text}")
        elif self.values is None:
            found.mistakes.append(
                f"{written[0]}: a config that may name plugins only can't read your environment: give the value by "
                "--set, if you trust it"
            )
        elif name not in self.values:
            near = find_nearest(name, self.values)
            meant = f"; did you mean {near}?" if near else ""
            found.mistakes.append(f"{written[0]}: there is no environment variable {name} here{meant}{text}")
        else:
            found.has_secret |= is_secret(name)
            return self.values[name]
        return written[0]


def escape_text(text: str) -> str:
    """Escape `${` in a text, so that reading the config fills in no variables."""
    return text.replace(_OPENING, f"${_OPENING}")
