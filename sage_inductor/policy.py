"""Which recipe each attention call gets: rules, the first that fits decides; or a function.

    {
      "version": 1,
      "rules": [
        {"module": "*.cross_attention", "recipe": "off"},
        {"layer": [0, 3], "head_dim": [64, 128], "length": [4096, null], "recipe": "sage1"},
        {"recipe": "auto"}
      ]
    }

    torch.compile(model, backend="sage", options={"sage.policy": "policy.json"})

``sage.policy`` and ``sage_inductor.config.policy`` take the path of such a file, what is in it (a
dict, or the list of its rules), a Policy, or a function that is called with a CallDescription and
returns what "recipe" may say, or None: no opinion.

docs/guide/policy.md says what each field means. A rule fits a call if each of its fields does. A
call that no rule fits asks for ``sage.recipe``.
"""

import collections
import contextlib
import dataclasses
import fnmatch
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sage_inductor import names, stages
from sage_inductor.names import RecipeOption, TrainingOption, is_integer
from sage_inductor.ops import compat
from sage_inductor.ops.formats import HEAD_DIMS, TAIL_BLOCKS
from sage_inductor.ops.notes import warn_once
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sparse.selector import EACH, RULES, Selection
from sage_inductor.session import session

VERSION = 1
# What says which blocks of keys are kept.
KeepOption = Selection | dict[str, Any] | Sequence[float] | float


@dataclasses.dataclass(frozen=True)
class Rule:
    """The recipe of the calls that fit every field. Ranges are inclusive, None: open.

    recipe: a recipe's name, "auto" or "off".
    module: a glob of the calling module's path, as the report shows it; * also stands for dots, and
    "*.attn" fits "attn", too.
    layer: the first number in that path.
    head_dim: q's.
    length: the rows of q.
    stage: the rule holds in this stage only (sage_inductor.stage).
    keep: self-attention computes the blocks of keys that score highest: this fraction of them, or
    one for each head of q, or as a Selection says; recipe must be a name.
    training: in the place of ``sage.training``, for calls that need gradients.

    Raises ValueError for an unknown recipe; a Policy checks the other fields.
    """

    recipe: RecipeOption
    module: str = "*"  # a glob, of Site.module
    layer: int | tuple[int | None, int | None] = (None, None)  # the first number in Site.module
    head_dim: int | tuple[int, ...] = ()  # q's; none: any
    length: tuple[int | None, int | None] = (None, None)  # N_q
    stage: str | None = None  # None: every one
    keep: KeepOption | None = None  # of the blocks of keys; a Policy has Selections
    training: TrainingOption | None = None  # None: as the settings say

    def __post_init__(self):
        names.check_recipe("Rule: recipe", self.recipe)
        for name, times in (("layer", 2), ("head_dim", 1)):
            if isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, (value,) * times)

    def fits(
        self, module: str, head_dim: int, at_least: Callable[[int], bool], stage: str | None = None
    ) -> bool:
        """Whether this rule is about a call in a stage. ``at_least(n)`` says whether the call's N_q
        is n or more. It is asked last, because an answer about a dynamic length is a guard. So is
        one about a dynamic head_dim."""
        first, last = self.length
        return (
            self.stage in (None, stage)
            and self.fits_module(module)
            and (not self.head_dim or head_dim in self.head_dim)
            and (first is None or at_least(first))
            and (last is None or not at_least(last + 1))
        )

    def fits_module(self, module: str) -> bool:
        """Whether this rule is about calls that `module` makes."""
        layer, (first, last) = layer_of(module), self.layer
        if layer is None and self.layer != (None, None):
            return False
        globs = self.module, self.module.removeprefix("*.")
        return (
            any(fnmatch.fnmatchcase(module, glob) for glob in globs)
            and (first is None or layer >= first)
            and (last is None or layer <= last)
        )


def layer_of(module: str) -> int | None:
    """The first number in a path: 3 of ``decoder.layers.3.attn``."""
    return next((int(name) for name in module.split(".") if name.isdecimal()), None)


FIELDS = tuple(field.name for field in dataclasses.fields(Rule))


