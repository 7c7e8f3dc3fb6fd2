"""``sage::gather_sdpa``: the queries of one rank against the keys of every rank of a process group.

Keys travel in one of three ways, which transport.py chooses:

rows    k and v are gathered as they are, and each rank prepares all of them
heads   rows of all heads become all rows of some heads, and the outputs go back: DeepSpeed-Ulysses
        (arXiv:2309.14509)
codes   each rank quantizes its own keys, and 8-bit codes are gathered:

    sample, leading, extremes = all_gather(rows of k and v)     small, in their own dtype
    k_mean, v_mean, v_amax = estimate(sample)                equal on all ranks
    codes, k_scale         = quantize(own blocks of k and v)
    prepared               = all_gather(codes, k_scale)      the only large collective
    out, lse               = sdpa(q, prepared)

prepared is bit for bit what one device makes of the whole k and v, whatever the shards' lengths:

* The sample has the rows that one device samples, and every rank estimates from all of them.
* Whether rows of v are beyond the estimated amax is decided by the extremes of all ranks.
* K_BLOCK keys share a scale. The rank where such a block begins quantizes all of it, and the ranks
  after it lend the rows that complete it: none, where shards are multiples of K_BLOCK.

Before that the ranks compare what they were called with. Opaque to torch.compile: the other ranks'
lengths may be known when it runs, not while it is traced.

Shapes: B batch, H_q and H_kv heads, D head_dim (D_v of v). N_q queries and N_r keys of this rank, N
keys of all P ranks. M: the most blocks that any rank quantizes.
"""

import bisect
import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops import compat
from sage_inductor.ops.attention_call import empty_outputs
from sage_inductor.ops.distributed import exchange, peers, transport
from sage_inductor.ops.distributed.exchange import all_gather, copy, said
from sage_inductor.ops.formats import K_BLOCK, MAX_ROWS, TINY, Prepared, pad_head_dim, pad_rows
from sage_inductor.ops.quantize.op import estimate, quantize_k, quantize_v
from sage_inductor.ops.recipe import Recipe, decode
from sage_inductor.ops.reference.quantize import sample_rows
from sage_inductor.ops.register import OPAQUE, autocast
from sage_inductor.ops.sdpa import SdpaCall, check, compose
from sage_inductor.ops.visibility import Band

FACTS = 1024  # bytes in which a rank tells the others what it was called with
ALIGN = 16  # bytes, of each tensor in a collective


