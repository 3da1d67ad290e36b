"""Process groups of torch: created by a role's ranks, aborted (cut) after a failure, and renewed together with models.

The public names are `ctx.process_group`, `ctx.device_mesh`, `ctx.rendezvous`, `.on(default_group=..., env="torchrun")`,
and a role's `renew`; the page is "Bring your trainer".
"""
