"""The suites of features, a folder each: without its feature it is deleted, too."""

from importlib import import_module

import_module("colocate.testing.executors")  # first: it has the bases of these suites, and takes these in
