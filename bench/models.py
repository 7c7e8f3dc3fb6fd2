"""Whole models: a call's time, the first call's, and peak memory, by eager, "inductor" and "sage".

$ python bench/models.py --json                 # bench/results/GPU/DATE-whole.json
$ python bench/models.py --models flux wan_1_3b
$ python bench/models.py --plan beside --json   # beside FlashAttention-3, and with FP8 linears
$ python bench/models.py --plan beside --quick  # tiny models, on a CPU too: that it runs

The classes are diffusers' and transformers' own, of the published sizes, in bf16 with random
weights and inputs, without gradients. diffusers' models compile their repeated blocks, as their
documentation recommends; language models compile `forward`. A row whose output by "sage" is not
near that by "inductor", or eager's is not, has an error instead of times.

fa3: "inductor" over diffusers' attention backend of FlashAttention-3. Where that is missing, or
refuses the model, the row says why, and has the other columns. FP8 linears: torchao's, of the
repeated blocks, with activations quantized as they come.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import sage_inductor
from bench import harness, peers
from bench.measure import burst, in_turns, peak_bytes, relative_l1, wall
from bench.tables import gain, markdown, show, speed_of

# Relative L1 of an output to inductor's, from which it is wrong. One token's logits of a random
# Llama differed by 0.07 under sage and by 0.03 under eager (H200, 2026-11-27).
NEAR = 0.15


@dataclasses.dataclass(frozen=True)
class Model:
    """A row."""

    title: str
    tokens: int  # that self-attention reads, masked ones too
    # On torch's default device, in its default dtype; of its blocks one in so many.
    make: Callable[[int], nn.Module]
    inputs: Callable[[], dict]  # the same; arguments of forward
    repeated: bool = True  # whether its blocks are compiled instead of its forward
    blocks: int = 0  # that it has
    fa3: str = "_flash_3"  # its attention backend of diffusers


# -- the models ----


def flux(part: int, **sizes) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    layers = {"num_layers": 19 // part, "num_single_layers": 38 // part}
    return FluxTransformer2DModel(guidance_embeds=True, **layers, **sizes)


def of_flux(image: int = 4096, text: int = 512) -> dict:
    ids = torch.zeros(image, 3)
    ids[:, 1], ids[:, 2] = torch.arange(image) // 64, torch.arange(image) % 64
    return dict(
        hidden_states=torch.randn(1, image, 64), encoder_hidden_states=torch.randn(1, text, 4096),
        pooled_projections=torch.randn(1, 768), timestep=torch.full((1,), 0.5),
        guidance=torch.full((1,), 3.5), img_ids=ids, txt_ids=torch.zeros(text, 3),
    )  # fmt: skip


def wan(heads: int, inner: int, layers: int) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(num_attention_heads=heads, ffn_dim=inner, num_layers=layers)


def of_wan(height: int, width: int, frames: int) -> dict:
    """height, width, frames: of the video; a latent has an eighth, and a quarter of all but one."""
    latent = 1, 16, (frames - 1) // 4 + 1, height // 8, width // 8
    return dict(
        hidden_states=torch.randn(latent), timestep=torch.full((1,), 500),
        encoder_hidden_states=torch.randn(1, 512, 4096),
    )  # fmt: skip


def hunyuan(part: int, **sizes) -> nn.Module:
    """All 20 double and 40 single blocks: 24 GiB of weights, which one 80 GB GPU holds."""
    from diffusers import HunyuanVideoTransformer3DModel

    layers = {"num_layers": 20 // part, "num_single_layers": 40 // part}
    return HunyuanVideoTransformer3DModel(guidance_embeds=True, **layers, **sizes)


def of_hunyuan(height: int, width: int, frames: int, words: int = 64) -> dict:
    """height, width, frames: as of_wan's. The pipeline pads a prompt of `words` tokens to 256 and
    masks the padding, in the dtype of the model."""
    latent = 1, 16, (frames - 1) // 4 + 1, height // 8, width // 8
    mask = torch.ones(1, 256)
    mask[:, words:] = 0
    return dict(
        hidden_states=torch.randn(latent), timestep=torch.full((1,), 500),
        encoder_hidden_states=torch.randn(1, 256, 4096), pooled_projections=torch.randn(1, 768),
        encoder_attention_mask=mask, guidance=torch.full((1,), 6000.0),
    )  # fmt: skip


def llama() -> nn.Module:
    """Llama 3.2 1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def of_llama(N: int) -> dict:
    return dict(input_ids=torch.randint(128256, (1, N)), use_cache=False, logits_to_keep=1)


