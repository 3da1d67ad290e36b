"""Optimizer steps over all ranks of a role, in calls that can be repeated after a failure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from colocate import Context
from colocate_ppo.spread import SpreadModel, gather_tensor


@attrs.define
class Call:
    """The updates that one call has made so far.

    Attributes:
        name: The call's method.
        number: The caller's number for the call; None if the call is never repeated.
        done: Number of updates so far, made or skipped.
        skipped: Number of skipped updates.
        sums: Sums of the reported numbers over the updates made.
    """

    name: str = ""
    number: int | None = None
    done: int = 0
    skipped: int = 0
    sums: dict[str, float] = attrs.field(factory=dict)

    def means(self, kind: str, ranks: int) -> dict[str, float]:
        """Return this rank's part of each metric's average over the updates. All ranks' parts add up to the average.

        Args:
            kind: Prefix of the names `grad_norm` and `skipped`; the latter is present only after a skipped update.
            ranks: Number of ranks.

        Returns:
            The averages by name; NaN if all updates were skipped.
        """
        count = self.done - self.skipped
        means = {name: value / count if count else math.nan for name, value in self.sums.items()}
        means[f"{kind}_grad_norm"] = means.pop("grad_norm")
        return means | {f"{kind}_skipped": self.skipped / ranks} if self.skipped else means


class Learner:
    """A model with an AdamW optimizer, which sums gradients over the ranks and clips the norm.

    Args:
        ctx: The role's context.
        model: The model.
        max_norm: The norm to which gradients are clipped.
        skip_nonfinite: Skip and count an update with a non-finite loss or gradient, instead of raising an error.

    Attributes:
        model: The model.
    """

    def __init__(self, ctx: Context, model: SpreadModel, max_norm: float = 1.0, skip_nonfinite: bool = False) -> None:
        self._ctx = ctx
        self.model = model
        self._max_norm, self._skip_nonfinite = max_norm, skip_nonfinite
        self._parameters = dict(model.module.named_parameters())
        self._optimizer = torch.optim.AdamW(self._parameters.values(), weight_decay=0.0)
        self._call = Call()

    def start_call(self, name: str, number: int | None) -> Call:
        """Start a call, or continue the last call if name and number are the same.

        A call that failed on some rank is repeated with its number, and makes the missing updates. All ranks miss
        equally many updates; otherwise colocate would have raised a `RenewalError`.
        """
        if number is None or (name, number) != (self._call.name, self._call.number):
            self._call = Call(name, number)
        return self._call

    def update_weights(self, minimised: Tensor, lr: float, **given: Tensor) -> None:
        """Make one update, unless the loss or the gradient isn't finite and would spoil all weights.

        Args:
            minimised: The loss: this rank's part of a sum over the ranks.
            lr: Learning rate.
            **given: Further numbers of this rank to add up in the call, in addition to `grad_norm`, this rank's part of
                the norm of the gradient before clipping.

        Raises:
            FloatingPointError: The loss or the gradient isn't finite, and `skip_nonfinite` is off. All ranks raise.
        """
        self._optimizer.zero_grad(set_to_none=True)
        # A bad loss on one rank spoils the norm on every rank, so all ranks make the same decision without a message.
        finite = torch.where(minimised.detach().isfinite(), 1.0, torch.nan)
        gradients = self._compute_gradients(minimised * finite)
        norm = gather_tensor(get_total_norm(gradients))
        clip_grads_with_norm_(self._parameters.values(), self._max_norm, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        numbers = {name: value.item() for name, value in given.items()}
        numbers["grad_norm"] = norm.item() / self._ctx.world_size
        skipped = not math.isfinite(numbers["grad_norm"])
        if skipped and not self._skip_nonfinite:
            raise self._bad_update(minimised.item(), norm.item())
        # From here on only the update itself can raise, so `done` counts exactly the finished updates.
        if not skipped:
            self._optimizer.step()
        self._call.done += 1
        self._call.skipped += skipped
        for name, number in numbers.items():
            self._call.sums[name] = self._call.sums.get(name, 0.0) + (0.0 if skipped else number)

    def _bad_update(self, loss: float, norm: float) -> FloatingPointError:
        call, role = self._call, self._ctx.role
        step = "" if call.number is None else f" of step {call.number}"
        return FloatingPointError(
            f"role {role!r} makes no update: in `{call.name}`{step}, minibatch {call.done}, the gradient's norm is "
            f"{norm}, with a loss of {loss} on this rank. The weights are as before. Look for scores, "
            "log-probabilities or learning rates that are too large; `skip_nonfinite: true` of the role leaves such "
            "updates out and counts them"
        )

    def renew_groups(self) -> None:
        """Use new process groups after a failed call. All ranks call this."""
        from colocate.torch import renew

        renew(self.model.wrapped, self._optimizer, self._ctx)

    def drop_moments(self) -> None:
        """Drop the optimizer's moments and free their memory."""
        self._optimizer.state.clear()
        self._call = Call()

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's moments by parameter name, without copying tensors."""
        return {
            name: dict(self._optimizer.state[p]) for name, p in self._parameters.items() if p in self._optimizer.state
        }

    def make_room(self, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Tensor]]:
        """Replace the optimizer's moments by zeros, which a checkpoint is then loaded into.

        Args:
            names: The names of the moments, by parameter name.
        """
        self.drop_moments()
        for name, moments in names.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {
                # AdamW counts steps in a zero-dimensional tensor on the CPU.
                moment: torch.zeros(()) if moment == "step" else torch.zeros_like(parameter)
                for moment in moments
            }
        return self.optimizer_state()

    def _compute_gradients(self, loss: Tensor) -> list[Tensor]:
        parameters: list[Tensor] = [*self._parameters.values()]
        if self.model.layout.parallel != "none":
            # DDP and FSDP2 average gradients over the ranks. This factor turns the average into a sum.
            torch.autograd.backward(loss * self._ctx.world_size)
            return [p.grad for p in parameters if p.grad is not None]
        torch.autograd.backward(loss)
        if self._ctx.world_size > 1:
            self._sum_gradients(parameters)
        return [p.grad for p in parameters if p.grad is not None]

    def _sum_gradients(self, parameters: list[Tensor]) -> None:
        """Sum all gradients over the ranks in one message, because each message adds latency."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._ctx.process_group())
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
