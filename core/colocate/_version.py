"""The version, apart from the names that `colocate` offers: what needs the one imports none of the others."""

__version__ = "0.3.0.dev0"
