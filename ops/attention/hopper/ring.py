"""The barriers of the Hopper kernels, forward and backward: who arrives at which.

A ring has STAGES places for blocks in shared memory. Block i is in place i % STAGES; the parity of
i // STAGES is the phase of that place's barriers.

    producer                                        each reader (a warpgroup)

    wait_free(i)  <------ free, one arrival a reader --------  release(i)
    TMA's bytes   ------> full, one arrival and the bytes ---> wait_full(i)

Turns let one warpgroup at a time use the tensor cores (kernel.py). Barrier w is warpgroup w's:

    pass_on(w)    ------> turn of w + 1, one arrival --------> wait(w + 1, n), its n-th turn

The kernel itself arrives at the first turn of warpgroup 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sage_inductor.ops.compat import aggregate


def record(cls):
    """Triton's aggregate, with an __init__ that takes all fields by name. A number for a field that
    is no constexpr becomes a tensor, as it does where it is assigned to a name."""
    kinds = cls.__annotations__

    def __init__(self, _semantic=None, **fields):
        for name, kind in kinds.items():
            x = fields[name]
            x = x.value if isinstance(x, gl.constexpr) else x
            if not isinstance(x, gl.base_value):
                x = gl.constexpr(x) if kind is gl.constexpr or x is None else _semantic.to_tensor(x)
            setattr(self, name, x)

    __init__.__triton_builtin__ = True  # the same for all, so no part of a kernel's hash
    cls.__init__ = __init__
    return aggregate(cls)


def fields(constants: str, values: str) -> dict:
    """The __annotations__ of a record with these."""
    kinds = dict.fromkeys(constants.split(), gl.constexpr)
    return kinds | dict.fromkeys(values.split(), gl.base_value)


@record
class Ring:
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr

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
    def release(self, i, pred=True):
        mbarrier.arrive(self.free.index(i % self.STAGES), count=1, pred=pred)


@gluon.jit
def make_ring(STAGES: gl.constexpr):
    """Not yet begun: what a kernel allocates before that gets no memory of the barriers'."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return Ring(full=full, free=free, STAGES=STAGES)
