"""Memory that the GPUs of a group map: which do, how it grows, what a graph keeps. No GPU is needed:
what ranks say is given. Calls that write to it are in tests/front/test_parallel.py, on two GPUs in
tests/front/test_nccl.py."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from sage_inductor.ops import compat
from sage_inductor.ops.distributed import peers

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs are here, a and b, of 5,000 and 4,000 bytes; this rank has b."""
    here = [SimpleNamespace(uuid=name, total_memory=n) for name, n in (("a", 5000), ("b", 4000))]
    found = SimpleNamespace(reached=True, captured=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: here[d if isinstance(d, int) else d.index]
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, other: found.reached)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.captured)
    monkeypatch.setattr(compat, "symmetric_backend", lambda device: "CUDA")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    return found


def group_of(monkeypatch, *answers, size=2):
    """What the other ranks say, collective by collective. This rank is the last."""
    answers = iter(answers)

    def said(mine, group, device):
        return [text.ljust(len(mine)) for text in next(answers)] + [mine]

    monkeypatch.setattr(peers, "said", said)
    return Group(size)


class Group:
    def __init__(self, size):
        self.size, self.rank, self.group_name = lambda: size, lambda: size - 1, "a group"


YES, NO = [b"\1"], [b"\0"]


@pytest.mark.parametrize(
    "said, reached, others, limit",
    [
        ([b"100 a"], True, YES, 80),
        ([b"60 a"], True, YES, 60),  # that of the smallest GPU
        ([b"100 a"], True, NO, None),  # the other rank does not see this one's
        ([b"100 a"], False, YES, None),
        ([b"100 c"], True, YES, None),  # of another host
        ([b"100 b"], True, YES, None),  # one GPU for two ranks
    ],
)
def test_ranks_that_see_each_others_gpus_map_their_memory(
    said, reached, others, limit, gpus, monkeypatch
):
    gpus.reached = reached
    group = group_of(monkeypatch, said, others)
    memory = peers.of(group, DEVICE)
    assert peers.of(group, DEVICE) is memory  # they are asked once
    assert (memory and memory.limit) == limit
    if memory:
        assert (memory.rank, memory.P, memory.bytes) == (1, 2, 0)


def test_there_is_none_alone_on_cpu_or_first_in_a_graph(gpus, monkeypatch):
    group = group_of(monkeypatch, [b"100 a"], YES)
    assert peers.of(Group(1), DEVICE) is None
    assert peers.of(group, torch.device("cpu")) is None
    gpus.captured = True
    assert peers.of(group, DEVICE) is None
    gpus.captured = False
    assert peers.of(group, DEVICE) is not None


@pytest.fixture
def allocated(monkeypatch):
    """Sizes that were allocated, and the last in which there was so much."""
    sizes = []

    def empty(size, dtype, device):
        if size > 6 * peers.STEP:
            raise torch.OutOfMemoryError("no memory")
        sizes.append(size)
        return torch.empty(size, dtype=dtype)

    monkeypatch.setattr(compat, "symmetric_empty", empty)
    monkeypatch.setattr(
        compat, "symmetric_rendezvous", lambda x, name: SimpleNamespace(memory=x, name=name)
    )
    return sizes


def test_it_grows_on_all_ranks_together(gpus, allocated, monkeypatch):
    group = group_of(monkeypatch, YES, YES, YES, YES, NO, YES)
    memory = peers.PeerMemory(group, DEVICE, limit=9 * peers.STEP)
    assert memory.reserve(peers.STEP - 5) and memory.reserve(peers.STEP)
    assert memory.reserve(peers.STEP + 1) and memory.bytes == 2 * peers.STEP
    assert not memory.reserve(9 * peers.STEP + 1)  # beyond the limit nobody is asked
    assert not memory.reserve(4 * peers.STEP)  # another rank has not as much
    assert memory.limit == memory.bytes == 2 * peers.STEP and memory.reserve(2 * peers.STEP)
    memory.limit = 9 * peers.STEP
    assert not memory.reserve(7 * peers.STEP)  # this rank has not as much
    assert allocated == [peers.STEP, 2 * peers.STEP, 4 * peers.STEP]
    assert memory._handle.name == "a group" and len(memory._handle.memory) == 2 * peers.STEP


