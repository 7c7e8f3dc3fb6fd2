"""``sage::append_kv`` and ``sage::read_kv``: the kernel, in Triton's interpreter and on a GPU, against
the op's emulation; the ops as torch sees them; what a cache's error does to attention."""

import math
import random

import pytest
import support
import torch
from kernel_cases import INTERPRETER, runners
from pairs import seeds
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from triton.runtime import interpreter

from sage_inductor.ops import gpus
from sage_inductor.ops.formats import HEAD_DIMS
from sage_inductor.ops.quantize.cache import append_kv, launch, read_kv

H200 = gpus.Gpu((9, 0), 132)


def tokens(rng, B: int, H: int, n: int, D: int, exact: bool, dtype, device) -> Tensor:
    """In one of three orders. exact: sums of them are the same in any order."""
    x = torch.randn(B, n, H, 2 * D, device=device) + torch.randn(H, 1, device=device)
    x = (8 * x).round() / 8 if exact else x * 10 ** rng.uniform(-4, 3)
    x = x.clamp(-6e4, 6e4).to(dtype)
    first = rng.choice((0, D, 3))
    return rng.choice((
        lambda: x[..., first : first + D].transpose(1, 2),
        lambda: x[..., :D].transpose(1, 2).contiguous(),
        lambda: x[..., ::2].permute(0, 2, 3, 1).contiguous().mT,
    ))()  # fmt: skip


def cache(B: int, H: int, N: int, D: int, device) -> list[Tensor]:
    """Codes and scales that nobody wrote, NaN, and memory around them."""
    codes = torch.full((B + 2, H, N, D), -77, dtype=torch.int8, device=device)
    scale = torch.full((B + 2, H, N), math.nan, device=device)
    return [codes[1:-1], scale[1:-1]]


