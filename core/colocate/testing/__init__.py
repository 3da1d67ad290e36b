"""Suites that an executor or a role plugin runs on itself, and a fixture that finds leaks.

- `colocate.testing.executors.Executor`: subclass it in a test file to try an executor.
- `colocate.testing.roles.RoleSuite`: subclass it to try a role class.
- `no_leaks`: a pytest fixture (there as soon as colocate is installed) that fails a test which leaves something behind.

All of it needs pytest, which colocate itself doesn't.
"""
