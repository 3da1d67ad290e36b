"""Define the framework's timeouts, in seconds, each with a reason.

Deadlines of calls aren't here, because users set these. Polling intervals are defined next to their loops.
"""

from __future__ import annotations

# -- calls and residents

# A rank whose weight sync was interrupted waits this long for the cause before reporting an error.
CAUSE_WITHIN_S = 5.0
ALIVE_WITHIN_S = 1.0  # A rank's receiving thread has this long to acknowledge a hold, even while the lane is busy.
STACKS_WITHIN_S = 0.5  # Ranks have this long to report their stacks.
SILENT_AFTER_S = 0.1  # A rank that hasn't reported a stack after this time is inspected from outside, too.
# A rank has this long to answer whether a call has begun; without an answer, the call counts as begun.
WITHDRAWN_WITHIN_S = 1.0
# Workers have this long to report memory use, because the report visits all objects of the roles.
LEDGERS_WITHIN_S = 10.0
SLOW_S = 60.0  # A call or constructor that takes longer is reported once.
STARTING_S = 4.0  # A group's start that takes longer is reported at the next check for slow calls.
CONNECTING_S = 8.0  # A slower connection or reservation is reported; a private cluster takes about this long to start.
SLOW_EVERY_S = 5.0  # The check for slow calls runs at this interval.
# Observers are notified this long after a call's end, so that several events are handled together.
TOLD_TOGETHER_S = 0.05
RELEASED_AFTER_S = 0.1  # The release of a dropped resident waits this long to travel with another message.
# A collective continues this long after a peer has left, because sent data may still arrive.
COLLECTIVE_PATIENCE_S = 0.1
# A collective step that a detached driver has left running has this long to end before process groups are aborted.
STEP_ENDS_WITHIN_S = 3.0
# Collective work has this long to finish before memory sleeps, because the work may write that memory.
WORKS_DONE_WITHIN_S = 30.0

DEBUGGED_S = 86400.0  # With `debug=True` process groups have this timeout, because a rank may stop in a debugger.
GROUPS_CONNECT_WITHIN_S = 60.0  # The ranks of a process group have this long to connect to each other.
RENEWED_WITHIN_S = 60.0  # After a failure, roles have this long to set up new process groups, and perhaps new models.
# This is the interval of the check for collectives that can't end because other ranks have stopped.
LOOKS_AT_GROUPS_EVERY_S = 0.02

# -- the end of workers, groups, pools, runtimes

GROUPS_CLOSE_WITHIN_S = 1.0  # An ending worker waits this long for torch's threads to close process groups.
LEAST_GRACE_S = 0.5  # Idle workers have this long to end, even if other workers have used up the grace period.
# An idle lane has this long to end, however short the grace period, because the close message is on the way.
IDLE_S = 0.5
AFTER_END_S = 5.0  # After the lane's end a worker has this long to exit; a role's thread or exit handler may block.
# Workers have this long to exit if other workers had to be killed, because the grace period is over.
AFTER_FORCE_S = 0.25
AFTER_KILL_S = 10.0  # A killed worker has this long to disappear, because the kernel may be busy.
# An interrupted start has this long to end, because the workers must be killed (`AFTER_KILL_S`).
GIVEN_UP_WITHIN_S = 15.0
# After a missed deadline, messages that arrived while this process was suspended have this long to be handled.
LOOKS_FOR_S = 0.5
RESTART_ENDS_WITHIN_S = 5.0  # A restart in progress has this long to end when the group is closed.
THREAD_ENDS_WITHIN_S = 5.0  # A thread of the framework has this long to end, because users' code may block the thread.
PRINTED_WITHIN_S = 1.0  # The reader of the driver's output has this long to receive the remaining lines of workers.
# Observers have this long to handle the last calls of a run, because users' code may block an observer.
TOLD_WITHIN_S = 5.0
SETTLES_AT_EXIT_S = 5.0  # Background work, such as a checkpoint, has this long to finish at interpreter exit.
AUDIT_SETTLES_S = 2.0  # An audit waits this long for ending objects to disappear before leaks are reported.

# -- children of roles

# After a child's end the exit code is awaited this long, because the code is known once all descendants have ended.
CHILD_CODE_WITHIN_S = 0.2
CHILD_SUSPECTED_S = 0.3  # A row whose connection broke waits this long for a report that the role's child has ended.
# After a sign of a child's end, such as a broken connection, the report of the end is awaited this long.
CHILD_TOLD_WITHIN_S = 1.0
CHILD_STACK_WITHIN_S = 2.0  # A hung child has this long to print stacks.
CHILD_ENDS_WITHIN_S = 15.0  # A killed child and all descendants have this long to disappear.
TOLD_AGAIN_AFTER_S = 5.0  # A call that continues after a child's end gets `ChildDied` again after this time.

# -- restarts

BACKOFF_S = 0.5  # A restart's second attempt waits this long; each later attempt waits at least twice as long.
LONGEST_BACKOFF_S = 30.0  # No attempt of a restart waits longer than this.
# By default a restart waits this long for replacement slots, because clouds start machines slowly.
REGROWN_WITHIN_S = 600.0
# One attempt to replace lost slots takes at most this long, because closing the pool waits for the attempt.
REPLACED_EVERY_S = 2.0
# After this number of worker deaths on a node, a restart prefers a spare slot on another node.
AVOIDED_AFTER_DEATHS = 2
# One attempt to get spare slots takes at most this long, because a restart may wait for the attempt.
SPARED_EVERY_S = 0.5
LOOKS_FOR_SLOTS_EVERY_S = 0.5  # If the cluster lacks machines, a search for replacement slots runs at this interval.

# -- connections

HANDSHAKE_S = 10.0  # A connection that hasn't authenticated after this time is dropped.
PEER_CONNECTS_WITHIN_S = 10.0  # Another worker has this long to accept a connection.

# -- the template

# A template process has this long to answer, because an import of torch may be in progress there.
FORKS_WITHIN_S = 30.0
TEMPLATE_IDLE_S = 60.0  # An unused template process ends after this time.

# -- keepers

KEEPER_CONNECTS_WITHIN_S = 10.0  # A keeper has this long to accept a connection.
LAST_WORDS_S = 0.3  # After the loss of a keeper, the cluster's message about the cause is awaited this long.
LISTED_WITHIN_S = 2.0  # Keepers have this long to list their workers.
# A keeper has this long to inspect a worker from outside, and the requester waits equally long.
LOOKED_AT_WITHIN_S = 2.0
# After a worker's end the lane is read for this long, because a forked child may keep the lane open.
LANE_ENDS_WITHIN_S = 0.2
# A keeper has this long to confirm that a worker was killed; a slower keeper counts as stuck.
KEEPER_KILLS_WITHIN_S = 4.0
DIALLED_WITHIN_S = 60.0  # A keeper ends if no driver has connected after this time, because the driver must be dead.
# A pool's other keepers end this much later than the lead keeper, so that no driver is granted an ending pool.
LEAD_SLACK_S = 5.0
ADOPTED_WITHIN_S = 10.0  # A keeper has this long to answer a driver that adopts the pool.
# The cluster has this long to release the name of an ended detached pool, or to publish a new pool.
NAME_SETTLES_WITHIN_S = 5.0
LEFT_WITHIN_S = 2.0  # A keeper has this long to confirm that the driver has detached.
