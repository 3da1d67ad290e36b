"""Random programs: plain data, made from a seed alone."""

from __future__ import annotations

import random

import attrs

KINDS = ("kill", "stop", "gil", "drop", "driver")
"""SIGKILL of a worker, SIGSTOP of a worker, the GIL held for ever, a connection dropped, SIGKILL of the driver."""

PEERS = ("peer", "peer listener")
DROPS = {
    "local": ("lane", *PEERS),
    "ray": ("lane", *PEERS, "keeper", "envoy"),
    "dask": ("lane", *PEERS, "keeper"),
}
"""The sockets that are ours, by executor: `local` has no keeper and no envoy, Dask no envoy."""

MOMENTS = ("idle", "call", "call", "queue", "transfer", "pipeline", "sleep", "wake", "spawn", "close")
TORCH = {"local": 0.45, "ray": 0.05, "dask": 0.05}
"""The share of programs that use process groups and train: importing torch takes longer than all the rest."""
TEARS = 0.7
"""The share of these in which ranks make different numbers of updates before the fault; the same share after it."""
TOGETHER = ("collective", "collective", "train", "train", "renewal", "renewal")  # moments of programs with torch
TURNERS = ("c", "d")
"""The additional roles of episodes in which roles take turns. They use no sibling, and have the most memory."""
TURNS = 0.3  # the share of episodes in which roles take turns
CHILDREN = 0.2  # the share of the other episodes in which role "a" has a child
BUDGETS = (1088 << 10, 1664 << 10)
"""The first has room for role "c" alone, the second for one role more; all roles need 1.75 MiB at least."""
ROLLOUTS = 0.5  # the share of episodes with some of `ROLLOUT`
ROLLOUT = ("weights", "rows", "child")
"""Syncs of weights to a role "s", calls whose rows end one by one, and a role "k" with a child on each rank."""
CHILD_BYTES = 128 << 10  # the memory of a child, at most
WAYS = ("stream", "stream", "return", "early", "all", "batch")
"""Ways to read rows: as rows end, with errors raised or returned, until the stream is closed, all at once, as a batched
method yields rows."""
STOPS = 0.25  # the share of episodes in which ranks stop in calls of role "a", with a debugger
RECORDS = 0.25  # the share of episodes in which role "a" is recorded
REPLAYS = 0.7  # the share of recordings that are replayed, amid another fault
PROFILES = 0.2  # the share of episodes in which a group is profiled
SAMPLERS = ("torch", "torch", "torch", "py-spy")
LANES = 0.3  # the share of episodes without turns that have a role in the background
BACKGROUND = "g"
"""The name of the background role."""
HOWS = ("wait", "keep", "abort")
AMID = ("talk", "talk_async", "submit", "stream", "batch")
"""The activities of a background role at a pause."""
SLOTS = 3
FREED = ("before", "backward")  # where a step of training raises while the other ranks wait


@attrs.frozen
class Step:
    what: str  # the kind: a method of `Steps`
    role: str = "a"  # "a" or "b"
    group: int = 0  # which of the episode's groups
    work_s: float = 0.0  # the duration of role code
    ranks: tuple[int, ...] = ()  # the ranks that are called, or that raise
    size: int = 0  # bytes of the payload; of a sync, bytes of its bucket
    count: int = 1  # the number of calls
    where: str = ""  # in a step of training, where ranks raise; of rows, one of `WAYS`
    how: str = ""  # of a pause: one of `HOWS`
    retry: int = 0  # of rows, like `sticky`: an option of the call
    sticky: bool = False
    giver: int | None = None  # of a sync, the source's group, if another one
    roles: tuple[str, ...] = ()  # the order in which roles are called, again and again


@attrs.frozen
class Fault:
    kind: str  # one of `KINDS`, or "none"
    moment: str  # the activity under way
    group: int  # the index of the group
    rank: int  # the slot of the group
    delay_s: float  # after the moment's begin
    target: str = ""  # the dropped connection
    # the end of a hang: the group's close, the pool's, the group's own grace, or (of a stop) SIGCONT
    ending: str = "close"
    grace: float = 0.2  # of the close
    where: str = ""  # amid rows, one of `WAYS`; amid a pause, one of `AMID`
    how: str = ""  # amid a pause, one of `HOWS`
    retry: int = 0  # amid rows
    others: tuple[int, int] = (0, 0)  # amid a sync, the target's group and the source's


@attrs.frozen
class Profiling:
    """A profile of a group."""

    group: int  # the index of the group
    role: str | None  # the profiled role; None for all
    sampler: str  # one of `SAMPLERS`
    late: bool  # whether the profile begins after the first steps
    fails: bool  # whether an error leaves its block
    again: bool  # whether the profile ends before `after`, where another one is taken


