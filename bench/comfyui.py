"""ComfyUI's own models at real sizes, random weights, bf16, and its own sampler: ms a step of
"pytorch attention", of our two nodes, of "comfy kitchen attention", and of Inductor alone.

$ python bench/comfyui.py --comfyui FOLDER --json    # on a GPU, some six minutes

FOLDER is a checkout of ComfyUI. The current Python has what its requirements.txt asks for.
"""

import contextlib
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from bench import harness
from bench.measure import relative_l1
from bench.tables import gain, markdown, speed_of

FOLDER = harness.ROOT / "docs" / "examples" / "ComfyUI-SageInductor"
BASE, INDUCTOR = "pytorch attention", "pytorch attention, torch.compile"


class Model(NamedTuple):
    what: str
    name: str  # of its class in comfy.supported_models
    unet: dict
    latent: tuple
    text: tuple
    pooled: int | None = None


MODELS = {
    "wan": Model(
        "Wan 2.1 1.3B, 832 x 480, 81 frames: 32,760 tokens", "WAN21_T2V",
        {
            "image_model": "wan2.1", "model_type": "t2v", "dim": 1536, "ffn_dim": 8960,
            "num_heads": 12, "num_layers": 30, "text_dim": 4096, "text_len": 512, "in_dim": 16,
            "out_dim": 16, "freq_dim": 256, "patch_size": (1, 2, 2), "qk_norm": True,
            "cross_attn_norm": True, "eps": 1e-6,
        },
        (1, 16, 21, 60, 104), (1, 512, 4096),
    ),
    "flux": Model(
        "Flux dev, 1024 x 1024: 4,096 tokens and 512 of text", "Flux",
        {
            "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768,
            "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24,
            "depth": 19, "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000,
            "patch_size": 2, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
        },
        (1, 16, 128, 128), (1, 512, 4096), 768,
    ),
}  # fmt: skip


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--comfyui", required=True, metavar="FOLDER", help="a checkout of ComfyUI")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--steps", type=harness.positive, default=3, help="of a round; default: 3")
    args = parser.parse_args(argv)
    device = harness.gpu(args)
    start(args.comfyui)
    import comfyui_version

    ours = nodes()
    versions = {**harness.installed(), "comfyui": comfyui_version.__version__}
    method = (
        "Milliseconds of a step of euler after the first, median; the variants take turns, "
        f"{args.rounds} rounds. Error: relative L1 of the first step's output to {BASE}'s, or to "
        "Inductor's where the model is compiled"
    )
    result = harness.Result("comfyui", method, args, versions)
    with torch.inference_mode():
        for name in args.models:
            result.add(measured(MODELS[name], variants(ours), args, device))
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    print(table(result["rows"]))
    return result.end("model", "variant")