@dataclasses.dataclass(frozen=True)
class CallDescription:
    """The attention call that a policy function is asked about.

    length and length_kv are numbers, or symbols where the shape is dynamic. A comparison with a
    symbol (``call.length >= 4096``) becomes a guard, and each answer gets a graph of its own. A
    length that depends on data is 1: nothing more is known of it."""

    module: str  # the path, as for a rule
    layer: int | None  # the first number in it
    head_dim: int  # of q and k
    length: int | torch.SymInt  # N_q
    length_kv: int | torch.SymInt  # N_kv
    kind: str  # "full", "causal", "window", "flex window", "keys", "mask", "bias" or "blocks"
    dtype: torch.dtype  # that attention returns
    device: torch.device
    stage: str | None = None  # one of the function's own, its attribute `stages`; None: any other


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """Rules in order; the first that fits a call decides its recipe.

    Raises ValueError for rules that a file may not hold."""

    rules: Sequence[Rule] = ()  # kept as a tuple

    def __post_init__(self):
        if not isinstance(self.rules, Sequence) or isinstance(self.rules, str):
            raise ValueError(f"Policy: rules must be a list of Rules, got {self.rules!r}")
        for number, rule in enumerate(self.rules, 1):
            if not isinstance(rule, Rule):
                raise ValueError(f"Policy: rule {number}: must be a Rule, got {rule!r}")
        object.__setattr__(self, "rules", from_python(self.rules))

    def __repr__(self):
        return f"Policy({[_given(rule) for rule in self.rules]})"

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Policy":
        """The policy in a file. Raises ValueError, ``file:line: reason``, if there is none."""
        try:
            text = Path(path).read_bytes().decode()
            whole = json.loads(text, object_pairs_hook=_Object)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{path}:{line}: must be UTF-8, got {error.reason}") from None
        except json.JSONDecodeError as error:
            comma = error.doc[: error.pos + 1].rstrip("]} \n").endswith(",")
            hint = " (a comma before the end?)" * comma
            raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}{hint}") from None
        try:
            return cls(_rules(whole))
        except ValueError as error:
            raise ValueError(f"{path}:{_line(text, error.path)}: {error}") from None

    def save(self, path: str | os.PathLike, note=None) -> None:
        """Write the file that `load` reads, with a `note`: any JSON. Raises OSError if it cannot be
        written."""
        Path(path).write_text(self.text(note), encoding="utf-8")

    def text(self, note=None) -> str:
        """What `save` writes: a line for each rule."""
        rules = ["\n    " + json.dumps(_given(rule)) for rule in self.rules]
        whole = [f'"version": {VERSION}', f'"rules": [{",".join(rules)}\n  ]']
        if note is not None:
            whole.append('"note": ' + json.dumps(note, indent=2).replace("\n", "\n  "))
        return "{\n  " + ",\n  ".join(whole) + "\n}\n"


def _given(rule: Rule) -> dict:
    """What a file says for a rule."""
    given = {x: y for x in FIELDS[1:] if (y := getattr(rule, x)) != getattr(Rule, x)}
    keep = {"keep": rule.keep.given()} if isinstance(rule.keep, Selection) else {}
    return given | keep | {"recipe": rule.recipe}


def stages_of(ruling: "Ruling") -> tuple[str, ...]:
    """The stages that its rules name or, of a function, that its attribute ``stages`` does."""
    if callable(ruling):
        given = getattr(ruling, "stages", ())
        if isinstance(given, str) or not all(isinstance(name, str) and name for name in given):
            raise ValueError(f"a function's stages must be a tuple of names, got {given!r}")
        return tuple(dict.fromkeys(given))
    return tuple(dict.fromkeys(rule.stage for rule in ruling if rule.stage is not None))


def unmatched(rules: tuple[Rule, ...], calls: Collection[tuple[str, str]]) -> list[str]:
    """A line for each rule that names modules and fits none of those that make attention calls, and
    one for the graphs in which no call has a path. calls: the graph and the module of each."""
    lines, seen = [], sorted({module for _, module in calls})
    without = sorted({graph for graph, _ in calls} - {graph for graph, module in calls if module})
    callers = ", ".join(map(json.dumps, seen[:4])) + ", ..." * (len(seen) > 4)
    for number, rule in enumerate(rules, 1):
        if seen and not any(map(rule.fits_module, seen)):
            where = {name: x for name, x in _given(rule).items() if name in ("module", "layer")}
            what = f"rule {number} of the policy fits no module so far: {json.dumps(where)}"
            lines.append(f"{what}; attention is called by {callers}")
    if without and not all(rule.fits_module("") for rule in rules):
        graphs = ", ".join(without[:4]) + ", ..." * (len(without) > 4)
        lines.append(
            f"no call of graph {graphs} has a module's path: rules that name modules or layers "
            "cannot fit these calls, rules by head_dim, length or stage can"
        )
    return lines


# -- what may be given ----

