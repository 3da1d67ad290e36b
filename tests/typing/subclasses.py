"""Role methods can be overridden, generic, abstract, and of plain classes."""

import abc
from typing import Generic, TypeVar, assert_type

import colocate
from colocate import Concat, First, Gather, Role, RoleCall, Scatter, method

T = TypeVar("T")


class Animal:
    pass


class Dog(Animal):
    pass


class Base(Role):
    @method(collect=First())
    def make(self, name: str) -> Animal:
        return Animal()

    @method
    def each(self, name: str) -> Animal:
        return Animal()

    @method(dispatch=Scatter("x"), collect=Concat())
    def spread(self, x: list[int]) -> list[int]:
        return x

    @method(collect=First())
    async def later(self, name: str) -> Animal:
        return Animal()


class Same(Base):
    @method(collect=First())
    def make(self, name: str) -> Animal:
        return Animal()

    @method(collect=Gather())
    def each(self, name: str) -> Animal:
        return Animal()

    @method(dispatch=Scatter("x"), collect=Concat("tp"))
    def spread(self, x: list[int]) -> list[int]:
        return x

    @method(collect=First())
    def later(self, name: str) -> Animal:
        return Animal()


class Narrower(Base):
    @method(collect=First())
    def make(self, name: str) -> Dog:
        return Dog()


class Fewer(Base):
    @method(collect=First())
    def make(self, name: int) -> Animal:  # E: the override takes other arguments
        return Animal()


class Elsewhere(Base):
    @method(collect=First())
    def each(self, name: str) -> Animal:  # E: the override gives one value, not a list
        return Animal()


class Own(Base):
    @method
    def both(self) -> list[int]:
        """On the class, a method has the type of its function, whatever its calls give."""
        assert_type(Base.each(self, "a"), Animal)
        assert_type(Base.make(self, name="a"), Animal)
        assert_type(Base.spread(self, [1]), list[int])
        assert_type(type(self).each(self, "a"), Animal)
        Base.each(self, 1)  # E: an int is no str
        Base.each(self)  # E: name is missing
        return [1]

    @method(collect=First())
    async def waits(self) -> Animal:
        assert_type(self.both(), list[list[int]])  # On self, the checkers see the type of a view's call.
        found: Animal = await Base.later(self, "a")
        Base.later(self)  # E: name is missing
        return found


class Abstract(Role, abc.ABC):
    @method(collect=First())
    @abc.abstractmethod
    def score(self, text: str) -> float: ...


class Concrete(Abstract):
    @method(collect=First())
    def score(self, text: str) -> float:
        return 1.0


class Plain:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @method(dispatch=Scatter("x"), collect=Concat())
    def times(self, x: list[float]) -> list[float]:
        return [value * self.scale for value in x]


class Open(Role):
    @method(collect=First())
    def count(self, /, a: int, *args: int, flag: bool = False, **kwargs: str) -> int:
        return a + len(args) + len(kwargs)


class Holder(Role, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    @method(collect=First())
    def get(self) -> T:
        return self.value


def calls(group: colocate.ColocatedGroup) -> None:
    assert_type(group[Same].make("a"), Animal)
    assert_type(group[Narrower].make("a"), Dog)
    assert_type(group[Narrower].make.submit("a"), colocate.Call[Dog])
    assert_type(group[Narrower].each("a"), list[Animal])
    assert_type(group.role("score", Concrete).score("a"), float)
    assert_type(group[Plain].times([1.0]), list[float])
    assert_type(colocate.role(Holder[int], 3), colocate.RoleSpec[Holder[int]])
    assert_type(group.role("holder", Holder[int]).get(), int)
    assert_type(group[Holder[int]].get.keep(), colocate.Resident[int])
    assert_type(group[Open].count(1, 2, flag=True, name="a"), int)
    group[Open].count(1, name=2)  # E: an int is no str
    group[Plain].times("a")  # E: a str is no list


def wider(base: Base) -> None:
    assert_type(base.make("a"), Animal)
    wider(Narrower())


def takes(call: RoleCall[[str], Animal]) -> Animal:
    return call("a")


def passed(narrower: Narrower, base: Base, plain: Plain) -> None:
    """A role's method can be passed on as a callable of its result type, or a wider one."""
    takes(base.make)
    takes(narrower.make)
    takes(base.each)  # E: each gives a list
    takes(plain.times)  # E: times takes a list
