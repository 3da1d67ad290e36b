"""Time limits, in seconds: how long something is waited for that should come at once, and why so long.

None of them is a deadline of a call; those are users' own. Steps of loops that look again are where the loops are.
"""

from __future__ import annotations

# -- calls and residents

ALIVE_WITHIN_S = 1.0
"""A rank says that it has heard of a hold: its receiving thread does, whatever its lane runs."""
STACKS_WITHIN_S = 0.5
"""Ranks say what they are doing."""
SILENT_AFTER_S = 0.1
"""Then a rank that has said nothing is looked at from outside; it may still answer."""
WITHDRAWN_WITHIN_S = 1.0
"""A rank says whether it has begun a call; one that holds the GIL or is stopped has begun something."""
LEDGERS_WITHIN_S = 10.0
"""Workers say what their memory is used for: they look at all that roles hold, beside what runs."""
SLOW_S = 60.0
"""A call or a constructor that takes longer is told, once."""
STARTING_S = 4.0
"""What a group does that takes longer to start is told, at the next look."""
CONNECTING_S = 8.0
"""Likewise of a connection and a reservation: an engine of its own takes so long."""
SLOW_EVERY_S = 5.0
"""So often such are looked for."""
TOLD_TOGETHER_S = 0.05
"""Observers are told so long after the end of a call, of all that have ended meanwhile."""
RELEASED_AFTER_S = 0.1
"""A dropped resident's release waits so long for a message to ride on."""
COLLECTIVE_PATIENCE_S = 0.1
"""A collective goes on so long after a peer of it has left: what that has sent may be on its way."""
STEP_ENDS_WITHIN_S = 3.0
"""What ranks are in together when their driver lets go ends by itself; what doesn't has its process groups cut."""
WORKS_DONE_WITHIN_S = 30.0
"""What ranks have begun together is done before memory that it may write sleeps; others may be about to begin it."""

GROUPS_CONNECT_WITHIN_S = 60.0
"""The ranks of a process group connect to each other, once all of them are about to."""
RENEWED_WITHIN_S = 60.0
"""Roles go on with new process groups after a failure: those connect, and models are perhaps built anew."""
LOOKS_AT_GROUPS_EVERY_S = 0.02
"""So often a rank that isn't back yet is looked at: whether it waits in a collective for one that is."""

# -- the end of workers, groups, pools, runtimes

GROUPS_CLOSE_WITHIN_S = 1.0
"""Process groups of a worker that ends are closed, in torch's own threads."""
LEAST_GRACE_S = 0.5
"""What is idle has so long to end, also when others have used the grace up."""
IDLE_S = 0.5
"""What a lane that runs nothing has to end, however short the grace: its message is on its way."""
AFTER_END_S = 5.0
"""A worker whose lane has ended leaves by itself, unless a role's thread or exit handler keeps it."""
AFTER_FORCE_S = 0.25
"""The same where others had to be ended: by then the grace is over for all of them."""
AFTER_KILL_S = 10.0
"""A killed worker is gone. The kernel may be busy with it."""
GIVEN_UP_WITHIN_S = 15.0
"""A start that was interrupted has ended: its workers are killed, see AFTER_KILL_S."""
LOOKS_FOR_S = 0.5
"""After a deadline that passed while this process was stopped, what has come meanwhile is taken first."""
RESTART_ENDS_WITHIN_S = 5.0
"""A restart that is under way ends when its group is closed."""
THREAD_ENDS_WITHIN_S = 5.0
"""A thread of the framework ends; one that runs what users have given it may not."""
PRINTED_WITHIN_S = 1.0
"""What workers have printed is taken by whoever reads it."""
TOLD_WITHIN_S = 5.0
"""Observers have heard of the last calls of a run; as THREAD_ENDS_WITHIN_S."""
SETTLES_AT_EXIT_S = 5.0
"""At interpreter exit, what nobody has waited for ends: a checkpoint, say."""
AUDIT_SETTLES_S = 2.0
"""What is on its way out is seen by an audit for so long: what it reports is still there then."""

# -- restarts

BACKOFF_S = 0.5
"""Before the second try; it doubles."""
LONGEST_BACKOFF_S = 30.0
"""Before any try."""
REPLACED_EVERY_S = 2.0
"""At a time, for slots in place of lost ones: who closes the pool meanwhile waits for that."""

# -- connections

HANDSHAKE_S = 10.0
"""A stranger that says nothing is dropped."""
PEER_CONNECTS_WITHIN_S = 10.0
"""Another worker takes a connection."""

# -- the template

FORKS_WITHIN_S = 30.0
"""A template answers; it may be importing torch meanwhile."""
TEMPLATE_IDLE_S = 60.0
"""Nobody has needed the template for so long: it ends."""

# -- keepers

KEEPER_CONNECTS_WITHIN_S = 10.0
"""A keeper takes a connection."""
LAST_WORDS_S = 0.3
"""The engine's own words about a lost keeper come by another way."""
LISTED_WITHIN_S = 2.0
"""Keepers say which workers they have."""
LOOKED_AT_WITHIN_S = 2.0
"""A worker is looked at from outside; whoever asks has stopped waiting by then."""
LANE_ENDS_WITHIN_S = 0.2
"""After a worker's end its lane may hold what it has sent; a child that it forked may keep the lane open."""
KEEPER_KILLS_WITHIN_S = 4.0
"""A keeper has killed a worker; generous, as a slot is of no use after its keeper has been ended."""
DIALLED_WITHIN_S = 60.0
"""A driver that reserves a slot dials its keeper at once; one that doesn't has gone meanwhile."""
LEAD_SLACK_S = 5.0
"""The other keepers of a pool outlive the lead so long, lest somebody be granted a pool that is about to go."""
ADOPTED_WITHIN_S = 10.0
"""A keeper answers who wants it."""
NAME_SETTLES_WITHIN_S = 5.0
"""The engine has heard that a detached pool has ended, and its name is free; or one that just begins can be seen."""
LEFT_WITHIN_S = 2.0
"""A keeper that goes on without this driver has heard so."""