# What ``sage.policy`` takes.
PolicyOption = (str | os.PathLike[str] | Policy | Rule | dict[str, Any] | list[Any]
                | Callable[[CallDescription], str | None])  # fmt: skip
# A policy in force: rules, or a function.
Ruling = tuple[Rule, ...] | Callable[[CallDescription], str | None]
# By path: what each file said when it could be read.
_rules_of_files: dict[str, tuple[Rule, ...]] = {}


def ruling(given) -> Ruling:
    """What ``sage.policy`` may be given, ready to be asked. Raises ValueError."""
    if given is None or given == "":
        return ()
    if given in (names.AUTO, names.OFF, *NAMED) and not os.path.exists(given):
        raise ValueError(f"must be a path of rules, got {given!r}, a recipe: did you mean recipe?")
    if isinstance(given, (str, os.PathLike)):
        return _of_file(os.path.abspath(given))
    if isinstance(given, Policy):
        return given.rules
    if isinstance(given, (dict, list, tuple, Rule)):
        return from_python([given] if isinstance(given, Rule) else given)
    if callable(given) and not isinstance(given, type):
        stages_of(given)
        return given
    what = "a path, a Policy, a dict, a Rule, a list of rules or a function of a CallDescription"
    raise ValueError(f"must be {what}, got {given!r}")


def frozen(name: str, given):
    """`given`, to be kept where it cannot change: what `ruling` makes of it will not depend on the
    folder that the process is in, nor on what becomes of a dict. Raises SageOptionError."""
    try:
        rules = ruling(given)
    except ValueError as error:
        raise names.wrong(f"{name}: {error}") from None
    if isinstance(given, (str, os.PathLike)):
        return given and os.path.abspath(given)
    return Policy(rules) if isinstance(given, (dict, list, tuple)) else given


def _of_file(path: str) -> tuple[Rule, ...]:
    """While graphs compile, what the file said for the first of them since torch._dynamo.reset():
    a model whose graphs have several policies is none that somebody asked for."""
    compiling = compat.CompileContext.current_compile_id() is not None
    read = session().rules_of_files if compiling else {}
    version = os.stat(path).st_mtime_ns if os.path.exists(path) else None
    if path not in read:
        try:
            _rules_of_files[path] = Policy.load(path).rules
        except ValueError as error:
            if path not in _rules_of_files:
                raise
            warn_once(f"{error}: the policy stays what this file said before")
        read[path] = version, _rules_of_files[path]
    if read[path][0] != version:
        warn_once(f"{path} has changed: graphs have what it said before, until "
                   "torch._dynamo.reset() is called")  # fmt: skip
    return read[path][1]


def from_python(given: dict | list | tuple) -> tuple[Rule, ...]:
    """The rules in what a file may hold, or in the list of its rules. Raises ValueError."""
    return _rules(given if isinstance(given, dict) else {"version": VERSION, "rules": given})


def ask(function: Callable, call: CallDescription) -> str | None:
    """What a function says of a call. Raises SageOptionError for an answer that is no recipe."""
    try:
        recipe = function(call)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise names.wrong(f"sage.policy: the function raised {reason}, for {call}") from error
    if recipe is not None:
        what = "sage.policy: the function must return None, or what a rule's recipe may be"
        names.check_recipe(f"{what}, for {call}: recipe", recipe)
    return recipe


# -- what a file may say ----


@contextlib.contextmanager
def _at(*path: str | int, of: str = "") -> Iterator[None]:
    """Within, a ValueError is about what these names and indices lead to: its `path`, from what is
    read on. of: the beginning of its message."""
    try:
        yield
    except ValueError as error:
        found = ValueError(of + str(error))
        found.path = (*path, *getattr(error, "path", ()))
        raise found from None


@_at()
def _rules(whole) -> tuple[Rule, ...]:
    if not isinstance(whole, dict):
        raise ValueError('a policy must be {"version": 1, "rules": [...]}')
    _check_keys(whole, ("version", "rules", "note"), ("version", "rules"))
    version, rules, found = whole["version"], whole["rules"], []
    with _at("version"):
        _must(is_integer(version, 1, VERSION), f"version must be {VERSION}", version)
    with _at("rules"):
        _must(isinstance(rules, (list, tuple)), "rules must be a list", rules)
    for i, rule in enumerate(rules):
        with _at("rules", i, of=f"rule {i + 1}: "):
            found.append(_rule(rule))
    return tuple(found)


