"""Process groups of torch: made by a role's ranks, cut if a peer would wait forever, and renewed along with models.

The public names are `ctx.process_group`, `ctx.device_mesh`, `ctx.rendezvous`, `.on(default_group=..., env="torchrun")`,
and a role's `renew`; the page is "Bring your trainer".
"""
