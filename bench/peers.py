"""Other packages' attention, where they are installed: providers beside those of providers.py.

FA3, FA4             bf16 through flash_attn_interface, or fa3_fwd_interface (of the package
                     fa3-fwd), and through flash_attn.cute
FA3-fp8 kernel       q, k and v in E4M3 beforehand, by a scale per batch and kv head
FA3-fp8 op           the same with that quantization, which Inductor compiles
sageattention G op   sageattn_qk_int8_pv_fp8_cuda_sm90 with scales of granularity G, per_warp or
                     per_thread; on other GPUs than Hopper "sageattention op", what sageattn takes
sageattention G kernel  the one op of it that attends, on what it was given: Hopper only
cuDNN-fp8 kernel     by cudnn-frontend, q, k and v in E4M3 beforehand, by a scale per tensor; it
                     finds amax of p and of the output. Output in bf16 where cuDNN has that (from
                     Blackwell on), else in E4M3 by v's scale, whose average it is, and a cast
cuDNN-fp8 op         the same with that quantization, which Inductor compiles
torchao-fp8 op       FA3-fp8 with torchao's quantization, in Triton. torchao-fp8 hadamard op: q, k
                     and v rotated, and the output back (HadamardMode.QKV)
comfy-kitchen op     int8_attention: q and k rotated, p v in INT8; never causal

No masks.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cases import Case
from bench.measure import Provider
from bench.tables import case_of, groups, markdown, with_speedup

FA3 = ("flash_attn_interface", "fa3_fwd_interface")
FA3 = next((name for name in FA3 if importlib.util.find_spec(name)), FA3[0])
MODULES = {
    "FA3": (FA3,),
    "FA3-fp8": (FA3,),
    "FA4": ("flash_attn.cute.interface",),
    "sageattention": ("sageattention",),
    "cuDNN-fp8": ("cudnn",),
    "torchao-fp8": (FA3, "torchao.prototype.attention.quantization"),
    "comfy-kitchen": ("comfy_kitchen",),
}
E4M3 = torch.float8_e4m3fn
P_SCALE = 256.0  # of p, which is at most 1: a power of two below E4M3's largest


def absent(kinds) -> dict[str, str]:
    """Those peers among `kinds` that cannot be imported, and why."""
    found = {}
    for kind in MODULES.keys() & set(kinds):
        try:
            _modules(kind)
        except (ImportError, OSError) as error:  # OSError: built for other libraries than these
            found[kind] = f"{error}".split("\n")[0]
    return dict(sorted(found.items()))


def versions(kinds) -> dict[str, str]:
    """Of the distributions that the peers among `kinds` come from."""
    names = (name for kind in MODULES.keys() & set(kinds) for name in MODULES[kind])
    tops = {name.partition(".")[0] for name in names}
    of_module = importlib.metadata.packages_distributions()
    names = sorted({name for top in tops for name in of_module.get(top, ())})
    return {name: importlib.metadata.version(name) for name in names}


def _modules(kind: str) -> list:
    return [importlib.import_module(name) for name in MODULES[kind]]


def build(case: Case, kind: str) -> list[Provider]:
    """The columns of one peer, which is installed; none for a case that it does not compute."""
    if case.mask:
        return []
    module, *others = _modules(kind)
    match kind:
        case "FA3" | "FA4":
            return [Provider(kind, _flash(module, case))]
        case "FA3-fp8":
            return _quantized(kind, _flash(module, case), _quantizer(case, (2, 3, 4)))
        case "cuDNN-fp8":
            return _quantized(kind, _cudnn(module, case), _quantizer(case, (0, 1, 2, 3, 4)))
        case "torchao-fp8":
            return _torchao(*others, _flash(module, case))
        case "comfy-kitchen":
            op = partial(module.int8_attention, scale=case.D**-0.5)
            return [Provider("comfy-kitchen op", op)] * (not case.is_causal)
    return _sageattention(module, case)


def _quantized(name: str, attend: Callable, quantize: Callable) -> list[Provider]:
    op = lambda *qkv: attend(*quantize(*qkv))  # noqa: E731
    return [Provider(f"{name} kernel", attend, quantize), Provider(f"{name} op", op)]


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


def _quantizer(case: Case, shared: tuple[int, ...]) -> Callable:
    """shared: the dimensions of [B, H_kv, H / H_kv, N, D] that have one scale."""

    def quantize(x):
        """x [B, H, N, D] in E4M3, and its scale fp32: [B, H_kv], FA3 has one for all heads of q
        that share a kv head, or of all of x [1, 1]."""
        B, H, N, D = x.shape
        groups = x.view(B, case.H_kv, H // case.H_kv, N, D)
        amax = groups.abs().amax(shared, keepdim=True).float()
        scale = amax.clamp(min=1e-12) / torch.finfo(E4M3).max
        return (groups / scale).to(E4M3).view(B, H, N, D), scale.view(scale.shape[:2])

    def quantize_all(q, k, v):
        x, scales = zip(*map(quantize, (q, k, v)), strict=True)
        return *x, *scales

    return torch.compile(quantize_all, fullgraph=True)


def _torchao(module, attend: Callable) -> list[Provider]:
    """Not fp8_fa3_sdpa, which takes FA3 from torch's registry: there must be its backward, too."""

    def op(*qkv):
        return attend(*module._fp8_sdpa_quantize(*qkv))

    def rotated(*qkv):
        out = attend(*module._fp8_hadamard_sdpa_quantize(*qkv))
        return module._inverse_hadamard_transform(out)

    return [Provider("torchao-fp8 op", op), Provider("torchao-fp8 hadamard op", rotated)]


