"""Calls of every pair of features: spelling, mask, band and its corner, lengths at the ends of tiles,
head_dims, groups, dtype, memory, recipe, lists, `keep`, stage, gradients, lse, export, dynamic
lengths, several calls in one graph.

Each is rewritten by the whole backend and runs op by op, without Inductor. It must be near exact
attention in float64, in every row, and have the bits of the same call in eager.
"""

import functools
import math
import random
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pairs import covering, drawn
from support import block_lists, op_by_op, relative_l1
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import sage_inductor
from sage_inductor import config
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference.exact import attention_exact, masked
from sage_inductor.ops.sparse.selector import BLOCK_SIZE, Selection
from sage_inductor.ops.visibility import NO_LISTS, BlockLists

AXES = dict(
    spelling=("sdpa", "attention", "softmax", "flex"),
    mask=("none", "keys", "keys of NaN", "rows", "heads", "bias", "transposed bias"),
    band=("full", "causal", "bottom right", "window"),
    lengths=((64, 64), (63, 129), (128, 127), (1, 65), (129, 64), (65, 192), (256, 256)),
    D=(64, 40, 128, 72),
    D_v=("as D", 24, 128),
    group=(1, 2),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    memory=("BNHD", "BHND", "inside a storage", "expanded"),
    scale=(None, 0.3),
    lse=(False, True),
    trains=(False, True),
    recipe=tuple(NAMED),
    keep=(None, 0.5),
    stage=(None, "late"),
    how=("compiled", "dynamic", "exported", "eager"),
    calls=("one", "two of one k and v", "two of another scale"),
)
SAMPLED, OTHERS = 4_000, 1_000


class Features(NamedTuple):
    """One call. N_q, N_kv: lengths; group: heads of q for each of k and v."""

    spelling: str
    mask: str
    band: str
    lengths: tuple[int, int]
    D: int
    D_v: int | str
    group: int
    dtype: torch.dtype
    memory: str
    scale: float | None
    lse: bool
    trains: bool
    recipe: str
    keep: float | None
    stage: str | None
    how: str
    calls: str

    def possible(self) -> "Features":
        """The same with what no such call can have taken out."""
        x = self
        if x.spelling == "flex":  # lists of blocks, and a band for those that are partial
            x = x._replace(mask="none", D=64, D_v="as D", trains=False, keep=None)
            # Of one query a mask_mod of i and j is one of j alone, which stays flex_attention.
            causal = x.band == "causal" and x.lengths[0] > 1
            x = x._replace(band="causal" if causal else "full")
            x = x._replace(how="compiled", memory="BNHD" if x.memory == "expanded" else x.memory)
        if x.keep:  # for self-attention of whole sequences
            x = x._replace(mask="none", band="full", lengths=(256, 256), lse=False, trains=False)
            x = x._replace(how="compiled" if x.how == "dynamic" else x.how)  # of one length
        if x.how == "eager" and x.spelling != "attention":
            x = x._replace(how="compiled")
        if x.spelling != "attention":
            x = x._replace(lse=False)
        if x.how == "exported":
            x = x._replace(trains=False)
        if x.mask == "keys of NaN" and (x.memory == "expanded" or x.trains):
            x = x._replace(
                mask="keys"
            )  # expanded, they are another batch's; SDPA's gradient is NaN
        if x.recipe == "sage3" and (x.keep or x.spelling == "flex"):
            x = x._replace(recipe="sage2-4b")  # there is no kernel
        return x

    def __str__(self):
        return "-".join(str(x).removeprefix("torch.") for x in self)


@functools.cache
def every() -> tuple[list[Features], set[int]]:
    """Many calls that are possible, and the places of few that have all pairs of features. Recipes of
    the same formats count as one, and lengths of which the same is the longer, and each occurs."""
    draw = random.Random(0)
    sampled = (Features(*map(draw.choice, AXES.values())).possible() for _ in range(SAMPLED))
    found = list(dict.fromkeys(sampled))
    kinds = [
        x._replace(recipe=(NAMED[x.recipe].qk, NAMED[x.recipe].pv), lengths=longer(*x.lengths))
        for x in found
    ]
    return found, set(covering(kinds, [[x.recipe, x.lengths] for x in found]))


