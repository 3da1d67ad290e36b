"""Process groups of torch: made by the ranks of a role, cut where a peer would wait for ever, and renewed with models.

What users see is `ctx.process_group`, `ctx.device_mesh`, `ctx.rendezvous`, `.on(default_group=..., env="torchrun")`,
and a role's `renew`; the page is "Bring your trainer".
"""