def _cudnn(module, case: Case) -> Callable:
    """(q, k, v, their scales) -> out [B, H_q, N, D] in bf16."""
    dequantize = torch.compile(lambda x, scale: (x.float() * scale).bfloat16(), fullgraph=True)

    @functools.cache
    def built(device: torch.device) -> tuple:  # at the first call, whose error is a row's
        handle = module.create_handle()
        try:
            found = torch.bfloat16, *_cudnn_graph(module, case, module.data_type.BFLOAT16, handle)
        except Exception:  # which one depends on the version; E4M3's is the one to report
            found = E4M3, *_cudnn_graph(module, case, module.data_type.FP8_E4M3, handle)
        one = torch.ones(1, 1, 1, 1, device=device)
        return handle, one, (one / P_SCALE, one * P_SCALE), (0 * one, 0 * one), *found

    def call(q, k, v, *scales):
        handle, one, of_p, amax, dtype, graph, symbols = built(q.device)
        descales = [scale.view(1, 1, 1, 1) for scale in scales]
        of_out = one if dtype == torch.bfloat16 else descales[2].reciprocal()
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=q.device)
        tensors = q, k, v, *descales, *of_p, of_out, out, *amax
        module.set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
        graph.execute(dict(zip(symbols, tensors, strict=True)), workspace, handle=handle)
        return out if dtype == torch.bfloat16 else dequantize(out, descales[2])

    return call


def _cudnn_graph(module, case: Case, out_type, handle) -> tuple:
    """cuDNN's graph, and its symbols: q, k, v, their descales, descale and scale of p, scale of the
    output, output, amax of p and of the output. All of q, k, v, out contiguous [B, H, N, D]."""
    fp32, e4m3 = module.data_type.FLOAT, module.data_type.FP8_E4M3
    graph = module.pygraph(
        io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle
    )

    def layout(H: int) -> dict[str, list[int]]:
        N, D = case.N, case.D
        return {"dim": [case.B, H, N, D], "stride": [H * N * D, N * D, D, 1]}

    heads = {"q": case.H_q, "k": case.H_kv, "v": case.H_kv}
    numbers = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
    given = {
        name: graph.tensor(name=name, data_type=e4m3, **layout(H)) for name, H in heads.items()
    }
    given |= {name: graph.tensor(name=name, data_type=fp32, **one) for name in numbers}
    out, _, *amax = graph.sdpa_fp8(
        **given, generate_stats=False, attn_scale=case.D**-0.5, use_causal_mask=case.is_causal
    )
    for symbol, dtype, of in ((out, out_type, layout(case.H_q)), *((x, fp32, one) for x in amax)):
        symbol.set_output(True).set_dim(of["dim"]).set_stride(of["stride"]).set_data_type(dtype)
    graph.build([module.heur_mode.A, module.heur_mode.FALLBACK])
    return graph, (*given.values(), out, *amax)


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


