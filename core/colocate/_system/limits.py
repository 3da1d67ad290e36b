"""Timeouts of the framework, in seconds, each with its reason.

None is a deadline of a call; those are users' own. Polling intervals are beside their loops.
"""

from __future__ import annotations

# -- calls and residents

CAUSE_WITHIN_S = 5.0  # for the cause of an interrupted weight sync to be reported, before its consequences are
ALIVE_WITHIN_S = 1.0  # for a rank's receiving thread to acknowledge a hold, whatever its lane runs
STACKS_WITHIN_S = 0.5  # for ranks to report their stacks
SILENT_AFTER_S = 0.1  # then a silent rank is inspected from outside; an answer may still come
# For a rank to say whether a call has begun; a rank that holds the GIL or is stopped has begun something.
WITHDRAWN_WITHIN_S = 1.0
LEDGERS_WITHIN_S = 10.0  # for workers to report memory use: a walk over all objects of roles, beside running calls
SLOW_S = 60.0  # a longer call or constructor is reported, once
STARTING_S = 4.0  # a longer start of a group is reported, at the next look
CONNECTING_S = 8.0  # the same for a connection or a reservation: a private cluster takes that long
SLOW_EVERY_S = 5.0  # interval of looking for slow calls
TOLD_TOGETHER_S = 0.05  # from the end of a call to the observers' event, to batch events
RELEASED_AFTER_S = 0.1  # a dropped resident's release waits this long for a message to join
# A collective continues this long after a peer has left: sent data may still arrive.
COLLECTIVE_PATIENCE_S = 0.1
# A collective step that a detached driver leaves behind ends by itself; else its process groups are aborted.
STEP_ENDS_WITHIN_S = 3.0
# Collective work in progress ends before memory sleeps that the work may write; other ranks may be about to join.
WORKS_DONE_WITHIN_S = 30.0

DEBUGGED_S = 86400.0  # timeout of process groups while a rank is stopped in a debugger (`debug=True`)
GROUPS_CONNECT_WITHIN_S = 60.0  # for the ranks of a process group to connect, once all are about to
# For roles to get new process groups after a failure: connections, and perhaps new models.
RENEWED_WITHIN_S = 60.0
# Interval of checking whether a late rank waits in a collective for a rank that is back.
LOOKS_AT_GROUPS_EVERY_S = 0.02

# -- the end of workers, groups, pools, runtimes

GROUPS_CLOSE_WITHIN_S = 1.0  # for an ending worker to close process groups, in torch's threads
LEAST_GRACE_S = 0.5  # minimum for idle workers to end, also after others have used up the grace
IDLE_S = 0.5  # for an idle lane to end, however short the grace: the message is on the way
AFTER_END_S = 5.0  # for a worker to exit after the lane's end; a role's thread or exit handler may block
AFTER_FORCE_S = 0.25  # the same if other workers had to be killed: the grace is over for all
AFTER_KILL_S = 10.0  # for a killed worker to disappear. The kernel may be busy
GIVEN_UP_WITHIN_S = 15.0  # for an interrupted start to end: its workers are killed, see AFTER_KILL_S
LOOKS_FOR_S = 0.5  # to read received messages after a deadline that passed while this process was stopped
RESTART_ENDS_WITHIN_S = 5.0  # for a restart in progress to end when the group is closed
THREAD_ENDS_WITHIN_S = 5.0  # for a thread of the framework to end; a user's code may block one
PRINTED_WITHIN_S = 1.0  # for a reader to take the printed output of workers
TOLD_WITHIN_S = (
    5.0  # for observers to handle the last calls of a run; as long as THREAD_ENDS_WITHIN_S, as a user's code may block
)
SETTLES_AT_EXIT_S = 5.0  # for background work to end at interpreter exit: a checkpoint, say
AUDIT_SETTLES_S = 2.0  # for things about to end to disappear before an audit reports leaks

# -- children of roles

CHILD_CODE_WITHIN_S = 0.2  # for the exit code after a child's end; grandchildren may have to end first
CHILD_SUSPECTED_S = 0.3  # a row with a broken connection waits this long for news of the role's child
# For the consequences of a child's end to arrive before the end is reported; longer than the above
CHILD_TOLD_WITHIN_S = 1.0
CHILD_STACK_WITHIN_S = 2.0  # for a hung child to print stacks
CHILD_ENDS_WITHIN_S = 15.0  # for a killed child and all descendants to disappear
TOLD_AGAIN_AFTER_S = 5.0  # then a call that ignores a child's end is warned again

# -- restarts

BACKOFF_S = 0.5  # before the second attempt; doubles each time
LONGEST_BACKOFF_S = 30.0  # before any attempt
REGROWN_WITHIN_S = 600.0  # default for a restart to get slots for lost ones: typical times of machines in clouds
REPLACED_EVERY_S = 2.0  # per attempt to replace lost slots: closing the pool waits for an attempt
AVOIDED_AFTER_DEATHS = 2  # of workers on a node: a restart then prefers a spare on another node
SPARED_EVERY_S = 0.5  # per attempt to get spares: a restart may wait for an attempt
LOOKS_FOR_SLOTS_EVERY_S = 0.5  # interval of looking for slots in place of lost ones, if the cluster lacks machines

# -- connections

HANDSHAKE_S = 10.0  # a silent stranger is dropped
PEER_CONNECTS_WITHIN_S = 10.0  # for another worker to accept a connection

# -- the template

FORKS_WITHIN_S = 30.0  # for a template to answer; may be importing torch meanwhile
TEMPLATE_IDLE_S = 60.0  # an unused template ends after this time

# -- keepers

KEEPER_CONNECTS_WITHIN_S = 10.0  # for a keeper to accept a connection
LAST_WORDS_S = 0.3  # the cluster's message about a lost keeper takes another way
LISTED_WITHIN_S = 2.0  # for keepers to list workers
LOOKED_AT_WITHIN_S = 2.0  # for a worker to be inspected from outside; the requester gives up at the same time
# After a worker's end the lane may still deliver data; a forked child may keep the lane open.
LANE_ENDS_WITHIN_S = 0.2
# For a keeper to kill a worker; generous, because a slot is lost with its keeper.
KEEPER_KILLS_WITHIN_S = 4.0
# A driver that reserves a slot dials the keeper at once; after this time the driver must be dead
DIALLED_WITHIN_S = 60.0
# The other keepers of a pool outlive the lead by this, so that no driver is granted a pool about to end.
LEAD_SLACK_S = 5.0
ADOPTED_WITHIN_S = 10.0  # for a keeper to answer a driver that adopts the pool
# For the cluster to release the name of an ended detached pool, or to publish a new one.
NAME_SETTLES_WITHIN_S = 5.0
LEFT_WITHIN_S = 2.0  # for a keeper to acknowledge that this driver has detached
