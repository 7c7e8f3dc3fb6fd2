"""Other packages' attention, where they are installed: providers beside those of providers.py.

FA3, FA4             bf16 through flash_attn_interface and through flash_attn.cute
FA3-fp8 kernel       q, k and v in E4M3 beforehand, by a scale per batch and kv head
FA3-fp8 op           the same with that quantization, which Inductor compiles
sageattention G op   sageattn_qk_int8_pv_fp8_cuda_sm90 with scales of granularity G, per_warp or
                     per_thread; on other GPUs than Hopper "sageattention op", what sageattn takes
sageattention G kernel  the one op of it that attends, on what it was given: Hopper only

No masks. cuDNN in FP8 is not among them: cudnn-frontend wants a graph built for each shape, with a
scale and an amax tensor for q, k, v, p and the output.
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cases import Case
from bench.measure import Provider

MODULES = {
    "FA3": "flash_attn_interface",
    "FA3-fp8": "flash_attn_interface",
    "FA4": "flash_attn.cute.interface",
    "sageattention": "sageattention",
}
E4M3 = torch.float8_e4m3fn


def absent(kinds) -> dict[str, str]:
    """Those peers among `kinds` that cannot be imported, and why."""
    found = {}
    for kind in MODULES.keys() & set(kinds):
        try:
            importlib.import_module(MODULES[kind])
        except (ImportError, OSError) as error:  # OSError: built for other libraries than these
            found[kind] = f"{error}".split("\n")[0]
    return dict(sorted(found.items()))


def versions(kinds) -> dict[str, str]:
    """Of the distributions that the peers among `kinds` come from."""
    tops = {MODULES[kind].partition(".")[0] for kind in MODULES.keys() & set(kinds)}
    of_module = importlib.metadata.packages_distributions()
    names = sorted({name for top in tops for name in of_module.get(top, ())})
    return {name: importlib.metadata.version(name) for name in names}


def build(case: Case, kind: str) -> list[Provider]:
    """The columns of one peer, which is installed; none for a case with a mask."""
    if case.mask:
        return []
    module = importlib.import_module(MODULES[kind])
    match kind:
        case "FA3" | "FA4":
            return [Provider(kind, _flash(module, case))]
        case "FA3-fp8":
            attend, quantize = _flash(module, case), _quantizer(case)
            op = lambda *qkv: attend(*quantize(*qkv))  # noqa: E731
            return [Provider("FA3-fp8 kernel", attend, quantize), Provider("FA3-fp8 op", op)]
    return _sageattention(module, case)


def _flash(module, case: Case) -> Callable:
    def call(q, k, v, *descales):
        out = module.flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)),  # [B, N, H, D]
            softmax_scale=case.D**-0.5,
            causal=case.is_causal,
            **dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=False)),
        )
        out = out[0] if isinstance(out, tuple) else out  # FA4 gives lse too, as older FA3 does
        return out.transpose(1, 2)

    return call


def _quantizer(case: Case) -> Callable:
    def quantize(x):
        """x [B, H, N, D] in E4M3, and its scale fp32 [B, H_kv]: FA3 has one for all heads of q
        that share a kv head."""
        B, H, N, D = x.shape
        groups = x.view(B, case.H_kv, H // case.H_kv, N, D)
        amax = groups.abs().amax((2, 3, 4), keepdim=True).float()
        scale = amax.clamp(min=1e-12) / torch.finfo(E4M3).max
        return (groups / scale).to(E4M3).view(B, H, N, D), scale.view(B, case.H_kv)

    def quantize_all(q, k, v):
        x, scales = zip(*map(quantize, (q, k, v)), strict=True)
        return *x, *scales

    return torch.compile(quantize_all, fullgraph=True)


def _sageattention(module, case: Case) -> list[Provider]:
    """Never as a CUDA graph: 2.2 launches on the legacy stream, so that a capture succeeds and a
    replay computes nothing."""
    given = {"tensor_layout": "HND", "is_causal": case.is_causal, "sm_scale": case.D**-0.5}
    if not on_hopper():
        return [Provider("sageattention op", partial(module.sageattn, **given), captures=False)]
    columns = []
    for granularity in ("per_warp", "per_thread"):
        name = f"sageattention {granularity}"
        op = partial(module.sageattn_qk_int8_pv_fp8_cuda_sm90, qk_quant_gran=granularity, **given)
        kernel = partial(_again, case.D)
        columns += [
            Provider(f"{name} kernel", kernel, partial(_attention_op, op), captures=False),
            Provider(f"{name} op", op, captures=False),
        ]
    return columns


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class _Recorder(TorchDispatchMode):
    call = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "qk_int8_sv_f8" in func.name():  # the package's own name for q kT in INT8, p v in FP8
            self.call = func, *args
        return func(*args, **(kwargs or {}))


def _attention_op(op: Callable, q, k, v) -> tuple:
    """The torch op by which `op` attends, and its arguments."""
    with _Recorder() as recorder:
        op(q, k, v)
    if recorder.call is None:
        raise RuntimeError("sageattention attends by no torch op named qk_int8_sv_f8...")
    return recorder.call


def _again(D: int, func, *args):
    """What the op writes; head_dim was padded to 64 or 128."""
    func(*args)
    names = [argument.name for argument in func._schema.arguments]
    return args[names.index("output")][..., :D]
