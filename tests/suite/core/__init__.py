"""Tests of core on every executor: calls, residents, failures and shutdown."""
