import acme
from colocate import Concat, First, Role, Scatter, method


class Reward(Role):
    """Scores texts: the nearer their length is to `wanted`, the better."""

    def __init__(self, wanted: int = 10, scale: float = 1.0) -> None:
        self.wanted = wanted
        self.scale = scale

    @method(dispatch=Scatter("texts"), collect=Concat())
    def score(self, texts: list[str]) -> list[float]:
        return [-self.scale * abs(len(text) - self.wanted) for text in texts]

    @method(collect=First())
    def version(self) -> str:
        return acme.__version__
