"""The steps of an optimizer over all ranks of a role, in calls that can be done again where one has failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from colocate import Context
from colocate_ppo.spread import SpreadModel, whole


@attrs.define
class Call:
    """The updates that one call makes.

    Attributes:
        name: What is called.
        number: What its caller calls it; None: nobody does it again.
        done: How many of its updates have been made, or left out.
        skipped: How many of these were left out.
        sums: What the others have given, added up.
    """

    name: str = ""
    number: int | None = None
    done: int = 0
    skipped: int = 0
    sums: dict[str, float] = attrs.field(factory=dict)

    def means(self, kind: str, ranks: int) -> dict[str, float]:
        """Return the average of each number over the updates, as parts that add up over the ranks.

        Args:
            kind: Begins the names of `grad_norm` and of `skipped`, which is there if an update was left out.
            ranks: How many ranks there are.

        Returns:
            By name; numbers that aren't any where all updates were left out.
        """
        made = self.done - self.skipped
        means = {name: value / made if made else math.nan for name, value in self.sums.items()}
        means[f"{kind}_grad_norm"] = means.pop("grad_norm")
        return means | {f"{kind}_skipped": self.skipped / ranks} if self.skipped else means


class Learner:
    """A model with its AdamW: gradients are summed over the ranks, then clipped.

    Args:
        ctx: The role's context.
        model: The model.
        max_norm: The norm to which gradients are clipped.
        skip_nonfinite: Leave out an update whose loss or gradient isn't finite, and count it, in place of an error.

    Attributes:
        model: The model.
    """

    def __init__(self, ctx: Context, model: SpreadModel, max_norm: float = 1.0, skip_nonfinite: bool = False) -> None:
        self._ctx = ctx
        self.model = model
        self._max_norm, self._skip_nonfinite = max_norm, skip_nonfinite
        self._named = dict(model.module.named_parameters())
        self._optimizer = torch.optim.AdamW(self._named.values(), weight_decay=0.0)
        self._call = Call()

    def call(self, name: str, number: int | None) -> Call:
        """The updates of a call: those that the last one has left when it has the same number, otherwise none yet.

        A call that failed on some rank is done again by another one with its number: it makes the updates that are
        missing, which are equally many on all ranks, or colocate would have raised a `RenewalError`.
        """
        if number is None or (name, number) != (self._call.name, self._call.number):
            self._call = Call(name, number)
        return self._call

    def step(self, minimised: Tensor, lr: float, **given: Tensor) -> None:
        """Make one update, unless the loss or the gradient isn't finite: one of these would spoil all weights.

        Args:
            minimised: The loss: this rank's part of a sum over the ranks.
            lr: Learning rate.
            **given: More numbers of this rank to be added up in the call, beside `grad_norm`: this rank's part of the
                norm of the gradient before clipping.

        Raises:
            FloatingPointError: The loss or the gradient isn't finite, and `skip_nonfinite` is off. All ranks raise.
        """
        self._optimizer.zero_grad(set_to_none=True)
        # A bad loss on one rank spoils the norm on every rank, so that all decide alike without another message.
        finite = torch.where(minimised.detach().isfinite(), 1.0, torch.nan)
        gradients = self._gradients(minimised * finite)
        norm = whole(get_total_norm(gradients))
        clip_grads_with_norm_(self._named.values(), self._max_norm, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        numbers = {name: value.item() for name, value in given.items()}
        numbers["grad_norm"] = norm.item() / self._ctx.world_size
        skipped = not math.isfinite(numbers["grad_norm"])
        if skipped and not self._skip_nonfinite:
            raise self._bad_update(minimised.item(), norm.item())
        # From here on nothing raises but the update itself: what is counted has been made.
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

    def renew(self) -> None:
        """Go on after a failed call, with new process groups. All ranks call it."""
        from colocate.torch import renew

        renew(self.model.wrapped, self._optimizer, self._ctx)

    def forget(self) -> None:
        """Drop the moments of all updates so far, and their memory."""
        self._optimizer.state.clear()
        self._call = Call()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The moments by the names of their parameters, as they are used: for a checkpoint."""
        return {name: dict(self._optimizer.state[p]) for name, p in self._named.items() if p in self._optimizer.state}

    def room(self, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Tensor]]:
        """The moments that a checkpoint has, to be filled from it: they are used from now on.

        Args:
            names: By the name of each parameter, those of its moments.
        """
        self.forget()
        for name, moments in names.items():
            parameter = self._named[name]
            self._optimizer.state[parameter] = {
                # AdamW counts its steps on the CPU, in a tensor without axes.
                moment: torch.zeros(()) if moment == "step" else torch.zeros_like(parameter)
                for moment in moments
            }
        return self.state()

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        parameters: list[Tensor] = [*self._named.values()]
        if self.model.layout.parallel != "none":
            torch.autograd.backward(loss * self._ctx.world_size)  # of which both give the mean
            return [p.grad for p in parameters if p.grad is not None]
        torch.autograd.backward(loss)
        if self._ctx.world_size > 1:
            self._sum_gradients(parameters)
        return [p.grad for p in parameters if p.grad is not None]

    def _sum_gradients(self, parameters: list[Tensor]) -> None:
        """Sum all gradients by one message: small ones cost their latency, not their bytes."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._ctx.process_group())
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
