"""What each recipe's error is at the attention calls of a model, while it runs.

Before each attention call that ``sage::sdpa`` can stand for, a probe gets the call's own q, k, v
and mask, and computes what exact attention gives and what each recipe does: no recipe's error
reaches the next call.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import collections
import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor import stages
from sage_inductor.choose.candidates import auto_recipes
from sage_inductor.choose.cost import SHORTEST, Prediction
from sage_inductor.choose.decide import decide, predicted
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.recipe import NAMED, RecipeName
from sage_inductor.ops.reference.exact import attention_exact, masked
from sage_inductor.ops.sdpa import SdpaCall
from sage_inductor.ops.sparse.selector import selected
from sage_inductor.ops.visibility import FULL, Band, as_4d
from sage_inductor.options import Settings
from sage_inductor.patterns import Decision, Site, reasons, rewrite
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.shared_kv import stacks
from sage_inductor.policy import Rule
from sage_inductor.study.findings import Finding, badness, keep_worst

SDPA = "sdpa"  # in the place of a recipe: scaled_dot_product_attention in the model's own dtype
STUDY = Settings(emulate=True, force=True)
QUIET_S = 3.0  # before progress is shown
# Numbers of a tensor that is computed at one time, 128 MiB in float64: the scores of exact
# attention, the outputs that are compared with it and, on CPU, the scores of an emulation.
MAX_SCORES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Row(Finding):
    """Relative L1: sum |error| / sum |exact|."""

    cos_sim: float
    relative_l1: float
    rmse: float
    worst_head: tuple[int, float]  # head, its relative L1
    worst_row: tuple[int, int, int, float]  # batch, head, row, its relative L1
    predicted: Prediction | None = None  # its time and SDPA's, where such calls were timed

    number = property(lambda self: self.relative_l1)

    @property
    def cells(self) -> tuple:
        """A row for Diagnosis.COLUMNS."""
        (head, of_head), (*where, of_row) = self.worst_head, self.worst_row
        return (
            self.where, self.site.spelling, *self.sizes, self.recipe, f"{self.cos_sim:.6f}",
            self.relative_l1, self.rmse, head, of_head, ", ".join(map(str, where)), of_row,
            *(self.predicted[1:3] if self.predicted else ("", "")),
        )  # fmt: skip


class Found:
    """What is kept of an attention call."""

    def __init__(self, site: Site, autos: tuple[str, ...]):
        self.site, self.autos = site, autos
        # By stage and recipe: the worst run, and the times of all runs together.
        self.rows: dict[str | None, dict[str, Row]] = {}
        self.times: dict[str | None, dict[str, Prediction]] = {}
        # The relative L1 of each head in its worst run; NaN where runs have other numbers of heads.
        self.heads: dict[str | None, dict[str, Tensor]] = {}

    def add(self, row: Row, heads: Tensor) -> None:
        stage, time = row.site.stage, row.predicted
        keep_worst(self.rows.setdefault(stage, {}), row.recipe, row)
        worst = self.heads.setdefault(stage, {})
        known = worst.get(row.recipe, heads)
        is_same = known.shape == heads.shape
        worst[row.recipe] = known.maximum(heads) if is_same else heads * torch.nan
        if time is not None:
            times = self.times.setdefault(stage, {})
            if known := times.get(row.recipe):
                time = time._replace(ours=known.ours + time.ours, sdpa=known.sdpa + time.sdpa)
            times[row.recipe] = time

    @property
    def errors(self) -> dict[str | None, dict[str, float]]:
        """By stage and recipe: Row.badness."""
        of_stages = self.rows.items()
        return {stage: {x: row.badness for x, row in of.items()} for stage, of in of_stages}


class Measured:
    """What is kept of all attention calls. A call's key is its module, its node's name and, since
    modules may have no name, its number among the calls of these names in a run. So a graph that
    Dynamo makes again, for other sizes, adds no call."""

    def __init__(self, recipes: tuple[RecipeName, ...], keeps: dict[str, Rule]):
        self.rules = {name: Rule(name) for name in recipes} | keeps  # keeps: by their names
        self.calls: dict[tuple, Found] = {}
        self.refused: dict[tuple, Site] = {}
        self.graphs = collections.Counter()  # of this run, by the call
        self.progress = None

    def run(self, run: Callable, model, args: tuple, kwargs: dict):
        """What `model` returns. run: backend.op_by_op's."""
        self.graphs.clear()
        with contextlib.closing(call_progress(len(self.calls))) as self.progress:
            return run(model, args, kwargs)

    def see(self, gm: torch.fx.GraphModule) -> None:
        calls, known = [], len(self.calls)
        for site in rewrite(gm, _measurable, put=lambda *each: calls.append(each)):
            if not site.rewritten:
                self.refused.setdefault(self._key(site), site)
        # Probes are inserted when all calls are found: to a proof of what a mask says a probe is a
        # call that may write to the mask.
        for call, site in calls:
            shape = call.shape
            autos = auto_recipes(shape.capability, shape.head_dim)
            found = self.calls.setdefault(self._key(site), Found(site, autos))
            self._measure(call, shape, found)
        self.progress.total += len(self.calls) - known

    def _measure(self, call: Call, shape: CallShape, found: Found) -> None:
        """The call, whenever the graph is about to make it."""
        recipes: dict[str, Decision] = {}
        for name, rule in self.rules.items():
            decision = decide(call, dataclasses.replace(STUDY, policy=(rule,)))
            recipes |= {name: decision} if decision.recipe else {}
        stacked = {name for name in recipes if name in NAMED and stacks(call, NAMED[name])}

        @torch.no_grad()
        def measure(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> None:
            scale = float(q.shape[3] ** -0.5 if call.scale is None else call.scale)
            sizes = {name: tuple(x.shape) for name, x in zip("qkv", (q, k, v), strict=True)}
            stage, mask = stages.current(), None if attn_mask is None else tuple(attn_mask.shape)
            site = dataclasses.replace(found.site, q=sizes["q"], k=sizes["k"], stage=stage)
            now = shape._replace(**sizes, mask=mask)
            errors = errors_of(q, k, v, attn_mask, shape.band, scale, {SDPA: None, **recipes})
            for name, error in errors.items():
                is_timed = name in NAMED and min(now.lengths) >= SHORTEST
                time = predicted(now, name, name in stacked) if is_timed else None
                found.add(Row(site, name, *error.numbers_of_row, time), _ratio(*error.heads))
            self.progress.update()

        call.emit.insert(measure, (call.q, call.k, call.v, call.attn_mask), None)

    def _key(self, site: Site) -> tuple:
        name = site.module, site.call
        self.graphs[name] += 1
        return *name, self.graphs[name]

    def refusals(self) -> list[Site]:
        """The calls without rows."""
        never, calls = Decision(None, reasons.NOT_RUN()), self.calls.values()
        not_run = (dataclasses.replace(x.site, decision=never) for x in calls if not x.rows)
        return [*self.refused.values(), *not_run]


def _measurable(call: Call) -> Decision:
    if call.blocks.size is not None:
        return Decision(None, reasons.NO_EXACT("by block lists"))
    if call.documents is not None:
        return Decision(None, reasons.NO_EXACT("of packed documents"))
    if call.sink is not None:
        return Decision(None, reasons.NO_EXACT("with a learned sink"))
    return decide(call, STUDY)


def call_progress(total: int = 0):
    """How many calls are measured, on stderr; nothing is shown in the first seconds."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = _Lines
    return tqdm(desc="diagnose", unit=" calls", total=total, delay=QUIET_S, leave=False)


class _Lines:
    """In tqdm's place."""

    def __init__(self, total: int, **_):
        self.n, self.total, self.said = 0, total, time.monotonic()

    def update(self) -> None:
        self.n += 1
        if time.monotonic() - self.said > QUIET_S:
            self.said = time.monotonic()
            sys.stderr.write(f"diagnose: {self.n} of {self.total} calls measured\n")

    def close(self) -> None:
        pass


class Error:
    """How far an output is from the exact one, which are given a part at a time."""

    def __init__(self, heads: int):
        self.sums = torch.zeros(6, dtype=torch.float64)
        self.heads = torch.zeros(2, heads, dtype=torch.float64)  # sums of |error| and |exact|
        self.numbers, self.worst_row = 0, (-1.0, (0, 0, 0))

    def add(self, actual: Tensor, exact: Tensor, b: int = 0, h: int = 0) -> None:
        """[B', H', N_q, D_v], the part of the output that begins at (b, h)."""
        actual, exact = actual.double(), exact.double()
        error = actual - exact
        error, size, squares = error.abs(), exact.abs(), (error, actual, exact)
        self.sums += torch.stack([
            error.sum(), size.sum(), (actual * exact).sum(), *(x.square().sum() for x in squares)
        ]).cpu()  # fmt: skip
        self.numbers += exact.numel()
        of_heads = torch.stack([error.sum((0, 2, 3)), size.sum((0, 2, 3))]).cpu()
        self.heads[:, h : h + exact.shape[1]] += of_heads
        rows = _ratio(error.sum(3), size.sum(3))
        at = rows.argmax()  # of a NaN, if there is one
        i, j, row = (int(n) for n in torch.unravel_index(at, rows.shape))
        found = rows[i, j, row].item(), (b + i, h + j, row)
        self.worst_row = max(self.worst_row, found, key=lambda each: badness(each[0]))

    @property
    def numbers_of_row(self) -> tuple:
        """Row's fields, from cos_sim on."""
        error, size, product, squares, of_actual, of_exact = self.sums
        heads = _ratio(*self.heads)
        head, (of_row, where) = int(heads.argmax()), self.worst_row
        return (
            (product / (of_actual.sqrt() * of_exact.sqrt())).item(), _ratio(error, size).item(),
            (squares / self.numbers).sqrt().item(), (head, heads[head].item()), (*where, of_row),
        )  # fmt: skip


def compare(actual: Tensor, exact: Tensor) -> dict[str, float]:
    """CosSim, relative L1 (sum |error| / sum |exact|) and RMSE of [B, H, N, D]."""
    error = Error(exact.shape[1])
    error.add(actual, exact)
    return dict(zip(("CosSim", "relative L1", "RMSE"), error.numbers_of_row[:3], strict=True))


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / size)  # a row that sees nothing is 0, and right


