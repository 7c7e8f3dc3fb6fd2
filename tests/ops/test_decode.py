"""``sage::decode``: its kernels, in Triton's interpreter and on a GPU, against their emulation and
against float64 by hand; the op as torch sees it; what its kernels compile to.

kernel_cases.py says what the interpreter cannot do: 16-bit numbers are fp16 there.
"""

import math
import random
import re
from typing import NamedTuple

import cubins
import noted
import pytest
import support
import torch
from kernel_cases import GPU, in_interpreter, runners
from pairs import chosen, seeds
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from sage_inductor.ops import gpus
from sage_inductor.ops.attention.decode import (
    KEYS_OF_WARP,
    WARPS,
    decode,
    launch,
    plan,
    reads_words,
    seen_range,
)
from sage_inductor.ops.decode_call import BLOCK_N, CODES, DecodeCall
from sage_inductor.ops.formats import OF_HALF
from sage_inductor.ops.reference import decode as reference
from sage_inductor.ops.reference.quantize import rotate
from sage_inductor.ops.sdpa import unsmoothed_lse

INT8, E4M3 = CODES
LENGTHS = 1, 63, 65, 128, 129, 191, 200, 257, 320, 321, 449
LONG = 1, 64, 1000, 4096, 5001, 8192  # on a GPU

# -- calls ----


class Draw(NamedTuple):
    call: DecodeCall
    processors: int


