"""``sage::sdpa``: scaled dot-product attention with a recipe. What the pass puts into graphs.

    visibility       = Visibility.of(attn_mask, band)    what mask and band hide
    out, lse, k_mean = attention(q, k, v, visibility)    smooths and quantizes k and v, too
    lse             += scale * q k_mean                  what smoothing k took off

4 bits have a smooth q, for which k and v are prepared apart:

    prepared         = quantize_kv(k, v, visibility)
    q_mean, delta    = smooth_q(q, k, prepared.k_mean)
    out, lse         = attention(q, prepared, q_mean, delta, visibility)

Calls that share k and v share what is made of them alone, which ``sage::prepare`` returns.
Eager runs this composition, and Inductor gets it (`opens`). The gradient is exact attention's,
recomputed in the inputs' own precision.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops import compat, gpus
from sage_inductor.ops.attention.select import attention, select, why_not_listed
from sage_inductor.ops.attention.tiles import WARPGROUPS
from sage_inductor.ops.attention_call import AttentionCall, empty_outputs, schema_of
from sage_inductor.ops.documents import BLOCK, places_of
from sage_inductor.ops.formats import HEAD_DIMS, K_BLOCK, MAX_ROWS, TAIL_BLOCKS, Prepared
from sage_inductor.ops.layout import ordered
from sage_inductor.ops.quantize.op import empty_kv, quantize_kv
from sage_inductor.ops.quantize.smooth import launch_unsmooth, smooth_q
from sage_inductor.ops.recipe import Recipe, decode
from sage_inductor.ops.reference.exact import masked
from sage_inductor.ops.register import autocast, launched_by, opens
from sage_inductor.ops.symbols import fix_head_dims
from sage_inductor.ops.visibility import BLOCK_SIZES, FULL, Band, BlockLists, Visibility, seen_keys


class SdpaCall(NamedTuple):
    """The arguments of ``sage::sdpa``.

    q [B, H_q, N_q, D], k [B, H_kv, N_kv, D], v [B, H_kv, N_kv, D_v] of one dtype (fp16, bf16, fp32)
    and device, any strides; H_q a multiple of H_kv.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None  # bool (True: sees) or floating (added), 2 to 4 dimensions that
    # broadcast to [B, H_q, N_q, N_kv], any strides; and a band: a query sees what both show
    prepared: list[Tensor]  # what `prepare_kv` gives for this k, v, mask and recipe, or nothing
    left: int | None  # the band: visibility.py
    right: int | None
    bottom_right: bool
    scale: float  # of the softmax
    recipe: str  # Recipe.encode()
    warpgroups: int | None  # the schedule of the Hopper kernel: select.hopper_tile
    out_bnhd: bool  # store out in [B, N, H, D] order
    portable: bool  # for a package: on CPU it opens into aten, and aten corrects lse
    kv_num_blocks: Tensor | None = None  # lists of blocks that queries see: BlockLists, any strides
    kv_indices: Tensor | None = None
    full_kv_num_blocks: Tensor | None = None
    full_kv_indices: Tensor | None = None
    block_q: int | None = None
    block_kv: int | None = None
    tail_block: int | None = None
    perm: Tensor | None = None  # int32 [N], a permutation: token perm[i] is the i-th of the lists'
    # blocks (layout.py). q, k, v, out and lse are in their own order
    # int32, of packed documents (documents.py): keys' perm [P]; [S, 4]; [P / 64]. Then q, k and v
    # are of tokens; perm, lists, band and attn_mask are of P places
    perm_k: Tensor | None = None
    spans: Tensor | None = None
    documents: Tensor | None = None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, scale: float, recipe: str,
        attn_mask: Tensor | None = None, band: Band = FULL, **others,
    ) -> "SdpaCall":  # fmt: skip
        """A call without what is not given."""
        usual: dict = dict(warpgroups=None, out_bnhd=False, portable=False, prepared=[])
        left, right, bottom_right = band
        return cls(
            q=q, k=k, v=v, scale=scale, recipe=recipe, attn_mask=attn_mask, left=left, right=right,
            bottom_right=bottom_right, **usual | others,
        )  # fmt: skip

    blocks, band = AttentionCall.blocks, AttentionCall.band
    keys_order = AttentionCall.keys_order

    def of_seen_keys(self) -> "SdpaCall":
        """The same call without the keys that its band hides from every query: they are in no mean
        and no scale, and take no time. All stay where k and v are prepared, for other calls, too,
        and where block lists may show a key that the band does not."""
        keys = seen_keys(self.band, self.q.shape[2], self.k.shape[2])
        if keys is None or self.prepared or self.blocks.size is not None:
            return self
        cut, (first, last), mask = torch.ops.aten.slice, keys, self.attn_mask
        if mask is not None and mask.shape[-1] != 1:
            mask = cut(mask, -1, first, last)
        return self._replace(
            k=cut(self.k, 2, first, last), v=cut(self.v, 2, first, last), attn_mask=mask
        )