@attrs.frozen
class Episode:
    """Groups are spawned on the pool, do something, suffer one fault, and are closed."""

    groups: tuple[int, ...]  # the number of slots of each
    second: str  # the slots of a role "b": "all", "first", or "" for none
    trains: bool  # whether there is a role "t", which trains a model on all slots
    before: tuple[Step, ...]  # the steps before the fault
    settled: bool  # whether `before` is awaited before the fault, or still under way
    restart: bool  # whether the hit group restarts; if `settled`, from a checkpoint made before the fault
    fault: Fault
    after: tuple[Step, ...]  # the steps after the fault, which must work with a group that hasn't failed
    budget: int = 0  # the roles' bytes on each slot, if roles take turns; else 0
    declared: tuple[str, ...] = ()  # the order of calls that the groups declare
    child: bool = False  # whether role "a" has a child, which does a part of its steps
    rollout: tuple[str, ...] = ()  # some of `ROLLOUT`
    background: bool = False  # whether there is a background role
    records: bool = False  # whether role "a" is recorded
    stops: bool = False  # whether ranks stop in calls of role "a"
    profile: Profiling | None = None
    replay: Fault | None = None  # the fault during a replay of the recording; None without a replay


@attrs.frozen
class Program:
    """The program of one seed."""

    seed: int
    kind: str
    slots: int
    torch: bool
    episodes: tuple[Episode, ...]


def kind_of(seed: int) -> str:
    """Return a seed's kind: each kind has seeds of its own, so that each can be counted."""
    return KINDS[seed % len(KINDS)]


def program(executor: str, seed: int, torch: bool | None = None) -> Program:
    draw = random.Random(f"{seed}")
    with_torch = draw.random() < TORCH[executor] if torch is None else torch
    kind = kind_of(seed)
    slots = draw.choice((2, 2, 3)) if with_torch else draw.choice((1, 2, 2, 3))
    episodes = tuple(_episode(draw, executor, kind, slots, with_torch) for _ in range(draw.randint(2, 4)))
    turns = random.Random(f"turns {seed}")  # a generator per addition keeps the rest of a seed's program
    episodes = tuple(_taking_turns(turns, each) if turns.random() < TURNS else each for each in episodes)
    children = random.Random(f"children {seed}")
    episodes = tuple(attrs.evolve(each, child=children.random() < CHILDREN and not each.budget) for each in episodes)
    rolls = random.Random(f"rollouts {seed}")
    episodes = tuple(_rolling_out(rolls, each) if rolls.random() < ROLLOUTS else each for each in episodes)
    lanes = random.Random(f"lanes {seed}")
    episodes = tuple(
        _in_lanes(lanes, each) if lanes.random() < LANES and not each.budget else each for each in episodes
    )
    asked = random.Random(f"asked {seed}")
    episodes = tuple(_asking(asked, each) for each in episodes)
    records = random.Random(f"records {seed}")
    episodes = tuple(attrs.evolve(each, records=records.random() < RECORDS) for each in episodes)
    stops = random.Random(f"stops {seed}")
    episodes = tuple(attrs.evolve(each, stops=stops.random() < STOPS) for each in episodes)
    replays = random.Random(f"replays {seed}")
    episodes = tuple(
        attrs.evolve(each, replay=_replaying(replays, executor, kind, each.groups[0]))
        if each.records and kind != "gil" and replays.random() < REPLAYS
        else each
        for each in episodes
    )
    profiles = random.Random(f"profiles {seed}")
    episodes = tuple(_profiling(profiles, each) if profiles.random() < PROFILES else each for each in episodes)
    return Program(seed, kind, slots, with_torch, episodes)


def _episode(draw: random.Random, executor: str, kind: str, slots: int, torch: bool) -> Episode:
    groups: tuple[int, ...] = (slots,)
    if slots > 1 and not torch and draw.random() < 0.35:
        first = draw.randint(1, slots - 1)
        groups = (first, slots - first)
    second = draw.choice(("", "all", "first"))
    fault = _fault(draw, executor, kind, groups, torch)
    before = tuple(_step(draw, groups, second, torch) for _ in range(draw.randint(0, 3)))
    after = tuple(_step(draw, groups, second, torch) for _ in range(draw.randint(1, 2)))
    if torch and draw.random() < TEARS:
        before = (*before, Step("tear", ranks=(draw.randrange(groups[0]),)))
    if torch and draw.random() < TEARS:
        after = (*after, Step("tear", ranks=(draw.randrange(groups[0]),)))
    restart = draw.random() < 0.35 and kind != "driver" and _fails_alone(fault)
    return Episode(groups, second, torch, before, draw.random() < 0.5, restart, fault, after)