def drawn(seed: int, runner) -> Draw:
    """A random call of caches that hold NaN, or codes with scales of NaN, where no key is."""
    rng = random.Random(f"decode {seed}")
    torch.manual_seed(seed)
    on_gpu, device = runner is GPU, runner.device
    B, H_kv, G, N_q = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 16), rng.randint(1, 16)
    of_words = on_gpu and seed % 2  # what hopper/decode.py computes
    if not on_gpu or of_words:  # fewer rows
        G = rng.choice((1, 2, 3, 4, 16)) if N_q < 5 else rng.choice((1, 1, 2, 5))
    N = rng.choice(LONG if on_gpu else LENGTHS)
    dtype = rng.choice((torch.float16, torch.bfloat16)) if on_gpu else torch.float16
    rotated = rng.random() < 0.25
    rotatable = 64, 64, 128, 256
    D = rng.choice(rotatable if rotated or of_words else (16, 16, 48, 64, 64, 80, 128, 256))
    D_v = rng.choice((D, *rotatable) if of_words else (D, D, 16, 64, 112))
    q = support.heads(B, G * H_kv, N_q, D, dtype, device) * rng.choice((0.3, 1, 2))
    kinds = CODES if of_words else (dtype, *CODES)
    k, k_scale = cache(rng, (B, H_kv, N, D), kinds, device)
    v, v_scale = cache(rng, (B, H_kv, N, D_v), kinds, device)
    start, end = borders(rng, B, N, N_q, device)
    mask = masks(rng, B, N_q, N, device) if rng.random() < 0.4 else None
    is_run = None
    if mask is not None and rng.random() < 0.5:  # as a static cache shows it, at times with holes
        mask = run_of(start.expand(B), end.expand(B), N_q, N)
        for b in range(B):
            mask[b, -1, rng.randrange(N)] ^= rng.random() < 0.3
        start, end, is_run = seen_range(mask)
    left = (
        None
        if mask is not None
        else rng.choice((None, None, None, None, 0, 63, 64, 100, 200, 2**30))
    )
    call = DecodeCall(
        q, k, v, start, end, rng.choice((D**-0.5, 0.05, -0.2)), k_scale, v_scale, mask, is_run,
        left, rotated, rng.random() < 0.5,
    )  # fmt: skip
    return Draw(poisoned(call), rng.choice((1, 2, 3, 5, 64)) * B * H_kv // 2)


def cache(rng, shape: tuple, kinds: tuple, device) -> tuple[Tensor, Tensor | None]:
    """Numbers of any size, as a cache would store them, and their scales."""
    B, H, N, D = shape
    room, first = N + rng.choice((0, 0, 7)), rng.choice((0, 0, D, 16))
    x = torch.randn(B, room, H, 2 * D, device=device) + torch.randn(H, 1, device=device)
    x = x * 10 ** rng.uniform(-1, 0.5)
    kind = rng.choice(kinds)
    scale = None
    if kind in CODES:
        x = x * 10 ** rng.uniform(-3, 0.5)
        x = x * torch.exp(torch.randn(B, room, H, 1, device=device))  # tokens of different size
        of = {"token": (3,), "head": (0, 1, 3), "one": (0, 1, 2, 3)}[
            rng.choice(("token", "token", "head", "one"))
        ]
        scale = x.abs().amax(of, keepdim=True) / (127 if kind == INT8 else 448)
        if rng.random() < 0.5:
            scale = scale * torch.randn_like(scale).sign()
        x = (x / scale).round() if kind == INT8 else x / scale
        scale = scale[..., 0].transpose(1, 2)
        scale = scale[..., :N] if scale.shape[2] > 1 else scale
        scale = scale if rng.random() < 0.5 else scale.contiguous()
    x = x.to(kind)
    if rng.random() < 0.5:  # [B, N, H, D] order, with more beside it
        return x[..., first : first + D].transpose(1, 2)[:, :, :N], scale
    return x[..., :D].transpose(1, 2).contiguous()[:, :, :N], scale


def run_of(start: Tensor, end: Tensor, N_q: int, N: int) -> Tensor:
    """bool [B, N_q, N]: each query sees the keys from start to its own place."""
    key, i = (torch.arange(n, device=start.device) for n in (N, N_q))
    place = end.clamp(0, N)[:, None, None] - N_q + i[:, None]
    return (key >= start[:, None, None]) & (key <= place)


def masks(rng, B: int, N_q: int, N: int, device) -> Tensor:
    """Of few keys, nearly all or none, for a batch or all, a query or all, in any order."""
    rows = rng.choice((1, B)), rng.choice((1, N_q))
    mask = torch.rand(*rows, 2 * N, device=device) < rng.choice((0.05, 0.5, 0.97))
    mask &= torch.rand(*rows, 1, device=device) < 0.9
    mask = mask[..., ::2] if rng.random() < 0.3 else mask[..., :N].contiguous()
    return mask.mT.contiguous().mT if rng.random() < 0.3 else mask


def borders(rng, B: int, N: int, N_q: int, device) -> tuple[Tensor, Tensor]:
    """Empty sequences, ends beside a tile's, and beyond what there is."""

    def number():
        of_tiles = BLOCK_N * rng.randint(0, N // BLOCK_N) + rng.choice((-1, 0, 1))
        return rng.choice((0, N - 1, rng.randint(0, N), of_tiles, of_tiles, N_q - 1, N + 9))

    pairs = [(rng.choice((0, 0, -3, 1, number())), rng.choice((N, N, number()))) for _ in range(B)]
    start, end = (
        torch.tensor(x, dtype=rng.choice((torch.int32, torch.int64)), device=device)
        for x in zip(*pairs)
    )
    return start if rng.random() < 0.7 else start[:1], end if rng.random() < 0.7 else end[:1]


def poisoned(a: DecodeCall) -> DecodeCall:
    """Without a number where there is no key."""
    B, H, N, _ = a.k.shape
    key = torch.arange(N, device=a.q.device)
    start, end = (x.expand(B)[:, None] for x in (a.start, a.end))
    outside = ((key < start) | (key >= end))[:, None].expand(B, H, N)
    k, v = a.k, a.v
    for x, scale in ((k, a.k_scale), (v, a.v_scale)):
        if x.dtype == INT8:
            x.masked_fill_(outside[..., None], 127)
        else:
            nan = torch.full_like(x, math.nan, dtype=torch.float32).to(x.dtype)
            x.copy_(torch.where(outside[..., None], nan.float(), x.float()).to(x.dtype))
        if scale is not None and scale.shape == outside.shape:
            scale.masked_fill_(outside, math.nan)
    return a


def by_hand(a: DecodeCall) -> tuple[Tensor, Tensor]:
    """float64, a query at a time, of what the codes stand for."""
    (B, H_q, N_q, D), (_, H_kv, N, D_v) = a.q.shape, a.v.shape
    q, k, v = (x.double() for x in a[:3])
    k = k if a.k_scale is None else k * a.k_scale.double()[..., None]
    v = v if a.v_scale is None else v * a.v_scale.double()[..., None]
    if a.rotated:  # q k^T of what was rotated: (q R) (k R / 2)^T = n / 2 q k^T
        q, k = rotate(a.q, a.q).double(), k * (OF_HALF / min(D, 128))
    out, lse = q.new_zeros(B, H_q, N_q, D_v), q.new_full((B, H_q, N_q), -math.inf)
    for b in range(B):
        start, end = (int(x.expand(B)[b].clamp(0, N)) for x in (a.start, a.end))
        for i in range(N_q):
            last = end - N_q + i
            first = start if a.left is None else max(start, last - a.left)
            keys = torch.arange(first, max(first, end if a.mask is not None else last + 1))
            if a.mask is not None:
                keys = keys[a.mask.cpu().expand(B, N_q, N)[b, i, keys]]
            if len(keys) == 0:
                continue
            keys = keys.to(q.device)
            for h in range(H_q):
                h_kv = h // (H_q // H_kv)
                s = k[b, h_kv, keys] @ q[b, h, i] * a.scale
                out[b, h, i], lse[b, h, i] = s.softmax(0) @ v[b, h_kv, keys], s.logsumexp(0)
    return out, lse


def call_of(B=2, H_kv=2, G=3, N_q=3, N=150, D=64, codes=None, **given) -> DecodeCall:
    """Of fp16, or of codes with a scale a token and head."""
    q, k, v = support.qkv(B, H_kv * G, H_kv, N_q, N, D, torch.float16)
    scale, end = None, torch.tensor([N - 9, 77])[:B]
    if codes is not None:
        k, v = ((8 * x).to(codes) for x in (k, v))
        scale = torch.rand(B, H_kv, N) / 8
    call = DecodeCall(q, k, v, torch.tensor([5]), end, D**-0.5, scale, scale)
    return call._replace(**given)


@runners
@seeds(300, always=16)
@pytest.mark.usefixtures("poisoned")
def test_it_is_attention_to_what_is_there(runner, seed):
    """As the emulation computes it, but for sums in another order, which round few numbers the other
    way: at most .8 % in 60 draws. And as float64 by hand, within the rounding of p, of rotated q and
    of out."""
    a, processors = drawn(seed, runner)
    a.check()
    gpu = gpus.Gpu((9, 0) if runner is GPU else (8, 9), processors)
    out, lse = launch(support.run, gpu, a)
    assert out.dtype == a.q.dtype and lse.dtype == torch.float32
    assert (out.transpose(1, 2) if a.out_bnhd else out).is_contiguous() and lse.is_contiguous()
    ways = (WARPS, KEYS_OF_WARP) if reads_words(a, gpu) else ()
    out_ref, lse_ref = reference.decode(a, plan(a, gpu)[1], *ways)
    exact, lse_exact = by_hand(a)
    assert out.isfinite().all() and ((lse == -math.inf) == (lse_exact == -math.inf)).all()
    assert (out[lse == -math.inf] == 0).all()
    eps = torch.finfo(a.q.dtype).eps
    off = (out.double() - out_ref.double()).norm()
    few, share = (8, 0.1) if runner is GPU else (16, 0.02)
    size = exact.abs().amax()
    assert off <= eps / few * exact.norm() + eps * size  # one number may be an ulp off
    assert (out != out_ref).sum() <= share * out.numel() + 1
    assert_close(lse, lse_ref, rtol=1e-5, atol=1e-5)
    of_q = 2 * eps * a.rotated * lse_exact.nan_to_num(neginf=0.0).abs().max().item()
    assert_close(out.double(), exact, rtol=2 * eps, atol=((2 * eps + of_q) * size).item() + 1e-7)
    assert_close(lse.double(), lse_exact, rtol=1e-5, atol=1e-4 + of_q)


@in_interpreter
@chosen(lambda left, N_q: N_q == 3, left=[None, 100], N_q=[1, 3])
def test_what_there_is_is_split_evenly(left, N_q):
    """With k = 0 a split's sum of exp2(0) is the number of the keys that its row sees."""
    given, a = [], call_of(2, 1, 1, N_q, N=1200, left=left)
    start, end = [3, 300], [1150, 301]  # all of 18 splits, of which 16 are summed up at a time
    a.k[:, :, 1100:] *= 3
    a = poisoned(a._replace(start=torch.tensor(start), end=torch.tensor(end)))

    def run(kernel, grid, tensors, numbers, **options):
        given.append(tensors)
        support.run(kernel, grid, tensors, numbers, **options)

    for x, y in zip(launch(run, gpu := gpus.Gpu((8, 9), 18), a), by_hand(a)):
        assert_close(x.double(), y, rtol=2e-3, atol=2e-3)
    launch(run, gpu, a._replace(k=torch.zeros_like(a.k)))
    splits = given[2][-1][:, 0, -1].exp2().round()  # of the last query
    for found, first, last in zip(splits, start, end):
        first = first if left is None else max(first, last - N_q - left)
        size = -(-(last - first) // len(found) // BLOCK_N) * BLOCK_N
        hidden = 0 if left is None else max(last - 1 - left - first, 0)  # keys of other queries
        borders = [min(max(i * size, hidden), last - first) for i in range(len(found) + 1)]
        expected = [b - a for a, b in zip(borders, borders[1:])]
        assert len(found) == 18 and found.tolist() == expected


@runners
def test_lse_gets_what_was_taken_off_k_by_an_op_of_its_own(runner):
    """A cache holds k less an anchor: attention is the same, lse is not."""
    a = DecodeCall(*(x.to(runner.device) if isinstance(x, Tensor) else x for x in call_of()))
    anchor = torch.randn(2, 2, 64, device=runner.device).half()
    whole = launch(support.run, gpu := gpus.Gpu((8, 9), 8), a)
    out, lse = launch(support.run, gpu, a._replace(k=a.k - anchor[:, :, None]))
    (lse,) = unsmoothed_lse(lse, a.q, anchor.float(), a.scale)
    assert_close(out, whole[0], rtol=1e-2, atol=1e-2)
    assert_close(lse, whole[1], rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [None, INT8])
def test_a_cuda_graph_follows_the_length(codes):
    a = call_of(N=5000, D=128, codes=codes, end=torch.tensor([5000, 1]))
    a = DecodeCall(*(x.cuda() if isinstance(x, Tensor) else x for x in a))
    decode(*a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode(*a)
    for end in ([5000, 1], [64, 4999], [0, 65]):
        a.end.copy_(torch.tensor(end))
        graph.replay()
        for x, y in zip(found, decode(*a)):
            assert torch.equal(x, y)


def test_keys_are_read_by_two_programs_a_processor_and_once():
    """By shapes alone: what a cache holds is not known."""
    q = torch.empty(1, 32, 16, 256, dtype=torch.bfloat16, device="meta")
    for B, H_kv, N_q, N, D, block_m, splits in (
        (1, 8, 1, 32768, 80, 16, 33), (16, 8, 1, 8192, 80, 16, 2), (64, 8, 1, 8192, 80, 16, 1),
        (1, 8, 8, 512, 128, 32, 8), (1, 8, 9, 1, 64, 64, 1), (1, 8, 16, 8192, 128, 64, 33),
        (1, 8, 16, 8192, 256, 32, 16), (1, 1, 3, 8192, 64, 64, 128), (1, 1, 3, 32768, 64, 64, 128),
        # hopper/decode.py
        (1, 8, 1, 32768, 128, 8, 49), (1, 8, 3, 32768, 64, 16, 33), (16, 8, 1, 8192, 128, 8, 3),
        (1, 8, 2, 2049, 64, 8, 9), (1, 2, 1, 99999, 128, 16, 128),
    ):  # fmt: skip
        k = torch.empty(B, H_kv, N, D, dtype=torch.int8, device="meta")
        a = DecodeCall(q[..., :N_q, :D].expand(B, -1, -1, -1), k, k, None, None, 1.0)
        assert plan(a, noted.H200)[:2] == (block_m, splits)


# -- the op ----

CALLS = {
    "mask": dict(mask=torch.arange(150).view(1, 1, -1) % 3 > 0),
    "fp16": {}, "INT8": dict(codes=INT8, rotated=True, out_bnhd=True), "E4M3": dict(codes=E4M3, left=20),
    "one key": dict(N=1, N_q=1, B=1, out_bnhd=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    a = call_of(**CALLS[name])
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    # The schema's test multiplies tensors, which those of E4M3 cannot be.
    torch.library.opcheck(decode, a, test_utils=utilities[a.k.dtype == E4M3 :])
    out, lse = decode(*poisoned(a))
    expected, lse_expected = by_hand(a)
    assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    assert_close(lse.double(), lse_expected, rtol=1e-3, atol=1e-3)
    assert (out.transpose(1, 2) if a.out_bnhd else out).is_contiguous()


@pytest.mark.sweep
def test_opcheck_with_symbols():
    torch.library.opcheck(decode, call_of(codes=INT8), test_utils="test_aot_dispatch_dynamic")


def test_one_graph_serves_every_length():
    """Of the cache, of what it holds, and of the queries."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return aot_eager(gm, inputs)

    compiled = torch.compile(torch.ops.sage.decode.default, backend=backend, fullgraph=True)
    for N, N_q in ((150, 3), (70, 16)):
        for end in (N, 3, 0):
            shown = torch.rand(1, N_q, N) < 0.7
            a = call_of(N=N, N_q=N_q, codes=INT8, end=torch.tensor([end]), mask=shown)
            for x in (a.q, a.k, a.v, a.k_scale, a.v_scale, a.mask):
                torch._dynamo.mark_dynamic(x, 2)
            torch._dynamo.mark_dynamic(a.mask, 1)
            for found, expected in zip(compiled(*a), decode(*a)):
                assert_close(found, expected)
    assert len(graphs) == 1


def test_eager_code_becomes_the_same_in_inductor():
    a = call_of(codes=INT8, left=30)
    found = torch.compile(torch.ops.sage.decode.default, fullgraph=True)(*a)
    for x, y in zip(found, decode(*a)):
        assert_close(x, y)


def changed(**given):
    """Tensors of another dtype, or of another shape, or other values."""

    def of(a: DecodeCall) -> DecodeCall:
        new = {}
        for name, x in given.items():
            old = getattr(a, name)
            if old is None:
                x = torch.zeros(x) if isinstance(x, tuple) else x
            elif isinstance(x, torch.dtype):
                x = old.to(x)
            elif isinstance(x, tuple):
                x = torch.zeros(x, dtype=old.dtype)
            new[name] = x
        return a._replace(**new)

    return of


@pytest.mark.parametrize(
    "codes, change, error, message",
    [
        (None, changed(q=torch.float32), TypeError, r"q must be one of .*float16, .*, got torch.float32"),
        (None, changed(k=torch.bfloat16), TypeError, "k must be one of .*int8.*, got torch.bfloat16"),
        (None, changed(v=torch.uint8), TypeError, "v must be one of .*, got torch.uint8"),
        (None, changed(k=INT8), ValueError, "k_scale goes with codes, and only that: k is torch.int8"),
        (INT8, changed(v_scale=None), ValueError, "v_scale goes with codes, .*: v is torch.int8"),
        (INT8, changed(v=torch.float16), ValueError, "v_scale goes with codes, .*: v is torch.float16"),
        (INT8, changed(k_scale=torch.float16), TypeError, "k_scale must be one of .*, got torch.float16"),
        (INT8, changed(k_scale=(2, 3, 150)), ValueError, r"k_scale must be \[2, 2, 150\] or broadcast, got \[2, 3, 150\]"),
        (INT8, changed(v_scale=(2, 150)), ValueError, r"v_scale must be \[2, 2, 150\] or broadcast, got \[2, 150\]"),
        (None, changed(q=(2, 6, 17, 64)), ValueError, "q must have 1 to 16 rows, got N_q=17"),
        (None, changed(q=(2, 6, 0, 64)), ValueError, "q must have 1 to 16 rows, got N_q=0"),
        (None, changed(q=(2, 5, 3, 64)), ValueError, "a multiple of k's, got 5, 2"),
        (None, changed(q=(2, 6, 3, 80)), ValueError, r"k must be \[2, 2, 150, 80\], got \[2, 2, 150, 64\]"),
        (None, changed(q=(6, 3, 64)), ValueError, "q, k and v must have 4 dimensions, got 3, 4, 4"),
        (None, changed(v=(2, 2, 150, 72)), ValueError, "a multiple of 16 up to 256, got 64, 72"),
        (None, changed(v=(2, 2, 150, 272)), ValueError, "a multiple of 16 up to 256, got 64, 272"),
        (None, changed(v=(2, 2, 151, 64)), ValueError, r"v must be \[2, 2, 150, 64\], got \[2, 2, 151, 64\]"),
        (None, changed(q=(3, 6, 3, 64)), ValueError, r"k must be \[3, 2, 150, 64\], got \[2,"),
        (None, lambda a: a._replace(v=a.v.mT.contiguous().mT), ValueError, "v's last stride must be 1, got 150"),
        (None, changed(k=(2, 2, 0, 64), v=(2, 2, 0, 64)), ValueError, "k must have 1 to .* rows, got N=0"),
        (None, changed(start=(3,)), ValueError, r"start must be \[2\] or broadcast, got \[3\]"),
        (None, changed(end=torch.float32), TypeError, "end must be one of .*int32.*, got torch.float32"),
        (None, lambda a: a._replace(end=a.end.to("meta")), ValueError, "end must be on cpu, got meta"),
        (None, changed(mask=(2, 1, 150)), TypeError, r"mask must be one of \(torch.bool,\), got torch.float32"),
        (None, lambda a: a._replace(mask=torch.ones(2, 2, 150).bool()), ValueError, r"mask must be \[2, 3, 150\] or broadcast, got \[2, 2, 150\]"),
        (None, lambda a: a._replace(mask=torch.ones(1, 1, 150).bool(), left=3), ValueError, "left must be None with a mask, got 3"),
        (None, changed(left=-1), ValueError, "left must be None or at least 0, got -1"),
        (None, lambda a: a._replace(q=a.q[..., :48], k=a.k[..., :48], rotated=True), ValueError, "rotated, head_dim must be one of .*, got 48"),
    ],
)  # fmt: skip
def test_what_is_not_defined_is_refused(codes, change, error, message):
    with pytest.raises(error, match=f"^sage::decode: .*{message}"):
        decode(*change(call_of(codes=codes)))
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=message):
        decode(*change(call_of(codes=codes)))
    with pytest.raises(error, match=message):  # what runs on CUDA
        launch(support.run, torch.device("cpu"), change(call_of(codes=codes)))


def test_e4m3_is_refused_before_sm_89():
    a = call_of(codes=E4M3)
    with pytest.raises(ValueError, match="E4M3 codes need a GPU of capability 8.9 or more"):
        launch(support.run, gpus.Gpu((8, 6), 8), a)


# -- what a mask shows ----


@pytest.mark.parametrize("N_q", [1, 3])
def test_a_run_is_what_each_query_sees_from_start_to_its_own_place(N_q):
    N, cases = 40, []
    for start, end in ((0, 40), (7, 33), (0, 2), (12, 13), (20, 20)):
        run = run_of(torch.tensor([start]), torch.tensor([end]), N_q, N)
        hole, more = run.clone(), torch.zeros(1, N_q, N, dtype=torch.bool)
        hole[0, -1, (start + end) // 2] ^= True
        more[:, :, start:end] = True  # to each query: none beyond its own place is hidden
        cases += [run, hole, more]
    masks = torch.cat(cases)
    for mask, start, end, is_run in zip(masks, *seen_range(masks)):
        keys = [[j for j in range(N) if mask[i, j]] for i in range(N_q)]
        every = sorted({j for each in keys for j in each})
        assert (start, end) == ((every[0], every[-1] + 1) if every else (N, 0))
        last = [int(end) - N_q + i for i in range(N_q)]
        assert is_run == all(
            each == [*range(int(start), max(int(start), place + 1))]
            for each, place in zip(keys, last)
        )


@in_interpreter
def test_each_sequence_has_its_own_run():
    """The first's mask hides a key, the second's is not read: it says what is not so."""
    N = 150
    mask = run_of(torch.tensor([5, 5]), torch.tensor([141, 77]), 3, N)
    mask[0, :, 50] = False
    a = call_of(mask=mask, is_run=torch.tensor([False, True]))
    shown = mask.clone()
    shown[1, :, 60] = False
    out, _ = launch(support.run, gpus.Gpu((8, 9), 18), a._replace(mask=shown))
    assert_close(out.double(), by_hand(a)[0], rtol=2e-3, atol=2e-3)


def test_words_are_read_where_codes_and_q_lie_in_fours():
    """Four numbers of q are 8 bytes. A package does not know strides."""
    gpu, a = gpus.Gpu((9, 0), 132), call_of(codes=INT8)
    assert reads_words(a, gpu) and plan(a, gpu).maxnreg
    assert not reads_words(a, gpus.Gpu((8, 9), 132)) and not plan(a, gpus.Gpu((8, 9), 132)).maxnreg

    def moved(x: Tensor, by: int) -> Tensor:
        return x.new_zeros(x.numel() + by)[by:].view(x.shape)

    for name, by, reads in (
        ("q", 2, False), ("q", 4, True), ("k", 2, False), ("k", 4, True), ("v", 1, False),
    ):  # fmt: skip
        assert reads_words(a._replace(**{name: moved(getattr(a, name), by)}), gpu) == reads, name
    for other in (
        a._replace(q=a.q.new_zeros(2, 6, 3, 65)[..., :64]), a._replace(q=a.q.mT.contiguous().mT),
        a._replace(v=a.v.half(), v_scale=None), a._replace(q=a.q.expand(2, 6, 3, 64).repeat(1, 1, 2, 1)),
    ):  # fmt: skip
        assert not reads_words(other, gpu)


# -- what its kernel for codes compiles to ----


@pytest.mark.parametrize("codes", CODES)
@chosen(
    lambda D, N_q, rotated, masked: D == 128 and not masked,
    D=[64, 128], N_q=[1, 4], rotated=[False, True], masked=[False, True],
)  # fmt: skip
def test_codes_are_read_at_once_and_nothing_spills_in_the_loop(codes, D, N_q, rotated, masked):
    """Of 4 or 16 rows that share a head. Each tile is copied by 16 bytes, and read as words."""
    found = noted.kernel(
        "decode_codes_kernel", noted.decode, (9, 0), D, codes, N_q, masked=masked, rotated=rotated
    )
    assert cubins.stack_bytes(found.asm["cubin"]) <= 16
    ptx = found.asm["ptx"]
    copied = re.findall(r"cp\.async\.\w+\.shared\.global .*, (0x\w+), ", ptx)
    assert copied and set(copied) == {"0x10"}
    assert "ld.global.b8" not in ptx or masked
    assert len(re.findall(r"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", ptx)) >= D // 4
