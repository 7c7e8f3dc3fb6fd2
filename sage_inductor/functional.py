"""``sage_inductor.attention``: scaled_dot_product_attention that asks for a recipe, called by name.

    out = sage_inductor.attention(q, k, v, is_causal=True)

What becomes of the call is decided as for one that ``backend="sage"`` finds, by a graph that holds
nothing else: `patterns.rewrite` makes of it what it would make of a model's, and what is left runs.

    eager                       decided once for each kind of call, and remembered
    backend="sage"              Dynamo leaves the call whole, and the pass finds it like any other
    other backends, export      decided while the call is traced, of the traced tensors

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import operator
import typing
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor import patterns, settings, stages
from sage_inductor.choose import cost, families
from sage_inductor.choose.decide import decide
from sage_inductor.config import config
from sage_inductor.names import AUTO, RecipeOption, check_recipe
from sage_inductor.ops import compat
from sage_inductor.patterns import reasons
from sage_inductor.patterns.call import Call, Decision, Site
from sage_inductor.patterns.graph import as_float, as_int
from sage_inductor.patterns.ours import ENTRIES
from sage_inductor.patterns.reasons import Reason
from sage_inductor.policy import Ruling
from sage_inductor.report import raise_if_refused, record
from sage_inductor.session import session


# What is returned, for type checkers.
@typing.overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ...,
    *, recipe: RecipeOption = ..., return_lse: typing.Literal[False] = ..., dropout_p: float = ...,
) -> Tensor: ...  # fmt: skip
@typing.overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ...,
    *, recipe: RecipeOption = ..., return_lse: typing.Literal[True], dropout_p: float = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
    *, recipe: RecipeOption = AUTO, return_lse: bool = False, dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T + mask) v, quantized where that is faster, else by
    ``torch.nn.functional.scaled_dot_product_attention``, whose arguments these are.

    What differs from SDPA: `dropout_p` is the last argument and given by name; `recipe` and
    `return_lse` are added; nested tensors are refused; and a quantized result is not exact
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

    Returns out [B, H_q, N_q, D_v] in q's dtype (under autocast in autocast's), with return_lse also
    the row logsumexp [B, H_q, N_q]: fp32, natural log, not differentiable. Where SDPA computes out,
    ``sage::lse`` computes lse.

    Raises SageOptionError for an unknown recipe, SageRefused under ``config.strict``, TypeError for
    nested tensors or an is_causal that is no bool, ValueError for a dropout_p that is not 0 and for
    dtypes, head_dims, lengths or heads that do not fit each other, and what SDPA raises.
    """
    if dropout_p != 0.0:
        raise ValueError(
            f"sage_inductor.attention: dropout_p must be 0, got {dropout_p}: for dropout call "
            "F.scaled_dot_product_attention"
        )
    # Dynamo asks for shapes, or the user does.
    if type(q) is compat.FakeTensor and compat.proxy_mode() is None or q.device.type == "meta":
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        lse = (q, k, attn_mask, is_causal, scale)
        return (out, torch.ops.sage.lse(*lse)) if return_lse else out
    if not isinstance(is_causal, bool | torch.SymBool):  # SDPA's dropout_p is at its place
        raise TypeError(
            f"is_causal must be True or False, got {is_causal!r} (SDPA has dropout_p in its place: "
            "give dropout_p by name)"
        )
    _check(q, k, v, enable_gqa)
    options = _Options(is_causal, as_float(scale), enable_gqa, recipe, return_lse)
    tensors = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    return _run_of(tensors, options).compute(*tensors)


def quantized(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, scale: float | None,
    enable_gqa: bool, *, recipe: str, module: str,
) -> Tensor | None:  # fmt: skip
    """In eager, `attention`, or None where SDPA would compute it: for a caller that has something
    else for that case. module: the path by which the policy and the report know the call."""
    _check(q, k, v, enable_gqa)
    tensors = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    options = _Options(False, as_float(scale), enable_gqa, recipe, False)
    run = _run_of(tensors, options, module)
    return run.compute(*tensors) if run.rewritten else None