def drawn(seed: int, runner) -> tuple:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    B, H, n = rng.randint(1, 3), rng.randint(1, 3), rng.choice((1, 1, 2, 15, 16, 17, 33))
    N = n + rng.choice((0, 1, 16, 30))
    rotated = rng.random() < 0.5
    D = rng.choice(HEAD_DIMS if rotated else (16, 48, 64, 80, 112, 256))
    D_v, device = rng.choice((D, D, 16, 96)), runner.device
    # fp32 is rotated as bf16, which the interpreter has not.
    dtype = (
        runner.dtype
        if rotated and runner is INTERPRETER
        else rng.choice((runner.dtype, torch.float32))
    )
    k = tokens(rng, B, H, n, D, rotated, dtype, device)
    v = tokens(rng, B, H, n, D_v, False, dtype, device)
    anchor = (8 * torch.randn(B, H, D, device=device)).round() / 8
    if rng.random() < 0.3:  # a token of zeros; one that has no numbers
        k[:, :, 0], v[:, :, n // 2] = anchor.to(dtype), 0
        k[0, 0, -1, 3], v[-1, -1, -1, 5] = math.nan, math.inf
    length = rng.choice((0, 1, N - n, (N - n) // 2))
    length = torch.tensor(
        min(length, N - n), dtype=rng.choice((torch.int32, torch.int64)), device=device
    )
    of_cache = *cache(B, H, N, D, device), *cache(B, H, N, D_v, device)
    return *of_cache, k, v, anchor, length, rotated


def appended(by, given: tuple) -> list[Tensor]:
    """All memory of the cache and around it. Codes of a new token that has no numbers are nobody's
    concern: 0."""
    memory = [(x if x._base is None else x._base).clone() for x in given[:4]]
    views = [
        whole.as_strided(x.shape, x.stride(), x.storage_offset())
        for whole, x in zip(memory, given[:4])
    ]
    by(*views, *given[4:])
    length, n = given[7], given[4].shape[2]
    for codes, scale in (views[:2], views[2:]):
        codes[:, :, length : length + n][scale[:, :, length : length + n].isnan()] = 0
    return memory


def by_kernel(*given) -> None:
    launch(support.run, H200, *given)


@pytest.fixture
def fused(monkeypatch):
    """The interpreter's tl.fma rounds once, as a GPU's does."""

    def create_fma(self, x, y, z):
        once = x.data.astype(float) * y.data.astype(float) + z.data.astype(float)
        return interpreter.TensorHandle(once.astype(x.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)


@runners
@seeds(60, always=12)
@pytest.mark.usefixtures("fused")
def test_tokens_are_quantized_where_they_go_and_nothing_else_is_written(runner, seed):
    given = drawn(seed, runner)
    for found, expected in zip(appended(by_kernel, given), appended(append_kv, given)):
        assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("runner", [pytest.param(INTERPRETER, marks=INTERPRETER.marks)])
@pytest.mark.parametrize("n, length", [(1, 40), (5, 36), (40, 1), (3, 2**31 + 5)])
def test_tokens_beyond_the_room_are_not_written(runner, n, length):
    """A GPU's assertion fails there, which the interpreter does not compile."""
    x = torch.randn(1, 1, n, 64).half()
    whole = torch.full((1, 1, 80, 64), 99, dtype=torch.int8), torch.full((1, 1, 80), 9.0)
    codes, scale = (y[:, :, :40] for y in whole)
    given = codes, scale, x, x, torch.zeros(1, 1, 64), torch.tensor(length), True
    of_v = [y.clone()[:, :, :40] for y in whole]
    by_kernel(codes, scale, *of_v, *given[2:])
    assert (whole[0][:, :, 40:] == 99).all() and (whole[1][:, :, 40:] == 9).all()
    assert (whole[1][:, :, :length] == 9).all() and (whole[1][:, :, length:40] != 9).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_on_cpu_they_are_an_error(compiled):
    given = call_of(length=torch.tensor(146))
    op = torch.compile(append_kv, fullgraph=True) if compiled else append_kv
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):  # torch's, Inductor's
        op(*given)


# -- the ops ----


def call_of(B=2, H=3, n=5, N=150, D=64, D_v=48, rotated=True, **given) -> tuple:
    call = dict(
        k_codes=torch.randint(-9, 9, (B, H, N, D), dtype=torch.int8), k_scale=torch.rand(B, H, N),
        v_codes=torch.randint(-9, 9, (B, H, N, D_v), dtype=torch.int8), v_scale=torch.rand(B, H, N),
        k=torch.randn(B, n, H, D).bfloat16().transpose(1, 2), v=torch.randn(B, H, n, D_v).bfloat16(),
        anchor=torch.randn(B, H, D), length=torch.tensor(7), rotated=rotated,
    )  # fmt: skip
    return tuple((call | given).values())


@pytest.mark.parametrize("rotated", [False, True])
def test_opcheck(rotated):
    torch.library.opcheck(append_kv, call_of(rotated=rotated))
    codes, scale, *_, anchor, _, _ = call_of()
    torch.library.opcheck(read_kv, (codes, scale, anchor, rotated, torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("D", [48, 64, 128, 256])
def test_what_is_read_is_what_was_appended(D, dtype):
    """Within half a code of a row's largest number, and the rounding of dtype before and after the
    rotation, which adds up errors of D channels."""
    rotated = D in HEAD_DIMS
    call = list(call_of(D=D, D_v=D, rotated=rotated, anchor=10 * torch.randn(2, 3, D)))
    call[4] = k = (torch.randn(2, 3, 5, D) + call[6][:, :, None]).to(dtype)
    call[5] = v = torch.randn(2, 3, 5, D).to(dtype)
    before = [x.clone() for x in call[:4]]
    append_kv(*call)
    eps = torch.finfo(torch.bfloat16 if dtype == torch.float32 else dtype).eps
    for i, x, anchor in ((0, k, call[6]), (2, v, None)):
        codes, scale = call[i : i + 2]
        here = torch.arange(150).sub(7).clamp(0, 4).add(7)[:, None] == torch.arange(150)
        written = here.any(0)
        for a, b in zip(call[i : i + 2], before[i : i + 2]):
            assert torch.equal(a[:, :, ~written], b[:, :, ~written])
        found = read_kv(codes, scale, anchor, rotated and i == 0, dtype)
        assert found.dtype == dtype and found.is_contiguous()
        of_x = x.float() - (0 if anchor is None else anchor[:, :, None])
        off = (found[:, :, 7:12].double() - x.double()).norm() / of_x.double().norm()
        # randn's largest of D is about 3: a code is 3 / 127, its error uniform.
        assert 1e-3 < off < 0.012 + 12 * eps, off


REFUSED = {
    "k_codes must be one of .*int8.*, got torch.float32": dict(k_codes=torch.zeros(2, 3, 150, 64)),
    r"k_scale must be \[2, 3, 150\], got \[2, 1, 150\]": dict(k_scale=torch.zeros(2, 1, 150)),
    "v_scale must be one of .*float32.*, got torch.float16": dict(v_scale=torch.zeros(2, 3, 150).half()),
    r"v must be \[2, 3, 5, 48\], got \[2, 3, 4, 48\]": dict(v=torch.zeros(2, 3, 4, 48)),
    "the cache must be contiguous, k_scale, v_codes is not": dict(
        k_scale=torch.zeros(3, 2, 150).transpose(0, 1), v_codes=torch.zeros(2, 3, 150, 96).char()[..., :48],
    ),
    r"anchor must be \[2, 3, 64\], got \[3, 64\]": dict(anchor=torch.zeros(3, 64)),
    r"length must be \[\], got \[1\]": dict(length=torch.tensor([7])),
    "length must be one of .*int64.*, got torch.float32": dict(length=torch.tensor(7.0)),
    "length must be on cpu, got meta": dict(length=torch.tensor(7, device="meta")),
    "k must have 1 to 150 rows, as the cache has, got 151": dict(n=151),
    "head_dim must be a multiple of 16 up to 256, got 72, 48": dict(D=72, rotated=False),
    "rotated, head_dim must be one of .*, got 80": dict(D=80),
    "k, v and codes must have 4 dimensions, got 3": dict(k=torch.zeros(3, 5, 64)),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_defined_is_refused(message):
    given = call_of(**REFUSED[message])
    with pytest.raises((ValueError, TypeError), match=f"^sage::append_kv: {message}"):
        append_kv(*given)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises((ValueError, TypeError), match=message),
    ):
        append_kv(*given)
    with pytest.raises(ValueError, match="sage::read_kv: head_dim must be one of .*, got 48"):
        read_kv(*call_of()[2:4], None, True, torch.float16)
