"""flex_attention that is attention under a band, proven from the graph alone, or by block lists.

    before:  block_mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, N, N)
             out = flex_attention(q, k, v, block_mask=block_mask)
    found:   Call(q, k, v, band=Band(None, 0))

mask_mod is a graph of four numbers b, h, i and j, and is read like a mask (bands.py). But flex
looks at the blocks of keys that the BlockMask lists, and applies mask_mod within the partial ones
only. So a band is all there is only where the lists say the same: every block that the band touches
is listed once, and every block listed as full lies inside the band. They are known when they are
constants of the graph: create_block_mask inside the compiled function, with static lengths. It is
then run, on the CPU. All other lists are operands, whatever made them:

    before:  block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128)
             out = flex_attention(q, k, v, block_mask=block_mask)
    found:   Call(q, k, v, blocks=BlockLists(counts, indices, None, None, 128, 128))

That is what compiled flex_attention computes. In eager mode it applies mask_mod to all keys and
does not read the lists (seen, torch 2.13).
"""

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from sage_inductor.ops import compat
from sage_inductor.ops.symbols import guarded, specialised
from sage_inductor.ops.visibility import BLOCK_SIZES, Band, BlockLists
from sage_inductor.patterns import graph, reasons
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.graph import Emitter, GraphIndex, op_name, statically_true, value_of
from sage_inductor.patterns.masks.bands import as_additive, read_band
from sage_inductor.patterns.masks.index_analysis import IndexAnalysis
from sage_inductor.patterns.masks.index_expr import Affine, TwoValued

MAX_EVALUATED = 2**26  # N_q * N_kv of a BlockMask: 8192 x 8192 took 1.9 s and 1.7 GB, on two cores

RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "empty")


def find(node: Node, index: GraphIndex) -> Call | None:
    """The call whose output `node` is: getitem(flex_attention, 0). Its HOP is then without users
    and can be erased; what made its BlockMask (vmap's nodes among it) is best left to AOTAutograd:
    fx.eliminate_dead_code would take vmap's increments from under other uses of vmap."""
    hop = node.args[0] if op_name(node) == "getitem" else None
    is_flex = op_name(hop) == "flex_attention" and node.args[1] == 0
    if not is_flex or not isinstance(hop.target, compat.HigherOrderOperator):
        return None
    q, k, v, score_mod, block_mask, scale, _, score_inputs, mask_inputs = hop.args
    call = Call(
        node, "flex_attention", Emitter(hop, index), q, k, v, value_of(node),
        scale=graph.as_float(scale),
        enable_gqa=not statically_true(value_of(q).shape[1] == value_of(k).shape[1]),
    )  # fmt: skip
    others = [user for user in hop.users if user is not node]
    call.dead = graph.left_over({hop}, node)
    if any(op_name(x) != "getitem" or not all(graph.idle(y, x) for y in x.users) for x in others):
        call.refused = reasons.LSE_USED()
    elif _result(of_scores := _subgraph(score_mod)) is not next(iter(of_scores.nodes)):
        call.refused = reasons.SCORE_MOD()
    elif score_inputs or mask_inputs:
        call.refused = reasons.MOD_CAPTURES()
    else:
        _read_block_mask(call, hop, block_mask, index)
    return call


def _subgraph(attribute: Node) -> torch.fx.Graph:
    return getattr(attribute.graph.owning_module, attribute.target).graph


def _result(graph: torch.fx.Graph) -> Node:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return output.args[0][0] if isinstance(output.args[0], (tuple, list)) else output.args[0]


def _read_block_mask(call: Call, hop: Node, block_mask: tuple, index: GraphIndex) -> None:
    """Say in `call` which keys its queries see, or why that is not known."""
    q, k = value_of(call.q), value_of(call.k)
    band = _mask_band(_subgraph(block_mask[-1]), q, k)
    if band is None:
        call.refused = reasons.MASK_MOD()
        return
    call.band = band
    blocks = BlockLists(*block_mask[2:6], *block_mask[-3:-1])
    if _says_the_same(band, blocks, hop, q.shape[2], k.shape[2], index):
        return
    call.blocks = blocks
    if not all(size in BLOCK_SIZES for size in blocks.size):
        call.refused = reasons.BLOCK_SIZE(BLOCK_SIZES, blocks.size)


def _says_the_same(
    band: Band, blocks: BlockLists, hop: Node, n_q, n_kv, index: GraphIndex
) -> bool:  # fmt: skip
    """Whether the lists are known to be those of the band."""
    lists, (block_q, block_kv) = blocks[:4], blocks.size
    fits = guarded(n_q <= block_q) and guarded(n_kv <= block_kv)
    if fits and _is_one_block(lists, index):
        return True
    needed = _needed(hop, [node for node in lists if node is not None], index)
    if any(map(_is_data, needed)) or not guarded(n_q * n_kv <= MAX_EVALUATED):
        return False
    n_q, n_kv = specialised(n_q), specialised(n_kv)
    if (needed, lists) not in index.block_lists:  # the layers of a model share a BlockMask
        index.block_lists[needed, lists] = _evaluate(needed, lists)
    lists = index.block_lists[needed, lists]
    return lists is not None and _covers(band, lists, n_q, n_kv, block_q, block_kv)