def _sdpa(call: SdpaCall) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, quantized as the recipe says. Arguments: SdpaCall's.

    Returns out [B, H_q, N_q, D_v] and lse [B, H_q, N_q] (natural log, fp32, not differentiable). A
    row that sees no key is 0 and its lse -inf. Keys that attn_mask or the band hides from every
    query, and keys of blocks that no list names, may hold anything, but for those of a call with
    `prepared`, for those that the band hides in a block that a list names, and for those in a tail.
    A tail_block (BlockLists) is for lists without a band, and a bool mask of keys for all queries.
    Raises ValueError or TypeError saying what must hold and what was got.
    """
    check(call)
    return compose(call)


sdpa = torch.library.custom_op(
    "sage::sdpa", schema_of(SdpaCall, tuple[Tensor, Tensor], _sdpa), mutates_args=()
)


@torch.library.custom_op("sage::prepare", mutates_args=())
def prepare_kv(
    k: Tensor, v: Tensor, attn_mask: Tensor | None, recipe: str, portable: bool
) -> list[Tensor]:
    """What `sdpa` makes of k and v before it looks at q, for calls that share them.

    Arguments: as `sdpa`'s. Returns `Prepared.tensors()`, contiguous; none of them differentiable.
    """
    check(SdpaCall.of(k, k, v, 0.0, recipe))
    found = compose_prepare(k, v, attn_mask, recipe, portable)
    # The emulation's are views, which outputs of an op may not be, and in any order.
    return [x.clone(memory_format=torch.contiguous_format) for x in found]


def check(call: SdpaCall) -> None:
    """Raise unless `sdpa` is defined for these arguments."""
    q, k, v, attn_mask, prepared, left, right, _, scale, recipe, *_ = call
    for name, x in (("q", q), ("k", k), ("v", v)):
        x.dim() == 4 or _refuse(f"{name} must be [B, H, N, D], got {x.dim()} dimensions")
        x.dtype == q.dtype or _refuse(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        x.device == q.device or _refuse(f"{name} must be on q's device {q.device}, got {x.device}")
        N = x.shape[2]
        1 <= N <= MAX_ROWS or _refuse(f"{name} must have 1 to {MAX_ROWS} rows, got N={N}")
        D = x.shape[3]
        1 <= D <= HEAD_DIMS[-1] or _refuse(f"head_dim must be 1..{HEAD_DIMS[-1]}, got {D}")
    valid = (torch.float16, torch.bfloat16, torch.float32)
    if q.dtype not in valid:
        raise TypeError(f"sage::sdpa: dtype must be one of {valid}, got {q.dtype}")
    k.shape[:3] == v.shape[:3] or _refuse(
        f"k and v must have one batch, heads and length, got {[*k.shape]} and {[*v.shape]}"
    )
    (k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3]) or _refuse(
        f"k must have q's batch and head_dim, got q {[*q.shape]} and k {[*k.shape]}"
    )
    q.shape[1] % k.shape[1] == 0 or _refuse(
        f"the heads of q must be a multiple of k's, got {q.shape[1]} and {k.shape[1]}"
    )
    if call.spans is not None:
        _check_documents(call)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and attn_mask.dtype not in valid:
            raise TypeError(f"sage::sdpa: attn_mask must be bool or {valid}, got {attn_mask.dtype}")
        attn_mask.device == q.device or _refuse(
            f"attn_mask must be on q's device {q.device}, got {attn_mask.device}"
        )
        lengths = (q.shape[2], k.shape[2]) if call.perm is None else 2 * tuple(call.perm.shape)
        full = (*q.shape[:2], *lengths)
        shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
        (
            2 <= attn_mask.dim() <= 4
            and all(m == 1 or m == n for m, n in zip(shape, full, strict=False))
        ) or _refuse(f"attn_mask must broadcast to {list(full)}, got {[*attn_mask.shape]}")
    for name, bound in (("left", left), ("right", right)):
        (bound is None or bound >= 0) or _refuse(f"{name} must be None or at least 0, got {bound}")
    valid = (None, *WARPGROUPS)
    call.warpgroups in valid or _refuse(f"warpgroups must be one of {valid}, got {call.warpgroups}")
    math.isfinite(scale) or _refuse(f"scale must be finite, got {scale}")
    if call.blocks.size is not None:
        _check_blocks(call.blocks, q)
    if call.tail_block is not None:
        _check_tail(call)
    if call.perm is not None and call.spans is None:
        _check_perm(call, call.perm)
    if prepared:
        n = Prepared.count(decode(recipe).of_pv)
        len(prepared) == n or _refuse(f"prepared must be empty or {n} tensors, got {len(prepared)}")


def _check_blocks(blocks: BlockLists, q: Tensor) -> None:
    valid = all(size in BLOCK_SIZES for size in blocks.size)
    valid or _refuse(f"block_q and block_kv must be of {BLOCK_SIZES}, got {blocks.size}")
    for count, index in blocks.lists:
        if not count.dtype == index.dtype == torch.int32:
            got = f"{count.dtype} and {index.dtype}"
            raise TypeError(f"sage::sdpa: block lists must be int32, got {got}")
        count.device == index.device == q.device or _refuse(
            f"block lists must be on q's device {q.device}, got {count.device}, {index.device}"
        )
        of_q = count.dim() == 3 and all(
            m == 1 or m == n for m, n in zip(count.shape[:2], q.shape[:2], strict=True)
        )
        (of_q and index.shape[:-1] == count.shape == blocks.kv_num_blocks.shape) or _refuse(
            "block lists must be [B or 1, H_q or 1, M_q] and [B or 1, H_q or 1, M_q, width] of "
            f"q {[*q.shape]}, got {[*count.shape]} and {[*index.shape]}"
        )
        rows = count.shape[2] * blocks.block_q
        # No guard on the number of blocks: which symbols have too few rows is known without one.
        is_short = compat.statically_known_true(rows < q.shape[2])
        is_short and _refuse(f"block lists must be for {q.shape[2]} queries, got {rows}")


def _check_perm(call: SdpaCall, perm: Tensor) -> None:
    n_q, n_kv = call.q.shape[2], call.k.shape[2]
    others = call.attn_mask is not None or call.band[:2] != (None, None) or call.prepared
    (call.blocks.size is not None and not others) or _refuse(
        "perm goes with block lists, without attn_mask, band and prepared"
    )
    n_q == n_kv or _refuse(f"with perm q and k must have one length, got {n_q} and {n_kv}")
    if perm.dtype != torch.int32:
        raise TypeError(f"sage::sdpa: perm must be int32, got {perm.dtype}")
    (perm.dim() == 1 and perm.shape[0] == n_q and perm.is_contiguous()) or _refuse(
        f"perm must be contiguous [{n_q}], got {[*perm.shape]} of strides {[*perm.stride()]}"
    )
    perm.device == call.q.device or _refuse(
        f"perm must be on q's device {call.q.device}, got {perm.device}"
    )


def _check_documents(call: SdpaCall) -> None:
    q, recipe = call.q, decode(call.recipe)
    given = {name: getattr(call, name) for name in ("perm", "perm_k", "spans", "documents")}
    complete = call.blocks.size is not None and all(x is not None for x in given.values())
    complete or _refuse("spans go with perm, perm_k, documents, and block lists")
    others = call.prepared or call.tail_block or call.portable and q.device.type == "cpu"
    others and _refuse("spans go without prepared, tail_block, and packages for a CPU")
    P, S = given["perm"].shape[0], given["spans"].shape[0]
    shapes = (P,), (P,), (S, 4), (P // K_BLOCK,)
    for (name, x), shape in zip(given.items(), shapes, strict=True):
        other = [compat.statically_known_true(n != m) for n, m in zip(x.shape, shape, strict=False)]
        if x.dim() != len(shape) or any(other):
            _refuse(f"{name} must be {list(shape)} where perm has {P} places, got {[*x.shape]}")
        if x.dtype != torch.int32:
            raise TypeError(f"sage::sdpa: {name} must be int32, got {x.dtype}")
        (x.device == q.device and x.is_contiguous()) or _refuse(
            f"{name} must be contiguous and on q's device {q.device}, got {x.device}"
        )
    size = call.blocks.size
    size == (BLOCK, BLOCK) or _refuse(f"with spans blocks must be of {BLOCK}, got {size}")
    q.shape[0] == 1 or _refuse(f"with spans q must be of one batch, got {[*q.shape]}")
    reason = why_not_listed(recipe, call.block_q, packed=True)
    reason and _refuse(f"{reason}, got {call.recipe}")


def _check_tail(call: SdpaCall) -> None:
    mask, size = call.attn_mask, call.tail_block
    size in TAIL_BLOCKS or _refuse(f"tail_block must be None or of {TAIL_BLOCKS}, got {size}")
    call.blocks.size is not None or _refuse("tail_block needs block lists, got none")
    call.band.kind == "full" or _refuse(
        f"tail_block needs lists without a band, which may hide some of a mean, got {call.band}"
    )
    of_keys = mask is None or mask.dtype == torch.bool and all(n == 1 for n in mask.shape[-3:-1])
    of_keys or _refuse(
        "beside tail_block attn_mask must be bool [B or 1, 1, 1, N_kv], as keys are in a mean for "
        f"all queries, got {mask.dtype} {[*mask.shape]}"
    )
    call.prepared and _refuse("beside tail_block prepared must be empty: a tail is made with it")


def _refuse(message: str) -> None:
    raise ValueError(f"sage::sdpa: {message}")


def compose(call: SdpaCall) -> tuple[Tensor, Tensor]:
    """`sdpa`, as calls of the ops that it is made of."""
    out, lse, k_mean = attend(call)
    if call.spans is not None:
        return out, _of_tokens(lse, k_mean, call)
    correction = lse, call.q, k_mean, call.scale
    return out, *(_unsmoothed_lse if call.portable else unsmoothed_lse)(*correction)


def _of_tokens(lse: Tensor, k_mean: Tensor, call: SdpaCall) -> Tensor:
    """lse [1, H_q, P] of places, and what k_mean [S, H_kv, D] took off it -> [1, H_q, T]."""
    T = call.q.shape[2]
    place = places_of(call.perm, T)
    document = call.documents.index_select(0, place // K_BLOCK)
    mean = k_mean.index_select(0, document).transpose(0, 1).unsqueeze(1)  # [H_kv, 1, T, D]
    group = call.q.unflatten(1, (k_mean.shape[1], -1))
    return lse.index_select(2, place) + call.scale * (group * mean).sum(-1).flatten(1, 2)


def attend(call: SdpaCall) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse of the smoothed keys, and k_mean: by one op unless q is smoothed, k and v are
    prepared, or Inductor may prepare them once for all, if they are constants."""
    call, recipe, order = call.of_seen_keys(), decode(call.recipe), call[-4:]
    q, k, v, prepared = call.q, call.k, call.v, None
    if call.perm is not None and recipe.of_pv.dtype is None:
        v = ordered(v, call.perm)
    seen = _visibility(k, v, call.attn_mask, call.band, recipe, call.blocks, call.perm)
    if call.prepared:
        prepared = Prepared(*call.prepared)
    elif recipe.of_qk.smooths_q or (call.tail_block is None and compat.folds_constants()):
        prepared = prepare(k, v, seen, recipe, *call.keys_order)
    how = call.scale, recipe, call.out_bnhd, call.warpgroups, *order
    found = attention(*attention_call(q, k, v, prepared, seen, *how))
    return (*found, prepared.k_mean) if prepared else tuple(found)


