"""Kinds of classes: the code that defines `NAME`, and an expression that makes a value of the class."""

from __future__ import annotations

import sys

# The last line of each kind is the expression for a value; GLOBAL is a global that the methods name.
KINDS = {
    "plain": "class NAME:\n    def seen(self): return GLOBAL, NAME\nNAME()",
    "slots": "class NAME:\n    __slots__ = ('__x', 'y')\n    def __init__(self): self.__x, self.y = 1, 2\n"
    "    def seen(self): return GLOBAL, NAME, self.__x\nNAME()",
    "enum": "class NAME(enum.Enum):\n    A = (1, 2)\n    B = (3, 4)\n    ALSO_A = (1, 2)\n"
    "    def __init__(self, x, y): self.x = x\n    def seen(self): return GLOBAL, NAME, self.x, self.ALSO_A is NAME.A\n"
    "NAME.B",
    "flag": "class NAME(enum.IntFlag):\n    R = 1\n    W = 2\n    RW = 3\n"
    "    def seen(self): return GLOBAL, NAME, self is NAME.RW\nNAME.RW",
    "dataclass": "@dataclasses.dataclass\nclass NAME:\n    x: int\n"
    "    y: list = dataclasses.field(default_factory=list)\n"
    "    def seen(self): return GLOBAL, NAME, dataclasses.replace(self, x=3), NAME(4)\nNAME(1)",
    "slots_dataclass": "@dataclasses.dataclass(slots=True, frozen=True)\nclass NAME:\n    x: int = 1\n"
    "    def seen(self): return GLOBAL, NAME, dataclasses.replace(self, x=3), hasattr(self, '__dict__')\nNAME()",
    "attrs": "@attrs.define\nclass NAME:\n    x: int\n"
    "    def seen(self): return GLOBAL, NAME, __class__, attrs.evolve(self, x=2)\nNAME(1)",
    "named_tuple": "class NAME(typing.NamedTuple):\n    x: int\n    y: str = 'y'\n"
    "    def seen(self): return GLOBAL, NAME, self._replace(x=2), NAME(5)\nNAME(1)",
    "protocol": "@typing.runtime_checkable\nclass NAMEP(typing.Protocol):\n    def seen(self): ...\n"
    "class NAME:\n    def seen(self): return GLOBAL, NAME, isinstance(self, NAMEP)\nNAME()",
    "exception": "class NAME(Exception):\n    def __init__(self, a, b):\n        super().__init__(f'{a} was {b}')\n"
    "        self.b = b\n    def seen(self): return GLOBAL, NAME, self.args, self.b\nNAME(1, 2)",
    "os_error": "class NAME(OSError):\n    def __init__(self, where):\n        super().__init__(2, 'none', where)\n"
    "        self.where = where\n    def seen(self): return GLOBAL, NAME, self.errno, self.filename, self.where\n"
    "NAME('x')",
    "generic": "NAMET = typing.TypeVar('NAMET')\nclass NAME(typing.Generic[NAMET]):\n"
    "    def seen(self): return GLOBAL, NAME, NAME[int].__origin__ is NAME\nNAME[int]()",
    "nested": "class NAME:\n    class Inner:\n        def seen(self): return GLOBAL, NAME.Inner\n"
    "    def __init__(self): self.inner = NAME.Inner()\n    def seen(self): return GLOBAL, NAME, self.inner.seen(),\\\n"
    "        type(self.inner) is NAME.Inner\nNAME()",
    "metaclass": "class NAMEM(type):\n    def __new__(cls, name, bases, names):\n"
    "        assert 'seen' in names\n        return super().__new__(cls, name, bases, names)\n"
    "class NAME(metaclass=NAMEM):\n    def seen(self): return GLOBAL, NAME, type(NAME) is NAMEM\nNAME()",
    "abc": "class NAMEB(abc.ABC):\n    @abc.abstractmethod\n    def seen(self): ...\n"
    "class NAME(NAMEB):\n    def seen(self): return GLOBAL, NAME, isinstance(self, NAMEB)\nNAME()",
    "pydantic": "class NAME(pydantic.BaseModel):\n    x: int = 1\n    @pydantic.field_validator('x')\n"
    "    @classmethod\n"
    "    def double(cls, x): return 2 * x\n    def seen(self): return GLOBAL, NAME, self.x, NAME(x=3).x\nNAME(x=2)",
    "parametrised": "NAMET = typing.TypeVar('NAMET')\nclass NAMEG(pydantic.BaseModel, typing.Generic[NAMET]):\n"
    "    x: NAMET\n    def seen(self): return GLOBAL, NAME is NAMEG[int], type(NAMEG[int](x=1)) is type(self)\n"
    "NAME = NAMEG[int]\nNAME(x=1)",
    "each_other": "class NAMEO:\n    def seen(self): return NAME\n"
    "class NAME:\n    def seen(self): return GLOBAL, NAMEO().seen() is NAME\nNAME()",
    "caches": "class NAME:\n    @functools.cached_property\n    def cached(self): return GLOBAL\n"
    "    @functools.lru_cache(maxsize=3)\n    def least(self): return GLOBAL\n"
    "    def seen(self): return self.cached, self.least(), NAME.least.cache_parameters()['maxsize']\nNAME()",
    "told_of_subclasses": "class NAMEB:\n    known = {}\n    def __init_subclass__(cls, *, key):\n"
    "        assert key not in NAMEB.known\n        cls.key = key\n        NAMEB.known[key] = cls\n"
    "class NAME(NAMEB, key='a'):\n    def seen(self): return GLOBAL, NAME.key, NAMEB.known['a'] is NAME\nNAME()",
    "told_by_a_base_that_is_there": "class NAMEB:\n    def __init_subclass__(cls, *, tag): cls.tag = tag\n"
    "class NAME(NAMEB, tag='a'):\n    def seen(self): return GLOBAL, NAME.tag, NAME.__bases__ == (NAMEB,)\nNAME()",
    "typed_dict": "class NAMEB(typing.TypedDict):\n    a: int\n"
    "class NAME:\n    def seen(self) -> NAMEB: return GLOBAL, NAMEB(a=1), typing.is_typeddict(NAMEB)\nNAME()",
    "new_type": "NAMEN = typing.NewType('NAMEN', int)\n"
    "class NAME:\n    def seen(self, x: NAMEN = NAMEN(2)) -> NAMEN: return GLOBAL, x, NAMEN.__name__\nNAME()",
    "parameters": "NAMEP = typing.ParamSpec('NAMEP')\n"
    "class NAME(typing.Generic[NAMEP]):\n    def seen(self): return GLOBAL, NAMEP.__name__\nNAME()",
    "sentinel": "class NAMES:\n    def __reduce__(self): return 'NAMEV'\nNAMEV = NAMES()\n"
    "class NAME:\n    def seen(self, x=NAMEV): return GLOBAL, x is NAMEV, type(x) is NAMES\nNAME()",
}

if sys.version_info >= (3, 12):
    KINDS["names_of_types"] = (
        "type NAMEJ = dict[str, NAMEJ] | int\ntype NAMER[T] = dict[T, int]\n"
        "class NAME[T: NAMEJ, **P, *Ts]:\n    def seen[U](self, x: NAMEJ = 1) -> NAMER[U]:\n"
        "        t, *others = NAME.__type_params__\n        names = NAMEJ.__value__, NAMER[str].__value__\n"
        "        return GLOBAL, NAME, t is T, others, t.__bound__ is NAMEJ, names\nNAME()"
    )

IMPORTS = "import abc, attrs, dataclasses, enum, functools, typing\n"


def code(kind: str, name: str, value: int) -> tuple[str, str]:
    """Return the code of a kind under a name, with its global, and the expression for a value."""
    imports = IMPORTS + ("import pydantic\n" if "pydantic" in KINDS[kind] else "")
    *lines, made = KINDS[kind].replace("NAME", name).replace("GLOBAL", f"G_{name}").splitlines()
    return "\n".join([imports, f"G_{name} = {value}", *lines, ""]), made
