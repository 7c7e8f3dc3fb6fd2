"""A prompt's image or video by exact attention and by sage: both, and their difference, in one PNG.

$ python bench/side_by_side.py black-forest-labs/FLUX.1-dev "a lighthouse at dusk"
$ python bench/side_by_side.py Wan-AI/Wan2.1-T2V-14B-Diffusers "a lighthouse at dusk" \\
    --height 720 --width 1280 --frames 81 --recipe sage1-rotated --png wan.png --json wan.json

MODEL is what DiffusionPipeline.from_pretrained of diffusers takes: a name or a folder. The columns
are exact attention (backend="inductor"; on a CPU eager), sage (on a CPU emulated), and ten times
the absolute difference; a row is the image, or a video's first and its middle frame. Both start
from the same noise. Seconds are those of a whole call of the pipeline, after one of two steps that
compiles. PSNR is that of all frames, in dB: the higher, the more alike.
"""

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy import ndarray

import sage_inductor
from bench import harness
from sage_inductor.ops.recipe import NAMED

DENOISERS = ("transformer", "transformer_2", "unet")  # those a pipeline has are compiled
HEAD = 24  # pixels above the frames, for what a column is
METHOD = (
    "Seconds: one call of the pipeline in bf16, after one of two steps that compiles. PSNR: of all "
    "frames, values of 0 to 1"
)


def main(argv=None) -> int:
    args = parse(argv)
    device = harness.current(args)
    from diffusers import DiffusionPipeline

    result = harness.Result("side-by-side", METHOD, args)
    pipe = DiffusionPipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16).to(device)
    sizes = {"height": args.height, "width": args.width, "num_frames": args.frames}
    given = {name: size for name, size in sizes.items() if size is not None}

    def call(steps: int | None) -> ndarray:
        """Frames [F, height, width, 3] of 0 to 1."""
        generator = torch.Generator("cpu").manual_seed(args.seed)
        counted = {} if steps is None else {"num_inference_steps": steps}
        out = pipe(args.prompt, generator=generator, output_type="np", **given, **counted)
        return out.frames[0] if hasattr(out, "frames") else out.images[:1]

    cuda = device.type == "cuda"
    options = {"sage.recipe": args.recipe} | ({} if cuda else {"sage.emulate": True})
    exact, exact_s = timed(pipe, call, args.steps, "inductor" if cuda else "eager", None)
    sage, sage_s = timed(pipe, call, args.steps, "sage", options)
    report = sage_inductor.report()
    row = {
        "plan": "side-by-side", "model": args.model, "prompt": args.prompt, "seed": args.seed,
        "frames": list(exact.shape), "psnr": psnr(exact, sage), "exact_s": exact_s,
        "sage_s": sage_s, "report": report.verdict,
    }  # fmt: skip
    result.add([row])
    shown = [0] if len(exact) == 1 else [0, len(exact) // 2]
    titles = (
        f"exact: {exact_s:.2f} s", f"sage: {sage_s:.2f} s",
        f"10 x difference, PSNR {row['psnr']:.1f} dB",
    )  # fmt: skip
    write(exact[shown], sage[shown], titles, args.png)
    print(f"\n{report}\n\n{'; '.join(titles)}; see {args.png}")
    return result.end()


def parse(argv):
    parser = harness.parser(__doc__)
    parser.add_argument("model", help="of diffusers: a name or a folder")
    parser.add_argument("prompt")
    for name in ("height", "width", "frames", "steps"):
        parser.add_argument(f"--{name}", type=harness.positive, help="default: the pipeline's")
    parser.add_argument("--seed", type=int, default=0, help="of the noise; default: 0")
    parser.add_argument("--recipe", choices=("auto", *NAMED), default="auto", help="default: auto")
    parser.add_argument("--png", default="side_by_side.png", help="default: %(default)s")
    return parser.parse_args(argv)


def timed(
    pipe, call: Callable[[int | None], ndarray], steps: int | None, backend: str, options
) -> tuple[ndarray, float]:
    """Frames, and seconds of the call that made them. The denoisers stay compiled by `backend`."""
    torch._dynamo.reset()
    for name in DENOISERS:
        if (module := getattr(pipe, name, None)) is not None:
            module.compile(backend=backend, options=options)
    call(2)
    start = time.perf_counter()
    frames = call(steps)  # on the host: the GPU has ended
    return frames, time.perf_counter() - start


def psnr(a: ndarray, b: ndarray) -> float:
    """dB, of values of 0 to 1; inf where all are equal."""
    error = np.square(a.astype(np.float64) - b).mean()
    return math.inf if error == 0 else -10 * math.log10(error)


def write(exact: ndarray, sage: ndarray, titles: tuple[str, ...], path: str) -> None:
    """Rows of frames [F, height, width, 3], below a line that says what a column is."""
    from PIL import Image, ImageDraw

    columns = (exact, sage, 10 * abs(exact - sage))
    rows = np.concatenate([np.concatenate(column) for column in columns], axis=1)
    pixels = np.rint(255 * rows.clip(0, 1)).astype(np.uint8)
    image = Image.new("RGB", (pixels.shape[1], HEAD + pixels.shape[0]), "white")
    image.paste(Image.fromarray(pixels), (0, HEAD))
    for i, title in enumerate(titles):
        ImageDraw.Draw(image).text((i * exact.shape[2] + 4, 6), title, fill="black")
    image.save(path)


if __name__ == "__main__":
    harness.run(main)
