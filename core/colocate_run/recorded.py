"""Apply a config's settings for recordings: record, replay or compare roles, and report differences."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from colocate.errors import ColocateError
from colocate.texts import find_nearest
from colocate_run.config.schema import Config
from colocate_run.folder import RunFolder, replace_nonfinite

if TYPE_CHECKING:
    from colocate.connecting import Runtime
    from colocate.driver import ColocatedGroup, FirstDifference
    from colocate.plugins import RoleSpec
    from colocate_run.run import Run

_FOLDER = "recording"
_INPUTS = ":inputs"
_log = logging.getLogger("colocate")


def match_roles(config: Config, name: str) -> list[tuple[str, str]]:
    """Return the group and name of each role that matches a name of the form "role" or "group.role"."""
    roles = [(group, role) for group, entry in config.groups.items() for role in entry.roles]
    return [(group, role) for group, role in roles if name in (role, f"{group}.{role}")]


def find_mistakes(config: Config) -> Iterator[tuple[tuple[str | int, ...], str, str | None]]:
    """Yield the mistakes in a config's settings for recordings: place, message, and the nearest valid name."""
    named = [
        *((("record", index), name.removesuffix(_INPUTS)) for index, name in enumerate(config.record)),
        *(((key, name), name) for key in ("replay", "compare") for name in getattr(config, key)),
    ]
    names = [role for entry in config.groups.values() for role in entry.roles]
    for place, name in named:
        if not match_roles(config, name):
            yield (
                place,
                f"there is no role {name!r}: there are {', '.join(dict.fromkeys(names))}",
                find_nearest(name, names),
            )
    for key in ("replay", "compare"):
        for name, folder in getattr(config, key).items():
            from colocate.driver import load_recording

            try:
                load_recording(folder)
            except ColocateError as error:
                yield (key, name), str(error), None
    replayed = {role for name in config.replay for role in match_roles(config, name)}
    for name in config.compare:
        if replayed & {*match_roles(config, name)}:
            yield ("compare", name), "is replayed: there is nothing to compare", None
    for key, is_given, roles, are in (
        ("record_limit", config.record_limit is not None, config.record, "recorded"),
        ("replay_from", config.replay_from is not None, config.replay or config.compare, "replayed or compared"),
        ("replay_loose", config.replay_loose, config.replay, "replayed"),
        ("tolerance", config.tolerance != 0.0, config.compare, "compared"),
    ):
        if is_given and not roles:
            yield (key,), f"is of roles that are {are}, and there are none", None


def apply_recordings(config: Config, group: str, name: str, role: RoleSpec[Any]) -> RoleSpec[Any]:
    """Return a role's spec with the config's settings to replay or compare the role."""
    from colocate.driver import Compare, Replay

    for key, folder in config.replay.items():
        if (group, name) in match_roles(config, key):
            role = role.on(replay=Replay(folder, config.replay_from, config.replay_loose))
    for key, folder in config.compare.items():
        if (group, name) in match_roles(config, key):
            role = role.on(compare=Compare(folder, config.tolerance, config.replay_from))
    return role


@attrs.define
class RecordedRoles:
    """The recorded and the compared roles of a run.

    Attributes:
        record: Recorded roles, by group and name.
        limit: Maximum size of the recording, in bytes or as text.
        inputs: Recorded roles with recorded inputs.
        compare: Folders of earlier runs, by compared role.
        has_differences: Whether a compared role returned different results, or was never called.
    """

    record: tuple[tuple[str, str], ...] = ()
    limit: int | str | None = None
    inputs: Collection[tuple[str, str]] = ()
    compare: Mapping[tuple[str, str], str] = attrs.field(factory=dict)
    has_differences: bool = attrs.field(default=False, init=False)

    @classmethod
    def from_config(cls, config: Config) -> RecordedRoles:
        """Read the recorded and the compared roles from a config."""
        names = [name.removesuffix(_INPUTS) for name in config.record]
        record = dict.fromkeys(role for name in names for role in match_roles(config, name))
        compare = {role: folder for name, folder in config.compare.items() for role in match_roles(config, name)}
        with_inputs = [name.removesuffix(_INPUTS) for name in config.record if name.endswith(_INPUTS)]
        inputs = {role for name in with_inputs for role in match_roles(config, name)}
        return cls(tuple(record), config.record_limit, inputs, compare)

    @contextlib.contextmanager
    def record_roles(
        self, runtime: Runtime, groups: Mapping[str, ColocatedGroup], folder: RunFolder, run: Run
    ) -> Iterator[None]:
        """A context manager that records the roles, and at the end adds the tables of comparisons to the run."""
        with contextlib.ExitStack() as stack:
            if self.record:
                views = {(group, role): groups[group].role(role) for group, role in self.record}
                inputs = [views[view_role] for view_role in self.inputs]
                place = folder.free_name(_FOLDER, "")
                stack.enter_context(runtime.record(views.values(), place, limit=self.limit, inputs=inputs))
            yield
            self._report_comparison(groups, folder, run)

    def _report_comparison(self, groups: Mapping[str, ColocatedGroup], folder: RunFolder, run: Run) -> None:
        from colocate.driver import comparison

        whole: dict[str, Any] = {}
        origins: list[tuple[str, FirstDifference]] = []
        for (group, role), before in self.compare.items():
            methods = comparison(groups[group].role(role))
            origins += [(group, each.origin) for each in methods if each.origin is not None]
            rows = [attrs.asdict(each) for each in methods]
            whole[f"{group}.{role}"] = rows
            shown = [{key: value for key, value in row.items() if key not in ("first", "origin")} for row in rows]
            run._tables[f"{role} compared with {before}"] = [{**row, **_round_numbers(row)} for row in shown]
        if origins:
            is_one = len({group for group, _ in origins}) == 1  # Calls of different groups have no common order.
            _, origin = min(origins, key=lambda each: each[1].seq if is_one else each[1].begun)
            _log.warning("begin here: %s", origin.words)
        if whole:
            folder.write_file("comparison.json", json.dumps(replace_nonfinite(whole), indent=2, allow_nan=False))
            differs = any(row["differ"] or row["missing"] for rows in whole.values() for row in rows)
            self.has_differences = differs or not all(any(row["calls"] for row in rows) for rows in whole.values())


def _round_numbers(row: Mapping[str, Any]) -> dict[str, str]:
    return {key: f"{row[key]:.3g}" for key in ("absolute", "relative")}
