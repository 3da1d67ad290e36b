"""The laws of core and of features on every executor: a folder has those of a feature, and goes with it.

This imports nothing: a worker that imports a role from here imports this, too.
"""
