"""``sage_inductor.gather_attention``: attention over keys that are spread over several devices.

    out = sage_inductor.gather_attention(q, k, v)      # this rank's rows of the sequence

k and v are gathered as they are, or as 8-bit codes, or heads are exchanged for rows: whichever the
group's measured rates predict to be fastest (ops/distributed/transport.py).
"""

import typing
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sage_inductor.errors import SageOptionError
from sage_inductor.names import AUTO, one_of
from sage_inductor.ops import compat
from sage_inductor.ops.recipe import NAMED, RecipeName

if typing.TYPE_CHECKING:  # a torch may be built without it
    from torch.distributed import ProcessGroup

OF_AUTO = "sage2-8b-rotated"
ASK = "ask"
GatherRecipe = typing.Literal["auto", RecipeName]
Lengths = Sequence[int] | typing.Literal["ask"] | None


@typing.overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, group: "ProcessGroup | None" = ..., is_causal: bool = ...,
    scale: float | None = ..., *, recipe: GatherRecipe = ..., lengths: Lengths = ...,
    return_lse: typing.Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@typing.overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, group: "ProcessGroup | None" = ..., is_causal: bool = ...,
    scale: float | None = ..., *, recipe: GatherRecipe = ..., lengths: Lengths = ...,
    return_lse: typing.Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, group: "ProcessGroup | None" = None, is_causal: bool = False,
    scale: float | None = None, *, recipe: GatherRecipe = AUTO, lengths: Lengths = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T) v of this rank's queries, over the keys of all ranks of a group.

    The keys are in the order of the ranks. Unlike `attention`, it always quantizes, and it takes no
    mask.

    q [B, H_q, N_q, D], k [B, H_kv, N_r, D], v [B, H_kv, N_r, D_v]: of fp16, bf16 or fp32; H_q a
    multiple of H_kv. N_q and N_r are this rank's, and may differ from rank to rank; the rest is
    equal on all, and so is whether N_q is N_r.
    group: None is the default one.
    is_causal: a rank's queries are where its keys are, so N_q is N_r.
    scale: of the scores; None: 1 / sqrt(D).
    recipe: "auto" is "sage2-8b-rotated". Neither lengths nor a policy change it.
    lengths: N_r of each rank. None: all are equal. "ask": the ranks tell each other, and the host
    waits for them.
    return_lse: whether lse is returned, too.

    Returns out [B, H_q, N_q, D_v], with return_lse also the row logsumexp [B, H_q, N_q]: fp32,
    natural log. Every rank of the group has to call it. There is no gradient.

    Raises SageOptionError for an unknown recipe or other lengths, RuntimeError without a process
    group or where a gradient is needed. If a rank's arguments are wrong, or differ from rank 0's,
    that rank raises a ValueError that says what is wrong, and the others a RuntimeError, on GPUs
    where they next synchronize. With lengths="ask" every rank raises a ValueError that names the
    rank. If a rank does not come, the collective of torch.distributed raises on the others, after
    its time-out.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "sage_inductor.gather_attention needs torch.distributed.init_process_group()"
        )
    if lengths != ASK and (isinstance(lengths, str) or lengths is not None and not lengths):
        raise SageOptionError(
            "sage_inductor.gather_attention: lengths must be the number of keys of each rank, None "
            f'(all are equal) or "ask", got {lengths!r}'
        )
    of_group = [compat.process_group, compat.all_gather_single, compat.all_to_all_single]
    if None in of_group + [compat.assert_async] * (lengths != ASK):
        raise RuntimeError(
            f"sage_inductor.gather_attention: torch {torch.__version__} has not what it needs of "
            "torch.distributed (ops/compat.py): use a torch that it was tested with, 2.11 or 2.13"
        )
    if dist.get_rank(group) < 0:
        raise RuntimeError("sage_inductor.gather_attention: this rank is not in the group")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError("sage_inductor.gather_attention has no gradient: use torch.no_grad()")
    name = (group or dist.group.WORLD).group_name
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    asked = is_causal, scale, _encoded(recipe), [] if lengths == ASK else lengths
    out, lse = torch.ops.sage.gather_sdpa(q, k, v, name, *asked)
    return (out, lse) if return_lse else out


@torch.compiler.assume_constant_result
def _encoded(recipe: str) -> str:
    name = one_of((AUTO, *NAMED), "sage_inductor.gather_attention: recipe", recipe)
    return NAMED[OF_AUTO if name == AUTO else name].encode()
