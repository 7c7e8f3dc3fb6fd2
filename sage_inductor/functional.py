"""``sage_inductor.attention``: scaled_dot_product_attention that asks for a recipe, called by name.

    out = sage_inductor.attention(q, k, v, is_causal=True)

What becomes of the call is decided as for one that ``backend="sage"`` finds, by a graph that holds
nothing else: `patterns.rewrite` makes of it what it would make of a model's, and what is left runs.

    eager                       decided once for each kind of call, and remembered
    backend="sage"              Dynamo leaves the call whole, and the pass finds it like any other
    other backends, export      decided while the call is traced, of the traced tensors

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import functools
import inspect
import operator
import typing
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor import patterns, stages
from sage_inductor.choose import cost, families
from sage_inductor.choose.decide import decide
from sage_inductor.names import AUTO, OFF, RecipeOption, check_recipe, unknown
from sage_inductor.ops import compat
from sage_inductor.ops.symbols import as_int
from sage_inductor.options import config, resolve, settings_in_force
from sage_inductor.patterns import reasons
from sage_inductor.patterns.call import Call, Decision
from sage_inductor.patterns.graph import as_float
from sage_inductor.patterns.reasons import Reason
from sage_inductor.patterns.sdpa import ENTRIES
from sage_inductor.policy import KeepOption, kept, stages_of
from sage_inductor.session import session
from sage_inductor.study.report import raise_if_refused, record


# What is returned, for type checkers.
@typing.overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ...,
    *, recipe: RecipeOption = ..., return_lse: typing.Literal[False] = ..., dropout_p: float = ...,
    keep: KeepOption | None = ...,
) -> Tensor: ...  # fmt: skip
@typing.overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ...,
    *, recipe: RecipeOption = ..., return_lse: typing.Literal[True], dropout_p: float = ...,
    keep: KeepOption | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(  # noqa: PLR0913  (SDPA's arguments and ours)
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
    *, recipe: RecipeOption = AUTO, return_lse: bool = False, dropout_p: float = 0.0,
    keep: KeepOption | None = None, **foreign,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T + mask) v, quantized where that is faster, else by
    ``torch.nn.functional.scaled_dot_product_attention``, whose arguments these are.

    What differs from SDPA: `dropout_p` is given by name; `recipe`, `return_lse` and `keep` are
    added; nested tensors are refused; and a quantized result is not exact
    (``sage_inductor.diagnose`` measures by how much). On CPU SDPA computes all calls, unless
    ``config.emulate`` is set.

    q [B, H_q, N_q, D], k [B, H_kv, N_kv, D], v [B, H_kv, N_kv, D_v]: of one floating dtype. Those
    of fp16, bf16 and, with ``config.force`` or ``config.emulate``, fp32 may be quantized.
    attn_mask: bool (True: the query sees the key) or floating (added to the scores), of a shape
    that broadcasts to [B, H_q, N_q, N_kv].
    is_causal: query i sees the keys 0 .. i.
    scale: of the scores; None: 1 / sqrt(D).
    enable_gqa: H_q may be a multiple of H_kv; a head of k serves H_q / H_kv heads in a row.
    recipe: "auto" (what ``sage_inductor.config.recipe`` says), or what to ask for in its place; a
    rule of the policy that fits comes first, and so does a config that switches everything off.
    return_lse: whether lse is returned, too.
    dropout_p: 0; it is there for calls that were SDPA's.
    keep: which blocks of keys self-attention computes, as a rule of a policy says it
    (docs/guide/sparse.md); recipe must be a name then.

    Returns out [B, H_q, N_q, D_v] in q's dtype (under autocast in autocast's), with return_lse also
    the row logsumexp [B, H_q, N_q]: fp32, natural log, not differentiable. Where SDPA computes out,
    ``sage::lse`` computes lse.

    Raises SageOptionError for an unknown recipe, SageRefused under ``config.strict``, TypeError for
    nested tensors or an is_causal that is no bool, ValueError for a dropout_p that is not 0, a keep
    that a policy may not have, and for dtypes, head_dims, lengths or heads that do not fit each
    other, and what SDPA raises.
    """
    if foreign:
        raise TypeError(_unexpected(foreign))
    if torch.compiler.is_dynamo_compiling():  # this function itself: else it is one call of a graph
        given = {"scale": scale, "enable_gqa": enable_gqa, "recipe": recipe, "dropout_p": dropout_p}
        return _in_graph(q, k, v, attn_mask, is_causal, **given, return_lse=return_lse, keep=keep)
    if keep is not None:
        keep = kept(keep, recipe, "sage_inductor.attention: ")
    tensors = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    options = is_causal, scale, enable_gqa, recipe, return_lse, keep
    key = _key(tensors, options) if dropout_p == 0.0 and type(is_causal) is bool else None
    run = session().runs.get(key)
    if run is None:
        _check(tensors, *options[:3], dropout_p, return_lse)
        # Dynamo asks for shapes, or the user does.
        if type(q) is compat.FakeTensor and compat.proxy_mode() is None or q.device.type == "meta":
            return _by_sdpa(tensors, *options[:3], return_lse)
        run = _run_of(tensors, options, key)
    return run.compute(*tensors)


