"""Whole models: a call's time, the first call's, and peak memory, by eager, "inductor" and "sage".

$ python bench/models.py --json                    # bench/results/GPU/DATE-whole.json
$ python bench/models.py --models flux wan_1_3b

The classes are diffusers' and transformers' own, of the published sizes, in bf16 with random
weights and inputs, without gradients. diffusers' models compile their repeated blocks, as their
documentation recommends; language models compile `forward`. A row whose output by "sage" is not
near that by "inductor", or eager's is not, has an error instead of times.
"""

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import sage_inductor
from bench import harness
from bench.measure import burst, in_turns, peak_bytes
from bench.tables import gain, markdown, show, speed_of

COLUMNS = ("eager", "inductor", "sage")
# Relative L1 of an output to inductor's, from which it is wrong. One token's logits of a random
# Llama differed by 0.07 under sage and by 0.03 under eager (H200, 2026-11-27).
NEAR = 0.15


@dataclasses.dataclass(frozen=True)
class Model:
    """A row."""

    title: str
    tokens: int  # that self-attention reads, masked ones too
    make: Callable[[], nn.Module]  # on torch's default device, in its default dtype
    inputs: Callable[[], dict]  # the same; arguments of forward
    repeated: bool = True  # whether its blocks are compiled instead of its forward


# -- the models ----


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(guidance_embeds=True)


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


def hunyuan() -> nn.Module:
    """All 20 double and 40 single blocks: 24 GiB of weights, which one 80 GB GPU holds."""
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(guidance_embeds=True)


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


MODELS = {
    "flux": Model("Flux, 1024 px", 4608, flux, of_flux),
    "wan_1_3b": Model(
        "Wan 1.3B, 480p", 32760, lambda: wan(12, 8960, 30), lambda: of_wan(480, 832, 81)
    ),
    "wan_14b": Model(
        "Wan 14B, 720p", 75600, lambda: wan(40, 13824, 40), lambda: of_wan(720, 1280, 81)
    ),
    "hunyuan": Model("HunyuanVideo, 544p", 67576, hunyuan, lambda: of_hunyuan(544, 960, 129)),
    "llama_16k": Model("Llama 3.2 1B, prefill", 16384, llama, lambda: of_llama(16384), False),
    "llama_32k": Model("Llama 3.2 1B, prefill", 32768, llama, lambda: of_llama(32768), False),
}


def draw(model: Model, device) -> tuple[nn.Module, dict]:
    """The model in bf16, and what its forward takes."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return model.make().eval(), model.inputs()
    finally:
        torch.set_default_dtype(before)


# -- the measurement ----


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=5, target_ms=1000.0)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args(argv)
    device = harness.gpu(args)
    result = harness.Result("whole", method(args), args)
    sage_inductor.config.rewrite_inductor = False  # it would rewrite the baseline
    with torch.no_grad():
        for name in args.models:
            result.add([measure(name, MODELS[name], args, device)])
            show(table(result["rows"][-1:]))
            torch.cuda.empty_cache()
    return result.end("model")


def method(args) -> dict[str, str]:
    return {
        "units": "ms a call; x: a column's time over sage's in one round (median, least, most)",
        "time": f"median of {args.rounds} rounds, in which each column runs for {args.target_ms:g} "
        "ms, after a third of that untimed; they take turns",
        "blocks": "whole models of the published sizes in bf16, random weights and inputs, no "
        "gradients, as users launch them: no CUDA graphs. Of diffusers' the repeated blocks are "
        "compiled, of language models forward",
        "first call": "seconds with empty caches, compilation included",
        "memory": "peak_bytes: what the process has allocated at most in a call, weights included",
    }


def measure(name: str, model: Model, args, device) -> dict:
    """A row; where it failed or is wrong, with an error instead of times."""
    row = {"plan": "whole", "model": name, "tokens": model.tokens, "error": None}
    torch._dynamo.reset()
    try:
        module, inputs = draw(model, device)
        with tempfile.TemporaryDirectory() as folder:
            columns = {each: Column(module, inputs, each, model.repeated) for each in COLUMNS}
            row["first_s"] = {each: x.first(f"{folder}/{each}") for each, x in columns.items()}
            report = sage_inductor.report()
            row["rewritten"], row["calls"] = len(report.rewritten), len(report)
            right = columns["inductor"].call()
            row["rel_l1"], row["of_eager"] = (
                error_of(columns[each].call(), right) for each in ("sage", "eager")
            )
            calls = {each: x.call for each, x in columns.items()}
            times = in_turns(calls, args.rounds, args.target_ms, burst)
            row["peak_bytes"] = {each: peak_bytes(x.call) for each, x in columns.items()}
        row["ms"] = {each: statistics.median(found) for each, found in times.items()}
        row["speed"] = {each: speed_of(times["sage"], times[each]) for each in COLUMNS[:2]}
    except Exception as error:  # a row that fails must not cost the others
        row["error"] = harness.in_a_line(error)
    return row


class Column:
    """The model, compiled in one way. The ways share its weights."""

    def __init__(self, module: nn.Module, inputs: dict, backend: str, repeated: bool):
        self.inputs, self.run, self.compiled = inputs, module, {}
        if backend == "eager":
            return
        if not repeated:
            self.run = torch.compile(module, backend=backend)
            return
        module.compile_repeated_blocks(backend=backend, fullgraph=True)
        for each in module.modules():
            if each._compiled_call_impl is not None:
                self.compiled[each] = each._compiled_call_impl
                each._compiled_call_impl = None

    @contextlib.contextmanager
    def active(self):
        for each, call in self.compiled.items():
            each._compiled_call_impl = call
        yield
        for each in self.compiled:
            each._compiled_call_impl = None

    def call(self) -> Tensor:
        with self.active():
            return next(iter(self.run(**self.inputs, return_dict=False)))

    def first(self, folder: str) -> float:
        """Seconds, with caches of its own."""
        os.environ.update(harness.caches(folder))
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.call()
        torch.cuda.synchronize()
        return round(time.perf_counter() - start, 1)


def error_of(found: Tensor, right: Tensor) -> float:
    """Relative L1. Raises ValueError where the two are not near."""
    found, right = found.float(), right.float()
    error = ((found - right).abs().sum() / right.abs().sum()).item()
    if not error < NEAR:  # a NaN is not
        raise ValueError(f"an output is not near inductor's: relative L1 {error:.3f}")
    return error


# -- the table ----


def table(rows: list[dict]) -> str:
    lines = [[
        "model", "tokens", "eager", '`"inductor"`', '`"sage"`', "over eager", 'over `"inductor"`',
        "relative L1 (eager's)", "first call, s", "peak, GiB",
    ]]  # fmt: skip
    for row in (row for row in rows if not row["error"]):
        ms = (row["ms"][each] for each in COLUMNS)
        ms = [f"{x / 1e3:.2f} s" if x >= 1e3 else f"{x:.1f} ms" for x in ms]
        first = (f"{row['first_s'][each]:.0f}" for each in COLUMNS[1:])
        peak = (f"{row['peak_bytes'][each] / 2**30:.1f}" for each in COLUMNS[1:])
        lines.append([
            MODELS[row["model"]].title, f"{row['tokens']:,}", *ms,
            *(gain(row["speed"][each]) for each in COLUMNS[:2]),
            f"{row['rel_l1']:.2%} ({row['of_eager']:.2%})",
            " and ".join(first), " and ".join(peak),
        ])  # fmt: skip
    return markdown(lines)


if __name__ == "__main__":
    harness.run(main, fresh=harness.CACHES)