def wan_14b(part: int) -> nn.Module:
    return wan(40, 13824, 40 // part)


# Its blocks get a mask that hides the prompt's padding, which `_flash_3` refuses.
VARLEN = "_flash_varlen_3"
MODELS = {
    "flux": Model("Flux, 1024 px", 4608, flux, of_flux, blocks=57),
    "wan_1_3b": Model(
        "Wan 1.3B, 480p", 32760, lambda part: wan(12, 8960, 30 // part),
        lambda: of_wan(480, 832, 81), blocks=30,
    ),
    "wan_14b_480p": Model(
        "Wan 14B, 480p", 32760, wan_14b, lambda: of_wan(480, 832, 81), blocks=40
    ),
    "wan_14b": Model("Wan 14B, 720p", 75600, wan_14b, lambda: of_wan(720, 1280, 81), blocks=40),
    "hunyuan": Model(
        "HunyuanVideo, 544p", 67576, hunyuan, lambda: of_hunyuan(544, 960, 129), blocks=60,
        fa3=VARLEN,
    ),
    "llama_16k": Model(
        "Llama 3.2 1B, prefill", 16384, lambda _: llama(), lambda: of_llama(16384), False
    ),
    "llama_32k": Model(
        "Llama 3.2 1B, prefill", 32768, lambda _: llama(), lambda: of_llama(32768), False
    ),
}  # fmt: skip
# Of the same classes, with two heads and a block of each kind.
QUICK = {
    "flux": Model(
        "Flux, tiny", 80, lambda _: flux(19, num_attention_heads=2), lambda: of_flux(64, 16),
        blocks=3,
    ),
    "wan_14b_480p": Model(
        "Wan, tiny", 48, lambda _: wan(2, 256, 1), lambda: of_wan(64, 64, 9), blocks=1
    ),
    "hunyuan": Model(
        "HunyuanVideo, tiny", 304,
        lambda _: hunyuan(20, num_attention_heads=2, num_refiner_layers=1),
        lambda: of_hunyuan(64, 64, 9, words=60), blocks=3, fa3=VARLEN,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """columns: of each row. models: those it measures, each with one in so many of its blocks. fp8:
    those with FP8 linears, too. table: of its rows."""

    columns: tuple[str, ...]
    models: dict[str, int]
    table: Callable[[list[dict]], str]
    fp8: tuple[str, ...] = ()


def draw(model: Model, device, part: int = 1) -> tuple[nn.Module, dict]:
    """The model in bf16, with one in `part` of its blocks, and what its forward takes."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return model.make(part).eval(), model.inputs()
    finally:
        torch.set_default_dtype(before)


def quantize(module: nn.Module) -> None:
    """The linears of its repeated blocks become torchao's in FP8, in place: weights ahead,
    activations as they come, a scale for each tensor. On a CPU the weights alone."""
    from torchao import quantization

    on_gpu = next(module.parameters()).device.type == "cuda"
    name = "Float8DynamicActivationFloat8WeightConfig" if on_gpu else "Float8WeightOnlyConfig"
    # Not torchao's settings of Inductor, which would be those of the other rows, too.
    config = getattr(quantization, name)(set_inductor_config=False)
    for each in module.modules():
        if type(each).__name__ in module._repeated_blocks:
            quantization.quantize_(each, config)


def lend_fa3() -> None:
    """diffusers takes FA3 from flash_attn_interface of a package flash_attn_3. The wheel that loads
    here, fa3-fwd, has the same functions in a module of another name. Raises ImportError."""
    from diffusers.models import attention_dispatch as dispatch

    if not dispatch._CAN_USE_FLASH_ATTN_3:
        found = importlib.import_module(peers.FA3)
        dispatch.flash_attn_3_func = found.flash_attn_func
        dispatch.flash_attn_3_varlen_func = found.flash_attn_varlen_func
        dispatch._CAN_USE_FLASH_ATTN_3 = True


# -- the measurement ----


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=5, target_ms=1000.0)
    parser.add_argument("--plan", choices=PLANS, default="whole")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: those of the plan")
    parser.add_argument("--quick", action="store_true", help="tiny models, on any device")
    args = parser.parse_args(argv)
    plan, models = PLANS[args.plan], QUICK if args.quick else MODELS
    if args.quick:  # of which nothing is kept but in a file that is named
        args.json = args.json or None
    device = harness.current(args) if args.quick else harness.gpu(args)
    result = harness.Result(args.plan, method(plan, args), args)
    sage_inductor.config.rewrite_inductor = False  # it would rewrite the baseline
    emulated = sage_inductor.config.patch(emulate=device.type == "cpu")
    with torch.no_grad(), emulated:
        for name in args.models or (name for name in plan.models if name in models):
            for row in measure(name, models[name], args, device):
                result.add([row])
                show(plan.table([row]))
            torch.cuda.empty_cache()
    return result.end("model")


def method(plan: Plan, args) -> dict[str, str]:
    found = {
        "units": "ms a call; x: a column's time over sage's in one round (median, least, most)",
        "time": f"median of {args.rounds} rounds, in which each column runs for {args.target_ms:g} "
        "ms, after a third of that untimed; they take turns",
        "blocks": "whole models of the published sizes in bf16, random weights and inputs, no "
        "gradients, as users launch them: no CUDA graphs. Of diffusers' the repeated blocks are "
        "compiled, of language models forward",
        "first call": "seconds with empty caches, compilation included",
        "memory": "peak_bytes: what the process has allocated at most in a call, weights included",
    }
    if plan.fp8:
        found["blocks"] += (
            ". FP8: the linears of these blocks, by torchao, weights and activations with a scale "
            "for each tensor. FA3: diffusers' backend _flash_3; HunyuanVideo's padding mask takes "
            f"{VARLEN}, which breaks the graph"
        )
        found["packages"] = ", ".join(
            f"{name} {version}"
            for name in ("diffusers", "fa3-fwd", "flash-attn-3", "torchao")
            if (version := version_of(name))
        )
    return found


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(name: str, model: Model, args, device) -> Iterator[dict]:
    """A row for each kind of its linears; where it failed or is wrong, with an error instead of
    times."""
    plan, module, exact = PLANS[args.plan], None, None
    part = 1 if args.quick else plan.models.get(name, 1)
    for linears in ("bf16", "fp8")[: 1 + (name in plan.fp8)]:
        row = {"plan": args.plan, "model": name, "tokens": model.tokens, "error": None}
        if plan.fp8:
            row |= {"linears": linears, "blocks": [model.blocks // part, model.blocks]}
        torch._dynamo.reset()
        try:
            if module is None:
                module, inputs = draw(model, device, part)
            if linears == "fp8":
                quantize(module)
            right = fill(row, model, plan, module, inputs, args)
            if exact is not None:
                row["of_fp8"] = relative_l1(right, exact)
            exact = right
        except Exception as error:  # a row that fails must not cost the others
            row["error"] = harness.in_a_line(error)
        yield row


def fill(row: dict, model: Model, plan: Plan, module: nn.Module, inputs: dict, args) -> Tensor:
    """What is measured, into a row. Returns inductor's output."""
    columns, on_gpu = {}, args.device.type == "cuda"
    row["first_s"], row["without"] = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for each in plan.columns:
            with without(row, each):
                columns[each] = column(each, model, module, inputs)
        for each in tuple(columns):
            with without(row, each, columns):
                row["first_s"][each] = columns[each].first(f"{folder}/{each}")
        report = sage_inductor.report()
        row["rewritten"], row["calls"] = len(report.rewritten), len(report)
        right = columns["inductor"].call()
        for each in [x for x in columns if x != "inductor"]:
            with without(row, each, columns):
                error = error_of(columns[each].call(), right)
                row["rel_l1" if each == "sage" else f"of_{each}"] = error
        calls = {each: x.call for each, x in columns.items()}
        clock = burst if on_gpu else functools.partial(wall, int)
        times = in_turns(calls, args.rounds, args.target_ms, clock)
        row["peak_bytes"] = {each: peak_bytes(call) for each, call in calls.items() if on_gpu}
    row["ms"] = {each: statistics.median(found) for each, found in times.items()}
    others = [each for each in columns if each != "sage"]
    row["speed"] = {each: speed_of(times["sage"], times[each]) for each in others}
    return right


@contextlib.contextmanager
def without(row: dict, name: str, columns: dict | None = None):
    """A row can do without FA3, and says why."""
    try:
        yield
    except Exception as error:
        if name != "fa3":
            raise
        said = " ".join(str(error).split())  # Dynamo's first line does not say what
        row["without"][name] = f"{type(error).__name__}: {said[:300]}"
        (columns or {}).pop(name, None)


def column(name: str, model: Model, module: nn.Module, inputs: dict) -> "Column":
    if name == "fa3":
        lend_fa3()
        return Column(module, inputs, "inductor", model.repeated, model.fa3)
    return Column(module, inputs, name, model.repeated)


class Column:
    """The model, compiled in one way, perhaps over an attention backend of diffusers. The ways
    share its weights."""

    def __init__(
        self, module: nn.Module, inputs: dict, backend: str, repeated: bool, attention: str = ""
    ):
        self.inputs, self.run, self.compiled, self.attention = inputs, module, {}, {}
        if attention:
            module.set_attention_backend(attention)  # raises where it cannot be used
            of_modules = (getattr(each, "processor", None) for each in module.modules())
            processors = [each for each in of_modules if hasattr(each, "_attention_backend")]
            self.attention = {each: each._attention_backend for each in processors}
            module.set_attention_backend("native")  # the process's default, too
        if backend == "eager":
            return
        if not repeated:
            self.run = torch.compile(module, backend=backend)
            return
        # What packs the keys that a mask shows reads their number on the host.
        module.compile_repeated_blocks(backend=backend, fullgraph=attention != VARLEN)
        for each in module.modules():
            if each._compiled_call_impl is not None:
                self.compiled[each] = each._compiled_call_impl
                each._compiled_call_impl = None

    @contextlib.contextmanager
    def active(self):
        given = {each: each._attention_backend for each in self.attention}
        for each, call in self.compiled.items():
            each._compiled_call_impl = call
        for each, attention in self.attention.items():
            each._attention_backend = attention
        try:
            yield
        finally:
            for each in self.compiled:
                each._compiled_call_impl = None
            for each, attention in given.items():
                each._attention_backend = attention

    def call(self) -> Tensor:
        with self.active():
            return next(iter(self.run(**self.inputs, return_dict=False)))

    def first(self, folder: str) -> float:
        """Seconds, with caches of its own."""
        os.environ.update(harness.caches(folder))
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else int
        return round(wall(synchronize, self.call, 1) / 1e3, 1)


def error_of(found: Tensor, right: Tensor) -> float:
    """Relative L1. Raises ValueError where the two are not near."""
    error = relative_l1(found.float(), right.float())
    if not error < NEAR:  # a NaN is not
        raise ValueError(f"an output is not near inductor's: relative L1 {error:.3f}")
    return error


# -- the tables ----


def table(rows: list[dict]) -> str:
    lines = [[
        "model", "tokens", "eager", '`"inductor"`', '`"sage"`', "over eager", 'over `"inductor"`',
        "relative L1 (eager's)", "first call, s", "peak, GiB",
    ]]  # fmt: skip
    columns = PLANS["whole"].columns
    for row in (row for row in rows if not row["error"]):
        first = (f"{row['first_s'][each]:.0f}" for each in columns[1:])
        lines.append([
            MODELS[row["model"]].title, f"{row['tokens']:,}", *(time_of(row, x) for x in columns),
            *(gain(row["speed"][each]) for each in columns[:2]),
            f"{row['rel_l1']:.2%} ({row['of_eager']:.2%})",
            " and ".join(first), peaks_of(row, columns[1:]),
        ])  # fmt: skip
    return markdown(lines)


def beside_table(rows: list[dict]) -> str:
    """With why a row has no FA3 below it."""
    lines = [[
        "model", "blocks", "tokens", "linears", '`"inductor"`', '`"inductor"` and FA3', '`"sage"`',
        'over `"inductor"`', "over FA3", "relative L1 (FA3's)", "that of FP8 linears", "peak, GiB",
    ]]  # fmt: skip
    columns, whys = PLANS["beside"].columns, {}
    for row in (row for row in rows if not row["error"]):
        title = MODELS[row["model"]].title
        whys |= {f"{title} without FA3: {why}\n": None for why in row["without"].values()}
        left, blocks = row["blocks"]
        of_fa3 = f" ({row['of_fa3']:.2%})" if "of_fa3" in row else ""
        lines.append([
            title, f"{blocks}" if left == blocks else f"{left} of {blocks}",
            f"{row['tokens']:,}", row["linears"], *(time_of(row, x) for x in columns),
            *(gain(row["speed"][x]) if x in row["speed"] else "-" for x in columns[:2]),
            f"{row['rel_l1']:.2%}{of_fa3}", f"{row['of_fp8']:.2%}" if "of_fp8" in row else "",
            peaks_of(row, ("inductor", "sage")),
        ])  # fmt: skip
    return "\n".join([markdown(lines), *whys])


def time_of(row: dict, column: str) -> str:
    ms = row["ms"].get(column)
    if ms is None:
        return "-"
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.1f} ms"


def peaks_of(row: dict, columns) -> str:
    peaks = row["peak_bytes"]
    return " and ".join(f"{peaks[each] / 2**30:.1f}" for each in columns if each in peaks)


TENTH = {"wan_14b_480p": 10, "wan_14b": 10, "hunyuan": 10}  # their blocks are alike
WHOLE = [name for name in MODELS if name != "wan_14b_480p"]
PLANS = {
    "whole": Plan(("eager", "inductor", "sage"), dict.fromkeys(WHOLE, 1), table),
    "beside": Plan(
        ("inductor", "fa3", "sage"), {"flux": 1, **TENTH}, beside_table, ("flux", "wan_14b_480p")
    ),
}


if __name__ == "__main__":
    harness.run(main, fresh=harness.CACHES)
