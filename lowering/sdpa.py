"""``sage::sdpa`` opens into smooth + quantize + attention when AOTAutograd traces a graph.

Inductor then sees what there is to see: on CUDA the Triton kernels themselves (they are
``triton_op``), in a CPU package the aten operations of the emulation. Nothing named ``sage`` is
left for a package to look up. Two cases stay whole:

* while ``torch.export`` traces, like every ``triton_op``: an exported program keeps what the model
  means and opens when it is compiled;
* on CPU, unless it is for a package: the emulation is for studies, and as one opaque call it
  compiles in no time (opened, a dynamic length cost 100 s).
"""

from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.export._trace import custom_triton_ops_decomposition_disabled

from sage_inductor.ops import sdpa
from sage_inductor.ops.sdpa import compose


@sdpa.register_torch_dispatch(FunctionalTensorMode)
def _open(mode, op, types, args, kwargs):
    q, portable = args[0], args[-1]
    if custom_triton_ops_decomposition_disabled() or (q.device.type == "cpu" and not portable):
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode:
        return compose(*args, **kwargs)
