"""Who is measured: the ways to compute one attention, each (q, k, v) -> out on the same tensors.

cuDNN, flash   SDPA restricted to one backend, in eager mode: Inductor's caches do not know
               the restriction and would answer with another backend's graph
flex           compiled FlexAttention; causal through a block mask
inductor       F.scaled_dot_product_attention compiled with backend="inductor"
RECIPE kernel  the attention kernel alone: k and v smoothed and quantized beforehand
RECIPE op      the same F.scaled_dot_product_attention compiled with backend="sage": what a
               user gets, with all its preparation
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case
from measure import draw
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sage_inductor.ops import reference, tiles
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import kernel
from sage_inductor.ops.sdpa import prepare as prepare_kv

EAGER = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
# strict: a call that stays SDPA is an error, not a row that flatters or slanders us.
SAGE_OPTIONS = {"sage.force": True, "sage.strict": True}
GATE_TOLERANCE = 1e-3  # few elements of out are a bf16 ulp (2^-8) off


@dataclasses.dataclass(frozen=True)
class Provider:
    name: str
    call: Callable  # what is timed: (*prepared) -> out [B, H_q, N, D]
    prepare: Callable = lambda q, k, v: (q, k, v)  # done before the clock starts
    recipe: str | None = None


def build(case: Case, kinds, recipes) -> list[Provider]:
    """The providers of one case, fresh: nothing is compiled before the first call."""
    return [provider for kind in kinds for provider in _build(case, kind, recipes)]


def _build(case: Case, kind: str, recipes) -> list[Provider]:
    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=case.is_causal, enable_gqa=case.H_q != case.H_kv
        )

    match kind:
        case "cuDNN" | "flash":
            return [Provider(kind, sdpa_kernel(EAGER[kind])(sdpa))]
        case "flex":
            return [Provider(kind, _flex(case))]
        case "inductor":
            return [Provider(kind, torch.compile(sdpa, backend="inductor", fullgraph=True))]
        case "kernel":
            return [_kernel(case.is_causal, recipe) for recipe in recipes]
        case "op":
            return [
                Provider(
                    f"{recipe} op",
                    torch.compile(
                        sdpa,
                        backend="sage",
                        fullgraph=True,
                        options={**SAGE_OPTIONS, "sage.recipe": recipe},
                    ),
                    recipe=recipe,
                )
                for recipe in recipes
            ]
        case _:
            raise ValueError(f"provider must be one of cases.ALL, got {kind!r}")


def _flex(case: Case) -> Callable:
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    @functools.cache
    def block_mask(n: int, device):
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)

    def call(q, k, v):
        mask = block_mask(q.shape[2], q.device) if case.is_causal else None
        return compiled(q, k, v, block_mask=mask, enable_gqa=case.H_q != case.H_kv)

    return call


def _kernel(is_causal: bool, name: str) -> Provider:
    recipe = NAMED[name]

    def prepare(q, k, v):
        return q, *prepare_kv(k, v, None, recipe)[:-1]

    def call(q, k_int8, k_scale, v, v_scale, v_mean):
        op, _ = kernel(q.device, recipe.pv, q.shape[3], masked=False, portable=False)
        return op(
            q, k_int8, k_scale, v, v_scale, v_mean, None, None, None, 0 if is_causal else None,
            False, q.shape[3] ** -0.5, q.shape[2], recipe.granularity, False,
        )[0]  # fmt: skip

    return Provider(f"{name} kernel", call, prepare, name)


def gate(D: int, is_causal: bool, name: str, device: torch.device) -> float:
    """The kernel's distance from its bit-faithful emulation, ||o - e|| / ||e||, the larger of
    normal and outlier inputs: grouped heads, a tail, and no full tile for the first causal rows."""
    recipe, provider = NAMED[name], _kernel(is_causal, name)
    block_n = tiles.tile(tiles.capability(device), recipe.pv, D, masked=False).BLOCK_N
    errors = []
    for kind in ("normal", "outlier"):
        q, k, v = draw(Case(1, 4, 2, 300, D, is_causal), kind, device)
        args = provider.prepare(q, k, v)
        with _poisoned_empty():
            out = provider.call(*args)
        emulated, _ = reference.attention(
            *args, None, None, None, 0 if is_causal else None, False, D**-0.5, q.shape[2],
            recipe.granularity, block_n,
        )  # fmt: skip
        emulated = emulated.double()
        errors.append(((out.double() - emulated).norm() / emulated.norm()).item())
    # max() would skip a NaN.
    return max(errors) if all(error == error for error in errors) else float("nan")


@contextlib.contextmanager
def _poisoned_empty():
    """`torch.empty` gives NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
