"""What was seen since the last ``torch._dynamo.reset()``, which forgets it."""

import re
import sys
import types

from sage_inductor.ops import compat
from sage_inductor.ops.notes import NOTES

_ATTENTION = re.compile(r"(scaled_dot_product|flex|multi_head)_attention\w*\(")
_NESTED = re.compile("nested.?tensor", re.I)
_TOLD = {  # by the reason's name: lines at which a graph breaks
    "CHUNKED": re.compile(r"split\(.*\.tolist\(\).*\b(k|keys?|key_states)\b"),
    "FROM_POSITIONS": re.compile(r"_is_packed_sequence\("),
    "SPARGE": re.compile(r"_block_sparse_attn_inst_buf\w*\("),
}


class Seen:
    """The graphs that were compiled since it was made, to say why none has an attention call, and
    which call is in none."""

    def __init__(self):
        self.graphs = 0  # that the pass saw
        self._compiled, self._breaks = self._counted()
        self._known = self._broken()

    @staticmethod
    def _counted() -> tuple[int, dict[str, int]]:
        if not _dynamo_is_there():
            return 0, {}
        return compat.counters["stats"]["unique_graphs"], dict(compat.counters["graph_break"])

    @staticmethod
    def _broken() -> list:
        """A copy: Dynamo's reset empties its own."""
        return list(_dynamo_is_there() and compat.graph_break_reasons or ())

    def left_to_eager(self) -> list[str]:
        """A line for each place where a graph breaks at an attention call, at packed documents, at
        SpargeAttn's kernels or at nested tensors. On a CPU attention to these always breaks it."""
        from sage_inductor.patterns import reasons  # which takes sympy with it

        known, found, told = set(map(id, self._known)), {}, {}
        for each in self._broken():
            call = each.user_stack[-1] if each.user_stack else None
            if id(each) in known or not call:
                continue
            line, place = call.line or "", f"{call.filename}:{call.lineno}"
            if _ATTENTION.search(line):
                found[f"attention at {place}"] = each.reason
            for name in (name for name, at in _TOLD.items() if at.search(line)):
                why = getattr(reasons, name)
                told[place] = f"{place}: {why(self.graphs)}; {why.remedy}"
        for text in self._new_breaks():
            if _NESTED.search(text) and text not in found.values():
                found["attention to nested tensors"] = text
        return [*told.values()] + [
            f"{what} stays in eager: a graph breaks there ({text.strip().splitlines()[0]})"
            for what, text in found.items()
        ]

    def _new_breaks(self) -> list[str]:
        breaks = self._counted()[1]
        return [text for text, n in breaks.items() if n > self._breaks.get(text, 0)]

    def why_without(self) -> str:
        compiled, new = self._counted()[0], self._new_breaks()
        others = compiled - self._compiled - self.graphs
        broken = (
            "; a graph break leaves what it is about to eager, with the attention in it: "
            f"{new[0].strip().splitlines()[0]}" if new else ""
        )  # fmt: skip
        if self.graphs:
            return f"none of {self.graphs} compiled graphs has one" + broken
        if others > 0:
            taken = (
                "an outer torch.compile takes the blocks in it for its own, whatever their backend"
            )
            return f"{others} graphs were compiled, none by sage ({taken})" + broken
        return "nothing was compiled" + broken


def _dynamo_is_there() -> bool:
    """Whether there can be anything to count. `import sage_inductor` does not import it."""
    return "torch._dynamo.utils" in sys.modules


class Session:
    def __init__(self):
        self.sites = []  # (graph, site), of report.py
        self.policies, self.calls = [], {}  # and, by the rules, (graph, module) of each call
        self.rules_of_files = {}  # of policy.py: what a file said first
        self.seen = Seen()
        self.stages: set[str] = set()  # that were in force
        self.runs, self.recorded = {}, set()  # of functional.py


def session() -> Session:
    known = compat.cached_backends  # a reset calls what is listed here, and empties the list
    if id(_begin) not in known:
        known[id(_begin)] = types.SimpleNamespace(reset=_begin)
    return _session


def _begin() -> None:
    global _session
    _session = Session()
    NOTES.clear()


_begin()