# -- the tables ----

KINDS = {"kernel": "The kernel alone", "op": "With all preparation"}


def table(rows: list[dict]) -> str:
    """Beside ours: kernels alone, then with all preparation. Bold: ahead of ours."""
    parts = []
    for kind, title in KINDS.items():
        its = speed_table(of_kind(rows, kind), f" {kind}")
        parts += [f"{title}: TFLOP/s (x cuDNN)\n", its]
    return "\n".join(parts)


def of_kind(rows: list[dict], kind: str) -> list[dict]:
    """The rows of one kind of providers, and of those that have no kinds."""
    others = tuple(f" {other}" for other in KINDS if other != kind)
    return [row for row in rows if not row["provider"].endswith(others)]


def leading(rows: list[dict]) -> list[dict]:
    """Of the rows of one case those that are ahead of ours; none where ours is not among them."""
    ours = max((row["tflops"] or 0 for row in rows if row["recipe"]), default=math.inf)
    return [row for row in rows if (row["tflops"] or 0) > ours]


def speed_table(rows: list[dict], kind: str) -> str:
    rows = [{**row, "case": f"{case_of(row)}{' causal' * row['is_causal']}"} for row in rows]
    providers = list(groups(rows, "provider"))
    lines = [["B x H x N x D", *(name.removesuffix(kind) for name in providers)]]
    for case, its in groups(rows, "case").items():
        ahead, cells = leading(its), {}
        for row in its:
            cell = with_speedup(row, f"{row['tflops']:.0f}") if row["tflops"] else "-"
            cells[row["provider"]] = f"**{cell}**" if row in ahead else cell
        lines.append([case, *(cells.get(name, "") for name in providers)])
    return markdown(lines)


def means_table(rows: list[dict]) -> str:
    """Ours over theirs, geometric means over cases: of head_dim 128 and 64 with as many heads of k,
    of models' shapes and of the others. Bold: behind theirs."""
    ratios, rows = {}, [{**row, "case": (case_of(row), row["is_causal"])} for row in rows]
    for case in groups(rows, "case").values():
        shape = case[0]
        column = "D={D} {}".format("causal" if shape["is_causal"] else "full", **shape)
        if shape["model"] or shape["D"] not in (64, 128):
            column = "models" if shape["model"] else "other shapes"
        shown = [row for row in case if row["tflops"]]
        for ours, theirs in itertools.product(shown, shown):
            kind = ours["provider"].rpartition(" ")[2]
            # What has no kinds includes its preparation, if it has any.
            alike = theirs["provider"].endswith(f" {kind}") or (
                kind == "op" and theirs["provider"].rpartition(" ")[2] not in KINDS
            )
            if ours["recipe"] and not theirs["recipe"] and alike:
                of = ratios.setdefault(f"{ours['provider']} / {theirs['provider']}", {})
                of.setdefault(column, []).append(ours["tflops"] / theirs["tflops"])
    columns = dict.fromkeys(itertools.chain(*ratios.values()))
    columns = sorted(columns, key=lambda column: not column.startswith("D="))
    lines = [["", *columns]]
    for pair, of in ratios.items():
        means = [statistics.geometric_mean(of[each]) if each in of else None for each in columns]
        texts = ("" if x is None else f"{x:.2f}x" for x in means)
        lines.append([
            pair,
            *(f"**{text}**" if x and x < 1 else text for x, text in zip(means, texts, strict=True)),
        ])  # fmt: skip
    return markdown(lines)


def families_table(rows: list[dict]) -> str:
    """Relative L1 in %, the worst of a family's shapes, on normal inputs and on those with
    outliers. A line per provider that prepares its operands, or needs not."""
    rows = of_kind(rows, "op")
    lines = [["", *groups(rows, "family")]]
    for provider, its in groups(rows, "provider").items():
        families, cells = groups(its, "family"), [provider]
        for family in lines[0][1:]:
            found = [row["accuracy"] for row in families.get(family, ())]
            worst = (max(x[kind]["rel_l1"] for x in found) for kind in ("normal", "outlier"))
            cells.append(", ".join(f"{100 * x:.3g}" for x in worst) if found else "")
        lines.append(cells)
    return markdown(lines)
