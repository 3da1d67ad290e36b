"""The chaos suite: random programs, random faults, and a model of the laws that judges the results."""