# No part of Inductor's CUDA graphs: the host may read the other ranks' lengths, and measures rates.
@torch.library.custom_op("sage::gather_sdpa", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def gather_sdpa(
    q: Tensor, k: Tensor, v: Tensor, group_name: str, is_causal: bool, scale: float, recipe: str,
    lengths: Sequence[int] | None = None, way: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T) v over the keys of all ranks of a group, in the order of its ranks.

    q [B, H_q, N_q, D], k [B, H_kv, N_r, D], v [B, H_kv, N_r, D_v], any strides: as `sdpa` has them.
    N_q and N_r may differ from rank to rank, nothing else may, nor whether they are equal.
    is_causal: the queries of a rank are where its keys are, so N_q is N_r. recipe: Recipe.encode().
    lengths: N_r of each rank. None: all are equal. []: the ranks tell each other, which the host
    waits for. way: transport.WAYS; "" is the one with the least predicted time.

    Returns out [B, H_q, N_q, D_v], stored as [B, N, H, D], and lse [B, H_q, N_q] (natural log,
    fp32); no gradient. Every rank of the group has to call it. If lengths are asked for, it raises
    ValueError on all of them, which names a rank and what is wrong with its arguments, or what rank
    0 has instead. Otherwise the others are told by an assertion on the device: a RuntimeError, on
    GPUs where they next synchronize.
    """
    group = compat.process_group(group_name)
    with torch.cuda.device_of(q):
        memory = peers.of(group, q.device)
        with contextlib.nullcontext() if memory is None else memory.in_order():
            facts = _facts(q, k, v, group, is_causal, scale, recipe, lengths, way)
            shards = _agree(facts, q.device, group, lengths)
            transfer = transport.Transfer.of(q, k, v, shards.lengths, is_causal, decode(recipe))
            way = way or transport.choose(transfer, group, q.device)
            if memory is not None and memory.reserve(transfer.written(way)):
                by = exchange.Peers(memory, shards.lengths)
            else:
                by = exchange.Collectives(group, shards.lengths)
            return _attend(q, k, v, group, shards, by, is_causal, scale, recipe, way)


def _attend(q, k, v, group, shards: "Shards", by, is_causal: bool, scale: float, recipe: str, way):
    """out and lse, when the ranks agree. by: what exchanges rows."""
    right, prepared = 0 if is_causal else None, []
    if way == "heads":
        q, k, v = by.heads((q, k, v))
    else:
        right = shards.offset(group.rank()) if is_causal else None
        if way == "rows":
            k, v = by.rows((k, v))
        else:
            prepared = _gather_prepared(k, v, shards, group, recipe).tensors()
            # It takes the place of k and v, of which only the shapes are read.
            k, v = (x.new_empty(()).expand(*x.shape[:2], shards.N, x.shape[3]) for x in (k, v))
    others = dict(band=Band(None, right), prepared=prepared, out_bnhd=True)
    out, lse = compose(SdpaCall.of(q, k, v, scale, recipe, **others))
    if way == "heads":
        out, lse = by.back((out, lse[..., None]))
        lse = lse[..., 0].contiguous()
    return out, lse


class Shards(NamedTuple):
    """Who has which keys, and who quantizes them."""

    lengths: tuple[int, ...]  # keys of each rank

    @property
    def N(self) -> int:
        return sum(self.lengths)

    def offset(self, rank: int) -> int:
        """The number of its first key."""
        return sum(self.lengths[:rank])

    def first_block(self, rank: int) -> int:
        """The first block that begins at this rank or at a later one."""
        return -(-self.offset(rank) // K_BLOCK)

    def blocks(self, rank: int) -> int:
        """Blocks that begin at this rank, which quantizes them."""
        return self.first_block(rank + 1) - self.first_block(rank)

    def leading(self, rank: int) -> int:
        """Its first rows, those of a block that began at an earlier rank."""
        return min(self.lengths[rank], self.first_block(rank) * K_BLOCK - self.offset(rank))

    def completing(self, rank: int) -> list[int]:
        """The ranks that complete its last block."""
        end = self.first_block(rank + 1) * K_BLOCK if self.blocks(rank) else 0
        return [r for r in range(rank + 1, len(self.lengths)) if self.offset(r) < end]

    def samples(self) -> list[range]:
        """Which of the rows of the sample each rank has."""
        rows = sample_rows(self.N).tolist()
        ends = [bisect.bisect_left(rows, self.offset(r)) for r in range(len(self.lengths) + 1)]
        return [range(first, end) for first, end in itertools.pairwise(ends)]

    def most(self, count) -> int:
        return max(count(rank) for rank in range(len(self.lengths)))


# -- what the ranks agree on ----


def _facts(q, k, v, group, is_causal: bool, scale: float, recipe: str, lengths, way: str) -> dict:
    """What this rank was called with; an error alone, if it is wrong."""
    try:
        _check(q, k, v, group, is_causal, scale, recipe, lengths, way)
    except (TypeError, ValueError) as error:
        said = str(error)[:FACTS]
        while len(json.dumps({"error": said})) > FACTS:  # a character may take 12 bytes of JSON
            said = said[:-1]
        return {"error": said}
    return {
        "length": k.shape[2], "batch": q.shape[0], "heads": q.shape[1],
        "heads of k": k.shape[1], "head_dim": q.shape[3], "head_dim of v": v.shape[3],
        "dtype": str(q.dtype), "is_causal": is_causal, "scale": scale, "recipe": recipe,
        "as many queries as keys": q.shape[2] == k.shape[2], "way": way,
    }  # fmt: skip


def _agree(facts: dict, device: torch.device, group, lengths) -> Shards:
    """The lengths of all ranks. An error on all, if any was called wrongly or unlike rank 0: before
    a collective whose size depends on it. If lengths are not asked for, the host reads nothing of
    the others: a digest is compared on the device."""
    if lengths is not None and not lengths:
        lengths = _exchanged(facts, device, group)
    else:
        length = facts.pop("length", None)
        lengths = list(lengths or [length] * group.size())
        # As many bytes as the facts: another rank may ask for them.
        text = json.dumps({**facts, "lengths": lengths}).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        mine = torch.full((FACTS // 8,), digest, device=device).view(torch.uint8)
        everyones = all_gather(mine, group)
        if "error" in facts:
            raise ValueError(f"sage::gather_sdpa: rank {group.rank()}: {facts['error']}")
        compat.assert_async((everyones == mine).all(), UNLIKE)
    if sum(lengths) > MAX_ROWS:
        raise ValueError(
            f"sage::gather_sdpa: the ranks must have at most {MAX_ROWS} keys, got {sum(lengths)}"
        )
    return Shards(tuple(lengths))


UNLIKE = (
    "sage::gather_sdpa: the ranks were called with different arguments or unequal lengths, or one "
    'of them wrongly: with lengths="ask" unequal ones are computed, and an error says what differs'
)


def _exchanged(facts: dict, device: torch.device, group) -> list[int]:
    """Every rank's length. Raises ValueError, which names a rank, as `_agree` says."""
    everyones = []
    for rank, each in enumerate(said(json.dumps(facts).encode().ljust(FACTS), group, device)):
        try:
            everyones.append(json.loads(each))
        except ValueError:
            everyones.append({"error": "did not ask for lengths, and another rank did"})
        if "error" in everyones[-1]:
            raise ValueError(f"sage::gather_sdpa: rank {rank}: {everyones[-1]['error']}")
    lengths = [facts.pop("length") for facts in everyones]
    for rank, facts in enumerate(everyones):
        names = [name for name in facts if facts[name] != everyones[0][name]]
        if names:
            its, first = (", ".join(f"{n} {x[n]}" for n in names) for x in (facts, everyones[0]))
            raise ValueError(f"sage::gather_sdpa: rank {rank} has {its}, rank 0 has {first}")
    return lengths


def _check(q, k, v, group, is_causal: bool, scale: float, recipe: str, lengths, way: str) -> None:
    check(SdpaCall.of(q, k, v, scale, recipe))
    decoded = decode(recipe)  # what is none may have any length
    N_q, N_r, P, rank = q.shape[2], k.shape[2], group.size(), group.rank()
    if is_causal and N_q != N_r:
        raise ValueError(f"is_causal needs as many queries as keys, got {N_q} and {N_r}")
    if lengths and (len(lengths) != P or min(lengths) < 1 or lengths[rank] != N_r):
        raise ValueError(
            f"lengths must be the numbers of keys of {P} ranks, {N_r} of them rank {rank}'s, "
            f"got {list(lengths)}"
        )
    if way:
        transfer = transport.Transfer.of(q, k, v, (N_r,) * P, is_causal, decoded)
        if reason := transfer.why_not(way):
            raise ValueError(reason)


# -- what is made of the keys of all ranks ----


def _gather_prepared(k: Tensor, v: Tensor, shards: Shards, group, recipe: str) -> Prepared:
    """What one device makes of the k and v of all ranks."""
    parts, k_mean, v_mean, v_amax = _statistics(k, v, shards, group)
    r, (B, H, _, D), D_v = decode(recipe), k.shape, v.shape[3]
    M, width = shards.most(shards.blocks), pad_head_dim(D) if r.rotated else D
    specs = [  # a rotated row of k fills the channels that pad it
        ((B, H, M * K_BLOCK, width), torch.uint8), ((B, H, M, 1), torch.float32),
        ((B, H, D_v, M * K_BLOCK), torch.uint8),
    ]  # fmt: skip
    mine = _message(specs, k.device)
    _quantize(parts, k_mean, v_mean, v_amax, r, *_views(mine, specs))
    k_parts, scale_parts, v_parts = _views(all_gather(mine, group), specs)
    N_pad, K_pad, V_pad = pad_rows(shards.N), pad_head_dim(D), pad_head_dim(D_v)
    k_codes = k_parts.new_empty(B, H, N_pad, K_pad)
    k_scale = scale_parts.new_zeros(B, H, N_pad // K_BLOCK, 1)
    v_codes = v_parts.new_empty(B, H, V_pad, N_pad)
    for rank in range(group.size()):
        first, count = shards.first_block(rank), shards.blocks(rank)
        rows, n = slice(first * K_BLOCK, (first + count) * K_BLOCK), count * K_BLOCK
        copy(k_codes[:, :, rows, :width], k_parts[rank, :, :, :n])
        k_scale[:, :, first : first + count] = scale_parts[rank, :, :, :count]
        copy(v_codes[:, :, :D_v, rows], v_parts[rank, :, :, :, :n])
    end = shards.first_block(group.size()) * K_BLOCK
    for padding in (
        k_codes[..., width:], k_codes[:, :, end:], v_codes[:, :, D_v:], v_codes[..., end:]
    ):  # fmt: skip
        padding.zero_()
    k_codes, v_codes = k_codes.view(r.of_qk.dtype), v_codes.view(r.of_pv.dtype)
    return Prepared(k_codes, k_scale, k_mean, v_codes, v_amax * (1 / r.of_pv.largest), v_mean)


def _statistics(k: Tensor, v: Tensor, shards: Shards, group) -> tuple:
    """[(rows of k, of v)] that this rank quantizes, whole blocks but for the last, and k_mean,
    v_mean and v_amax of all ranks."""
    rank, samples, leading = group.rank(), shards.samples(), shards.leading(group.rank())
    rows = sample_rows(shards.N, k.device)[samples[rank].start : samples[rank].stop]
    most_sampled, most_leading = max(map(len, samples)), shards.most(shards.leading)
    (B, H, _, D), D_v = k.shape, v.shape[3]
    own = [x[:, :, which] for which in (rows - shards.offset(rank), slice(leading)) for x in (k, v)]
    own.append(torch.stack(torch.aminmax(v, dim=2)))
    shapes = [(B, H, n, d) for n in (most_sampled, most_leading) for d in (D, D_v)]
    specs = [(shape, k.dtype) for shape in (*shapes, (2, B, H, D_v))]
    mine = _message(specs, k.device)
    for to, x in zip(_views(mine, specs), own, strict=True):
        to[tuple(map(slice, x.shape))] = x
    *sampled, k_leading, v_leading, extremes = _views(all_gather(mine, group), specs)
    sampled = [[y[:, :, : len(s)] for y, s in zip(x, samples, strict=True)] for x in sampled]
    k_mean, v_mean, v_amax = estimate(*(torch.cat(each, 2) for each in sampled))
    v_amax = v_amax.clamp(min=TINY)
    distance = (extremes.float() - v_mean).abs().amax((0, 1))  # [B, H_kv, D_v], of all rows
    is_exceeded = ~(distance <= v_amax).all(2, keepdim=True)  # so is NaN
    v_amax = torch.where(is_exceeded, distance, v_amax).clamp(min=TINY)

    # A block that another rank completes is apart: to join it to the others would copy all rows.
    completing = shards.completing(rank)
    end = leading + (k.shape[2] - leading) // K_BLOCK * K_BLOCK if completing else k.shape[2]
    parts = [(k[:, :, leading:end], v[:, :, leading:end])]
    if completing:
        parts.append(tuple(
            torch.cat([x[:, :, end:], *(y[r][:, :, : shards.leading(r)] for r in completing)], 2)
            for x, y in ((k, k_leading), (v, v_leading))
        ))  # fmt: skip
    return parts, k_mean, v_mean, v_amax


def _quantize(
    parts: list[tuple[Tensor, Tensor]], k_mean: Tensor, v_mean: Tensor, v_amax: Tensor,
    recipe: Recipe, k_bytes: Tensor, k_scale: Tensor, v_bytes: Tensor,
) -> None:  # fmt: skip
    """The parts' codes of k, one after the other, [B, H_kv, M * K_BLOCK, width], their scales
    [B, H_kv, M, 1] and codes of v [B, H_kv, D_v, M * K_BLOCK]. What is behind them is not set."""
    first = 0
    for k, v in parts:
        count = -(-k.shape[2] // K_BLOCK)
        if not count:
            continue
        n, rows = count * K_BLOCK, slice(first * K_BLOCK, (first + count) * K_BLOCK)
        codes, scale = quantize_k(k, k_mean, recipe)
        copy(k_bytes[:, :, rows], codes.view(torch.uint8)[:, :, :n, : k_bytes.shape[3]])
        k_scale[:, :, first : first + count] = scale[:, :, :count]
        codes, _ = quantize_v(v, v_mean, v_amax, recipe)
        copy(v_bytes[..., rows], codes.view(torch.uint8)[:, :, : v.shape[3], :n])
        first += count


# -- messages: tensors, given as (shape, dtype), in one array of bytes ----


def _sizes(specs: Sequence[tuple]) -> list[int]:
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
    return [n + -n % ALIGN for n in sizes]


def _message(specs: Sequence[tuple], device: torch.device) -> Tensor:
    return torch.empty(sum(_sizes(specs)), dtype=torch.uint8, device=device)


def _views(messages: Tensor, specs: Sequence[tuple]) -> list[Tensor]:
    """[*shape] in a message, [P, *shape] in those of all ranks."""
    parts = messages.split(_sizes(specs), -1)
    return [
        part.view(dtype)[..., : math.prod(shape)].unflatten(-1, shape)
        for part, (shape, dtype) in zip(parts, specs, strict=True)
    ]


@gather_sdpa.register_fake
def _(q, k, v, group_name, is_causal, scale, recipe, lengths=None, way=""):
    # Nothing is checked: an error on the one rank that compiles would leave the others waiting.
    if not q.dim() == v.dim() == 4:
        return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    return empty_outputs(q, v.shape[-1], out_bnhd=True)


autocast("gather_sdpa")
OPAQUE.add(torch.ops.sage.gather_sdpa.default)
if compat.register_effectful_op is not None:
    # Ranks meet in the order of their calls, which Inductor could change on one of them.
    compat.register_effectful_op(torch.ops.sage.gather_sdpa.default, compat.EffectType.ORDERED)