def _is_data(node: Node) -> bool:
    """Whether a node may have another value in each call (an input, even a length, or a random
    number), or cannot be run here (a torch.func transform other than vmap)."""
    name = op_name(node)
    transform = name.endswith(graph.NESTING) and "vmap" not in name
    random = any(word in name for word in RANDOM)
    return node.op in ("get_attr", "placeholder") or random or transform


def _mask_band(mask_mod: torch.fx.Graph, q, k) -> Band | None:
    sizes = {"b": q.shape[0], "h": q.shape[1], "i": q.shape[2], "j": k.shape[2]}
    numbers = (node for node in mask_mod.nodes if node.op == "placeholder")
    facts = {node: Affine(0, {x: 1}) for node, x in zip(numbers, sizes, strict=True)}
    result = _result(mask_mod)
    analysis = IndexAnalysis(GraphIndex(mask_mod), facts, sizes)
    meaning = as_additive(analysis.describe(result), value_of(result))
    if meaning is None or meaning.conjuncts:
        return None
    return read_band(meaning.bounds, sizes, "i", "j")


def _is_one_block(lists, index: GraphIndex) -> bool:
    """What flex_attention makes of block_mask=None: one partial block, the first."""
    analysis = IndexAnalysis(index)
    count, index = (analysis.describe(node) for node in lists[:2])
    constants = isinstance(count, TwoValued) and isinstance(index, TwoValued)
    constants = constants and count.constant and index.constant and lists[2] is None
    return constants and count.yes == 1 and index.yes == 0


def _needed(hop: Node, nodes, index: GraphIndex) -> tuple[Node, ...]:
    """What must run before `hop` to have `nodes`: what they are made of, what writes to that, and
    vmap's own bookkeeping. In graph order."""
    writers = [node for node in index.writers if node < hop]
    needed, stack = set(), list(nodes)
    while stack:
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += node.all_input_nodes
        made = (node for node in needed if node.op != "placeholder")
        stored = {key for node in made for key in graph.storages(node)}
        others = (node for node in writers if node not in needed)
        stack = [node for node in others if stored.intersection(graph.storages(node))]
    return tuple(sorted(needed.union(node for node in index.nesting if node < hop)))


def _evaluate(needed: tuple, nodes: tuple) -> list | None:
    """The tensors that `nodes` are; None if `needed` cannot be run."""
    values, depth = {}, 0
    here = torch.device("cpu")

    def concrete(args):
        args = map_aggregate(args, lambda x: here if isinstance(x, torch.device) else x)
        return map_arg(args, values.__getitem__)

    with compat.unset_fake_temporarily(), torch.no_grad():
        try:
            for node in needed:
                if node.op == "call_method":
                    self, *args = concrete(node.args)
                    values[node] = getattr(self, node.target)(*args, **concrete(node.kwargs))
                else:
                    values[node] = node.target(*concrete(node.args), **concrete(node.kwargs))
                depth += op_name(node) == "_vmap_increment_nesting"
                depth -= op_name(node) == "_vmap_decrement_nesting"
        except Exception:  # noqa: BLE001  (the user's ops may raise anything: it is data)
            return None
        finally:
            for _ in range(depth):
                compat.functorch._vmap_decrement_nesting()
    return [None if node is None else values[node] for node in nodes]


def _covers(band: Band, lists, n_q: int, n_kv: int, block_q: int, block_kv: int) -> bool:
    """Whether every block that the band touches is listed once, and all full ones lie inside it."""
    i = torch.arange(n_q) + (n_kv - n_q if band.bottom_right else 0)
    first = torch.zeros_like(i) if band.left is None else i - band.left  # [N_q], the first key
    last = torch.full_like(i, n_kv) if band.right is None else i + band.right
    start = torch.arange(0, n_kv, block_kv)
    end = (start + block_kv).clamp(max=n_kv) - 1
    first, last = first[:, None].clamp(min=0), last[:, None].clamp(max=n_kv - 1)
    touched = (torch.maximum(first, start) <= torch.minimum(last, end)).split(block_q)
    inside = ((first <= start) & (end <= last)).split(block_q)
    touched = torch.stack([rows.any(0) for rows in touched])  # [blocks of queries, of keys]
    inside = torch.stack([rows.all(0) for rows in inside])
    partial, full = _listed(*lists[:2], touched.shape), _listed(*lists[2:], touched.shape)
    if partial is None or full is None:
        return False
    listed = partial + full
    return bool(((listed == 1) | ((listed == 0) & ~touched)).all() and (inside | (full == 0)).all())


def _listed(count, index, shape) -> torch.Tensor | None:
    """How often each block is listed, [B, H, blocks of queries, of keys]; None: out of range."""
    if count is None:
        return torch.zeros(1, 1, *shape, dtype=torch.long)
    counts = torch.zeros(*index.shape[:3], shape[1] + 1, dtype=torch.long)  # 1: what is not used
    used = torch.arange(index.shape[3]) < count[..., None]
    if index.shape[2] < shape[0] or (used & ((index < 0) | (index >= shape[1]))).any():
        return None
    counts.scatter_add_(3, index.long().clamp(0, shape[1]), used.long())
    return counts[:, :, : shape[0], : shape[1]]
