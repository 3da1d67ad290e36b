"""The role `ppo.actor`: a policy that imitates demonstrations, then answers questions and learns from advantages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from colocate import Concat, ConfigError, First, Reduce, Role, Scatter, checks, method, needs
from colocate.signatures import brief
from colocate_ppo import checkpoint, maths
from colocate_ppo.forward import INFERENCE, response_log_probs, response_logits
from colocate_ppo.generation import generate
from colocate_ppo.learner import Learner
from colocate_ppo.model import Weights, end_tokens, load_pretrained_model, make_scratch_model, make_small_llama
from colocate_ppo.options import BOUND, COUNT, POSITIVE, Limit, limit_problems, refuse_options
from colocate_ppo.parallel import gather_numbers, make_total, split_minibatches, step_generator
from colocate_ppo.rollout import Estimates, Rollout, make_rollout, widen_prompts
from colocate_ppo.spread import Dtype, Layout, Parallel, SpreadModel
from colocate_ppo.task import Problems, question_text
from colocate_ppo.tokenizer import load_tokenizer, make_character_tokenizer

_LIMITS: Mapping[str, Limit] = {
    "layers": COUNT,
    "hidden": COUNT,
    "heads": COUNT,
    "feed_forward": COUNT,
    "lr": POSITIVE,
    "warm_up_lr": POSITIVE,
    "max_grad_norm": BOUND,
    "threads": COUNT,
}


def _option_problems(options: Mapping[str, Any], *_: object) -> Iterator[tuple[str, str]]:
    wrong = [*limit_problems(options, _LIMITS)]
    yield from wrong
    hidden, heads = options["hidden"], options["heads"]
    if not wrong and options["model"] is None and hidden % (2 * heads):
        yield "hidden", f"must be an even multiple of `heads` ({heads}), not {hidden}"


@checks(_option_problems)
@needs("process_group")
class Actor(Role):
    """The policy model, with a tokenizer and an optimizer.

    Args:
        model: A hub id or a local folder with a causal language model and its tokenizer; None makes a small Llama with
            random weights that reads characters. A model with code of its own (`auto_map`) fails to load.
        layers: Layers of the small Llama.
        hidden: Hidden size of the small Llama.
        heads: Attention heads of the small Llama.
        feed_forward: Width of the small Llama's feed-forward layers.
        phrases: Texts that become one token each, such as the common beginning of all questions.
        stop: Further tokens that end an answer, each as text or number. The model's own end tokens (`eos_token_id` of
            its generation config, or else the tokenizer's end token) always end an answer.
        template_options: Options of the chat template for questions that are messages, such as `enable_thinking:
            false`.
        lr: Learning rate.
        warm_up_lr: Learning rate of the supervised warm-up.
        max_grad_norm: The norm to which gradients are clipped.
        threads: Number of torch threads in this process; None keeps the default.
        parallel: How the ranks share the model: "none", "ddp" or "fsdp2"; see `Layout`.
        dtype: The dtype of computations, also for an engine that generates with this module. Weights are float32.
        gradient_checkpointing: Recompute layers in the backward pass, which takes less memory and more time.
        skip_nonfinite: Skip and count an update with a non-finite loss or gradient, instead of raising an error.
    """

    def __init__(
        self,
        model: str | None = None,
        layers: int = 2,
        hidden: int = 128,
        heads: int = 4,
        feed_forward: int = 256,
        phrases: Sequence[str] = (),
        stop: Sequence[str | int] = (),
        template_options: Mapping[str, Any] | None = None,
        lr: float = 1e-4,
        warm_up_lr: float = 1e-3,
        max_grad_norm: float = 1.0,
        threads: int | None = None,
        parallel: Parallel = "none",
        dtype: Dtype = "float32",
        gradient_checkpointing: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        refuse_options(f"role {self.ctx.role!r}", _option_problems({**locals()}))
        if threads is not None:
            torch.set_num_threads(threads)
        if model is None:
            self.tokenizer = make_character_tokenizer(phrases, stop)
            config = make_small_llama(self.tokenizer, layers, hidden, heads, feed_forward)
            inner = make_scratch_model(config, self.ctx.generator, self.ctx.device)
        else:
            inner = load_pretrained_model(model, self.ctx.device)
            self.tokenizer = load_tokenizer(model, end_tokens(inner), stop, template_options)
        self.config = inner.config
        # Set the model's own end tokens, too, so that an engine that runs this model stops at the same tokens.
        inner.generation_config.eos_token_id = [*self.tokenizer.ends]
        self.has_learned = model is not None
        self.model = SpreadModel(self.ctx, inner, Layout(parallel, dtype, gradient_checkpointing))
        self.learner = Learner(self.ctx, self.model, max_grad_norm, skip_nonfinite)
        self.lr, self.warm_up_lr = lr, warm_up_lr

    @method(collect=First(), awake=())
    def is_pretrained(self) -> bool:
        """Return whether the weights were loaded from a folder or the hub."""
        return self.has_learned

    @method(collect=First(), awake=())
    def ends(self) -> list[int]:
        """Return the ids of the tokens that end an answer."""
        return [*self.tokenizer.ends]

    def renew(self) -> None:
        """Use new process groups after a failed call."""
        self.learner.renew_groups()

    @method(collect=First())
    def weights(self) -> Weights:
        """Return the model's config and a copy of the weights, which other ranks and roles can `load`."""
        return {"config": self.config.to_dict(), "state": self.model.copy_weights()}

    @method
    def load(self, weights: Weights) -> None:
        """Replace the model's weights and reset the optimizer."""
        self.model.load_weights(weights["state"])
        self.learner.drop_moments()

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the weights by the names of transformers, for `colocate.sync_weights`."""
        from colocate.torch import named_weights  # Imported only when needed, because the import is slow.

        return named_weights(self.model.module)

    @method(dispatch=Scatter("problems"), collect=Reduce("sum"))
    def warm_up(self, problems: Problems, lr_scale: float = 1.0, number: int | None = None) -> float:
        """Make one supervised training step on the problems' own answers.

        Args:
            problems: The demonstrations.
            lr_scale: Multiplies the warm-up's learning rate.
            number: The step's number: after a failure, a second call with the same number repeats no update.

        Returns:
            The mean cross-entropy of a token in nats, as the sum of the ranks' parts.
        """
        call = self.learner.start_call("warm_up", number)
        if not call.done:
            self._learn_answers(problems, self.warm_up_lr * lr_scale)
        return call.means("policy", self.ctx.world_size)["loss"]

    def _learn_answers(self, problems: Problems, lr: float) -> None:
        problems = self._with_prompts(problems)
        prompts = self.tokenizer.pad_rows(problems.prompts, self.ctx.device, side="left")
        answers = self.tokenizer.encode_answers(problems.answers, self.ctx.device)
        shown = make_rollout(prompts, answers, problems, problems.answers)
        logits = response_logits(self.model, shown["tokens"], shown["attention"], answers.tokens.shape[1])
        surprise = -maths.token_log_probs(logits, answers.tokens)
        loss = maths.token_mean(surprise, answers.mask, make_total(self.ctx)(answers.mask.sum()))
        self.learner.update_weights(loss, lr, loss=loss)

    @method(dispatch=Scatter("problems"), collect=Concat(), awake=INFERENCE)
    def generate(
        self,
        problems: Problems,
        max_new_tokens: int,
        temperature: float = 1.0,
        greedy: bool = False,
        number: int | None = None,
    ) -> Rollout:
        """Generate an answer to each problem.

        Args:
            problems: The problems to answer.
            max_new_tokens: The longest answer, end token included.
            temperature: Divides the logits before sampling.
            greedy: Take the likeliest token each time instead of sampling.
            number: The step's number, which selects the rank's random numbers, so that a second call draws the same;
                None draws the next ones.
        """
        drawn = None if greedy else step_generator(self.ctx, number)
        problems = self._with_prompts(problems)
        prompts = self.tokenizer.pad_rows(problems.prompts, self.ctx.device, side="left")
        # All ranks pad to the widest prompt of any rank, so that the ranks' parts form one batch.
        prompts = widen_prompts(prompts, max(gather_numbers(self.ctx, prompts.tokens.shape[1])), self.tokenizer.pad)
        self.model.check_length(prompts.tokens.shape[1] + max_new_tokens)
        with self.model.gather_weights():
            responses = generate(
                self.model,
                prompts,
                max_new_tokens=max_new_tokens,
                ends=self.tokenizer.ends,
                pad=self.tokenizer.pad,
                temperature=temperature,
                generator=drawn,
            )
        return make_rollout(prompts, responses, problems, self.tokenizer.decode_responses(responses))

    @method(dispatch=Scatter("rollout"), collect=Concat(), awake=INFERENCE)
    @torch.no_grad()
    def log_probs(self, rollout: Rollout, temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each response token, `[B, R]`."""
        return response_log_probs(self.model, rollout, temperature)

    @method(dispatch=Scatter("rollout", "log_probs", "estimates"), collect=Reduce("sum"))
    def update(
        self,
        rollout: Rollout,
        log_probs: Tensor,
        estimates: Estimates,
        minibatch: int = 64,
        epochs: int = 1,
        clip: float = 0.2,
        entropy_coefficient: float = 0.0,
        temperature: float = 1.0,
        lr_scale: float = 1.0,
        number: int | None = None,
    ) -> dict[str, float]:
        """Update the policy with PPO's clipped objective.

        Args:
            rollout: The answers.
            log_probs: `[B, R]`, the result of `log_probs` before the update.
            estimates: The critic's estimates for the answers.
            minibatch: Rows of a minibatch over all ranks.
            epochs: How often each row is used.
            clip: PPO's clip range: how far the probability ratio may move from 1 with a gain in the objective.
            entropy_coefficient: The weight of an entropy bonus.
            temperature: The temperature of the sampling.
            lr_scale: Multiplies the learning rate.
            number: The step's number: after a failure, a second call with the same number resumes at the failed
                minibatch.

        Returns:
            Means over the minibatches, as sums of the ranks' parts: `policy_loss`, `entropy`, `clip_fraction`,
            `policy_grad_norm`; and `policy_skipped`, the number of skipped updates, if any.
        """
        call = self.learner.start_call("update", number)
        counts = gather_numbers(self.ctx, len(log_probs))
        for rows in split_minibatches(counts, self.ctx.rank, minibatch, epochs)[call.done :]:
            mask, tokens, old = rollout["mask"][rows], rollout["tokens"][rows], log_probs[rows]
            logits = response_logits(self.model, tokens, rollout["attention"][rows], mask.shape[1], temperature)
            # Mask padding before `exp`, because an infinite ratio on padding would make the gradient NaN.
            now = torch.where(mask, maths.token_log_probs(logits, tokens[:, -mask.shape[1] :]), old)
            losses, clipped = maths.policy_loss(now, old, estimates["advantages"][rows], clip)
            count = make_total(self.ctx)(mask.sum())
            policy_loss = maths.token_mean(losses, mask, count)
            entropy = maths.token_mean(maths.entropy(logits), mask, count)
            self.learner.update_weights(
                policy_loss - entropy_coefficient * entropy,
                self.lr * lr_scale,
                policy_loss=policy_loss,
                entropy=entropy,
                clip_fraction=maths.token_mean(clipped.float(), mask, count),
            )
        return call.means("policy", self.ctx.world_size)

    def save(self, directory: str) -> None:
        """Write a checkpoint of model and optimizer into a folder."""
        checkpoint.save(self.ctx, directory, self.model, self.learner)

    def restore(self, directory: str) -> None:
        """Restore model and optimizer from a checkpoint of any number of ranks."""
        checkpoint.restore(self.ctx, directory, self.model, self.learner)

    def _with_prompts(self, problems: Problems) -> Problems:
        """Return the problems with a prompt for each question; build missing prompts.

        Raises:
            ConfigError: A question leaves no room for an answer.
        """
        pairs = zip(problems.prompts, problems.questions, strict=True)
        prompts = [prompt or self.tokenizer.make_prompt(question) for prompt, question in pairs]
        prepared = attrs.evolve(problems, prompts=prompts)
        room = getattr(self.config.get_text_config(), "max_position_embeddings", None) or math.inf
        if (full := next((row for row, prompt in enumerate(prompts) if len(prompt) >= room), None)) is not None:
            raise ConfigError(
                f"{describe_question(prepared, full)} fills all the room of the model, which takes {room}: give "
                "shorter "
                "questions (`task`, `task_options`), or a `model` that takes more"
            )
        return prepared


def describe_question(asked: Problems, row: int) -> str:
    """Describe a question for an error text, with the length in tokens."""
    return f"the question {brief(repr(question_text(asked.questions[row])))} of {len(asked.prompts[row])} tokens"


def collect_actor_weights(roles: Mapping[str, object]) -> Weights:
    """Return the weights of the actor among a group's roles.

    Raises:
        ConfigError: No role is an actor.
    """
    for role in roles.values():
        if isinstance(role, Actor):
            return role.weights()
    raise ConfigError("it gets its model from an actor (`use: ppo.actor`), and was given none")
