import random

import torch

from colocate import Concat, First, Role, Run, Scatter, Weights, method, sync_weights

WORDS = ["add", "bee", "cab", "dad", "abbey", "beach", "cocoa", "decay"]


class Actor(Role):
    def __init__(self) -> None:
        self.scores = torch.nn.Parameter(torch.zeros(27, 4))  # of four answers, for each first letter

    def named_weights(self):
        yield "scores", self.scores

    @method(collect=First())
    def tokens(self, words: list[str]) -> torch.Tensor:
        rows = [[ord(letter) - ord("a") + 1 for letter in word] for word in words]
        return torch.tensor([row + [0] * (5 - len(row)) for row in rows])

    @method(collect=First())
    def learn(self, tokens: torch.Tensor, answers: torch.Tensor, rewards: torch.Tensor) -> float:
        log_probs = self.scores[tokens[:, 0]].log_softmax(1)[range(len(answers)), answers]
        loss = -(log_probs * (rewards - rewards.mean())).mean()
        (gradient,) = torch.autograd.grad(loss, self.scores)
        self.scores.data -= 8.0 * gradient
        return loss.item()


class Engine(Role):
    def __init__(self) -> None:
        self.scores = torch.zeros(27, 4)

    def load_weights(self, weights: Weights, version: int) -> None:
        for _, tensor in weights:
            self.scores.copy_(tensor)

    def named_weights(self):
        yield "scores", self.scores

    @method(dispatch=Scatter("tokens"), collect=Concat())
    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(self.scores[tokens[:, 0]].softmax(1), 1, generator=self.ctx.generator)[:, 0]


class Reward(Role):
    @method(collect=First())
    def score(self, words: list[str], answers: torch.Tensor) -> torch.Tensor:
        right = torch.tensor(["abcd".index(word[0]) for word in words])
        return (answers == right).float()


def train(run: Run, check: bool = False) -> None:
    policy, draw = run.groups["policy"], random.Random(0)
    actor, engine, reward = policy.role("actor", Actor), policy.role("engine", Engine), policy.role("reward", Reward)
    for step in range(1, 9):
        words = draw.choices(WORDS, k=256)
        tokens = actor.tokens.keep(words)
        sync_weights(actor, engine, check=check)
        answers = engine.generate.keep(tokens.ref)
        rewards = reward.score.keep(words, answers.ref)
        actor.learn(tokens.ref, answers.ref, rewards.ref)
        run.log(step, reward=rewards.fetch().mean().item())
