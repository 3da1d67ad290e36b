"""Roles for these tests alone; `colocate.testing.probes` has the roles that executors' suites share."""