def errors_of(
    q, k, v, attn_mask, band: Band, scale: float, decisions: dict[str, Decision | None]
) -> dict[str, Error]:
    """By SDPA (None) or a recipe. Recipes share nothing between heads, so a part of them is
    computed at a time, with the heads of q that they serve."""
    (B, H_q, N_q, _), (H_kv, N_kv) = q.shape, k.shape[1:3]
    G, holds_scores = H_q // H_kv, q.device.type == "cpu"  # the emulation does
    columns = max(v.shape[3], N_kv if holds_scores else 0)
    pairs = max(1, MAX_SCORES // max(1, G * N_q * columns))  # of a batch and a head of k
    heads, batches = min(H_kv, pairs), max(1, min(B, pairs // H_kv))
    found, mask = {name: Error(H_q) for name in decisions}, None
    for b, h in itertools.product(range(0, B, batches), range(0, H_kv, heads)):
        of_b, of_kv = slice(b, b + batches), slice(h, h + heads)
        of_q = slice(h * G, (h + heads) * G)
        if attn_mask is not None:
            mask, every = as_4d(attn_mask), slice(None)
            shared = mask.shape[0] == 1, mask.shape[1] == 1  # by batches, by heads
            mask = mask[every if shared[0] else of_b, every if shared[1] else of_q]
        inputs = q[of_b, of_q], k[of_b, of_kv], v[of_b, of_kv], mask, band, scale
        exact = _exact_out(*inputs)
        for name, error in found.items():
            error.add(_computed(decisions[name], of_q, *inputs), exact, b, h * G)
    return found


def _exact_out(q, k, v, attn_mask, band: Band, scale: float) -> Tensor:
    """Exact attention in float64, a part of the rows of one head at a time."""
    (B, H, N_q, _), N_kv = q.shape, k.shape[2]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(B, H, N_q, N_kv)
    left, right = band.from_the_top(N_q, N_kv)
    rows = max(1, MAX_SCORES // (B * N_kv))
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    for h, first in itertools.product(range(H), range(0, N_q, rows)):
        part = slice(None), slice(h, h + 1), slice(first, first + rows)
        kv = slice(None), slice(h // (H // k.shape[1]), h // (H // k.shape[1]) + 1)
        with torch.autocast(q.device.type, enabled=False):
            out[part], _ = attention_exact(
                q[part], k[kv], v[kv], scale, None if attn_mask is None else attn_mask[part],
                None if left is None else left - first, None if right is None else right + first,
            )  # fmt: skip
    return out


def _computed(
    by: Decision | None, heads: slice, q, k, v, attn_mask, band: Band, scale: float
) -> Tensor:
    """By a recipe, and the blocks that are selected, or by SDPA. heads: which of q's are given."""
    if by is not None and by.recipe is not None:
        call = SdpaCall.of(q, k, v, scale, NAMED[by.recipe].encode(), attn_mask, band)
        if by.selection is not None:
            call = call._replace(**selected(q, k, scale, by.selection.of(heads)))
        return torch.ops.sage.sdpa(*call)[0]
    if band != FULL:
        none = q.new_zeros(q.shape[2], k.shape[2])
        attn_mask = masked(none, attn_mask, *band)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale, enable_gqa=True)