def attention_call(
    q: Tensor, k: Tensor, v: Tensor, prepared: Prepared | None, visibility: Visibility,
    scale: float, recipe: Recipe, out_bnhd: bool = False, warpgroups: int | None = None,
    perm: Tensor | None = None, perm_k: Tensor | None = None, spans: Tensor | None = None,
    documents: Tensor | None = None,
) -> AttentionCall:  # fmt: skip
    """What the attention op takes: with q's means where q is smoothed, and v itself, in 16 bits,
    where v is not quantized. prepared None: the op prepares k and v."""
    q_mean = delta = visible = None
    if prepared is None:
        visible = visibility.keys(k) if spans is None else None
    elif recipe.of_qk.smooths_q:
        of_qk = ordered(q, perm), ordered(k, perm)
        q_mean, delta = smooth_q(*of_qk, prepared.k_mean, visibility.keys(k))
    if recipe.of_pv.dtype is None and v.dtype == torch.float32:
        v = v.bfloat16()
    a = AttentionCall(
        q, k, None, v, scale, k.shape[2] if perm is None else perm.shape[0], recipe.encode(),
        out_bnhd, *visibility[:2], *visibility.band, None, None, None, None, q_mean, delta, visible,
        warpgroups, *visibility.blocks, None, None, None, None, perm, perm_k, spans, documents,
    )  # fmt: skip
    return a if prepared is None else a.with_prepared(prepared)


