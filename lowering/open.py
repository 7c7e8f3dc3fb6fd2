"""``sage::sdpa`` (and ``sage::prepare``, its first half) opens into smooth + quantize + attention
when AOTAutograd traces a graph, ``sage::select_blocks`` and ``sage::with_sink`` into what they are
made of.

Inductor then sees what there is to see: on CUDA the Triton kernels themselves (they are
``triton_op``) or, where it cannot launch the fastest ones, calls of opaque ops
(``quantize_kv_opaque``, ``attention_opaque``), whose kernels start to compile then; in a CPU
package the aten operations of the emulation. Nothing named ``sage`` is left for a package to look
up. Three cases stay whole:

* while ``torch.export`` traces, like every ``triton_op``: an exported program keeps what the model
  means and opens when it is compiled;
* attention on CPU, unless it is for a package: the emulation is for studies, and as one opaque call
  it compiles in no time (opened, a dynamic length cost 100 s);
* tensor subclasses: DTensor shards the op (ops/sharding.py) and calls it on local tensors, and that
  call opens. What the op is made of has no sharding.
"""

from sage_inductor.lowering.realize import stored
from sage_inductor.ops.compat import FunctionalTensorMode, exporting
from sage_inductor.ops.lse import compose_with_sink, with_sink
from sage_inductor.ops.sdpa import SdpaCall, compose, compose_prepare, prepare_kv, sdpa
from sage_inductor.ops.selector import compose_select, select_blocks


def _opens(custom_op, into, tensors: slice, portable_at: int | None = None) -> None:
    """tensors: which of the arguments several kernels read; portable_at: which is `portable`; None:
    it opens on CPU too."""

    @custom_op.register_torch_dispatch(FunctionalTensorMode)
    def open_(mode, op, types, args, kwargs):
        x, portable = args[0], portable_at is None or args[portable_at]
        is_subclass = any(hasattr(each, "__tensor_flatten__") for each in types)
        if is_subclass or exporting() or (x.device.type == "cpu" and not portable):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            if x.device.type != "cpu":  # there the emulation's operations fuse as they may
                args = list(args)
                args[tensors] = map(stored, args[tensors])
            return into(*args, **kwargs)


_opens(
    sdpa, lambda *args: compose(SdpaCall(*args)), slice(1, 3), SdpaCall._fields.index("portable")
)
_opens(prepare_kv, compose_prepare, slice(0, 2), 4)
_opens(select_blocks, compose_select, slice(0, 2))
_opens(with_sink, compose_with_sink, slice(0, 0))
