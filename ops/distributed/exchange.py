"""Rows of other ranks, as they are: by collectives, or written by each rank to where they are read.

rows   all ranks' rows of all heads
heads  all ranks' rows of this rank's heads
back   this rank's rows of all ranks' heads

Shapes: gather.py's. Each takes and returns several tensors, [B, H, N_r, D] with a D of their own.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops import compat

ALIGN = 256  # bytes, of each array in a rank's memory
# If a rank writes as many bytes, its own included, rows that are contiguous are copied by the copy
# engines. Those begin 8 us later and write faster (a call on two H200s: with 14 MB of rows 130 us
# instead of 114, with CogVideoX's 218 MB 3.74 ms instead of 4.06).
ONE_KERNEL = 2**25


def _each(move: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """`move`, of each of several tensors."""
    return functools.wraps(move)(lambda self, xs: [move(self, x) for x in xs])


class Collectives(NamedTuple):
    group: object
    lengths: tuple[int, ...]  # rows of each rank

    @_each
    def rows(self, x: Tensor) -> Tensor:
        """[B, H, N, D], stored as [N, B, H, D]: what a projection stored as [N_r, H, D] is not
        copied before it is sent, and equal lengths not after."""
        longest, rows = max(self.lengths), x.permute(2, 0, 1, 3)
        if len(rows) < longest:
            rows = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
        mine = rows.contiguous()
        everyones = all_gather(_bytes(mine), self.group).view(x.dtype).view(-1, *mine.shape)
        if min(self.lengths) == longest:
            rows = everyones.flatten(0, 1)
        else:
            rows = torch.cat([each[:n] for each, n in zip(everyones, self.lengths, strict=True)])
        return rows.permute(1, 2, 0, 3)

    @_each
    def heads(self, x: Tensor) -> Tensor:
        """[B, H / P, N, D], stored as [N, B, H / P, D]."""
        P, wide = len(self.lengths), _wide(x)
        sent = wide.unflatten(1, (P, -1)).permute(1, 3, 0, 2, 4).contiguous()  # [P, N_r, B, H/P, D]
        row = sent[0, 0].shape
        received = _all_to_all(sent, [len(sent[0])] * P, self.lengths, self.group)
        return received.view(-1, *row).permute(1, 2, 0, 3).view(x.dtype)

    @_each
    def back(self, x: Tensor) -> Tensor:
        """[B, H, N_r, D], stored as [B, N_r, H, D], of [B, H / P, N, D]."""
        P, N_r = len(self.lengths), self.lengths[self.group.rank()]
        sent = _wide(x).permute(2, 0, 1, 3).contiguous()
        received = _all_to_all(sent, self.lengths, [N_r] * P, self.group)
        received = received.view(P, N_r, *sent.shape[1:]).permute(2, 1, 0, 3, 4)
        return received.flatten(2, 3).contiguous().view(x.dtype).transpose(1, 2)


class Peers:
    """The same in the memory of the group's GPUs. What `rows` and `heads` return is valid until
    this rank joins the first collective of the next call. memory: a peers.PeerMemory."""

    def __init__(self, memory, lengths: tuple[int, ...]):
        self.memory, self.lengths, self.at = memory, lengths, 0

    def rows(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return self._of_all(xs, lambda rows: [rows] * len(self.lengths))

    def heads(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return self._of_all(xs, lambda rows: rows.chunk(len(self.lengths), 2))

    def back(self, xs: Sequence[Tensor]) -> list[Tensor]:
        index = slice(None), slice(None), self.memory.rank
        sent = []
        for x in xs:
            parts = x.transpose(1, 2).split(self.lengths, 1)  # [B, N_r, H / P, D]
            shapes = [(*each.shape[:2], len(parts), *each.shape[2:]) for each in parts]
            sent.append((parts, shapes, index))
        return [x.flatten(2, 3).clone().transpose(1, 2) for x in self._put(sent)]

    def _of_all(self, xs: Sequence[Tensor], parts_of) -> list[Tensor]:
        N, first = sum(self.lengths), sum(self.lengths[: self.memory.rank])
        sent = []
        for x in xs:
            parts = parts_of(x.permute(2, 0, 1, 3))
            shapes = [(N, *each.shape[1:]) for each in parts]
            sent.append((parts, shapes, slice(first, first + x.shape[2])))
        return [x.permute(1, 2, 0, 3) for x in self._put(sent)]

    def _put(self, sent: Sequence[tuple]) -> list[Tensor]:
        """A part of each tensor to each rank, there at an index of an array of a shape. Returns
        this rank's arrays, when all ranks have written."""
        found, pairs = [], []
        for parts, shapes, index in sent:
            arrays = [
                self.memory.array(rank, shape, part.dtype, self.at)
                for rank, (part, shape) in enumerate(zip(parts, shapes, strict=True))
            ]
            first = self.memory.rank + 1  # no two ranks write to the same one at a time
            for rank in (*range(first, len(parts)), *range(first)):
                pairs.append(_wide_pair(arrays[rank][index], parts[rank]))
            most = max(math.prod(shape) for shape in shapes) * parts[0].dtype.itemsize
            self.at += most + -most % ALIGN
            found.append(arrays[self.memory.rank])
        if sum(x.nbytes for _, x in pairs) < ONE_KERNEL:
            compat.foreach_copy(*map(list, zip(*pairs, strict=True)))
        else:
            for array, part in pairs:
                array.copy_(part)
        self.memory.arrive()
        return found


def all_gather(mine: Tensor, group) -> Tensor:
    """Every rank's bytes, [P, n], in one collective; n is equal on all."""
    everyones = mine.new_empty(group.size(), mine.numel())
    compat.all_gather_single(everyones.view(-1), mine, group=group)
    return everyones


def said(mine: bytes, group, device: torch.device) -> list[bytes]:
    """What each rank says, in as many bytes. The host waits for it."""
    sent = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    return [bytes(each) for each in all_gather(sent, group).tolist()]


def _all_to_all(sent: Tensor, rows_sent, rows_received, group) -> Tensor:
    """[n], this rank's rows of every rank's `sent`; rows_sent go to each, rows_received come."""
    row = sent.numel() * sent.dtype.itemsize // sum(rows_sent)
    received = sent.new_empty(sum(rows_received) * row // sent.dtype.itemsize)
    compat.all_to_all_single(
        _bytes(received), _bytes(sent),
        [n * row for n in rows_received], [n * row for n in rows_sent], group=group,
    )  # fmt: skip
    return received


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def copy(to: Tensor, x: Tensor) -> None:
    """x into `to`."""
    to, x = _wide_pair(to, x)
    to.copy_(x)


def _wide_pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide = _wide(x), _wide(y)
    return wide if wide[0].dtype == wide[1].dtype else (x, y)


def _wide(x: Tensor) -> Tensor:
    """x as numbers of eight bytes, of which torch copies as many in the time of one of its own."""
    whole = 8 // x.dtype.itemsize
    fits = x.stride(-1) == 1 and not any(n % whole for n in (x.shape[-1], *x.stride()[:-1]))
    return x.view(torch.int64) if fits and x.storage_offset() % whole == 0 else x
