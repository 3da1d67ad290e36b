"""Tests of core and of each feature on every executor; a feature's folder is removed with the feature.

This file imports nothing: a worker that imports a role from here runs this file, too.
"""
