"""nn.MultiheadAttention and nn.TransformerEncoderLayer, which Dynamo leaves as one call.

    before:  query = x.transpose(1, 0)
             both = multi_head_attention_forward(query, query, query, E, H, W, b, ..., W_o, b_o)
             out = both[0]
    after:   qkv = linear(x, W, b).unflatten(-1, (3, H, -1))  # [B, N, 3, H, D]
             q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()    # [B, H, N, D] each, views
             o = attention(q, k, v)                           # inserted by who asked for the Call
             out = linear(o.transpose(1, 2).flatten(2), W_o, b_o).transpose(0, 1).contiguous()

The encoder layer's fast path (`_transformer_encoder_layer_fwd`: eval, no grad) becomes the same
with its residuals, norms and feed-forward. What follows eager, and what does not:

* need_weights=True, the default, is written with attention too, as long as nothing depends on the
  weights. is_causal is a hint that F.multi_head_attention_forward takes, instead of attn_mask, only
  with need_weights=False and no key_padding_mask; so here.
* Both hide where a mask is True; SDPA's attn_mask keeps there. nn.MultiheadAttention writes a bool
  mask as a float one first (0, -inf): its bool origin is found again, as kernels read it faster.
* The fast path reads its float mask as bool: any number but 0 hides. So here.
* A row with nothing to attend to is NaN in the fast path and with need_weights=True, and is the
  output projection of 0 with need_weights=False; here, of what the attention gives (SDPA: 0).
"""

import functools
import inspect
import math
import operator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.fx import Node

from sage_inductor.ops import compat
from sage_inductor.ops.visibility import CAUSAL, FULL
from sage_inductor.patterns import graph, reasons
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.graph import Emitter, GraphIndex, by_schema, op_name, value_of
from sage_inductor.patterns.reasons import Reason

MHA = F.multi_head_attention_forward
ENCODER_LAYER = compat.encoder_layer


def find(node: Node, index: GraphIndex) -> Call | None:
    """The call whose value `node` is: the encoder layer itself, of MHA's (out, weights) the out."""
    if node.op != "call_function":
        return None
    if node.target is ENCODER_LAYER:
        return _encoder_layer(node, Emitter(node, index))
    if node.target is MHA and not any(_is_item(user, 0) for user in node.users):
        return _multi_head_attention(node, node, Emitter(node, index))
    if _is_item(node, 0) and isinstance(node.args[0], Node) and node.args[0].target is MHA:
        mha = node.args[0]
        return _multi_head_attention(mha, node, Emitter(mha, index))
    return None


# -- F.multi_head_attention_forward -----------------------------------------------------------


def _multi_head_attention(mha: Node, node: Node, emit: Emitter) -> Call:
    """mha: (out [N, B, E], weights); node: out, or mha where nobody reads out."""
    args = inspect.signature(MHA).bind(*mha.args, **mha.kwargs)
    args.apply_defaults()
    args = SimpleNamespace(**args.arguments)
    spelling = "nn.MultiheadAttention"
    reason = _unprojectable(mha, args.query, args.num_heads, emit.index)
    if reason is None and (args.static_k is not None or args.static_v is not None):
        reason = reasons.STATIC_KV()
    if reason is None and node is mha:
        reason = reasons.OUT_UNUSED()
    if reason:
        inputs = (args.query, args.key, args.value)
        return Call(node, spelling, emit, *inputs, value_of(node), refused=reason)

    q, k, v = _in_projections(emit, args)
    k = _appended(emit, k, args.bias_k, args.add_zero_attn)
    v = _appended(emit, v, args.bias_v, args.add_zero_attn)
    is_causal = args.is_causal is True and args.key_padding_mask is None and not args.need_weights
    attn_mask = None if is_causal else _attn_mask(emit, args)

    def finish(out: Node) -> Node:
        out = emit(F.linear, _joined(emit, out), args.out_proj_weight, args.out_proj_bias)
        return emit(torch.ops.aten.contiguous.default, emit(torch.transpose, out, 0, 1))

    return Call(
        node, spelling, emit, q, k, v, _attention_value(node, q, k, v, attn_mask),
        attn_mask=attn_mask,
        dropout_p=args.dropout_p if args.training else 0.0,
        band=CAUSAL if is_causal else FULL,
        dead=graph.left_over({mha}, node),
        finish=finish,
        refused=_used_otherwise(mha) or _other_dtype(node, q),
    )  # fmt: skip


