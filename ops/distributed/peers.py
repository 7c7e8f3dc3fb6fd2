"""Memory of a group's GPUs that each of them maps: a rank writes rows to where another reads them.

This is torch's symmetric memory, which is CUDA's virtual memory of the GPUs of one host. Rows need
no copies before and after. The ranks meet in 3 us, where NCCL's smallest all-gather takes 10 (two
H200s joined by NVLink, 2026-11-28).

Who may write when: each call begins with a collective that a rank joins after all that it read
before, so nobody writes over what another rank still reads. What is written before `arrive` can be
read after it. Replays of a CUDA graph order nothing: what else the group calls has to be on their
stream, or ordered by events.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sage_inductor.ops import compat
from sage_inductor.ops.distributed.exchange import said
from sage_inductor.ops.gpus import captures

SHARE = 50  # a group keeps at most 1 / SHARE of a GPU's memory
STEP = 2**21  # bytes: such memory is allocated in multiples of it
TEXT = 64  # bytes in which a rank says which GPU it has
TIMEOUT = 600_000  # ms that a rank waits for one that joined the call's first collective


class PeerMemory:
    """A group's memory on this rank's GPU. All ranks have to ask it for the same, in one order."""

    def __init__(self, group, device: torch.device, limit: int):
        self.group, self.device, self.limit = weakref.ref(group), device, limit
        self.rank, self.P, self.bytes = group.rank(), group.size(), 0
        self._memory, self._handle = None, None
        self._captured: dict[int, tuple] = {}  # by size: graphs write to it when they are replayed
        self._read: torch.cuda.Event | None = None

    def fits(self, size: int) -> bool:
        """A CUDA graph that is captured has what was there before."""
        return size <= (self.bytes if captures(self.device) else self.limit)

    def reserve(self, size: int) -> bool:
        """Whether each rank has `size` bytes. If it has to allocate them, the host waits."""
        if not self.fits(size):
            return False
        if size > self.bytes:
            self._allocate(size + -size % STEP)
        if captures(self.device):
            self._captured[self.bytes] = self._memory, self._handle
        return size <= self.bytes

    def _allocate(self, size: int) -> None:
        """Unless a rank cannot: it has not as much, or a container keeps processes apart."""
        group = self.group()
        memory = _tried(compat.symmetric_empty, size, dtype=torch.uint8, device=self.device)
        if _all(memory is not None, group, self.device):
            handle = _tried(compat.symmetric_rendezvous, memory, group.group_name)
            if _all(handle is not None, group, self.device):
                self._memory, self._handle, self.bytes = memory, handle, size
        if self.bytes < size:
            self.limit = self.bytes

    def give_up(self) -> None:
        """Have none from now on."""
        self.limit = self.bytes = 0
        self._memory = self._handle = None

    def array(self, rank: int, shape: Sequence[int], dtype: torch.dtype, at: int) -> Tensor:
        """[*shape] in that rank's memory, from byte `at` on: a multiple of exchange.ALIGN."""
        return self._handle.get_buffer(rank, shape, dtype, at // dtype.itemsize)

    def arrive(self) -> None:
        """Wait for the other ranks: what they wrote before can be read after."""
        self._handle.barrier(0, TIMEOUT)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """A call, from before its first collective to its last read. It waits for what a call
        before it reads on another stream, unless a CUDA graph is captured."""
        captured, stream = captures(self.device), torch.cuda.current_stream(self.device)
        if self._read is not None and not captured:
            stream.wait_event(self._read)
        try:
            yield
        finally:
            if not captured:
                self._read = stream.record_event()


_known: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def of(group, device: torch.device) -> PeerMemory | None:
    """None if a rank does not map the memory of all. Every rank has to ask: the first time they
    tell each other which GPUs they have."""
    needed = compat.symmetric_empty, compat.symmetric_rendezvous, compat.foreach_copy
    if group.size() == 1 or device.type != "cuda" or None in needed:
        return None
    if group not in _known:
        if captures(device):
            return None
        _known[group] = _meet(group, device)
    return _known[group]


def _meet(group, device: torch.device) -> PeerMemory | None:
    here = {_name(i): i for i in range(torch.cuda.device_count())}
    mine = torch.cuda.get_device_properties(device)
    text = f"{mine.total_memory // SHARE} {_name(device)}".encode().ljust(TEXT)
    texts = [each.decode().split() for each in said(text, group, device)]
    mapped = len({name for _, name in texts}) == group.size() and all(
        name in here
        and (here[name] == device.index or torch.cuda.can_device_access_peer(device, here[name]))
        for _, name in texts
    )
    # NVSHMEM's barrier is empty in torch's source (read, not run). The variable is for hosts on
    # which GPUs reach each other wrongly.
    by_cuda = compat.symmetric_backend is None or compat.symmetric_backend(device) in (None, "CUDA")
    mapped &= by_cuda and os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
    limit = min(int(its) for its, _ in texts)
    return PeerMemory(group, device, limit) if _all(mapped, group, device) else None


def _name(device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _tried(function, *given, **options):
    try:
        return function(*given, **options)
    except RuntimeError:
        return None


def _all(answer: bool, group, device: torch.device) -> bool:
    return all(map(any, said(bytes([answer]), group, device)))