def _rule(rule) -> Rule:
    rule = _given(rule) if isinstance(rule, Rule) else rule
    _must(isinstance(rule, dict), 'must be {"recipe": ..., ...}', rule)
    _check_keys(rule, (*FIELDS, "note"), ("recipe",))
    fields = {}
    for name, value in rule.items():
        with _at(name):
            if name != "note":
                fields[name] = _field(name, value)
    found = Rule(**fields)
    with _at("recipe"):
        if found.keep is not None:
            kept(found.keep, found.recipe)
    return found


def kept(keep: KeepOption, recipe: str, of: str = "") -> Selection:
    """What `keep` says beside a recipe. Raises ValueError; of: the beginning of its message."""
    with _at(of=of):
        if recipe in (names.AUTO, names.OFF):
            raise ValueError(f"beside keep, recipe must be the name of one, got {recipe!r}")
        return _keep(keep.given() if isinstance(keep, Selection) else keep)


def _must(holds: bool, what: str, value) -> None:
    if not holds:
        got = json.dumps(value, ensure_ascii=False, default=repr)
        raise ValueError(f"{what}, got {got}")


def _field(name: str, value):
    """A field of Rule from what is given for it."""
    if check := {"recipe": names.check_recipe, "training": names.check_training}.get(name):
        return check(name, value)
    if check := {"stage": stages.check, "keep": _keep}.get(name):
        return check(value)
    if name == "module":
        _must(isinstance(value, str), "module must be a string", value)
        return value
    several = _several(value)
    if name == "head_dim":
        valid = several and all(is_integer(x, 1, HEAD_DIMS[-1]) for x in several)
        _must(valid, f"head_dim must be a number of 1 to {HEAD_DIMS[-1]}, or a list of such", value)
        return tuple(several)
    minimum, one = (0, "a number or ") if name == "layer" else (1, "")
    if one and is_integer(value, minimum):
        return value, value
    valid = len(several) == 2 and all(x is None or is_integer(x, minimum) for x in several)
    _must(valid, f"{name} must be {one}[from, to], numbers from {minimum} on or null", value)
    is_empty = None not in value and value[0] > value[1]
    _must(not is_empty, f"{name} must not be an empty range", value)
    return tuple(value)


def _keep(value) -> Selection:
    fields = value if isinstance(value, dict) else {"top_k": value}
    name = fields.get("rule", "pooled")
    with _at("rule"):
        _must(name in list(RULES), f"rule must be one of {', '.join(RULES)}", name)
    rule = RULES[name]
    valid = ("rule", *rule.amounts, *rule.others, *EACH)
    for field in fields:
        with _at(field):
            if field in Selection._fields and field not in valid:
                raise ValueError(f"rule {name} takes {', '.join(valid[1:])}, got {field}")
    _check_keys(fields, valid, ())
    for field, x in fields.items():
        what, holds = _KEEP.get(field, (None, None))
        with _at(*[field] * isinstance(value, dict)):
            _must(holds is None or holds(x), f"{field} must be {what}", x)
    usual, amounts = Selection._field_defaults, ", ".join(rule.amounts)
    given = sum({*_several(fields.get(x, usual[x]))} != {usual[x]} for x in rule.amounts)
    how_many = "at least one of " if name == "pooled" else "one of " * (len(rule.amounts) > 1)
    above = ", above 0" * ("top_k" in rule.amounts)
    what = f"rule {name} must be given {how_many}{amounts}{above}"
    _must(given == 1 or given > 1 and name == "pooled", what, value)
    read: dict[str, Any] = {field: _as_tuple(x) for field, x in fields.items()}
    keep = Selection(**read)
    _check_places(keep, fields, value)
    return keep


def _check_places(keep: Selection, fields: dict, value) -> None:
    """What fields of keep, each valid by itself, say together of a prefix, a tail and a layout."""
    competes, prefix = keep.mode == "compete", sum(keep.segments)
    with _at(*["segments"] * (prefix > 0)):
        _must(prefix > 0 or not competes, "mode compete is about segments", value)
        _must(prefix == 0 or not keep.dense, "segments and dense must not both be given", value)
        block, lengths = max(keep.size), keep.segments if competes else (prefix,)
        what = f"segments must be multiples of {block}{' together' * (not competes)}, as blocks "
        what += "are not padded"
        _must(all(n % block == 0 for n in lengths), what, keep.segments)
    with _at("tail_block"):
        _must(keep.tail or "tail_block" not in fields, "tail_block needs a tail", value)
    if keep.layout is None:
        with _at("cube"):
            _must("cube" not in fields, "cube needs a layout", value)
        return
    with _at("dense"):
        outside = all(
            start == 0 < (end or 0) or start < 0 and end is None for start, end in keep.dense
        )
        what = "with a layout dense must be [0, n] and [-n, null], the tokens around the video"
        _must(outside, what, keep.dense)
    with _at("layout"):
        whole = all(n % of == 0 for n, of in zip(keep.layout, keep.cube, strict=True))
        whole = whole and math.prod(keep.layout) % block == 0
        what = "rule vsa must be given a layout of whole cubes, and of blocks of "
        what += f"{block} tokens, as blocks are not padded"
        _must(whole or keep.rule != "vsa", what, keep.layout)


