from colocate import Concat, Reduce, Role, Scatter, method


class Counter(Role):
    """Counts the syllables of lines, roughly: groups of vowels.

    Args:
        vowels: What counts as one.
        wanted: How many a line should have.
    """

    def __init__(self, vowels: str = "aeiouy", wanted: int = 5) -> None:
        self.vowels = vowels
        self.wanted = wanted

    @method(dispatch=Scatter("lines"), collect=Concat())
    def syllables(self, lines: list[str]) -> list[int]:
        """The number of syllables of each line."""
        return [self._count(line.lower()) for line in lines]

    @method(dispatch=Scatter("counts"), collect=Reduce("mean"))
    def fit(self, counts: list[int]) -> float:
        """The part of the lines that have as many as wanted."""
        return sum(count == self.wanted for count in counts) / len(counts)

    def _count(self, line: str) -> int:
        pairs = zip(" " + line, line, strict=False)
        return sum(letter in self.vowels and before not in self.vowels for before, letter in pairs)