def start(comfyui: str) -> None:
    """Import ComfyUI, which reads its arguments from sys.argv."""
    sys.path.insert(0, comfyui)
    given, sys.argv = sys.argv, ["", "--use-pytorch-cross-attention", "--highvram"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.cli_args

    sys.argv = given


def nodes() -> dict[str, type]:
    """The repository's, by their ids."""
    spec = importlib.util.spec_from_file_location("sage_inductor_nodes", FOLDER / "__init__.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NODE_CLASS_MAPPINGS


def variants(ours: dict[str, type]) -> dict[str, Callable]:
    """Name -> what makes a patched clone of a model."""
    from comfy.ldm.modules.attention import get_attention_function
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    def kitchen(model):
        model = model.clone()
        model.set_model_optimized_attention(get_attention_function("comfy_kitchen_int8"))
        return model

    def inductor(model):
        def keep(guards):
            return ["transformer_options" not in guard.name for guard in guards]

        model = model.clone()
        set_torch_compile_wrapper(model, "inductor", options={"guard_filter_fn": keep})
        return model

    def node(id: str):
        return lambda model: ours[id]().patch(model, "auto", 0.0, 1.0)[0]

    return {
        BASE: lambda model: model,
        "comfy kitchen attention": kitchen,
        "Sage Inductor": node("SageInductorAttention"),
        INDUCTOR: inductor,
        "Sage Inductor (torch.compile)": node("SageInductorCompile"),
    }


def measured(model: Model, makes: dict[str, Callable], args, device) -> list[dict]:
    """A row a variant. One that fails has the error for a row."""
    patcher, rows, ready, outs = drawn(model, device), {}, {}, {}
    for name, make in makes.items():
        row = rows[name] = {"model": model.what, "variant": name, "error": None}
        torch.cuda.reset_peak_memory_stats()
        with logged() as lines:
            try:
                patched = make(patcher)
                _, seconds, outs[name] = sampled(model, patched, args.steps, device)
            except Exception as error:
                row["error"] = harness.in_a_line(error)
                continue
        ready[name] = patched
        row |= {
            "first_step_s": round(seconds, 1), "log": lines, "ms": [],
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }  # fmt: skip
    for _ in range(args.rounds):
        for name, patched in ready.items():
            rows[name]["ms"] += sampled(model, patched, args.steps, device)[0]
    for name in ready:
        to = {
            base: relative_l1(outs[name], outs[base]) for base in (BASE, INDUCTOR) if base in outs
        }
        rows[name] |= {"to": to, "speed": speed_of(rows[name]["ms"], rows[BASE]["ms"])}
    return [*rows.values()]


def drawn(model: Model, device):
    """ComfyUI's ModelPatcher of the model, whose weights are random."""
    import comfy.model_patcher
    import comfy.supported_models

    config = getattr(comfy.supported_models, model.name)(dict(model.unet))
    config.unet_config["num_heads"] = model.unet["num_heads"]
    config.set_inference_dtype(torch.bfloat16, None)
    module = config.get_model({}, "", device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for path, p in module.diffusion_model.named_parameters():
        x = torch.empty(p.shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        if p.ndim > 1:
            x *= p[0].numel() ** -0.5
        elif "norm" in path and path.endswith(("weight", "scale")):
            x = 1 + 0.1 * x
        else:
            x *= 0.02
        p.data = x.to(p.dtype)  # Wan's patch embedding is fp32
    return comfy.model_patcher.ModelPatcher(module, device, device)


def sampled(model: Model, patched, steps: int, device) -> tuple[list[float], float, torch.Tensor]:
    """ms of each step after the first, seconds of the first, the model's output there."""
    import comfy.sample

    generator = torch.Generator().manual_seed(1)
    more = {"guidance": 3.5}
    if model.pooled:
        more["pooled_output"] = torch.randn(1, model.pooled, generator=generator)
    conds = [[torch.randn(model.text, generator=generator), more]]
    noise = torch.randn(model.latent, generator=generator)
    times, first = [], []

    def callback(step, x0, x, total):
        torch.cuda.synchronize(device)
        times.append(time.perf_counter())
        if not first:
            first.append((x.float() - x0.float()).cpu())

    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    comfy.sample.sample(
        patched, noise, steps, 1.0, "euler", "simple", conds, conds, torch.zeros_like(noise),
        seed=5, disable_pbar=True, callback=callback,
    )  # fmt: skip
    ms = [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]
    return ms, times[0] - begin, first[0]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What the nodes log meanwhile."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    log, handler = logging.getLogger("ComfyUI-SageInductor"), Lines()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)


def table(rows: list[dict]) -> str:
    lines = [["model", "attention", "ms a step", "gain", "error", "first step, s"]]
    for row in rows:
        if not row["error"]:
            compiled = row["variant"].endswith("torch.compile)")
            ms = sorted(row["ms"])[len(row["ms"]) // 2]
            of = INDUCTOR if compiled else BASE
            error = "" if row["variant"] in (BASE, INDUCTOR) else f"{row['to'][of]:.2%}"
            speed = "" if row["variant"] == BASE else gain(row["speed"], "**")
            seconds = f"{row['first_step_s']:.0f}"
            lines.append([row["model"], row["variant"], f"{ms:.0f}", speed, error, seconds])
    return markdown(lines)


if __name__ == "__main__":
    harness.run(main, harness.CACHES)