def _check(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Raise ValueError for what SDPA would refuse in the words of the products that it makes."""
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in (q, k, v))
    if not plain or any(x.is_nested for x in (q, k, v)):
        return  # symbolic sizes would be guarded; nested tensors have a message of their own
    casts = torch.is_autocast_enabled(q.device.type)  # SDPA's inputs, to one dtype
    if len({x.dtype for x in (q, k, v)}) > 1 and not casts or not q.is_floating_point():
        raise ValueError(
            "sage_inductor.attention: q, k and v must have one floating dtype, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}"
        )
    if min(x.dim() for x in (q, k, v)) < 3:
        return
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "sage_inductor.attention: q and k must have one head_dim, got "
            f"{q.shape[-1]} and {k.shape[-1]}"
        )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            "sage_inductor.attention: k and v must have one length, got "
            f"{k.shape[-2]} and {v.shape[-2]}"
        )
    H_q, H_kv = q.shape[-3], k.shape[-3]
    if q.dim() == 4 and not enable_gqa and H_q != H_kv and 1 not in (H_q, H_kv):
        raise ValueError(
            f"sage_inductor.attention: q has {H_q} heads and k {H_kv}: set enable_gqa=True"
        )


# Dynamo puts the call into its graph as it is; AOTAutograd and export trace what it does.
torch.compiler.allow_in_graph(attention)
ENTRIES.add(attention)


class _Kind(NamedTuple):
    """What a decision may depend on, of one tensor."""

    shape: tuple
    stride: tuple | None
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    reason: Reason | None  # why no recipe may compute with it

    @classmethod
    def of(cls, x: Tensor, grad: bool) -> "_Kind":
        reason = None
        if x.is_nested:
            raise TypeError(
                "sage_inductor.attention: q, k, v and attn_mask must not be nested tensors: "
                "pad them (to_padded_tensor), or call scaled_dot_product_attention"
            )
        if compat.functorch.is_functorch_wrapped_tensor(x):
            reason = reasons.IN_A_TRANSFORM()
        elif type(x) not in _PLAIN or x.layout != torch.strided:
            reason = reasons.SUBCLASS(type(x).__name__)
        stride = None if reason else x.stride()
        return cls(
            tuple(map(as_int, x.shape)), stride, x.dtype, x.device, grad and x.requires_grad, reason
        )

    def stand_in(self) -> Tensor:
        """A tensor of this kind; to be called where tensors are fake."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        x = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return x.requires_grad_(self.needs_grad)


_TRACED = (compat.FakeTensor, compat.FunctionalTensor)
_PLAIN = (Tensor, torch.nn.Parameter, *_TRACED)


class _Options(NamedTuple):
    """`attention`'s arguments but the tensors."""

    is_causal: bool
    scale: float | None
    enable_gqa: bool
    recipe: str
    return_lse: bool


class _Run(NamedTuple):
    """The decision of a call."""

    compute: Callable  # the graph's function
    rewritten: bool  # whether a recipe computes it, and not SDPA


def _run_of(tensors: tuple[Tensor, ...], options: _Options, module: str = "") -> _Run:
    """What computes a call with these tensors, the decision taken."""
    grad, device = torch.is_grad_enabled(), tensors[0].device.type
    kinds = tuple(_Kind.of(x, grad) for x in tensors)
    exporting = torch.compiler.is_exporting()
    if exporting or torch.compiler.is_compiling() or type(tensors[0]) in _TRACED:
        portable = exporting or compat.virtualized.aot_compilation is True
        stage = stages.current() if portable else None
        fake_mode = compat.detect_fake_mode(tensors)
        return _decided(kinds, options, module, fake_mode, portable, stage)
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    given = tuple(map(_hashable, config.to_dict().values()))
    kinds_of = _but_lengths(kinds) if _is_short(kinds) else kinds
    stage = stages.current()
    key = kinds_of, options, module, grad, autocast, given, families.flash_attention(), stage
    runs = session().runs
    run = runs.get(key)
    if run is None:
        if len(runs) >= MAX_KINDS:
            runs.clear()
        run = runs[key] = _decided(kinds, options, module, None, False, stage)
    return run


class _Same(NamedTuple):
    """A function of the user's, which need not be hashable, in a key that keeps it alive."""

    function: Callable

    def __hash__(self) -> int:
        return id(self.function)

    def __eq__(self, other) -> bool:
        return type(other) is _Same and self.function is other.function


def _hashable(value):
    return _Same(value) if callable(value) and value.__hash__ is None else value


MAX_KINDS = 4096  # of calls that are remembered, some 10 KiB each


def _is_short(kinds: tuple[_Kind, ...]) -> bool:
    """Whether a call stays SDPA at its length and at any other as short, by every policy. Decoding
    makes a call of another length for each token, and deciding takes 3 ms."""
    lengths = (kind.shape[-2] for kind in kinds[:2] if len(kind.shape) > 1)
    trains = any(kind.needs_grad for kind in kinds)
    return (
        not (config.emulate or config.force or trains) and min(lengths, default=0) < cost.SHORTEST
    )


def _but_lengths(kinds: tuple[_Kind, ...]) -> tuple:
    shapes = (kind.shape[:-2] + (kind.shape[-1:] if i < 3 else ()) for i, kind in enumerate(kinds))
    return tuple(k._replace(shape=s, stride=None) for k, s in zip(kinds, shapes, strict=True))


def _decided(
    kinds, options: _Options, module, fake_mode, portable: bool, stage: str | None
) -> _Run:
    """What computes the call; its site goes to the report."""
    check_recipe("sage_inductor.attention: recipe", options.recipe)
    wanted = settings.resolve({}, portable=portable, stage=stage)
    with compat.disable_modes():
        gm = _graph_of(kinds, options, module, fake_mode)
        reason = next((kind.reason for kind in kinds if kind.reason), None)

        def decision(call: Call) -> Decision:
            return Decision(None, reason) if reason else decide(call, wanted)

        sites = patterns.rewrite(gm, decision, portable)
    _record(sites, wanted.policy)
    if wanted.strict:
        raise_if_refused(sites)
    for node in gm.graph.nodes:  # fake tensors, which nobody needs any more
        node.meta.clear()
    return _Run(gm.forward, any(site.rewritten for site in sites))


def _graph_of(kinds, options: _Options, module: str, fake_mode) -> torch.fx.GraphModule:
    """The call alone, as if `module` made it, its inputs stand-ins of these kinds."""
    is_causal, scale, enable_gqa, recipe, return_lse = options
    graph = torch.fx.Graph()
    with fake_mode or compat.FakeTensorMode():
        values = [kind.stand_in() for kind in kinds]
        q, k, v, attn_mask = (*values, None)[:4]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        lse = torch.ops.sage.lse(q, k, attn_mask, is_causal, scale) if return_lse else None
    nodes = [graph.placeholder(name) for name, _ in zip("qkvm", values, strict=False)]
    q, k, v, attn_mask = (*nodes, None)[:4]
    call = graph.call_function(
        attention, (q, k, v, attn_mask, is_causal, scale, enable_gqa),
        {"recipe": recipe, "return_lse": return_lse},
    )  # fmt: skip
    for node, value in zip(nodes, values, strict=True):
        node.meta["example_value"] = value
    call.meta["example_value"] = (out, lse) if return_lse else out
    call.meta["nn_module_stack"] = {"": (module, None)}
    if return_lse:
        items = tuple(graph.call_function(operator.getitem, (call, i)) for i in range(2))
        for node, value in zip(items, (out, lse), strict=True):
            node.meta["example_value"] = value
    graph.output(items if return_lse else call)
    return torch.fx.GraphModule({}, graph)


def _record(sites: list[Site], policy: Ruling) -> None:
    """Add the call's site to the report, once for each graph that has such calls."""
    graph, recorded = str(compat.CompileContext.current_compile_id()), session().recorded
    for site in sites:
        if (graph, site) not in recorded:
            recorded.add((graph, site))
            record([site], policy)
