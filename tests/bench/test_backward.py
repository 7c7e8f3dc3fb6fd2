"""bench/backward: the recipe against exact gradients and the laboratory's."""

import pytest
from support import relative_l1
from torch.testing import assert_close

from bench import gradients
from bench.backward import recipe


@pytest.mark.parametrize("N", [256, 200])
@pytest.mark.parametrize("kind", ["normal", "biased"])
def test_the_recipe_is_as_near_as_the_laboratorys(kind, N):
    case = recipe.draw(2, N, 128, kind)
    found, expected = recipe.emulate(recipe.prepare(*case)), recipe.exact(*case)
    of = (x[None].float() for x in case)
    simulated = gradients.gradients(*of, gradients.ENTRIES["G, dP INT8"])[1:]
    for x, y, z in zip(found, simulated, expected, strict=True):
        assert relative_l1(x, z) < max(0.05, 1.2 * relative_l1(y[0], z))
        assert relative_l1(x, z) > 1e-3


def test_the_exact_gradients_are_autograds():
    case = recipe.draw(2, 100, 64)
    expected = gradients.exact(*(x[None] for x in case))[1:]
    for x, y in zip(recipe.exact(*case), expected, strict=True):
        assert_close(x, y[0], rtol=1e-9, atol=1e-9)
