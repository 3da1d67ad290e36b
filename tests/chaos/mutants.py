"""Deliberately broken builds."""


def apply_from_environment() -> None:
    """Nothing yet."""
