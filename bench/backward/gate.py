"""The kernels' values and times on a Hopper GPU, beside cuDNN's and flash attention's backward.

$ python bench/backward/gate.py 8192 16384

Values: the preparation's against recipe.py's; of the gradients relative L1 to the emulation, and to
exact ones beside the emulation's own. Times: the median of ROUNDS turns of TURN_MS, all in turn.
"whole" is the preparation and both kernels, launched one after another, with all that they
allocate; the parts are timed alone besides, the two kernels on what was prepared before.
"""

import dataclasses
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.backward import launch, preparation, recipe

CASES = (("normal", 2, 1024), ("biased", 2, 1000), ("biased", 1, 4160), ("normal", 1, 72))
HEADS, D = 32, 128
ROUNDS, TURN_MS = 5, 40.0


def calls(x: recipe.Inputs) -> tuple[dict, list[torch.Tensor]]:
    """What launches each kernel, and the dQ, dK and dV that they write."""
    outs = [torch.full((len(x.q8), x.N, D), float("nan"), device="cuda").bfloat16() for _ in "qkv"]
    its, (dq, *dkdv) = x.batched(), (each[None] for each in outs)
    return {"dq": launch.dq(its, dq), "dkdv": launch.dkdv(its, *dkdv)}, outs


def whole(case: tuple, forward: recipe.Forward) -> list[torch.Tensor]:
    """dQ, dK and dV of 16-bit tensors."""
    x = preparation.prepare(*case, forward).batched()
    dq, dk, dv = (torch.empty_like(each)[None] for each in case[:3])
    launch.dq(x, dq)()
    launch.dkdv(x, dk, dv)()
    return [each[0] for each in (dq, dk, dv)]


def different(x: recipe.Inputs, y: recipe.Inputs, step: float = 1 / 8) -> list[str]:
    """What of x is not y's within rounding: of at most 1 % of INT8 codes and 2 % of E4M3's a step,
    of scales and the like 1e-5 of the largest. step: of E4M3, relative to the larger code."""
    found = []
    for field in dataclasses.fields(x):
        a, b = getattr(x, field.name), getattr(y, field.name)
        if not isinstance(a, torch.Tensor):
            same = a == b
        elif a.dtype == torch.int8:
            far = (a.int() - b.int()).abs()
            same = far.max() <= 1 and (far > 0).float().mean() <= 0.01
        elif a.dtype == recipe.E4M3:
            a, b = a.float(), b.float()
            far = (a - b).abs() > step * torch.maximum(a.abs(), b.abs()) + 2**-6
            same = not far.any() and a.isfinite().all()
            if a.is_cuda:
                same = same and (a != b).float().mean() <= 0.02
        else:
            a, b = (t.view(-1, t.shape[-1]) for t in (a, b))
            far = (a - b).abs() <= 1e-5 * b.abs().amax(-1, keepdim=True) + 1e-5 * b.abs()
            same = far.all()
        if not same:
            found.append(field.name)
    return found


def check(kind: str, heads: int, N: int) -> None:
    case = recipe.draw(heads, N, D, kind, "cuda")
    forward = recipe.forward(*case[:3])
    x, own = preparation.prepare(*case, forward), recipe.prepare(*case, forward)
    if names := different(x, own):
        sys.exit(f"{kind} {N}: not the recipe's {names}")
    its, outs = calls(x)
    for call in its.values():
        call()
    first = [each.clone() for each in outs]
    for call in its.values():
        call()
    if not all(map(torch.equal, first, outs)):
        sys.exit(f"{kind} {N}: two runs differ")
    names = zip(("dQ", "dK", "dV"), outs, recipe.emulate(x), recipe.exact(*case), strict=True)
    if not all(map(torch.equal, first, whole(case, forward))):
        sys.exit(f"{kind} {N}: the whole differs from its parts")
    for name, out, emulated, exact in names:
        far, own = recipe.l1(out, emulated), recipe.l1(emulated, exact)
        print(f"{kind} {N} {name}: {far:.4f}, exact {recipe.l1(out, exact):.4f} ({own:.4f})")
        if not far < 0.02:
            sys.exit("not the emulation's")


def rivals(case: tuple) -> dict:
    """SDPA's backward alone, by backend."""
    *leaves, do = (each[None] for each in case)
    leaves, found = [each.detach().requires_grad_() for each in leaves], {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*leaves)
        found[backend.name] = lambda out=out: torch.autograd.grad(
            out, leaves, do, retain_graph=True
        )
    return found


def measure(its: dict) -> dict[str, float]:
    """ms of each."""
    found = {name: [] for name in its}
    for _ in range(ROUNDS):
        for name, call in its.items():
            count = max(2, int(TURN_MS / found[name][-1])) if found[name] else 2
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for i in range(count + count // 2):
                if i == count // 2:  # a third of the turn is untimed
                    start.record()
                call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) / count)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def main(lengths: list[int]) -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for case in CASES:
        check(*case)
    for N in lengths:
        case = recipe.draw(1, N, D, "normal", "cuda")
        forward = recipe.Forward(
            *(x.expand(HEADS, *x.shape[1:]).contiguous() for x in recipe.forward(*case[:3]))
        )
        case = tuple(x.expand(HEADS, N, D).contiguous() for x in case)
        its, _ = calls(preparation.prepare(*case, forward))
        its["prepare"] = lambda case=case, forward=forward: preparation.prepare(*case, forward)
        its["whole"] = lambda case=case, forward=forward: whole(case, forward)
        ms = measure(its | rivals(case))
        best = min(ms["CUDNN_ATTENTION"], ms["FLASH_ATTENTION"])
        print(N, {name: round(t, 3) for name, t in ms.items()}, end=" ")
        print(f"{best / (ms['dq'] + ms['dkdv']):.3f}x without, {best / ms['whole']:.3f}x whole")


if __name__ == "__main__":
    main([int(N) for N in sys.argv[1:]] or [8192])