def _in_projections(emit: Emitter, args: SimpleNamespace) -> list[Node]:
    """q, k, v [B, H, N, D]: one linear for neighbours that project one input with one weight."""
    inputs = (args.query, args.key, args.value)
    separate = (args.q_proj_weight, args.k_proj_weight, args.v_proj_weight)
    counts = (1, 1, 1)
    if args.key is args.value and not args.use_separate_proj_weight:
        counts = (3,) if args.query is args.key else (1, 2)

    heads, E = [], int(value_of(args.out_proj_weight).shape[1])  # the argument may be a symbol
    for count in counts:
        first = len(heads)
        rows = slice(first * E, (first + count) * E)

        def part(packed, rows=rows, whole=count == 3):
            return packed if packed is None or whole else emit(operator.getitem, packed, rows)

        weight = separate[first] if args.use_separate_proj_weight else part(args.in_proj_weight)
        x, batch_dim = inputs[first], 1
        if op_name(x) == "transpose" and set(x.args[1:]) == {0, 1}:  # batch_first: no copy of x
            x, batch_dim = x.args[0], 0
        heads += _heads(emit, x, weight, part(args.in_proj_bias), count, args.num_heads, batch_dim)
    return heads


def _appended(emit: Emitter, x: Node, bias: Node | None, zero: bool) -> Node:
    """x [B, H, S, D] with what add_bias_kv and add_zero_attn append to the sequence."""
    if bias is not None:
        H = int(value_of(x).shape[1])
        bias = emit(torch.transpose, emit(torch.unflatten, bias, -1, (H, -1)), 1, 2)  # [1, H, 1, D]
        row = emit(F.pad, emit(torch.narrow, x, 2, 0, 0), (0, 0, 0, 1))  # zeros: [B, H, 1, D]
        x = emit(torch.cat, [x, emit(torch.add, row, bias)], 2)
    return emit(F.pad, x, (0, 0, 0, 1)) if zero else x


def _attn_mask(emit: Emitter, args: SimpleNamespace) -> Node | None:
    """Both masks as SDPA's one: bool [B|1, H|1, L|1, S] if both are, or float."""
    appended = (args.bias_k is not None) + bool(args.add_zero_attn)
    hidden, added = [], []
    for mask, is_padding in ((args.attn_mask, False), (args.key_padding_mask, True)):
        if mask is None:
            continue
        origin = _bool_origin(emit, mask)
        mask = mask if origin is None else origin
        if appended:
            mask = emit(F.pad, mask, (0, appended))  # what was appended is seen
        if is_padding:  # [B, S]
            mask = _unsqueezed(emit, mask, 1, 1)
        elif value_of(mask).dim() == 2:  # [L, S]
            mask = _unsqueezed(emit, mask, 0, 0)
        else:  # [B*H, L, S]
            mask = emit(torch.unflatten, mask, 0, (-1, args.num_heads))
        (hidden if value_of(mask).dtype == torch.bool else added).append(mask)

    hides = functools.reduce(functools.partial(emit, torch.logical_or), hidden) if hidden else None
    adds = functools.reduce(functools.partial(emit, torch.add), added) if added else None
    if hides is None:
        return adds
    if adds is None:
        return emit(torch.logical_not, hides)
    return emit(torch.masked_fill, adds, hides, -math.inf)


# -- torch._transformer_encoder_layer_fwd -----------------------------------------------------


def _encoder_layer(node: Node, emit: Emitter) -> Call:
    """node: [B, N, E], as its src."""
    args = SimpleNamespace(**by_schema(node, torch.ops.aten._transformer_encoder_layer_fwd))
    spelling = "nn.TransformerEncoderLayer"
    reason = _unprojectable(node, args.src, args.num_heads, emit.index)
    if reason:
        inputs = (args.src,) * 3
        return Call(node, spelling, emit, *inputs, value_of(node), refused=reason)

    norms = (args.norm_weight_1, args.norm_bias_1), (args.norm_weight_2, args.norm_bias_2)
    norm1, norm2 = (
        functools.partial(
            emit, F.layer_norm, normalized_shape=(args.embed_dim,), weight=w, bias=b, eps=args.eps
        )
        for w, b in norms
    )
    x = norm1(args.src) if args.norm_first else args.src
    q, k, v = _heads(emit, x, args.qkv_weight, args.qkv_bias, 3, args.num_heads, batch_dim=0)
    attn_mask = None
    if args.mask is not None:
        hides = _hidden(emit, args.mask)
        if args.mask_type == 1:  # [B, S]
            hides = _unsqueezed(emit, hides, 1, 1)
        attn_mask = emit(torch.logical_not, hides)

    def feed_forward(x: Node) -> Node:
        x = emit(F.linear, x, args.ffn_weight_1, args.ffn_bias_1)
        x = emit(F.gelu if args.use_gelu else F.relu, x)
        return emit(F.linear, x, args.ffn_weight_2, args.ffn_bias_2)

    def finish(out: Node) -> Node:
        out = emit(F.linear, _joined(emit, out), args.proj_weight, args.proj_bias)
        x = emit(torch.add, args.src, out)
        if args.norm_first:
            x = emit(torch.add, x, feed_forward(norm2(x)))
        else:
            x = norm1(x)
            x = norm2(emit(torch.add, x, feed_forward(x)))
        return emit(torch.ops.aten.contiguous.default, x)

    return Call(
        node, spelling, emit, q, k, v, _attention_value(node, q, k, v, attn_mask),
        attn_mask=attn_mask,
        finish=finish,
        refused=_other_dtype(args.src, q) or _other_dtype(node, q),
    )  # fmt: skip


