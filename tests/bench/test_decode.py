"""bench/decode.py, without a GPU."""

import torch

from bench import decode
from bench.decoding import by_hand
from bench.measure import relative_l1


def test_all_that_is_timed_computes_one_thing_and_the_table_says_how_near():
    torch.manual_seed(0)
    shape = decode.Shape(1, 2, 3, 200, 64, 4, 0.5)
    inputs = decode.draw(shape, torch.device("cpu"))
    exact, errors = by_hand(*inputs[:4]), {}
    for x in decode.PROVIDERS:
        errors[x.name] = relative_l1(x.call(*x.prepare(*inputs)).double(), exact)
    assert errors.pop("SDPA") > 0.1  # it sees all keys
    assert (
        max(errors[x] for x in ("SDPA, mask", "bf16, mask", "bf16")) < 0.005 < errors["INT8"] < 0.02
    )
    assert errors["INT8"] < errors["E4M3"] < 0.06
    names = [x.name for x in decode.PROVIDERS]
    row = {
        "part": "calls", "shape": shape._asdict(), "rel_l1": errors, "times": dict.fromkeys(names, {"ms": 0.05}),
        "speed": dict.fromkeys(names, {"x": 1.5, "x_min": 1.4, "x_max": 1.6}),
    }  # fmt: skip
    head, _, line, _, last = decode.table([row]).splitlines()
    assert head.startswith(
        "| B | H_kv | G | N | D | N_q | filled | SDPA, mask | SDPA | bf16, mask |"
    )
    assert line.startswith("| 1 | 2 | 3 | 200 | 64 | 4 | 0.5 | 50.0 | 50.0, 1.50x (1.40 to 1.60) |")
    assert f"INT8 {errors['INT8']:.2%}" in last
