"""The command `colocate`, implemented by `colocate_run`."""

from colocate._signals.guard import calls_users_code


@calls_users_code  # a job's code
def main() -> None:
    """Run the command line."""
    from colocate_run.cli import main

    main()
