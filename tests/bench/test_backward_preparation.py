"""bench/backward/preparation.py in Triton's interpreter against recipe.py.

Its rounding to FP8 drops the carry and subnormals: codes are compared within a factor of 2 there. On a GPU
bench/backward/gate.py compares them.
"""

import os

import pytest
import torch
from torch.testing import assert_close

from bench.backward import gate, preparation, recipe

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs TRITON_INTERPRET=1 (make test does)",
    ),
    pytest.mark.usefixtures("poisoned"),
]


def strided(x):
    """x as a model has it: heads side by side in a row, beside other tensors' rows."""
    rows = torch.full((x.shape[1], x.shape[0] + 1, x.shape[2]), float("nan"), dtype=x.dtype)
    rows[:, 1:] = x.transpose(0, 1)
    return rows[:, 1:].transpose(0, 1)


@pytest.mark.parametrize("kind", ["normal", "biased"])
@pytest.mark.parametrize(("heads", "N"), [(2, 256), (3, 1), (2, 63), (2, 321), (1, 1100)])
def test_it_writes_what_the_recipe_does(heads, N, kind):
    case = recipe.draw(heads, N, 128, kind)
    forward = recipe.forward(*case[:3])
    found = preparation.prepare(*map(strided, case), forward._replace(o=strided(forward.o)))
    expected = recipe.prepare(*case, forward)
    # One key: dS is 0 and so is beta, of which the recipe's qt has denormal numbers.
    assert set(gate.different(found, expected, step=0.51)) <= ({"qt"} if N == 1 else set())


def test_a_gradient_in_other_units_changes_scales_alone():
    case = recipe.draw(1, 200, 64, "biased")
    forward = recipe.forward(*case[:3], softmax_scale=0.3)
    plain, scaled = (
        preparation.prepare(*case[:3], case[3] * unit, forward, 0.3) for unit in (1.0, 2.0**-20)
    )
    assert not gate.different(plain, recipe.prepare(*case, forward, 0.3), step=0.51)
    for name in ("q8", "g8", "k8", "v8", "vectors"):
        assert torch.equal(getattr(plain, name), getattr(scaled, name)), name
    for name in ("kt", "qt", "ot"):
        assert torch.equal(getattr(plain, name).float(), getattr(scaled, name).float()), name
    for name in ("row_scale", "qt_scale", "ot_scale"):
        assert torch.equal(getattr(plain, name) * 2.0**-20, getattr(scaled, name)), name


def test_no_gradient_gives_zeros():
    q, k, v, do = recipe.draw(1, 100, 64)
    x = preparation.prepare(q, k, v, 0 * do, recipe.forward(q, k, v))
    assert not x.g8.any() and not x.ot.float().any() and not x.vectors[2].any()
    for each in recipe.emulate(x):
        assert_close(each, torch.zeros_like(each))
