"""The command `colocate`, which `colocate_run` has."""

from colocate._signals.guard import calls_users_code


@calls_users_code  # a job's
def main() -> None:
    """Run the command line."""
    from colocate_run.cli import main

    main()
