# docs/examples/words.py
from colocate import Concat, Role, Run, Scatter, method


class Guesser(Role):
    """Guesses words, and remembers the best one that it was told."""

    def __init__(self, letters: str = "abc", length: int = 4) -> None:
        self.letters = letters
        self.length = length
        self.best = (0.0, "")
        self.tries = 0

    @method(dispatch=Scatter("numbers"), collect=Concat())
    def guess(self, numbers: list[int]) -> list[str]:
        size = len(self.letters)
        return ["".join(self.letters[n // size**i % size] for i in range(self.length)) for n in numbers]

    @method(dispatch=Scatter("words", "scores"))
    def learn(self, words: list[str], scores: list[float]) -> tuple[float, str]:
        self.tries += len(words)
        self.best = max(self.best, *zip(scores, words, strict=True))
        return self.best


class Judge(Role):
    """Scores words by how many letters are where they are in the secret one."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    @method(dispatch=Scatter("words"), collect=Concat())
    def score(self, words: list[str]) -> list[float]:
        return [sum(a == b for a, b in zip(word, self.secret, strict=True)) / len(word) for word in words]


def search(run: Run, *, steps: int = 5, batch: int = 16) -> None:
    """The job: what `colocate run` calls."""
    group = run.groups["players"]
    guesser, judge = group.role("guesser", Guesser), group.role("judge", Judge)
    run.total(steps)
    for step in range(1, steps + 1):
        with group.scope(), run.timed("search"):
            words = guesser.guess.keep(list(range((step - 1) * batch, step * batch)))
            score, word = max(guesser.learn(words.ref, judge.score.keep(words.ref).ref))
        run.log(step, score=score)
        if run.stopping or score == 1.0:
            break
    run.show("the best word", [{"word": word, "score": score}])
