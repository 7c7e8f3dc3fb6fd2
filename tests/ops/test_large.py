"""On a real GPU: offsets beyond 2^31 elements, against the same call on contiguous memory.

Each offset is a product of an index and a stride. So a few rows do: what matters is that they lie
far apart. An H200 has the room; every case takes seconds.
"""

import math

import pytest
import support
import torch
from pairs import pairs
from support import relative_l2, sdpa

from sage_inductor.ops import recipe as recipes

pytestmark = pytest.mark.gpu

both = dict(recipe=list(recipes.NAMED), portable=[False, True])
kernels = pytest.mark.parametrize(
    "recipe, portable", [(r, p) for r in recipes.NAMED for p in (False, True)], ids=str
)
BANDS = [{}, {"right": 0}, {"left": 70, "right": 20, "bottom_right": True}]
FAR = 2**31 + 2**27


@pytest.fixture(autouse=True)
def room():
    if torch.cuda.mem_get_info()[1] < 90 << 30:
        pytest.skip("needs a GPU with 90 GiB")
    yield
    torch.cuda.empty_cache()


def apart(x, dim):
    """x, its strides such that the last index of a dimension alone is beyond 2^31 elements, in
    memory that holds what no result may depend on. Each stride is less than 2^31, and aligned."""
    assert x.shape[dim] > 2
    strides = list(x.contiguous().stride())
    strides[dim] = (FAR // (x.shape[dim] - 1) + 63) // 64 * 64
    assert strides[dim] < 2**31 < strides[dim] * (x.shape[dim] - 1)
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides))
    between = math.nan if x.is_floating_point() else True
    memory = torch.full((size,), between, dtype=x.dtype, device="cuda")
    return memory.as_strided(x.shape, strides).copy_(x)


def qkv(B=3, H_q=3, H_kv=3, N_q=300, N_kv=300, D=64):
    q, k, v = support.qkv(B, H_q, H_kv, N_q, N_kv, D, torch.bfloat16, "cuda")
    return q.contiguous(), k.contiguous(), v.contiguous()


def assert_same(found, expected, recipe, in_another_order=False):
    """To the bit, but where sums are taken in another order: where PyTorch smooths q, and where
    neighbours in memory are other ones, which changes a kernel's layout (seen on an H200: a few
    elements an ulp off)."""
    bound = 1e-2 if recipes.NAMED[recipe].of_qk.smooths_q else 1e-3 if in_another_order else 0.0
    for x, y in zip(found, expected, strict=True):
        if bound:
            assert x.isfinite().all() and relative_l2(x, y) < bound
        else:
            assert torch.equal(x, y)


@pairs(which=[0, 1, 2], dim=[0, 1, 2, 3], **both)
def test_inputs_beyond_2_to_the_31_elements(which, dim, recipe, portable):
    inputs = list(qkv())
    far = inputs.copy()
    far[which] = apart(inputs[which], dim)
    padding = torch.arange(300, device="cuda").expand(3, 1, 1, 300) >= 20  # statistics of the rest
    for kwargs in (*BANDS, {"attn_mask": padding}):
        kwargs |= {"recipe": recipe, "portable": portable}
        assert_same(sdpa(*far, **kwargs), sdpa(*inputs, **kwargs), recipe, dim == 3)


@pairs(dtype=[torch.bool, torch.bfloat16], dim=[0, 1, 2, 3], **both)
def test_masks_beyond_2_to_the_31_elements(dtype, dim, recipe, portable):
    q, k, v = qkv(N_kv=500)
    attn_mask = torch.randn(3, 3, 300, 500, device="cuda")
    attn_mask = attn_mask > 0 if dtype == torch.bool else attn_mask.to(dtype)
    kwargs = {"recipe": recipe, "portable": portable}
    found = sdpa(q, k, v, attn_mask=apart(attn_mask, dim), **kwargs)
    assert_same(found, sdpa(q, k, v, attn_mask=attn_mask, **kwargs), recipe, dim > 1)


@pairs(bnhd=[False, True], **both)
def test_queries_and_outputs_of_more_than_2_to_the_31_elements(bnhd, recipe, portable):
    """64 heads of 270,000 queries and few keys."""
    _, k, v = qkv(1, 64, 2, 1, 100, 128)
    shape = (1, 270_000, 64, 128) if bnhd else (1, 64, 270_000, 128)
    q = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    q = q.transpose(1, 2) if bnhd else q
    assert q.numel() > 2**31
    for right in (None, 0):
        kwargs = dict(recipe=recipe, portable=portable, out_bnhd=bnhd, right=right)
        found = [x[:, -2:].clone() for x in sdpa(q, k, v, **kwargs)]
        few = q[:, -2:].contiguous(), k[:, -1:].contiguous(), v[:, -1:].contiguous()
        assert_same(found, sdpa(*few, **kwargs), recipe)


@kernels
def test_keys_and_values_of_more_than_2_to_the_31_elements(recipe, portable):
    """64 heads of 270,000 keys and few queries: what k and v are quantized to is as large. Each head
    has means of its own."""
    q, _, _ = qkv(1, 64, 1, 100, 1, 128)
    means = torch.arange(64, device="cuda", dtype=torch.bfloat16)[None, :, None, None] / 8
    k, v = (
        torch.empty(1, 64, 270_000, 128, dtype=torch.bfloat16, device="cuda").normal_().add_(means)
        for _ in range(2)
    )
    found, lse = sdpa(q, k, v, recipe=recipe, portable=portable)
    last = (x[:, -2:].contiguous() for x in (q, k, v))
    expected, expected_lse = sdpa(*last, recipe=recipe, portable=portable)
    # Where there are fewer heads the Hopper kernel deals tiles out in other pieces: an ulp or two.
    torch.testing.assert_close(found[:, -2:], expected, rtol=2**-6, atol=0.02)
    assert (lse[:, -2:] - expected_lse).abs().max() < 1e-2
