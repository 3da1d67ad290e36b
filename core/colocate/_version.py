"""The version, in a module without imports of the package's names."""

__version__ = "0.3.0.dev0"
