"""The command `colocate`, which `colocate_run` has."""


def main() -> None:
    """Run the command line."""
    from colocate_run.cli import main

    main()
