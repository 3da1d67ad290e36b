"""A role saves by `dcp.async_save`, which returns while the files are being written.

The checkpoint counts when they are there: where `save` returns the future, or leaves it in an attribute, as torch's own
recipe does. Where it hides the future, a checkpoint that counts can be restored, or it is the role's error.

Modes: processes, ray, dask.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from hx import attempt, connect, end, verdict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import colocate
from colocate import Role, RoleError, method


class Trainer(Role):
    def __init__(self, how):
        self.how, self.held = how, {}
        self.state = {"step": torch.zeros(1 << 20)}

    @method
    def step(self):
        self.state["step"] += 1

    @method
    def at(self):
        return self.state["step"].mean().item()

    def save(self, directory):
        if self.how != "hidden":
            Path(directory, f"other-{self.ctx.rank}").write_text("what is written at once")
        kind = AsyncCheckpointerType.PROCESS if self.how == "process" else AsyncCheckpointerType.THREAD
        group = self.ctx.process_group()
        future = dcp.async_save(self.state, checkpoint_id=directory, process_group=group, async_checkpointer_type=kind)
        if self.how == "hidden":
            self.held["future"] = future
        elif self.how == "returned":
            return future
        else:
            self.future = future
        return None

    def restore(self, directory):
        dcp.load(self.state, checkpoint_id=directory, process_group=self.ctx.process_group())


with connect() as runtime, runtime.reserve(slots=2) as pool:
    for how in ("returned", "attribute", "hidden", "process"):
        # A process of torch's needs the default group.
        roles = {"trainer": colocate.role(Trainer, how).on(default_group=how == "process")}
        with tempfile.TemporaryDirectory() as made, pool.spawn(roles) as group:
            folder = Path(made, "one")
            trainer = group.role("trainer", Trainer)
            trainer.step()
            found = attempt(group.checkpoint, folder)
            refused = how == "hidden" and isinstance(found, RoleError) and not folder.exists()
            trainer.step()
            if not refused:
                found = attempt(group.restore, folder), trainer.at()
            verdict(how, refused or found == ("one", [1.0, 1.0]), found)
end()