@pytest.mark.parametrize("here, there", [(False, YES), (True, NO)])
def test_memory_that_some_rank_cannot_map_is_not_used(here, there, gpus, allocated, monkeypatch):
    def rendezvous(*_):
        raise RuntimeError("a container keeps processes apart")

    if not here:
        monkeypatch.setattr(compat, "symmetric_rendezvous", rendezvous)
    group = group_of(monkeypatch, YES, there)
    memory = peers.PeerMemory(group, DEVICE, limit=peers.STEP)
    assert not memory.reserve(1) and not memory.reserve(1)  # the second asks nobody
    assert memory.bytes == memory.limit == 0


def test_what_a_graph_writes_to_is_kept_and_a_graph_allocates_nothing(gpus, allocated, monkeypatch):
    group = group_of(monkeypatch, *[YES] * 4)
    memory = peers.PeerMemory(group, DEVICE, limit=9 * peers.STEP)
    assert memory.reserve(peers.STEP)
    gpus.captured = True
    assert memory.reserve(1) and not memory.fits(peers.STEP + 1)
    assert not memory.reserve(peers.STEP + 1)
    of_graph = memory._handle
    gpus.captured = False
    assert memory.fits(peers.STEP + 1) and memory.reserve(3 * peers.STEP)
    assert list(memory._captured) == [peers.STEP] and memory._captured[peers.STEP][1] is of_graph
    assert len(allocated) == 2


def test_a_call_waits_for_what_another_stream_reads_but_not_in_a_graph(gpus, monkeypatch):
    did = []
    stream = SimpleNamespace(record_event=lambda: len(did), wait_event=did.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    memory = peers.PeerMemory(Group(2), DEVICE, limit=0)
    with memory.in_order():  # nothing was read
        assert did == []
    with memory.in_order():
        assert did == [0]
    with pytest.raises(ValueError), memory.in_order():
        did.append("launched before an error")
        raise ValueError
    assert memory._read == 3
    gpus.captured = True
    with memory.in_order():
        pass
    assert did == [0, 1, "launched before an error"] and memory._read == 3


def test_a_group_that_ends_takes_its_memory_along(gpus, monkeypatch):
    group = group_of(monkeypatch, [b"100 a"], YES)
    held = weakref.ref(peers.of(group, DEVICE))
    assert held() is not None
    del group
    gc.collect()
    assert held() is None


def test_memory_that_is_given_up_is_neither_asked_for_nor_captured(gpus, allocated, monkeypatch):
    group = group_of(monkeypatch, YES, YES)
    memory = peers.PeerMemory(group, DEVICE, limit=peers.STEP)
    assert memory.reserve(5)
    memory.give_up()
    gpus.captured = True
    assert not memory.fits(5) and not memory.reserve(5)
    gpus.captured = False
    assert not memory.fits(5) and not memory.reserve(5)


@pytest.mark.parametrize("backend, disabled, used", [
    ("CUDA", "0", True), (None, "0", True), ("NVSHMEM", "0", False), ("CUDA", "1", False),
])  # fmt: skip
def test_other_backends_and_hosts_whose_gpus_do_not_reach_each_other(
    backend, disabled, used, gpus, monkeypatch
):
    monkeypatch.setattr(compat, "symmetric_backend", lambda device: backend)
    monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
    group = group_of(monkeypatch, [b"100 a"], YES)
    assert (peers.of(group, DEVICE) is not None) == used


def test_arrays_are_where_they_are_asked_for():
    memory = peers.PeerMemory(Group(2), DEVICE, limit=0)
    memory._handle = SimpleNamespace(
        get_buffer=lambda *given: given, barrier=lambda *given: waited.append(given)
    )
    waited = []
    assert memory.array(1, (3, 4), torch.bfloat16, 512) == (1, (3, 4), torch.bfloat16, 256)
    memory.arrive()
    assert waited == [(0, peers.TIMEOUT)]