def longer(N_q: int, N_kv: int) -> str:
    return "one query" if N_q == 1 else "queries" if N_q > N_kv else "keys" if N_q < N_kv else ""


def parameters() -> list:
    found, always = every()
    others = [i for i in range(len(found)) if i not in always][:OTHERS]
    chosen = (i for i in sorted((*always, *others)) if i in always or drawn(str(found[i])))
    return [pytest.param(found[i], id=str(found[i])) for i in chosen]


# -- the call ----


class Inputs(NamedTuple):
    q: Tensor
    q_2: Tensor  # of the second call
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None


B, H_KV = 2, 2


def inputs(x: Features, more: int = 0) -> Inputs:
    """more: rows beyond the features' lengths."""
    (N_q, N_kv), D_v = (n + more for n in x.lengths), x.D if x.D_v == "as D" else x.D_v

    def make(H, N, D, expanded=False):
        if x.memory == "expanded" and expanded:
            return torch.randn(1, H, N, D).to(x.dtype).expand(B, -1, -1, -1)
        if x.memory == "BHND":
            return torch.randn(B, H, N, D).to(x.dtype)
        wide = 24 if x.memory == "inside a storage" else 0
        return torch.randn(B, N, H, D + wide).to(x.dtype).transpose(1, 2)[..., wide // 3 :][..., :D]

    H = H_KV * x.group
    q, q_2 = make(H, N_q, x.D), make(H, N_q, x.D)
    k, v = make(H_KV, N_kv, x.D, True) + 0, make(H_KV, N_kv, D_v, True)
    k = k + torch.randn(H_KV, 1, x.D).to(x.dtype) if x.memory != "expanded" else k
    mask = attn_mask(x.mask, H, N_q, N_kv, x.dtype)
    if x.mask == "keys of NaN":
        hidden = ~mask[:, 0, 0]  # [B, N_kv]
        k, v = (t.clone() for t in (k, v))
        k.transpose(1, 2)[hidden] = math.nan
        v.transpose(1, 2)[hidden] = math.inf
    return Inputs(q, q_2, k, v, mask)


def attn_mask(kind: str, H: int, N_q: int, N_kv: int, dtype) -> Tensor | None:
    """In each row some key counts: the first."""
    shape = {"rows": (N_q, N_kv), "heads": (B, H, N_q, N_kv)}.get(kind, (B, 1, 1, N_kv))
    match kind:
        case "none":
            return None
        case "bias":
            return torch.randn(H, N_q, N_kv).to(dtype)
        case "transposed bias":
            return torch.randn(N_kv, N_q).to(dtype).mT
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    return mask


BANDS = {  # left, right, bottom_right
    "full": (None, None, False), "causal": (None, 0, False), "bottom right": (None, 0, True),
    "window": (40, 9, False),
}  # fmt: skip


def shown(x: Features, N_q, N_kv) -> Tensor:
    """[N_q, N_kv]: what the band shows, as a model writes it."""
    i, j = torch.arange(N_q)[:, None], torch.arange(N_kv)
    match x.band:
        case "causal":
            return j <= i
        case "bottom right":
            return j <= i + (N_kv - N_q)
        case "window":
            return (j >= i - 40) & (j <= i + 9)
    raise AssertionError(x.band)


def with_band(x: Features, mask: Tensor | None, N_q, N_kv) -> Tensor | None:
    if x.band == "full":
        return mask
    band = shown(x, N_q, N_kv)
    if mask is None:
        return band
    return mask & band if mask.dtype == torch.bool else mask.masked_fill(~band, -math.inf)


def attend(x: Features, q, k, v, mask, scale, blocks: BlockLists):
    """The call as its spelling has it."""
    N_q, N_kv = q.shape[2], k.shape[2]
    is_causal = x.band == "causal" and mask is None
    if x.spelling == "softmax":
        k, v = (t.repeat_interleave(x.group, 1) for t in (k, v))
        mask = with_band(x, mask, N_q, N_kv)
        scores = q @ k.mT * (x.D**-0.5 if scale is None else scale)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        return scores.softmax(-1) @ v
    if x.spelling == "flex":
        causal = {"mask_mod": lambda b, h, i, j: j <= i} if x.band == "causal" else {}
        mask = BlockMask.from_kv_blocks(
            *blocks[:4], BLOCK_SIZE=blocks.size, seq_lengths=(N_q, N_kv), **causal
        )
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    given = dict(
        attn_mask=mask if is_causal else with_band(x, mask, N_q, N_kv), is_causal=is_causal,
        scale=scale, enable_gqa=True,
    )  # fmt: skip
    if x.spelling == "attention":
        return sage_inductor.attention(q, k, v, **given, return_lse=x.lse)
    return F.scaled_dot_product_attention(q, k, v, **given)


def calls(x: Features, blocks: BlockLists = NO_LISTS):
    """The function that is compiled: its attention, once or twice."""

    def function(q, q_2, k, v, mask):
        outs = [attend(x, q, k, v, mask, x.scale, blocks)]
        if x.calls != "one":
            other = 0.2 if x.calls.endswith("scale") else x.scale
            outs.append(attend(x, q_2, k, v, mask, other, blocks))
        return outs

    return function


# -- what judges it ----

# Relative L1, by p and v's format. 16 bits: 0.041 of one query whose scores are 3.4 times the usual.
BOUNDS = {"16bit": 0.05, "fp8": 0.1, "nvfp4": 0.45}


def bound(recipe: str) -> float:
    r = NAMED[recipe]
    return BOUNDS["nvfp4"] if r.of_qk.smooths_q else BOUNDS[r.pv]


def exactly(x: Features, given: Inputs, lists: BlockLists) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each call, in float64."""
    q, q_2, k, v, mask = given
    if mask is not None and mask.dtype == torch.bool and x.mask == "keys of NaN":
        k, v = (t.nan_to_num(0, 0, 0) for t in (k, v))
    band = BANDS[x.band]
    found = []
    for each, scale in ((q, x.scale), (q_2, 0.2 if x.calls.endswith("scale") else x.scale)):
        scale = x.D**-0.5 if scale is None else scale
        blocks = lists
        if x.keep:
            kept = torch.ops.sage.select_blocks(
                each, k, scale, *Selection(top_k=x.keep).arguments()
            )
            blocks = BlockLists(*kept, None, None, *BLOCK_SIZE)
        found.append(attention_exact(each, k, v, scale, mask, *band, blocks))
    return found[: 1 if x.calls == "one" else 2]


def check(x: Features, outs, given: Inputs, lists: BlockLists) -> None:
    expected = exactly(x, given, lists)
    assert len(outs) == len(expected)
    for found, (exact, exact_lse) in zip(outs, expected, strict=True):
        out, lse = found if x.lse else (found, None)
        assert out.shape == exact.shape and out.dtype == x.dtype
        sees = exact_lse > -math.inf
        hidden = out.detach()[~sees]
        assert (hidden == 0).all()
        out = torch.where(sees[..., None], out.detach(), 0)
        assert relative_l1(out, exact) < bound(x.recipe)
        norms = exact.norm(dim=-1)[sees]
        if NAMED[
            x.recipe
        ].of_qk.smooths_q:  # 4 bits take one value for another, many times as large
            norms = norms.clamp(min=norms.mean())
        of_rows = (out.double() - exact).norm(dim=-1)[sees] / norms
        assert of_rows.max() < 5 * bound(x.recipe)
        if lse is not None:
            assert (lse - exact_lse)[sees].abs().max() < 5 * bound(x.recipe)
            assert (lse[~sees] == -math.inf).all()


def differentiable(x: Features, given: Inputs) -> list[Tensor]:
    """Attention in float64, whose gradients are 0 in rows that see no key."""
    q, q_2, k, v, mask = given
    k, v = (t.repeat_interleave(x.group, 1) for t in (k, v))
    outs = []
    for each, scale in ((q, x.scale), (q_2, 0.2 if x.calls.endswith("scale") else x.scale)):
        scale = x.D**-0.5 if scale is None else scale
        s = masked(each @ k.mT * scale, mask, *BANDS[x.band])
        empty = (s == -math.inf).all(-1, keepdim=True)
        outs.append(s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v)
    return outs[: 1 if x.calls == "one" else 2]


def check_gradients(x: Features, run, given: Inputs) -> None:
    """The gradient of a random sum is exact attention's."""
    leaves = [t.detach().clone().requires_grad_() for t in given[:4]]
    exact = [t.detach().double().nan_to_num(0, 0, 0).requires_grad_() for t in given[:4]]
    outs = [out[0] if x.lse else out for out in run(Inputs(*leaves, given.attn_mask))]
    cotangents = [torch.randn(out.shape, dtype=torch.float64) for out in outs]
    expected = differentiable(x, Inputs(*exact, given.attn_mask))
    used = [i for i in range(4) if i != 1 or x.calls != "one"]
    found = torch.autograd.grad(
        outs, [leaves[i] for i in used], [c.to(x.dtype) for c in cotangents]
    )
    wanted = torch.autograd.grad(expected, [exact[i] for i in used], cotangents)
    for a, b in zip(found, wanted, strict=True):
        assert a.isfinite().all()
        allowed = 1e-3 if x.dtype == torch.float32 else 0.04
        # Of one key the gradient is 0, but for rounding in fp32: 1e-4 in all was seen.
        rounding = 4 * torch.finfo(torch.float32).eps * b.numel()
        assert (a.double() - b).abs().sum() < allowed * (b.abs().sum() + 0.1) + rounding


def settings_of(x: Features) -> dict:
    rule = {"recipe": x.recipe} | ({"keep": x.keep} if x.keep else {})
    rules = [rule | {"stage": x.stage}, {"recipe": "off"}] if x.stage else [rule]
    return {"emulate": True, "force": True, "policy": rules}


def mark_lengths(given: Inputs) -> None:
    for tensor in given[:4]:
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
    if given.attn_mask is not None:
        torch._dynamo.maybe_mark_dynamic(given.attn_mask, given.attn_mask.dim() - 2)
        torch._dynamo.maybe_mark_dynamic(given.attn_mask, given.attn_mask.dim() - 1)


def compiled(x: Features, function, given: Inputs, options: dict):
    """A function of Inputs, rewritten."""
    if x.how == "eager":
        return lambda each: function(*each)
    if x.how != "exported":
        run = torch.compile(function, backend="sage", options=options, fullgraph=True)
        if x.how == "dynamic":
            mark_lengths(given)
        return lambda each: run(*each)

    class Model(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    program = torch.export.export(Model(), tuple(given))
    sage_inductor.rewrite(program, options=options)
    run = program.module()
    return lambda each: run(*each)


@pytest.mark.parametrize("x", parameters())
def test_a_call_of_any_features_is_exact_attention_quantized(x):
    lists = NO_LISTS
    if x.spelling == "flex":
        N_q, N_kv = x.lengths
        lists = block_lists(B, 1, N_q, N_kv, 128, 64, 0.7, unread=0)
    settings = settings_of(x)
    options = {f"sage.{name}": value for name, value in settings.items()}
    given, function = inputs(x), calls(x, lists)
    with sage_inductor.stage(x.stage), config.patch(**settings), op_by_op():
        run = compiled(x, function, given, options)
        with torch.set_grad_enabled(x.trains):
            outs = run(given)
            # What is exported or runs in eager is decided by the stage in force.
            stage = x.stage if x.how in ("compiled", "dynamic") else None
            sites = [site for site in sage_inductor.report() if site.stage == stage]
            assert sites and all(site.rewritten for site in sites), sites
            check(x, outs, given, lists)
            if x.how == "dynamic" and x.spelling != "flex" and not x.keep:
                again = inputs(x, 1)
                check(x, run(again), again, lists)
        if x.trains:
            check_gradients(x, run, given)
        is_causal = x.band == "causal" and x.mask == "none"
        if x.spelling in ("sdpa", "attention") and (x.band == "full" or is_causal):
            with torch.no_grad():
                eager = calls(x._replace(spelling="attention"))(*given)
            for a, b in zip(outs, eager, strict=True):
                a, b = (a, b) if x.lse else ((a,), (b,))
                assert all(map(torch.equal, a, b))


def test_few_calls_have_every_pair_of_features():
    found, always = every()
    assert len(always) < 120 < 2_000 < len(found)
    for name, values in AXES.items():
        assert {getattr(found[i], name) for i in always} == set(values), name
