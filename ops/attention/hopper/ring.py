"""What the Hopper kernels, forward and backward, have in common: their context and their barriers.

A ring has STAGES places for blocks in shared memory. Block i is in place i % STAGES, and the parity
of i // STAGES is the phase of that place's barriers. Who arrives at them:

    producer                                                       each reader, a warpgroup

    wait_free(i)  <-- free: one arrival a reader ----------------  release(i)
    TMA           --> full: one arrival and all bytes of block i -> wait_full(i)

In kernel.py the warpgroups also take turns at the tensor cores. `order` has a barrier for each of
them, at which the one before it arrives once; the kernel itself arrives first, at warpgroup 0's.
"""

import functools
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sage_inductor.ops.compat import aggregate


@aggregate
class Ring:
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, full, free, STAGES):
        self.full, self.free, self.STAGES = full, free, gl.constexpr(STAGES)

    @gluon.jit
    def begin(self, READERS: gl.constexpr):
        for i in gl.static_range(self.STAGES):
            mbarrier.init(self.full.index(i), count=1)
            mbarrier.init(self.free.index(i), count=READERS)

    @gluon.jit
    def wait_full(self, i, pred=True):
        mbarrier.wait(self.full.index(i % self.STAGES), (i // self.STAGES) & 1, pred=pred)

    @gluon.jit
    def wait_free(self, i):
        mbarrier.wait(self.free.index(i % self.STAGES), ((i // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, i):
        mbarrier.arrive(self.free.index(i % self.STAGES), count=1)


@gluon.jit
def make_ring(STAGES: gl.constexpr):
    """`begin` initialises them after all allocations: else Triton may give their memory away."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return Ring(full, free, STAGES)


@functools.cache
def _of_names(names: tuple[str, ...]):
    def __init__(self, **values):
        for name, x in values.items():
            setattr(self, name, x)

    vars(__init__)["__triton_builtin__"] = True  # the same for all, so no part of a kernel's hash
    kinds = dict.fromkeys(names, gl.base_value)
    return aggregate(type("Context", (), {"__annotations__": kinds, "__init__": __init__}))


def context(_semantic: Any = None, _generator: Any = None):
    """All that the calling function has names for, constants as constants: its parameters, and what
    it has assigned."""
    names = {name: gl.constexpr(None) if x is None else x for name, x in _generator.lscope.items()}
    return _of_names(tuple(names))(**names)


vars(context)["__triton_builtin__"] = True
