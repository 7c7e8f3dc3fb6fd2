"""A whole number that is known when a package runs, and what is known of it before.

What a launch function computes of such numbers becomes C++. A comparison is decided where the facts
decide it; else the recording says which answer this way through the function has.
"""

import dataclasses
import math
import operator

import torch


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a number while packaging: low <= it <= high, and it is a multiple of
    divisor. Arithmetic on facts is what follows for the results, in C++ and Python alike."""

    low: int | float  # or -math.inf
    high: int | float  # or math.inf
    divisor: int = 1  # 0: the number is 0

    @classmethod
    def of(cls, x) -> "Facts":
        return x.facts if isinstance(x, Number) else cls(int(x), int(x), abs(int(x)))

    def __add__(self, y: "Facts") -> "Facts":
        return Facts(self.low + y.low, self.high + y.high, math.gcd(self.divisor, y.divisor))

    def __sub__(self, y: "Facts") -> "Facts":
        return Facts(self.low - y.high, self.high - y.low, math.gcd(self.divisor, y.divisor))

    def __mul__(self, y: "Facts") -> "Facts":
        corners = [
            a * b if a and b else 0  # inf * 0
            for a in (self.low, self.high)
            for b in (y.low, y.high)
        ]
        return Facts(min(corners), max(corners), self.divisor * y.divisor)

    def __floordiv__(self, y: "Facts") -> "Facts":
        self._check_divided_by(y)
        exact = y.low == y.high and self.divisor % y.low == 0
        low = 0 if y.high == math.inf else self.low // y.high
        high = math.inf if self.high == math.inf else self.high // y.low
        return Facts(low, high, self.divisor // y.low if exact else 1)

    def __mod__(self, y: "Facts") -> "Facts":
        self._check_divided_by(y)
        if y.low == y.high and self.divisor % y.low == 0:
            return Facts.of(0)
        return Facts(0, min(self.high, y.high - 1))

    def _check_divided_by(self, y: "Facts") -> None:
        if self.low < 0 or y.low <= 0:
            raise ArithmeticError(f"C++ divides by zero or rounds otherwise: {self} by {y}")

    def minimum(self, y: "Facts") -> "Facts":
        divisor = math.gcd(self.divisor, y.divisor)
        return Facts(min(self.low, y.low), min(self.high, y.high), divisor)

    def maximum(self, y: "Facts") -> "Facts":
        divisor = math.gcd(self.divisor, y.divisor)
        return Facts(max(self.low, y.low), max(self.high, y.high), divisor)


def _computed(cpp: str, of_facts, x, y):
    if not (isinstance(x, (int, Number)) and isinstance(y, (int, Number))):
        return NotImplemented
    facts = of_facts(Facts.of(x), Facts.of(y))
    if facts.low == facts.high:
        return facts.low
    recording = (x if isinstance(x, Number) else y).recording
    return Number(recording, recording.name(cpp.format(text_of(x), text_of(y))), facts)


def _operators(cpp: str, of_facts) -> tuple:
    """The methods of an operator, for a number on its left and on its right."""
    return (
        lambda x, y: _computed(cpp, of_facts, x, y),
        lambda x, y: _computed(cpp, of_facts, y, x),
    )


class Number:
    """A number that C++ computes as `text`. Where Python needs to know it, it raises TypeError."""

    __hash__ = None  # equal to what, is a question for the C++ function

    def __init__(self, recording, text: str, facts: Facts, is_size: bool = False):
        self.recording, self.text, self.facts = recording, text, facts
        self.is_size = is_size  # of a tensor that was given

    def at_most(self, most: int) -> "Number":
        """It, which is checked when it runs."""
        self.recording.expect(f'"{self.text}", {self.text}, {self.facts.low}, {most}, 1')
        high = min(self.facts.high, most)
        return Number(self.recording, self.text, dataclasses.replace(self.facts, high=high))

    def __mul__(self, y):
        return self if type(y) is int and y == 1 else _computed("{} * {}", operator.mul, self, y)

    __add__, _ = _operators("{} + {}", operator.add)
    __radd__, __rmul__ = __add__, __mul__
    __sub__, __rsub__ = _operators("{} - {}", operator.sub)
    __floordiv__, __rfloordiv__ = _operators("{} / {}", operator.floordiv)
    __mod__, __rmod__ = _operators("{} % {}", operator.mod)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.sym_min:
            return _computed("std::min<int64_t>({}, {})", Facts.minimum, *args)
        if function is torch.sym_max:
            return _computed("std::max<int64_t>({}, {})", Facts.maximum, *args)
        return NotImplemented

    def __lt__(self, y):
        return self._is("<", y, lambda a, b: a.high < b.low, lambda a, b: a.low >= b.high)

    def __le__(self, y):
        return self._is("<=", y, lambda a, b: a.high <= b.low, lambda a, b: a.low > b.high)

    def __gt__(self, y):
        return not self <= y

    def __ge__(self, y):
        return not self < y

    def __eq__(self, y):
        def never(a: Facts, b: Facts) -> bool:
            remainder = b.low == b.high and (b.low % a.divisor if a.divisor else b.low)
            # torch has already assumed, for the whole graph, that an unknown size is not 1.
            one = self.is_size and b == Facts.of(1)
            return one or a.low > b.high or a.high < b.low or bool(remainder)

        return self._is("==", y, lambda a, b: text_of(y) == self.text, never)

    def __ne__(self, y):
        return not self == y

    def __bool__(self):
        return self != 0

    def __index__(self):
        raise TypeError(f"a number that is known only when a package runs: {self.text}")

    def _is(self, operator: str, y, always, never) -> bool:
        if not isinstance(y, (int, Number)):
            raise TypeError(f"{self.text} is a whole number, and cannot be compared to {y!r}")
        facts = self.facts, Facts.of(y)
        if always(*facts) or never(*facts):
            return always(*facts)
        return self.recording.ask(f"{self.text} {operator} {text_of(y)}")


def text_of(x: "int | Number") -> str:
    """A size in C++."""
    return x.text if isinstance(x, Number) else str(int(x))
