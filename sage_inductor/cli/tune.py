"""``python -m sage_inductor tune``: measure every GPU, print the table and write it where later
processes read it."""

import functools
import sys

import torch

from sage_inductor import cost
from sage_inductor.cli.progress import track
from sage_inductor.tune import tune as measure


def tune(head_dims: list[int], lengths: list[int]) -> int:
    if not torch.cuda.is_available():
        print("tune measures GPUs: torch sees no CUDA device", file=sys.stderr)
        return 2
    of_name = {torch.cuda.get_device_name(i): i for i in range(torch.cuda.device_count())}
    try:
        for name in of_name:
            cost.check_writable(name)
    except (OSError, RuntimeError) as error:
        message = f"the table cannot be written: {error} ($SAGE_INDUCTOR_TABLES names its folder)"
        print(message, file=sys.stderr)
        return 2
    progress = functools.partial(track, describe=describe)
    for name, index in of_name.items():
        device = torch.device("cuda", index)
        table = measure(device, head_dims, lengths, progress=progress, save=cost.save)
        for recipe, head_dim, kind, row in table["crossover"]:
            found = ", ".join(f"N={N} with B*H >= {heads}" for heads, N in row) or "never"
            print(f"{name}: head_dim {head_dim}, {kind}: {recipe} from {found}")
        print(f"written to {cost.save(table)}")
    return 0


def describe(case: tuple) -> str:
    """A case of sage_inductor/tune.py's, in the words of the progress."""
    head_dim, kind, _, B, H, N = case
    return f"head_dim {head_dim}, {kind}, B={B} H={H} N={N}"
