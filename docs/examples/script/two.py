from grpo import make_prompts
from grpo_roles import Actor, Reference, Reward

import colocate

roles = {"actor": colocate.role(Actor), "reference": colocate.role(Reference), "reward": colocate.role(Reward)}
with colocate.spawn(roles, slots=2, processes=True) as group:
    actor, reference = group.role("actor", Actor), group.role("reference", Reference)
    reward = group.role("reward", Reward)
    for step in range(1, 31):
        seqs = actor.generate.keep(make_prompts(step))
        scores = reward.score.keep(seqs.ref)
        score = actor.update(seqs.ref, scores.ref, reference.logprobs.keep(seqs.ref).ref)
        if step % 10 == 0:
            print(f"step {step}: reward {score:.2f}")
