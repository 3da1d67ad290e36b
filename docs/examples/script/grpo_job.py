from grpo import make_prompts
from grpo_roles import Actor, Reference, Reward

from colocate import Run


def train(run: Run, *, steps: int = 30, every: int = 10, crash_at: int = 0) -> None:
    """The job: what `colocate run` calls, also with `--resume` and after a restart."""
    group = run.groups["policy"]
    actor, reference = group.role("actor", Actor), group.role("reference", Reference)
    reward = group.role("reward", Reward)
    done = int(group.wait_ready() or 0)
    run.total(steps)
    for step in range(done + 1, steps + 1):
        if step == crash_at and not group.generation:
            actor.crash(1)
        with group.scope():
            seqs = actor.generate.keep(make_prompts(step))
            scores = reward.score.keep(seqs.ref)
            score = actor.update(seqs.ref, scores.ref, reference.logprobs.keep(seqs.ref).ref)
        run.log(step, reward=score)
        if run.is_due(step, every):
            with run.checkpoint(step) as directory:
                group.checkpoint(directory / "policy", tag=step)
        if run.stopping:
            break