def _several(x) -> Sequence:
    return x if isinstance(x, (list, tuple)) else [x]


def _as_tuple(x):
    return tuple(map(_as_tuple, x)) if isinstance(x, (list, tuple)) else x


def _is_fraction(x) -> bool:
    return is_integer(x, 0, 1) or isinstance(x, float) and 0 <= x <= 1


def _are(x, valid: Callable[[Any], bool], count: int | None = None) -> bool:
    """Whether it is a list of valid ones, of this length."""
    return isinstance(x, (list, tuple)) and count in (None, len(x)) and all(map(valid, x))


def _is_box(x) -> bool:
    return _are(x, lambda n: is_integer(n, 1), 3)


def _is_range(x) -> bool:
    """Whether it is a range that is not empty at every length."""
    if not _are(x, lambda n: n is None or type(n) is int, 2) or x[0] is None:
        return False
    start, end = x
    return end is None or (start < 0) != (end < 0) or start < end


# What must hold for a field of keep.
_KEEP = {
    **dict.fromkeys(("top_p", "similarity"), ("a fraction, 0 to 1", _is_fraction)),
    **dict.fromkeys(("top_k", "sparsity"), (
        "a fraction, 0 to 1, or a list of one for each head of q",
        lambda x: _is_fraction(x) or _are(x, _is_fraction) and len(x) > 0,
    )),
    **dict.fromkeys(
        ("dense_first", "dense_last"), ("a number of tokens", lambda x: is_integer(x, 0))
    ),
    "dense": (
        "a list of ranges [from, to] of tokens, none of them empty: numbers, below 0 from the end "
        "on, and to may be null", lambda x: _are(x, _is_range),
    ),
    "tau": ("a number", lambda x: type(x) in (int, float) and abs(x) < math.inf),
    "segments": (
        "a list of numbers of tokens", lambda x: _are(x, lambda n: is_integer(n, 0))
    ),
    "mode": ("exempt or compete", lambda x: x in ("exempt", "compete")),
    "scores": ("as_trained or fp32", lambda x: x in ("as_trained", "fp32")),
    "blocks": (
        "[queries, keys], each 64 or 128", lambda x: _are(x, lambda n: n in (64, 128), 2)
    ),
    "layout": ("[frames, rows, columns]", _is_box),
    "tail": ("true or false", lambda x: isinstance(x, bool)),
    "tail_block": (f"of {TAIL_BLOCKS}", lambda x: is_integer(x, 0) and x in TAIL_BLOCKS),
    "cube": (
        "[frames, rows, columns], a multiple of 64 tokens",
        lambda x: _is_box(x) and math.prod(x) % 64 == 0,
    ),
}  # fmt: skip


def _check_keys(given: dict, valid: tuple[str, ...], needed: tuple[str, ...]) -> None:
    for name in given:
        with _at(name):
            if name not in valid:
                raise ValueError(names.unknown(str(name), valid, ""))
            if (count := getattr(given, "counts", {}).get(name, 1)) > 1:
                raise ValueError(f"{name} is given {count} times")
    for name in needed:
        if name not in given:
            raise ValueError(f"{name} is missing")


class _Object(dict):
    """counts: how often each name is given."""

    def __init__(self, pairs: list[tuple]):
        super().__init__(pairs)
        self.counts = collections.Counter(name for name, _ in pairs)


def _line(text: str, path: tuple[str | int, ...]) -> int:
    """The line of valid JSON in which the value at `path` begins."""
    read, between = json.JSONDecoder().raw_decode, re.compile(r"[\s,:]*")
    at = between.match(text).end()
    for step in path:
        starts, is_list, at = {}, text[at] == "[", between.match(text, at + 1).end()
        while text[at] not in "}]":
            name = len(starts)
            if not is_list:
                name, at = read(text, at)
                at = between.match(text, at).end()
            starts[name] = at
            at = between.match(text, read(text, at)[1]).end()
        at = starts[step]
    return text.count("\n", 0, at) + 1
