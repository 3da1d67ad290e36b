"""The command `colocate`, implemented by `colocate_run`."""

from colocate._signals.guard import calls_users_code


@calls_users_code  # The command may run a job, which is users' code.
def main() -> None:
    """Run the command line."""
    from colocate_run.cli import main

    main()
