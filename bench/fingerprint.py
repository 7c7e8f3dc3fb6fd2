"""What every recipe computes, to the bit: a hash of out and lse for each of some 400 calls.

$ python bench/fingerprint.py --out before.json       # at one commit
$ python bench/fingerprint.py --compare before.json   # at another, on the same GPU

A change of the code that is none of what is computed changes no hash. It runs at any commit from
0.1.0 on: the op's arguments are put together by the names in its schema, and nothing else of the
library is asked for but its recipes. Kernels are compiled by several processes at once.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import sys
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import sage_inductor  # noqa: F401  registers the ops and the backend
from sage_inductor.ops import recipe as recipes

# By today's name that of 0.1.0, by which cases are called at every commit.
_OLD = {"sage2-8b-per-token": "sage2-8b-rows", "sage1-per-token": "accurate"}
RECIPES = tuple(_OLD.get(name, name) for name in recipes.NAMED)
BANDS = {  # left, right, bottom_right
    "causal": (None, 0, False),
    "window": (100, 0, False),
    "bottom right": (None, 0, True),
    "band": (70, 20, True),
}
MASKS = ("mask", "padding", "lowest", "bias", "-inf")


@dataclasses.dataclass(frozen=True)
class Call:
    """q [B, H_q, N_q, D], k [B, H_kv, N_kv, D], v [B, H_kv, N_kv, D_v]. kind: full, a band of BANDS
    or a mask of MASKS. layout: how q, k and v lie in memory, out too."""

    N_q: int
    D: int
    kind: str = "full"
    N_kv: int = 0  # N_q
    D_v: int = 0  # D
    H_q: int = 4
    H_kv: int = 4
    B: int = 2
    dtype: str = "bf16"
    layout: str = "BNHD"  # BHND, fused (BN3HD), unaligned (BNH with a channel more)
    scale: float = 0.0  # D**-0.5

    @property
    def name(self) -> str:
        N_kv, D_v = self.N_kv or self.N_q, self.D_v or self.D
        heads = f"{self.B}x{self.H_q}/{self.H_kv}"
        scale = f" scale {self.scale}" if self.scale else ""
        shape = f"{heads}x{self.N_q}/{N_kv}x{self.D}/{D_v}"
        return f"{shape} {self.dtype} {self.layout} {self.kind}{scale}"


EAGER = (  # with the fastest kernels
    Call(1, 64),
    Call(63, 128, layout="BHND"),
    Call(200, 64, "causal"),
    Call(2048, 64, "causal", layout="BHND"),
    Call(4096, 64, H_q=2, H_kv=2, B=1),
    Call(8192, 128, "causal", H_q=6, H_kv=2, B=1),
    Call(8192, 128, H_q=3, H_kv=1, B=1),
    Call(777, 128, "window", N_kv=1536),
    Call(777, 64, "band", N_kv=200),
    Call(777, 128, "lowest", layout="BHND"),
    Call(200, 64, "-inf", N_kv=777, H_kv=1),
    Call(200, 40, layout="fused"),
    Call(777, 72, "causal"),
    Call(777, 80, dtype="fp16"),
    Call(1536, 96, layout="fused"),
    Call(777, 160, "causal", layout="BHND"),
    Call(777, 256, "mask", H_kv=2),
    Call(200, 64, N_kv=777, D_v=128),
    Call(777, 64, layout="unaligned"),
    Call(200, 128, "causal", scale=-0.3),
)
BOTH = (  # and with those that travel in a package
    Call(777, 128),
    Call(777, 128, "causal", H_q=8, H_kv=2),
    Call(1536, 128, "causal", dtype="fp16"),
    Call(2048, 64, "causal", H_q=8, H_kv=1, dtype="fp16", layout="fused"),
    Call(4096, 128, H_q=8, H_kv=8, B=1),
    Call(200, 128, "bottom right", N_kv=777),
    Call(777, 64, "window", layout="BHND"),
    Call(777, 128, "mask", N_kv=200),
    Call(2048, 64, "padding", H_kv=2),
    Call(777, 64, "bias", H_kv=2, dtype="fp16"),
    Call(1536, 256, "causal", layout="BHND"),
    Call(63, 128, N_kv=777, D_v=40, layout="unaligned"),
)
COMPILED = (Call(777, 64), Call(1536, 128, "causal", H_q=8, H_kv=2))


def cases() -> dict[str, tuple[str, Call, str]]:
    """name -> (recipe, call, how: "eager", "portable" or "compiled")."""
    ways = (("eager", EAGER + BOTH), ("portable", BOTH), ("compiled", COMPILED))
    return {
        f"{recipe}: {call.name} {how}": (recipe, call, how)
        for recipe in RECIPES
        for how, calls in ways
        for call in calls
    }


def tensors(call: Call, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k with a bias in each channel, v with a mean, and the mask."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[call.dtype]
    N_kv, D_v = call.N_kv or call.N_q, call.D_v or call.D

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    def make(H, N, D, mean, size=1.0):
        x = (size * draw(call.B, H, N, D) + mean).to(dtype)  # BHND
        if call.layout == "BHND":
            return x
        x = x.transpose(1, 2)
        if call.layout == "unaligned":  # rows begin anywhere
            return F.pad(x, (1, 0))[..., 1:].transpose(1, 2)
        if call.layout == "fused":
            return torch.stack([x, x, x], 2)[:, :, 1].transpose(1, 2)
        return x.contiguous().transpose(1, 2)

    q = make(call.H_q, call.N_q, call.D, 0.0, 2.0)
    k = make(call.H_kv, N_kv, call.D, 4 * draw(call.H_kv, 1, call.D))
    v = make(call.H_kv, N_kv, D_v, 3.0)
    full = call.B, call.H_q, call.N_q, N_kv
    rows = draw(*full) > 0.5 if call.kind in ("mask", "-inf") else None
    match call.kind:
        case "mask":
            return q, k, v, rows
        case "-inf":
            return q, k, v, torch.zeros_like(rows, dtype=dtype).masked_fill(~rows, -torch.inf)
        case "bias":
            return q, k, v, draw(1, *full[1:]).to(dtype)
        case "padding" | "lowest":
            shown = torch.arange(N_kv, device=device) >= N_kv // 3  # left padding
            shown = shown.expand(call.B, 1, 1, N_kv).clone()
            shown[0] = True
            if call.kind == "padding":
                return q, k, v, shown
            lowest = torch.finfo(dtype).min
            return q, k, v, torch.zeros_like(shown, dtype=dtype).masked_fill(~shown, lowest)
    return q, k, v, None


def named(recipe: str) -> recipes.Recipe:
    """A recipe by the name that 0.1.0 gave it."""
    return next(each for name, each in recipes.NAMED.items() if recipe in (name, _OLD.get(name)))


def arguments(recipe: str, call: Call, how: str, inputs: tuple) -> tuple:
    """Those of ``torch.ops.sage.sdpa``, in the order of its schema."""
    q, k, v, attn_mask = inputs
    left, right, bottom_right = BANDS.get(call.kind, (None, None, False))
    values = dict(
        q=q, k=k, v=v, attn_mask=attn_mask, prepared=[], left=left, right=right,
        bottom_right=bottom_right, scale=call.scale or call.D**-0.5, recipe=named(recipe).encode(),
        warpgroups=None, out_bnhd=call.layout != "BHND", portable=how == "portable",
    )  # fmt: skip
    schema = torch.ops.sage.sdpa.default._schema  # what is younger than the cases has a default
    return tuple(values.get(x.name, x.default_value) for x in schema.arguments)


@torch.no_grad()
def compute(recipe: str, call: Call, how: str, inputs: tuple) -> tuple[Tensor, ...]:
    if how != "compiled":
        return torch.ops.sage.sdpa(*arguments(recipe, call, how, inputs))
    torch._dynamo.reset()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=call.kind == "causal", enable_gqa=call.H_q != call.H_kv
        )

    options = {"sage.force": True, "sage.recipe": recipe}
    return (torch.compile(attend, backend="sage", options=options)(*inputs[:3]),)


def fingerprint(name: str, device: str) -> str:
    """The hash of what a case gives; of a second run too, which must give the same."""
    recipe, call, how = cases()[name]
    inputs = tensors(call, zlib.crc32(call.name.encode()), device)
    found = []
    for _ in range(1 if how == "compiled" else 2):
        digest = hashlib.sha256()
        try:
            outputs = compute(recipe, call, how, inputs)
        except ValueError as error:  # this device does not run the recipe
            return f"ValueError: {error}".split(",")[0]
        for x in outputs:
            digest.update(x.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
        found.append(digest.hexdigest())
    return found[0] if len(set(found)) == 1 else "changes from run to run"


def compare(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for each case that is not the same in both."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        pair = before.get(name), after.get(name)
        if None in pair:
            lines.append(f"{'only after' if pair[0] is None else 'missing'}: {name}")
        elif pair[0] != pair[1] or "changes" in pair[0]:
            lines.append(f"differs: {name} ({pair[0][:40]} -> {pair[1][:40]})")
    return lines


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="FILE", help="where to write the hashes; else printed")
    parser.add_argument("--compare", metavar="FILE", help="hashes of another commit; 1: not equal")
    parser.add_argument("--jobs", type=int, default=12, help="processes that share the GPU")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench/fingerprint.py hashes what a GPU gives: torch sees none", file=sys.stderr)
        return 2
    found = in_processes(list(cases()), args.jobs, "cuda")
    text = json.dumps(found, indent=1, sort_keys=True)
    if args.out:
        Path(args.out).write_text(text)
    elif not args.compare:
        print(text)
    if not args.compare:
        return 0
    lines = compare(json.loads(Path(args.compare).read_text()), found)
    print("\n".join(lines) or f"all {len(found)} are the same")
    return 1 if lines else 0


def in_processes(names: list[str], jobs: int, device: str) -> dict[str, str]:
    context = multiprocessing.get_context("spawn")  # a fork has no CUDA
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        found = pool.map(fingerprint, names, itertools.repeat(device))
        return dict(zip(names, found, strict=True))


if __name__ == "__main__":
    sys.exit(main())
