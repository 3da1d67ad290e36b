"""Laws of the kernel: what holds of calls, residents, failures and ends on every executor, as core does it."""