def _unsmoothed_lse(lse: Tensor, q: Tensor, k_mean: Tensor, scale: float) -> list[Tensor]:
    """lse [B, H_q, N_q] with what smoothing took off it: k_mean [B, H_kv, D] off every key."""
    group = q.unflatten(1, (k_mean.shape[1], -1))  # [B, H_kv, H_q / H_kv, N_q, D]
    # In fp32, as k_mean.
    return [lse + scale * (group * k_mean[:, :, None, None]).sum(-1).flatten(1, 2)]


# lse is rarely read. One op instead of 8 of aten saves 1 s of 20 s of tracing (24 layers), and
# where it is read 300 of 331 us (64 heads of 64, 8K tokens; H100): aten stores fp32 products. Every
# call of sdpa is traced with it and few keep it, so its kernel is not compiled ahead.
unsmoothed_lse = launched_by(lambda run, _gpu, *given: [launch_unsmooth(*given, run)], ahead=False)(
    _unsmoothed_lse
)


def compose_prepare(
    k: Tensor, v: Tensor, attn_mask: Tensor | None, recipe: str, portable: bool
) -> list[Tensor]:
    """`prepare_kv`, as calls of the ops that it is made of."""
    r = decode(recipe)
    visibility = _visibility(k, v, attn_mask, FULL, r, BlockLists(), None)
    return prepare(k, v, visibility, r).tensors()


