"""``sage::sdpa`` opens into smooth + quantize + attention when AOTAutograd traces a graph.

Inductor then sees what there is to see: on CUDA the Triton kernels themselves (they are
``triton_op``), on CPU the aten operations of the emulation. Nothing named ``sage`` is left for a
package to look up, but for kernels that cannot travel (``portable=False``).

While ``torch.export`` traces, the op stays whole, like every ``triton_op``: an exported program
keeps what the model means and opens when it is compiled.
"""

from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.export._trace import custom_triton_ops_decomposition_disabled

from sage_inductor.ops import sdpa
from sage_inductor.ops.sdpa import compose


@sdpa.register_torch_dispatch(FunctionalTensorMode)
def _open(mode, op, types, args, kwargs):
    if custom_triton_ops_decomposition_disabled():
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode:
        return compose(*args, **kwargs)