def _by_sdpa(tensors, is_causal, scale, enable_gqa: bool, return_lse: bool):
    """What `attention` returns, exactly."""
    q, k, v, attn_mask = (*tensors, None)[:4]
    given = dict(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask, **given)
    return (out, torch.ops.sage.lse(q, k, attn_mask, is_causal, scale)) if return_lse else out


def sparse_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, proj: Callable[[Tensor], Tensor], keep: KeepOption,
    *, recipe: RecipeOption, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """SLA (arXiv:2509.24006), with its branch for what is left out:

        attention(q, k, v, keep=keep) + proj(f(q) (f(k)^T v) / (1e-5 + f(q) sum f(k)))

    f is softmax over the channels, and the sums are over all keys. For inference.

    q, k, v, recipe, scale: `attention`'s, in [B, H, N, D]. keep: such as {"rule": "sla", "top_k":
    0.1}. proj: what a layer applies to the branch, [B, H_q, N, D_v] -> the same; it runs under
    autocast in q's dtype, unless that is fp32.

    Returns [B, H_q, N, D_v] in q's dtype. Raises what `attention` does.
    """
    out = attention(q, k, v, scale=scale, enable_gqa=True, recipe=recipe, keep=keep)
    of_q, of_k = q.softmax(-1), k.softmax(-1)
    group = q.shape[1] // k.shape[1]
    values, total = (
        x.repeat_interleave(group, 1) for x in (of_k.mT @ v, of_k.sum(2, keepdim=True))
    )
    linear = of_q @ values / (1e-5 + (of_q * total).sum(-1, keepdim=True))
    with torch.autocast(q.device.type, dtype=q.dtype, enabled=q.dtype != torch.float32):
        linear = proj(linear)
    return (out + linear).to(q.dtype)


def video_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, keep: KeepOption, *, recipe: RecipeOption
) -> Tensor:
    """VSA (arXiv:2505.13389), with its coarse branch:

        attention(q, k, v, keep=keep) + gate * (softmax(q_mean k_mean^T / sqrt(D)) v_mean)

    The means are of the tokens of each block; what a block of queries gets, each of its rows does.
    They are in q's dtype, with segments in fp32. Their attention is exact, unless a rule of the
    policy fits it. For inference.

    q, k, v, recipe: `attention`'s, in [B, H, N, D], tokens in the order of the blocks, unless keep
    has a layout. gate [B, H_q, N, D_v]. keep: such as {"rule": "vsa", "sparsity": 0.9}.

    Returns [B, H_q, N, D_v] in q's dtype. Raises what `attention` does, and ValueError for another
    number of tokens than keep's layout has.
    """
    asked = kept(keep, recipe, "sage_inductor.video_sparse_attention: ")
    out = attention(q, k, v, enable_gqa=True, recipe=recipe, keep=keep)
    dtype, (block_q, block_kv) = torch.float32 if asked.segments else q.dtype, asked.size
    blocks, N, perm = (block_q, block_kv, block_kv), q.shape[2], None
    block_of = torch.arange(N, device=q.device) // block_q
    if asked.layout is not None:
        if N != asked.tokens:
            raise ValueError(f"keep's layout must be of q's {N} tokens, got {asked.tokens}")
        before, _ = asked.beside
        perm = torch.ops.sage.cube_order(q, list(asked.layout), list(asked.cube), before)
        block_of = perm.argsort() // block_q
    means = (
        torch.ops.sage.pool_blocks(x, None, block, False, perm)[0].to(dtype)
        for x, block in zip((q, k, v), blocks, strict=True)
    )
    coarse = attention(*means, enable_gqa=True, recipe=OFF).index_select(2, block_of)
    return (out + gate * coarse).to(q.dtype)