def _visibility(
    k, v, attn_mask, band: Band, recipe: Recipe, blocks: BlockLists, perm: Tensor | None
) -> Visibility:
    """What the tiles of queries see of the kernel that computes the call."""
    capability = None if k.device.type == "cpu" else gpus.capability(k.device)
    head_dim = max(int(k.shape[3]), int(v.shape[3]))
    lists = blocks.size, blocks.tail_block is not None
    tile = select(capability, recipe, head_dim, attn_mask is not None, *lists)
    n_kv = k.shape[2] if perm is None else perm.shape[0]
    return Visibility.of(attn_mask, band, n_kv, tile.BLOCK_M, blocks)


def prepare(
    k: Tensor, v: Tensor, visibility: Visibility, recipe: Recipe, perm: Tensor | None = None,
    spans: Tensor | None = None, documents: Tensor | None = None,
) -> Prepared:  # fmt: skip
    """What kernels read of k and v. perm: the order of it."""
    visible = visibility.keys(k) if spans is None else None
    return Prepared(*quantize_kv(k, v, visible, recipe.encode(), perm, spans, documents))


def _sdpa_fake(call: SdpaCall) -> tuple[Tensor, Tensor]:
    check(call)
    fix_head_dims(call.q, call.v)
    return empty_outputs(call.q, call.v.shape[3], call.out_bnhd)


