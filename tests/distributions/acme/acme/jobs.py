import json
from typing import Any


def tally(run: Any, *, steps: int = 3, texts: list[str] | None = None, checkpoint_every: int = 1) -> None:
    """Score texts that grow by a letter each step; the checkpoint is the number of the step."""
    done = json.loads((run.resumed / "done.json").read_text()) if run.resumed else 0
    run.total(steps)
    reward = run.groups["policy"]["reward"]
    words = texts or ["a", "bb", "ccc"]
    for step in range(done + 1, steps + 1):
        with run.timed("score"):
            scores = reward.score([word + "x" * step for word in words])
        run.log(step, reward=sum(scores) / len(scores))
        if run.stopping or step % checkpoint_every == 0 or step == steps:
            with run.checkpoint(step) as directory:
                (directory / "done.json").write_text(json.dumps(step))
        if run.stopping:
            break
    run.show("scores", [{"text": word, "score": score} for word, score in zip(words, reward.score(words), strict=True)])