def quantized(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, scale: float | None,
    enable_gqa: bool, *, recipe: str, module: str,
) -> Tensor | None:  # fmt: skip
    """In eager, `attention`, or None where SDPA would compute it: for a caller that has something
    else for that case. module: the path by which the policy and the report know the call."""
    tensors = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    options = False, scale, enable_gqa, recipe, False, None
    key = _key(tensors, options, module)
    run = session().runs.get(key)
    if run is None:
        _check(tensors, *options[:3])
        run = _run_of(tensors, options, key, module)
    return run.compute(*tensors) if run.rewritten else None


def _check(
    tensors: tuple, is_causal, scale, enable_gqa: bool, dropout_p: float = 0.0,
    return_lse: bool = False,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError for what SDPA would refuse in the words of the products that it
    makes."""
    q, k, v, attn_mask = (*tensors, None)[:4]
    if dropout_p != 0.0:
        raise _refused(
            f"dropout_p must be 0, got {dropout_p}: for dropout call F.scaled_dot_product_attention"
        )
    if not all(isinstance(x, Tensor) for x in tensors):
        got = ", ".join(type(x).__name__ for x in tensors)
        raise _refused(f"q, k, v and attn_mask must be tensors, got {got}", TypeError)
    if not isinstance(is_causal, bool | torch.SymBool):  # SDPA's dropout_p is at its place
        what = f"is_causal must be True or False, got {is_causal!r}"
        place = "SDPA has dropout_p in its place: give dropout_p by name"
        raise _refused(f"{what} ({place})", TypeError)
    if return_lse and compat.functorch.peek_interpreter_stack() is not None:
        raise _refused("return_lse must be False inside a torch.func transform")
    if isinstance(scale, Tensor):
        raise _refused("scale must be a number, got a tensor: give scale.item()", TypeError)
    if any(type(x) not in _PLAIN or x.is_nested or x.is_meta for x in tensors):
        return  # symbolic sizes would be guarded; nested tensors have a message of their own
    casts = torch.is_autocast_enabled(q.device.type)  # SDPA's inputs, to one dtype
    if len({x.dtype for x in (q, k, v)}) > 1 and not casts or not q.is_floating_point():
        got = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise _refused(f"q, k and v must have one floating dtype, got {got}")
    of_mask = torch.bool if attn_mask is None else attn_mask.dtype
    if not (of_mask.is_floating_point or of_mask == torch.bool):
        raise _refused(f"attn_mask must be bool or floating, got {of_mask}")
    if min(x.dim() for x in (q, k, v)) < 3:
        return
    if q.shape[-1] != k.shape[-1]:
        got = f"{q.shape[-1]} and {k.shape[-1]}"
        raise _refused(f"q and k must have one head_dim, got {got}")
    if k.shape[-2] != v.shape[-2]:
        raise _refused(f"k and v must have one length, got {k.shape[-2]} and {v.shape[-2]}")
    H_q, H_kv = q.shape[-3], k.shape[-3]
    if q.dim() == 4 and not enable_gqa and H_q != H_kv and 1 not in (H_q, H_kv):
        raise _refused(f"q has {H_q} heads and k {H_kv}: set enable_gqa=True")
    scores = [*map(max, q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2]]
    shape = () if attn_mask is None or q.dim() != k.dim() else attn_mask.shape
    if any(n not in (1, m) for n, m in zip(reversed(shape), reversed(scores), strict=False)):
        raise _refused(f"attn_mask must broadcast to {scores}, got {list(shape)}")


# What other libraries call an argument, and what it is here.
_FOREIGN = {
    "tensor_layout": "transpose q, k and v to [B, H, N, D]",
    "sm_scale": "it is called scale",
    "softmax_scale": "it is called scale",
    "causal": "it is called is_causal",
    "window_size": "give a mask of positions as attn_mask",
}


def _unexpected(foreign: dict) -> str:
    """The message about arguments that do not exist, all at once."""
    hints = [f"{name!r}: {_FOREIGN.get(name) or unknown(name, _SIGNATURE.parameters, '')}"
             for name in foreign]  # fmt: skip
    what = "sage_inductor.attention() got an unexpected keyword argument "
    return f"{what}{', '.join(hints)} (docs/guide/migration.md)"


def _refused(what: str, kind: type = ValueError) -> Exception:
    return kind(f"sage_inductor.attention: {what}")


# Dynamo puts the call into its graph as it is; AOTAutograd and export trace what it does.
_SIGNATURE = inspect.signature(attention)
_SIGNATURE = _SIGNATURE.replace(parameters=list(_SIGNATURE.parameters.values())[:-1])
attention.__signature__ = _SIGNATURE  # without `foreign`


def _in_graph(*args, **kwargs):
    return attention(*args, **kwargs)


_in_graph.__signature__ = _SIGNATURE
for _entry in (attention, _in_graph):
    torch.compiler.allow_in_graph(_entry)
    ENTRIES.add(_entry)


_TRACED = (compat.FakeTensor, compat.FunctionalTensor)
_PLAIN = {Tensor, torch.nn.Parameter}


class _Run(NamedTuple):
    """The decision of a call."""

    compute: Callable  # SDPA, or the graph's function
    rewritten: bool  # whether a recipe computes it, and not SDPA


MAX_KINDS = 4096  # of calls that are remembered, of which each has at most 10 KiB


def _key(tensors: tuple, options: tuple, module: str = "") -> tuple | None:
    """All that decides on a call of plain tensors in eager; None: the decision is not kept. Most
    eager calls need nothing else of ours, so this is one flat function."""
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    q, k, v = tensors[:3]
    try:
        key = (
            q.shape, q.stride(), q.dtype, q.device, q.layout, q.requires_grad,
            k.shape, k.stride(), k.dtype, k.device, k.layout, k.requires_grad,
            v.shape, v.stride(), v.dtype, v.device, v.layout, v.requires_grad,
        )  # fmt: skip
        for x in tensors[3:]:
            key += x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad
    except RuntimeError:  # a layout without strides
        return None
    device, autocast = q.device.type, False
    if compat.is_any_autocast_enabled():
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    transformed = compat.functorch.peek_interpreter_stack() is not None
    return (
        *key, *options, module, torch.is_grad_enabled(), autocast, transformed,
        *settings_in_force(), families.flash_attention(), stages.current(),
    )  # fmt: skip


def _kind(key: tuple, tensors: tuple) -> tuple:
    """The key without lengths, if every policy leaves a call to SDPA at any length as short.
    Decoding makes a call of another length for each token, and deciding takes 3 ms."""
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    sizes = [x.shape for x in tensors]
    short = min(map(len, sizes[:3])) > 2 and min(x[-2] for x in sizes[:2]) < cost.SHORTEST
    if not short or trains or config.emulate or config.force:
        return key
    kind = [*key]
    for i, size in enumerate(sizes):
        is_mask = i == 3
        kind[6 * i : 6 * i + 2] = (size[:-2], is_mask or size[-1])
    return tuple(kind)


def _run_of(tensors: tuple, options: tuple, key: tuple | None, module: str = "") -> _Run:
    """What computes a call with these tensors, the decision taken; its site goes to the report."""
    runs, kind = session().runs, key and _kind(key, tensors)
    if len(runs) >= MAX_KINDS:
        runs.clear()
    if kind in runs:
        runs[key] = runs[kind]
        return runs[key]
    check_recipe("sage_inductor.attention: recipe", options[3])
    exporting = torch.compiler.is_exporting()
    traced = exporting or torch.compiler.is_compiling() or type(tensors[0]) in _TRACED
    portable = exporting or traced and compat.virtualized.aot_compilation is True
    stage = None if traced and not portable else stages.current()
    wanted = resolve({}, portable=portable, stage=stage)
    stages.warn_if_misspelled(stage, stages_of(wanted.policy))
    reason = next(filter(None, map(_why_not, tensors)), None)
    grad, fake_mode = torch.is_grad_enabled(), compat.detect_fake_mode(tensors) if traced else None

    def stand_in(x: Tensor) -> Tensor:
        given = dict(dtype=x.dtype, device=x.device)
        shape = tuple(map(as_int, x.shape))
        if reason:
            return torch.empty(shape, **given)
        made = torch.empty_strided(shape, x.stride(), **given)
        return made.requires_grad_(grad and x.requires_grad)

    def decision(call: Call) -> Decision:
        return Decision(None, reason) if reason else decide(call, wanted)

    with compat.disable_modes():
        with fake_mode or compat.FakeTensorMode():
            values = [stand_in(x) for x in tensors]
            given = options[0], as_float(options[1]), *options[2:]
            gm = _graph_of(values, given, module)
        sites = patterns.rewrite(gm, decision, portable)
    graph, recorded = str(compat.CompileContext.current_compile_id()), session().recorded
    for site in sites:  # of a graph that has several such calls, once
        if (graph, site) not in recorded:
            recorded.add((graph, site))
            record([site], wanted.policy)
    if wanted.strict:
        raise_if_refused(sites)
    for node in gm.graph.nodes:  # fake tensors, which nobody needs any more
        node.meta.clear()
    is_rewritten, compute = any(site.rewritten for site in sites), gm.forward
    if not (is_rewritten or options[4]):
        names = zip(("is_causal", "scale", "enable_gqa"), given, strict=False)
        others = {name: x for name, x in names if x is not None and x is not False}
        compute = functools.partial(F.scaled_dot_product_attention, **others)
        compute = compute if others else compute.func
    run = _Run(compute, is_rewritten)
    if key is not None:
        runs[key] = runs[kind] = run
    return run


def _why_not(x: Tensor) -> Reason | None:
    """Why no recipe may compute with a tensor. Raises TypeError for a nested one."""
    if x.is_nested:
        raise _refused(
            "q, k, v and attn_mask must not be nested tensors: pad them (to_padded_tensor), or "
            "call scaled_dot_product_attention", TypeError,
        )  # fmt: skip
    if compat.functorch.peek_interpreter_stack() is not None:
        return reasons.IN_A_TRANSFORM()
    plain = type(x) in (*_PLAIN, *_TRACED) and x.layout == torch.strided
    return None if plain else reasons.SUBCLASS(type(x).__name__)


def _graph_of(values: list[Tensor], options: tuple, module: str) -> torch.fx.GraphModule:
    """The call alone, of fake tensors, as if `module` made it."""
    is_causal, scale, enable_gqa, recipe, return_lse, keep = options
    graph, value = torch.fx.Graph(), _by_sdpa(values, is_causal, scale, enable_gqa, return_lse)
    nodes = [graph.placeholder(name) for name, _ in zip("qkvm", values, strict=False)]
    q, k, v, attn_mask = (*nodes, None)[:4]
    call = graph.call_function(
        attention, (q, k, v, attn_mask, is_causal, scale, enable_gqa),
        {"recipe": recipe, "return_lse": return_lse, "keep": keep},
    )  # fmt: skip
    for node, each in zip(nodes, values, strict=True):
        node.meta["example_value"] = each
    call.meta["example_value"] = value
    call.meta["nn_module_stack"] = {"": (module, None)}
    if return_lse:
        items = tuple(graph.call_function(operator.getitem, (call, i)) for i in range(2))
        for node, each in zip(items, value, strict=True):
            node.meta["example_value"] = each
    graph.output(items if return_lse else call)
    return torch.fx.GraphModule({}, graph)