def _hidden(emit: Emitter, mask: Node) -> Node:
    """Where the fast path's mask is not 0, not expanded: merge_masks undone."""
    origin = _bool_origin(emit, mask)
    if origin is not None:
        return origin
    if op_name(mask) == "add" and len(mask.all_input_nodes) == len(mask.args) == 2:
        origins = [_bool_origin(emit, each) for each in mask.args]
        kept = not any(emit.index.written_after(each, mask) for each in mask.args)
        if kept and all(origin is not None for origin in origins):
            return emit(torch.logical_or, *origins)
    if op_name(mask) == "expand" and value_of(mask.args[0]).dim() == 4:
        return _hidden(emit, mask.args[0])
    return emit(torch.ne, mask, 0)


# -- both -------------------------------------------------------------------------------------


def _heads(emit, x, weight, bias, count: int, H: int, batch_dim: int) -> list[Node]:
    """`count` projections of x ([B, N, E], or [N, B, E] for batch_dim 1): views [B, H, N, D]."""
    x = emit(torch.unflatten, emit(F.linear, x, weight, bias), -1, (count, H, -1))
    x = emit(torch.permute, x, (2, batch_dim, 3, 1 - batch_dim, 4))  # [count, B, H, N, D]
    x = emit(torch.unbind, x)
    return [emit(operator.getitem, x, i) for i in range(count)]


def _joined(emit: Emitter, out: Node) -> Node:
    """[B, H, N, D] -> [B, N, E], a view of what attention stores as [B, N, H, D]."""
    return emit(torch.flatten, emit(torch.transpose, out, 1, 2), 2)


def _attention_value(node: Node, *inputs: Node | None) -> torch.Tensor:
    """[B, H, N, D], stored as [B, N, H, D]: what `_joined` views."""
    B, H, N, D = value_of(inputs[0]).shape
    out = value_of(inputs[0]).new_empty(B, N, H, D).transpose(1, 2)
    needs_grad = any(value_of(x).requires_grad for x in inputs if x is not None)
    return out.requires_grad_(needs_grad and value_of(node).requires_grad)


def _bool_origin(emit: Emitter, mask: Node) -> Node | None:
    """The bool mask of which `mask` is itself, or the float form: -inf where True, else 0."""
    if value_of(mask).dtype == torch.bool:
        return mask
    source = mask.args[0] if mask.args else None
    if op_name(mask) == "masked_fill_" and op_name(source) == "zeros_like":  # F._canonical_mask
        origin = source.args[0]
        same = mask.args[1:] == (origin, -math.inf) and len(source.users) == 1
        same = same and value_of(origin).dtype == torch.bool
        written = emit.index.written_after
        return origin if same and not (written(mask, mask) or written(origin, mask)) else None
    if op_name(mask) == "expand" and value_of(source).dim() == 4:  # merge_masks; SDPA broadcasts
        return _bool_origin(emit, source)
    if op_name(mask) == "view" and len(mask.args) == 5:  # merge_masks
        origin = _bool_origin(emit, source)
        return origin and emit(torch.ops.aten.view.default, origin, list(mask.args[1:]))
    return None


def _unsqueezed(emit: Emitter, x: Node, *dims: int) -> Node:
    return functools.reduce(functools.partial(emit, torch.unsqueeze), dims, x)


def _is_item(node: Node, i: int) -> bool:
    return node.target is operator.getitem and node.args[1] == i


def _unprojectable(node: Node, x: Node, num_heads, index: GraphIndex) -> Reason | None:
    """The reason the projections cannot be written, or None if they can."""
    if index.functorch_depth(node):
        return reasons.IN_A_TRANSFORM()
    for value in map(value_of, node.all_input_nodes):
        if value is None:
            return reasons.NO_SHAPES()
        if isinstance(value, torch.Tensor) and (
            type(value) is not compat.FakeTensor or value.layout != torch.strided
        ):
            return reasons.SUBCLASS(type(value).__name__)
    if value_of(x).dim() != 3:
        return reasons.UNBATCHED(value_of(x).dim())
    if not isinstance(num_heads, int):
        return reasons.NUM_HEADS(num_heads)
    return None


def _used_otherwise(mha: Node) -> Reason | None:
    for user in mha.users:
        if _is_item(user, 1) and not all(graph.idle(reader, user) for reader in user.users):
            return reasons.WEIGHTS_USED()
        if user.target is not operator.getitem:
            return reasons.OUT_AS_TUPLE(user.name)
    return None


def _other_dtype(node: Node, q: Node) -> Reason | None:
    """What `GraphIndex.autocasts_around` cannot see, and the fast path under autocast."""
    given, got = value_of(node).dtype, value_of(q).dtype
    return None if given == got else reasons.OTHER_DTYPE(given, got)
