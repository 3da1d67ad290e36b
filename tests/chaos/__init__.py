"""The chaos suite: random programs, random faults, and a model of the laws that judges what came of it."""
