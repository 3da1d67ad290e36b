"""Time limits, in seconds: how long something is waited for that should come at once, and why so long.

None of them is a deadline of a call; those are users' own. Steps of loops that look again are where the loops are.
"""

from __future__ import annotations

# -- calls and residents

CAUSE_WITHIN_S = 5.0  # what has ended a sync of weights in another group is told by that, before what follows from it
ALIVE_WITHIN_S = 1.0  # a rank says that it has heard of a hold: its receiving thread does, whatever its lane runs
STACKS_WITHIN_S = 0.5  # ranks say what they are doing
SILENT_AFTER_S = 0.1  # then a rank that has said nothing is looked at from outside; it may still answer
# A rank says whether it has begun a call; one that holds the GIL or is stopped has begun something.
WITHDRAWN_WITHIN_S = 1.0
LEDGERS_WITHIN_S = 10.0  # workers say what their memory is used for: they look at all that roles hold, beside what runs
SLOW_S = 60.0  # a call or a constructor that takes longer is told, once
STARTING_S = 4.0  # what a group does that takes longer to start is told, at the next look
CONNECTING_S = 8.0  # likewise of a connection and a reservation: a cluster of its own takes so long
SLOW_EVERY_S = 5.0  # so often such are looked for
TOLD_TOGETHER_S = 0.05  # observers are told so long after the end of a call, of all that have ended meanwhile
RELEASED_AFTER_S = 0.1  # a dropped resident's release waits so long for a message to ride on
# A collective goes on so long after a peer of it has left: what that has sent may be on its way.
COLLECTIVE_PATIENCE_S = 0.1
# What ranks are in together when their driver lets go ends by itself; what doesn't has its process groups cut.
STEP_ENDS_WITHIN_S = 3.0
# What ranks have begun together is done before memory that it may write sleeps; others may be about to begin it.
WORKS_DONE_WITHIN_S = 30.0

DEBUGGED_S = 86400.0  # an operation of a process group waits for a rank that somebody looks at (`debug=True`)
GROUPS_CONNECT_WITHIN_S = 60.0  # the ranks of a process group connect to each other, once all of them are about to
# Roles go on with new process groups after a failure: those connect, and models are perhaps built anew.
RENEWED_WITHIN_S = 60.0
# So often a rank that isn't back yet is looked at: whether it waits in a collective for one that is.
LOOKS_AT_GROUPS_EVERY_S = 0.02

# -- the end of workers, groups, pools, runtimes

GROUPS_CLOSE_WITHIN_S = 1.0  # process groups of a worker that ends are closed, in torch's own threads
LEAST_GRACE_S = 0.5  # what is idle has so long to end, also when others have used the grace up
IDLE_S = 0.5  # what a lane that runs nothing has to end, however short the grace: its message is on its way
AFTER_END_S = 5.0  # a worker whose lane has ended leaves by itself, unless a role's thread or exit handler keeps it
AFTER_FORCE_S = 0.25  # the same where others had to be ended: by then the grace is over for all of them
AFTER_KILL_S = 10.0  # a killed worker is gone. The kernel may be busy with it
GIVEN_UP_WITHIN_S = 15.0  # a start that was interrupted has ended: its workers are killed, see AFTER_KILL_S
LOOKS_FOR_S = 0.5  # after a deadline that passed while this process was stopped, what has come meanwhile is taken first
RESTART_ENDS_WITHIN_S = 5.0  # a restart that is under way ends when its group is closed
THREAD_ENDS_WITHIN_S = 5.0  # a thread of the framework ends; one that runs what users have given it may not
PRINTED_WITHIN_S = 1.0  # what workers have printed is taken by whoever reads it
TOLD_WITHIN_S = 5.0  # observers have heard of the last calls of a run; as THREAD_ENDS_WITHIN_S
SETTLES_AT_EXIT_S = 5.0  # at interpreter exit, what nobody has waited for ends: a checkpoint, say
AUDIT_SETTLES_S = 2.0  # what is on its way out is seen by an audit for so long: what it reports is still there then

# -- children of roles

CHILD_CODE_WITHIN_S = 0.2  # after a child's end its exit code is there; what it had started may have to end first
CHILD_SUSPECTED_S = 0.3  # a row with a broken connection waits this long for news of the role's child
CHILD_TOLD_WITHIN_S = 1.0  # what a child's end has broken is heard of before that end; longer than the above
CHILD_STACK_WITHIN_S = 2.0  # a child that hangs has printed its stacks
CHILD_ENDS_WITHIN_S = 15.0  # a child that was killed is gone, with all that it had started
TOLD_AGAIN_AFTER_S = 5.0  # a call that goes on after its child's end is told once more, if it does nothing about it

# -- restarts

BACKOFF_S = 0.5  # before the second try; it doubles
LONGEST_BACKOFF_S = 30.0  # before any try
REGROWN_WITHIN_S = 600.0  # slots come in place of lost ones, unless the user says otherwise: as machines do in clouds
REPLACED_EVERY_S = 2.0  # at a time, for slots in place of lost ones: who closes the pool meanwhile waits for that
AVOIDED_AFTER_DEATHS = 2  # of workers on a node: a restart takes a spare elsewhere, if there is one
SPARED_EVERY_S = 0.5  # likewise for spares: a restart may wait for that
LOOKS_FOR_SLOTS_EVERY_S = 0.5  # whether there are some in place of lost ones, where the cluster lacks the machines

# -- connections

HANDSHAKE_S = 10.0  # a stranger that says nothing is dropped
PEER_CONNECTS_WITHIN_S = 10.0  # another worker takes a connection

# -- the template

FORKS_WITHIN_S = 30.0  # a template answers; it may be importing torch meanwhile
TEMPLATE_IDLE_S = 60.0  # nobody has needed the template for so long: it ends

# -- keepers

KEEPER_CONNECTS_WITHIN_S = 10.0  # a keeper takes a connection
LAST_WORDS_S = 0.3  # the cluster's own words about a lost keeper come by another way
LISTED_WITHIN_S = 2.0  # keepers say which workers they have
LOOKED_AT_WITHIN_S = 2.0  # a worker is looked at from outside; whoever asks has stopped waiting by then
# After a worker's end its lane may hold what it has sent; a child that it forked may keep the lane open.
LANE_ENDS_WITHIN_S = 0.2
# A keeper has killed a worker; generous, as a slot is of no use after its keeper has been ended.
KEEPER_KILLS_WITHIN_S = 4.0
DIALLED_WITHIN_S = 60.0  # a driver that reserves a slot dials its keeper at once; one that doesn't has gone meanwhile
# The other keepers of a pool outlive the lead so long, lest somebody be granted a pool that is about to go.
LEAD_SLACK_S = 5.0
ADOPTED_WITHIN_S = 10.0  # a keeper answers who wants it
# The cluster has heard that a detached pool has ended, and its name is free; or one that just begins can be seen.
NAME_SETTLES_WITHIN_S = 5.0
LEFT_WITHIN_S = 2.0  # a keeper that goes on without this driver has heard so
