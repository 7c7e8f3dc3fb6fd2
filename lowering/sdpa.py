"""``sage::sdpa`` (and ``sage::prepare``, its first half) opens into smooth + quantize + attention
when AOTAutograd traces a graph.

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

from sage_inductor.ops import prepare_kv, sdpa
from sage_inductor.ops.sdpa import compose, compose_prepare


def _opens(custom_op, into) -> None:
    @custom_op.register_torch_dispatch(FunctionalTensorMode)
    def open_(mode, op, types, args, kwargs):
        x, portable = args[0], args[-1]
        if custom_triton_ops_decomposition_disabled() or (x.device.type == "cpu" and not portable):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return into(*args, **kwargs)


_opens(sdpa, compose)
_opens(prepare_kv, compose_prepare)