sdpa.register_fake(schema_of(SdpaCall, tuple[Tensor, Tensor], _sdpa_fake))


@prepare_kv.register_fake
def _(k, v, attn_mask, recipe, portable):
    check(SdpaCall.of(k, k, v, 0.0, recipe))
    fix_head_dims(k, v)
    return empty_kv(k, v, recipe).tensors()


def _save_inputs(ctx, inputs, output):
    call = SdpaCall(*inputs)
    ctx.prepared, ctx.band, ctx.scale = len(call.prepared), call.band, call.scale
    ctx.listed = call.blocks.size is not None
    ctx.save_for_backward(call.q, call.k, call.v, call.attn_mask)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out, _grad_lse):
    """Exact attention's gradient, by SDPA's own backward on a recomputed forward."""
    if ctx.listed:
        raise NotImplementedError("sage::sdpa: attention by block lists has no backward")
    saved = [x if x is None else x.detach() for x in ctx.saved_tensors]
    q, k, v, attn_mask = saved
    needed = [i for i in range(4) if ctx.needs_input_grad[i]]
    for i in needed:
        saved[i].requires_grad_()
    # With a scale that is not positive, CPU's causal SDPA gives NaN (torch 2.13).
    is_causal = attn_mask is None and ctx.band == Band(right=0) and ctx.scale > 0
    with torch.enable_grad():
        if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
            attn_mask = attn_mask.float()  # SDPA takes no other; nothing is lost
        if not is_causal and any(bound is not None for bound in ctx.band[:2]):
            if attn_mask is None or attn_mask.dtype == torch.bool:
                hidden = attn_mask is not None and ~attn_mask
                attn_mask = q.new_zeros(1).masked_fill(torch.as_tensor(hidden), -math.inf)
            shape = torch.broadcast_shapes(attn_mask.shape, (q.shape[2], k.shape[2]))
            attn_mask = masked(attn_mask.expand(shape), None, *ctx.band)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=ctx.scale, enable_gqa=True
        )
    grads = torch.autograd.grad(out, [saved[i] for i in needed], grad_out)
    found = dict(zip(needed, grads, strict=True))
    of_others = (None,) * (len(ctx.needs_input_grad) - 5)  # torch leaves out trailing defaults
    return *(found.get(i) for i in range(4)), [None] * ctx.prepared, *of_others


sdpa.register_autograd(_backward, setup_context=_save_inputs)
prepare_kv.register_autograd(
    lambda ctx, _grads: (None,) * 5,  # of no use: no output has a gradient
    setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(*output),
)
autocast("sdpa")
autocast("prepare")
of_portable = SdpaCall._fields.index("portable")
opens(sdpa, lambda *args: compose(SdpaCall(*args)), portable=of_portable)
opens(prepare_kv, compose_prepare, portable=4)
