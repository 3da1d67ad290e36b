"""Colocate's entries in a Ray cluster's tables: placement groups and actors. Runs in the envoy and `Owner` actors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs
import ray
from ray.util.placement_group import placement_group_table

from colocate.executor import Running
from colocate_ray.nodes import Nodes

PREFIX = "colocate/"  # Names of colocate's placement groups and actors in Ray start with this prefix.
OWNER = "/owner-"  # Names of actors that own a pool contain this part.
KEEPERS = "/keepers-"  # Names of actors that hold keepers contain this part.
_ACTOR = "Ray actor"
_JOB_DIGITS = 8  # The last digits of a placement group's id are the job's id. Ray's table has no column for the job.


def list_own(nodes: Nodes, held: Collection[str] = ()) -> list[Running]:
    """List this driver's placement groups and actors, including owners' reservations with ids in `held`."""
    job_id: str = ray.get_runtime_context().get_job_id()
    everyone = _read_actors()
    owned = _owned_reservations(everyone)

    def is_own(name: str, job: str) -> bool:
        return name in held if name in owned else job == job_id

    groups = [group for group in _read_groups() if is_own(_group_id(group), group["job"])]
    actors = [actor for actor in everyone if is_own(_reservation_id(actor), actor["JobID"])]
    holders = {(_reservation_id(actor), actor["Address"]["NodeID"]) for actor in actors if KEEPERS in actor["Name"]}
    groups_found = [_add_doubt(_make_reservation(group, nodes, None), group, holders) for group in groups]
    return groups_found + [_make_actor(actor, nodes) for actor in actors]


def list_strays(nodes: Nodes) -> list[Running]:
    """List the placement groups and actors of drivers that are gone."""
    jobs = {job["JobID"]: job for job in _read_jobs()}
    living = list_living_jobs()
    everyone = _read_actors()
    owned = _owned_reservations(everyone)
    groups = [group for group in _read_groups() if group["job"] not in living]
    actors = [actor for actor in everyone if actor["JobID"] not in living and _reservation_id(actor) not in owned]
    reservations = [
        _make_reservation(entry, nodes, jobs.get(entry["job"])) for entry in groups if _group_id(entry) not in owned
    ]
    return reservations + [_make_actor(actor, nodes) for actor in actors]


def list_living_jobs() -> set[str]:
    """Return the ids of Ray's jobs with live drivers."""
    return {job["JobID"] for job in _read_jobs() if not job["IsDead"]}


def find_owner(name: str) -> tuple[str, int] | None:
    """Return the node id and the process id of a pool's owner; None if Ray doesn't list the owner."""
    owners = [(actor["Address"]["NodeID"], actor["Pid"]) for actor in _read_actors() if actor["Name"] == name]
    return owners[0] if owners else None


def list_groups(owner: str) -> list[str]:
    """Return the ids of the placement groups that an owner has created."""
    return [
        group["placement_group_id"] for group in _read_groups() if _group_id(group) == _reservation_id({"Name": owner})
    ]


def _owned_reservations(actors: Iterable[Mapping[str, Any]]) -> set[str]:
    return {_reservation_id(actor) for actor in actors if OWNER in actor["Name"]}


def _reservation_id(actor: Mapping[str, Any]) -> str:
    name: str = actor["Name"]
    return name.removeprefix(PREFIX).rpartition("/")[0]


def _group_id(group: Mapping[str, Any]) -> str:
    name: str = group["name"]
    return name.removeprefix(PREFIX)


def _make_reservation(group: Mapping[str, Any], nodes: Nodes, job: Mapping[str, Any] | None) -> Running:
    names = sorted({nodes.name_of(node) for node in group["bundles_to_node_id"].values() if node})
    detail = f"placement group {group['placement_group_id']} of {len(group['bundles'])} slots"
    if job is not None:
        detail += f", made by the job {job['JobID']} of pid {job['DriverPid']} on {job['DriverIPAddress']}"
    if group["state"] != "CREATED":
        detail += f", {group['state']}"
    return Running("reservation", group["name"].removeprefix(PREFIX), node=", ".join(names), detail=detail)


def _add_doubt(found: Running, group: Mapping[str, Any], holders: set[tuple[str, str]]) -> Running:
    """Set a reservation's `doubt` text if the placement group isn't complete, or an actor with keepers is lost."""
    # An owner's holders are named after the reservation, and a driver's holders after the runtime.
    owners = {found.id, found.id.rpartition("/")[0]}
    held = {node for owner, node in holders if owner in owners}
    lost = [str(index) for index, node in group["bundles_to_node_id"].items() if node not in held]
    doubt = ""
    if group["state"] != "CREATED":
        doubt = f"its placement group is {group['state']}"
    elif lost:
        doubt = f"of its placement group's bundles, {', '.join(lost)} have lost the Ray actor that holds their keepers"
    return attrs.evolve(found, doubt=doubt)


def _make_actor(actor: Mapping[str, Any], nodes: Nodes) -> Running:
    name = actor["Name"].removeprefix(PREFIX)
    return Running(
        _ACTOR,
        name,
        owner=name.rpartition("/")[0],
        node=nodes.name_of(actor["Address"]["NodeID"]),
        pid=actor["Pid"],
        since=actor["StartTime"] / 1000 or None,
        detail=f"actor {actor['ActorID']}",
    )


def _read_groups() -> Iterator[dict[str, Any]]:
    table: Mapping[str, dict[str, Any]] = placement_group_table()
    for key, group in table.items():
        if group["name"].startswith(PREFIX) and group["state"] != "REMOVED":
            yield {**group, "job": key[-_JOB_DIGITS:]}


def _read_actors() -> list[dict[str, Any]]:
    from ray._private import state

    ask: Callable[..., dict[str, dict[str, Any]]] = state.actors
    return [actor for actor in ask(actor_state_name="ALIVE").values() if actor["Name"].startswith(PREFIX)]


def _read_jobs() -> list[dict[str, Any]]:
    from ray._private import state

    ask: Callable[[], list[dict[str, Any]]] = state.jobs
    return ask()