def _taking_turns(draw: random.Random, episode: Episode) -> Episode:
    """Return the episode with two more roles, under a budget that has no room for all roles."""
    roles = ("a", *TURNERS, *(("b",) if episode.second else ()))

    def of_any(step: Step) -> Step:
        return attrs.evolve(step, role=draw.choice(TURNERS)) if draw.random() < 0.5 else step

    def more(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        group, count = draw.randrange(len(episode.groups)), draw.randint(1, 3)
        turns = Step("turns", group=group, count=count, roles=tuple(draw.choices(roles, k=draw.randint(3, 5))))
        at = draw.randint(0, len(steps))
        changed = [of_any(step) for step in steps]
        return (*changed[:at], turns, *changed[at:])

    fault = episode.fault
    if fault.moment in ("idle", "call", "queue", "sleep", "wake") and draw.random() < 0.5:
        fault = attrs.evolve(fault, moment="turns")
    return attrs.evolve(
        episode,
        before=more(episode.before),
        fault=fault,
        after=more(episode.after),
        budget=draw.choice(BUDGETS),
        declared=draw.choice(((), (), tuple(draw.sample(roles, len(roles))))),
    )


def _rolling_out(draw: random.Random, episode: Episode) -> Episode:
    """Return the episode with some steps of `ROLLOUT`, and perhaps the fault amid one of these steps."""
    rollout = tuple(draw.sample(ROLLOUT, draw.randint(1, len(ROLLOUT))))

    def more(steps: tuple[Step, ...], share: float) -> tuple[Step, ...]:
        for what in rollout:
            group = draw.randrange(len(episode.groups))
            step = Step(
                what,
                draw.choice(("a", "a", "b")),
                group,
                work_s=draw.choice((0.0, 0.005, 0.02)),
                ranks=(draw.randrange(episode.groups[group]),) if what == "child" or draw.random() < 0.5 else (),
                size=draw.choice((1 << 16, 1 << 28) if what == "weights" else (100, 20_000)),
                count=draw.randint(1, 3),
                where=draw.choice(WAYS),
                giver=draw.choice((None, 1 - group)) if len(episode.groups) > 1 else None,
            )
            if draw.random() < share:
                at = draw.randint(0, len(steps))
                steps = (*steps[:at], step, *steps[at:])
        return steps

    fault = episode.fault
    if fault.moment in ("idle", "call", "queue", "sleep", "wake", "turns") and draw.random() < 0.6:
        other = draw.randrange(len(episode.groups))
        pair = (fault.group, other) if draw.random() < 0.5 else (other, fault.group)
        fault = attrs.evolve(fault, moment=draw.choice(rollout), where=draw.choice(WAYS), others=pair)
    return attrs.evolve(
        episode,
        before=more(episode.before, 0.8),
        fault=fault,
        after=more(episode.after, 0.6),
        budget=episode.budget + CHILD_BYTES if episode.budget and "child" in rollout else episode.budget,
        rollout=rollout,
    )


def _in_lanes(draw: random.Random, episode: Episode) -> Episode:
    """Return the episode with a background role and pauses, and perhaps the fault amid a pause."""

    def more(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        changed = [attrs.evolve(step, role=BACKGROUND) if draw.random() < 0.3 else step for step in steps]
        for _ in range(draw.randint(0, 2)):
            group, where = draw.randrange(len(episode.groups)), draw.choice(AMID)
            ranks = (draw.randrange(episode.groups[group]),) if draw.random() < 0.2 else ()
            step = Step("pause", BACKGROUND, group, draw.choice((0.0, 0.005, 0.02)), ranks)
            changed.insert(draw.randint(0, len(changed)), attrs.evolve(step, where=where, how=_how(draw, where)))
        return tuple(changed)

    fault = episode.fault
    if fault.moment not in ("spawn", "close", *TOGETHER) and fault.target not in PEERS and draw.random() < 0.6:
        where = draw.choice(AMID)
        fault = attrs.evolve(fault, moment="pause", where=where, how=_how(draw, where))
    return attrs.evolve(episode, before=more(episode.before), fault=fault, after=more(episode.after), background=True)


def _how(draw: random.Random, where: str) -> str:
    """Return a way to pause: a wait for a stream's end would block the stream's reader."""
    return draw.choice(HOWS[1:] if where in ("stream", "batch") else HOWS)


def _asking(draw: random.Random, episode: Episode) -> Episode:
    """Return the episode with options for its calls with rows."""

    def of(step: Step) -> Step:
        retry, sticky = draw.choice((0, 0, 1, 2)), draw.random() < 0.3
        return attrs.evolve(step, retry=retry, sticky=sticky) if step.what == "rows" else step

    fault = attrs.evolve(episode.fault, retry=draw.choice((0, 1, 2)))
    if episode.restart and fault.moment in ("idle", "call", "queue") and draw.random() < 0.5:
        fault = attrs.evolve(fault, moment="rows", where=draw.choice(WAYS))
    before, after = tuple(map(of, episode.before)), tuple(map(of, episode.after))
    return attrs.evolve(episode, before=before, fault=fault, after=after)


def _replaying(draw: random.Random, executor: str, kind: str, slots: int) -> Fault:
    fault = _fault(draw, executor, kind, (slots,), False)
    if fault.kind == "gil":  # a call of the replayed role would have to hold the GIL
        fault = attrs.evolve(fault, kind="stop")
    return attrs.evolve(fault, moment="replay", ending=draw.choice(("close", "cont")))


def _profiling(draw: random.Random, episode: Episode) -> Episode:
    if episode.fault.moment == "spawn":
        return episode
    group, role = draw.randrange(len(episode.groups)), draw.choice((None, "a"))
    late, fails, again = draw.random() < 0.5, draw.random() < 0.3, draw.random() < 0.5
    profile = Profiling(group, role, draw.choice(SAMPLERS), late, fails, again)
    fault = episode.fault
    if fault.kind in ("kill", "none") and fault.moment not in ("spawn", "close", "renewal") and draw.random() < 0.3:
        fault = attrs.evolve(fault, moment="profile", group=group, rank=draw.randrange(episode.groups[group]))
    return attrs.evolve(episode, profile=profile, fault=fault)


def _fails_alone(fault: Fault) -> bool:
    """Return whether the fault alone makes the group fail, and leaves its slots usable."""
    if fault.moment in ("spawn", "close"):
        return False
    return fault.kind == "kill" or fault.target == "lane" or (fault.kind in ("stop", "gil") and fault.ending == "grace")


def _fault(draw: random.Random, executor: str, kind: str, groups: tuple[int, ...], torch: bool) -> Fault:
    group = draw.randrange(len(groups))
    rank = draw.randrange(groups[group])
    moment = draw.choice((*MOMENTS, *TOGETHER) if torch else MOMENTS)
    if kind == "driver":  # the driver dies amid anything, also with unresponsive ranks
        kind = draw.choice(("none", "none", "kill", "stop", "gil"))
    target = ""
    endings: tuple[str, ...] = ("close", "close", "pool", "grace")
    if kind == "drop":
        target = draw.choice(_targets(executor, groups[group]))
        moment = "transfer" if target in PEERS else moment
        moment = "call" if target == "envoy" and moment == "close" else moment
    if kind == "stop":
        endings += ("cont", "cont")
    if moment == "renewal":  # a renewal has more time than a hold
        endings = tuple(ending for ending in endings if ending != "grace")
    if moment == "close":
        endings = ("close", "pool")
    elif moment == "spawn":
        endings = ("close",)
    delay_s = draw.choice((0.0, 0.002, 0.01, 0.03, 0.06, 0.1))
    return Fault(
        kind, moment, group, rank, delay_s, target, draw.choice(endings), draw.choice((0.0, 0.1, 0.2, 0.3, 0.5))
    )


def _targets(executor: str, slots: int) -> tuple[str, ...]:
    found = [name for name in DROPS[executor] if name not in PEERS or slots > 1]  # one worker has no peers
    if "envoy" in found:
        # The end of an envoy ends the connection to Ray, and a new connection takes seconds.
        found = [name for name in found for _ in range(1 if name == "envoy" else 3)]
    return tuple(found)


def _step(draw: random.Random, groups: tuple[int, ...], second: str, torch: bool) -> Step:
    what = draw.choice(
        ("step", "submit", "submit", "use", "use", "pipeline", "fail", "sleep", "sleep", "wake", "wake")
        + (("add", "add", "add_failing", "train", "train", *["train_failing"] * 8) if torch else ())
    )
    group = draw.randrange(len(groups))
    role = "b" if second and draw.random() < 0.4 else "a"
    slots = groups[group] if role == "a" or second == "all" else 1
    ranks = tuple(sorted(draw.sample(range(slots), draw.randint(1, slots))))
    if what in ("add_failing", "fail", "train_failing") and len(ranks) > 1 and draw.random() < 0.7:
        ranks = ranks[:1]
    return Step(
        what,
        role,
        group,
        draw.choice((0.0, 0.0, 0.005, 0.02)),
        ranks,
        draw.choice((0, 100, 20_000, 300_000)),
        draw.randint(1, 4),
        draw.choice(FREED) if what == "train_failing" else "",
    )
