from colocate import Run


def review(run: Run, *, lines: list[str]) -> None:
    """Say how good some lines are.

    Args:
        run: What a job is given.
        lines: The lines.
    """
    (group,) = run.groups.values()
    counter = group["counter"]
    with group.scope():
        counts = counter.syllables.keep(lines)
        run.log(1, fit=counter.fit(counts.ref))
        run.show("lines", [{"line": line, "syllables": n} for line, n in zip(lines, counts.fetch(), strict=True)])
