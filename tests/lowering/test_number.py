"""Numbers that are known when a package runs: arithmetic, and what is decided before."""

import math
import operator
import random
import re

import pytest
import torch

from sage_inductor.lowering.number import Facts, Number


class Recorder:
    """As record.py's, of numbers that are known here: what C++ computes, computed by Python."""

    def __init__(self, values: dict[str, int]):
        self.values, self.asked = values, 0

    def evaluate(self, text: str) -> int:
        def divided(a, b):
            assert a >= 0 and b > 0
            return a // b, a % b

        text = text.replace("std::max<int64_t>", "max").replace("std::min<int64_t>", "min")
        if found := re.fullmatch(r"(\w+) ([/%]) (\w+)", text):
            a, b = (eval(found[i], {}, self.values) for i in (1, 3))
            return divided(a, b)[found[2] == "%"]
        return eval(text, {"max": max, "min": min}, self.values)

    def name(self, text: str) -> str:
        name = f"n{len(self.values)}"
        self.values[name] = self.evaluate(text)
        return name

    def ask(self, text: str) -> bool:
        self.asked += 1
        return self.evaluate(text)


ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod,
              torch.sym_max, torch.sym_min]  # fmt: skip
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


def test_numbers_are_what_python_computes():
    rng, decided, counts = random.Random(0), 0, dict.fromkeys(ARITHMETIC + COMPARISONS, 0)
    for _ in range(400):
        recorder, known = Recorder({}), []  # pairs: a Number, what it is
        for i in range(3):
            divisor = rng.choice((1, 2, 16))
            low = divisor * rng.randrange(0, 4)
            high = rng.choice((low + divisor * rng.randrange(1, 6), math.inf))
            top = low + 10 * divisor if high == math.inf else high
            recorder.values[f"x{i}"] = value = rng.randrange(low, top + 1, divisor)
            known.append((Number(recorder, f"x{i}", Facts(low, high, divisor)), value))
        known += [(n, n) for n in (0, 1, 2, 7, 16)]
        for _ in range(12):
            (x, a), (y, b) = rng.choice(known), rng.choice(known)
            if not (isinstance(x, Number) or isinstance(y, Number)):
                continue
            operation = rng.choice(ARITHMETIC)
            try:
                found = operation(x, y)
            except ArithmeticError:
                low, divisor = Facts.of(x).low, Facts.of(y)
                assert operation in (operator.floordiv, operator.mod)
                assert low < 0 or divisor.low <= 0
                continue
            counts[operation] += 1
            value = operation(a, b)
            facts = Facts.of(found)
            assert (
                recorder.evaluate(found.text) == value
                if isinstance(found, Number)
                else found == value
            )
            assert facts.low <= value <= facts.high
            assert value % facts.divisor == 0 if facts.divisor else value == 0
            known.append((found, value))
            compare, before = rng.choice(COMPARISONS), recorder.asked
            (x, a), (y, b) = rng.choice(known), rng.choice(known)
            answer = compare(x, y)
            assert answer == compare(a, b), (compare, x, y)
            if isinstance(x, Number) or isinstance(y, Number):
                counts[compare] += 1
                decided += recorder.asked == before
    assert min(counts.values()) > 50 and decided > 300, (counts, decided)


def test_what_is_decided_is_not_asked():
    recorder = Recorder({"n": 8})
    n = Number(recorder, "n", Facts(4, 32, 4))
    assert n > 3 and n >= 4 and not n < 4 and n <= 32 and not n > 32 and n != 5 and n != 36
    assert n == n and n % 4 == 0 and bool(n) and (n * 4) % 16 == 0 and n * 1 is n and 3 < n
    assert Number(recorder, "n", Facts(1, math.inf), is_size=True) != 1
    assert not recorder.asked
    assert n == 8 and recorder.asked == 1
    assert Number(recorder, "n", Facts(1, math.inf)) != 1 and recorder.asked == 2


def test_numbers_where_python_needs_to_know_them_raise():
    n = Number(Recorder({"n": 8}), "n", Facts(0, 32))
    for use in (int, float, range, math.ceil, math.sqrt, hash, [1, 2].__getitem__, "{:d}".format,
                lambda n: n + 0.5, lambda n: n < 0.5, lambda n: n == None, lambda n: -n):  # noqa: E711  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            use(n)
    for divide in (lambda: 5 // n, lambda: 5 % n, lambda: (n - 1) // 2, lambda: (n - 1) % 2, lambda: n // -1):  # fmt: skip
        with pytest.raises(ArithmeticError, match="divides by zero or rounds otherwise"):
            divide()
