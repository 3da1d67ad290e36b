"""Roles of these laws alone; those that an executor's suite has, too, lie in `colocate.testing.probes`."""
