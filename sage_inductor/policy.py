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

import dataclasses
import fnmatch
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence

import torch

from sage_inductor import names, stages
from sage_inductor.ops.formats import HEAD_DIMS
from sage_inductor.ops.recipe import ALIASES, NAMED
from sage_inductor.ops.selector import Selection

VERSION = 1
_log = logging.getLogger("sage_inductor")


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
    keep: self-attention computes the blocks of keys that score highest, this fraction of them or as
    a Selection says; recipe must be a name.
    training: in the place of ``sage.training``, for calls that need gradients.

    Raises ValueError for an unknown recipe; a Policy checks the other fields.
    """

    recipe: str  # a name in NAMED, "auto" or "off"
    module: str = "*"  # a glob, of Site.module
    layer: tuple[int | None, int | None] = (None, None)  # the first number in Site.module
    head_dim: tuple[int, ...] = ()  # q's; none: any
    length: tuple[int | None, int | None] = (None, None)  # N_q
    stage: str | None = None  # None: every one
    keep: Selection | dict | float | None = None  # of the blocks of keys; a Policy has Selections
    training: str | None = None  # None: as the settings say

    def __post_init__(self):
        if not isinstance(self.recipe, str) or self.recipe not in ALIASES:  # a Policy warns of it
            names.one_of((names.AUTO, names.OFF, *NAMED), "Rule: recipe", self.recipe)

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
        for number, rule in enumerate(self.rules, 1):
            if not isinstance(rule, Rule):
                raise ValueError(f"Policy: rule {number}: must be a Rule, got {rule!r}")
        object.__setattr__(self, "rules", from_python([_given(rule) for rule in self.rules]))

    def __repr__(self):
        return f"Policy({[_given(rule) for rule in self.rules]})"

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Policy":
        """The policy in a file. Raises ValueError, ``file:line: reason``, if there is none."""
        try:
            with open(path, "rb") as file:
                text = file.read().decode()
            whole = _parse(text)
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
            rules = _rules(whole)
        except _Invalid as error:
            raise ValueError(f"{path}:{error.line}: {error}") from None
        return cls(rules)

    def save(self, path: str | os.PathLike, note=None) -> None:
        """Write the file that `load` reads, with a `note`: any JSON. Raises OSError if it cannot be
        written."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.text(note))

    def text(self, note=None) -> str:
        """What `save` writes: a line for each rule."""
        rules = ["\n    " + json.dumps(_given(rule)) for rule in self.rules]
        whole = [f'"version": {VERSION}', f'"rules": [{",".join(rules)}\n  ]']
        if note is not None:
            whole.append('"note": ' + json.dumps(note, indent=2).replace("\n", "\n  "))
        return "{\n  " + ",\n  ".join(whole) + "\n}\n"


def _given(rule: Rule) -> dict:
    """What a file says for a rule."""
    given = {name: getattr(rule, name) for name in FIELDS[1:]}
    if isinstance(rule.keep, Selection):
        given["keep"] = rule.keep.given()
    return {name: x for name, x in given.items() if x != getattr(Rule, name)} | {
        "recipe": rule.recipe
    }


def stages_of(ruling: "Ruling") -> tuple[str, ...]:
    """The stages that its rules name or, of a function, that its attribute ``stages`` does."""
    if callable(ruling):
        given = getattr(ruling, "stages", ())
        if isinstance(given, str) or not all(isinstance(name, str) and name for name in given):
            raise ValueError(f"a function's stages must be a tuple of names, got {given!r}")
        return tuple(dict.fromkeys(given))
    return tuple(dict.fromkeys(rule.stage for rule in ruling if rule.stage is not None))


def unmatched(rules: tuple[Rule, ...], modules: Iterable[str]) -> list[str]:
    """A line for each rule that names modules and fits none of those that make attention calls."""
    lines, seen = [], sorted(set(modules))
    calls = (
        "attention is called by " + ", ".join(map(json.dumps, seen[:4])) + ", ..." * (len(seen) > 4)
    )
    for number, rule in enumerate(rules, 1):
        if seen and not any(map(rule.fits_module, seen)):
            where = {name: x for name, x in _given(rule).items() if name in ("module", "layer")}
            what = f"rule {number} of the policy fits no module so far: {json.dumps(where)}"
            lines.append(f"{what}; {calls}")
    return lines


# -- what may be given ----

# A policy in force: rules, or a function.
Ruling = tuple[Rule, ...] | Callable[[CallDescription], str | None]
# By path: what each file said when it could be read.
_rules_of_files: dict[str, tuple[Rule, ...]] = {}
_reported_errors: set[str] = set()


def ruling(given) -> Ruling:
    """What ``sage.policy`` may be given, ready to be asked. Raises ValueError."""
    if given is None or given == "":
        return ()
    if given in (names.AUTO, names.OFF, *ALIASES, *NAMED) and not os.path.exists(given):
        raise ValueError(f"must be a path of rules, got {given!r}, a recipe: did you mean recipe?")
    if isinstance(given, (str, os.PathLike)):
        return _of_file(os.path.abspath(given))
    if isinstance(given, Policy):
        return given.rules
    if isinstance(given, Rule):
        return Policy((given,)).rules
    if isinstance(given, (dict, list, tuple)):
        return from_python(given)
    if callable(given) and not isinstance(given, type):
        stages_of(given)
        return given
    what = "a path, a Policy, a dict, a Rule, a list of rules or a function of a CallDescription"
    raise ValueError(f"must be {what}, got {given!r}")


def frozen(name: str, given):
    """`given`, to be kept where it cannot change: what `ruling` makes of it will not depend on the
    folder that the process is in, nor on what becomes of a dict. Raises ValueError, as `ruling`,
    with the option's name."""
    try:
        rules = ruling(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if isinstance(given, (str, os.PathLike)):
        return given and os.path.abspath(given)
    return Policy(rules) if isinstance(given, (dict, list, tuple)) else given


def _of_file(path: str) -> tuple[Rule, ...]:
    try:
        _rules_of_files[path] = Policy.load(path).rules
    except ValueError as error:
        if path not in _rules_of_files:
            raise
        if str(error) not in _reported_errors:
            _reported_errors.add(str(error))
            _log.warning("%s: the policy stays what this file said before", error)
    return _rules_of_files[path]


def from_python(given: dict | list | tuple) -> tuple[Rule, ...]:
    """The rules in what a file may hold, or in the list of its rules. Raises ValueError."""
    if not isinstance(given, dict):
        rules = [_given(rule) if isinstance(rule, Rule) else rule for rule in given]
        given = {"version": VERSION, "rules": rules}
    try:
        return _rules(_parse(json.dumps(given)))
    except _Invalid as error:
        raise ValueError(str(error)) from None
    except TypeError as error:
        raise ValueError(f"must be what JSON can say: {error}") from None


def ask(function: Callable, call: CallDescription) -> str | None:
    """What a function says of a call. Raises ValueError for an answer that is no recipe."""
    try:
        recipe = function(call)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"sage.policy: the function raised {reason}, for {call}") from error
    if recipe is not None:
        try:
            names.check_recipe("recipe", recipe)
        except ValueError as error:
            what = "the function must return None, or what a rule's recipe may be"
            raise ValueError(f"sage.policy: {what}: {error}, for {call}") from None
    return recipe


# -- what a file may say ----


class _Invalid(ValueError):
    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


def _rules(whole: "_Located") -> tuple[Rule, ...]:
    if not isinstance(whole.value, dict):
        raise _Invalid(whole.line, 'a policy must be {"version": 1, "rules": [...]}')
    _check_keys(whole, ("version", "rules", "note"), ("version", "rules"))
    version, rules = whole.value["version"], whole.value["rules"]
    if not _is_integer(version.value, 1, VERSION):
        raise _Invalid(version.line, f"version must be {VERSION}, got {version.text}")
    if not isinstance(rules.value, list):
        raise _Invalid(rules.line, f"rules must be a list, got {rules.text}")
    return tuple(_rule(number, rule) for number, rule in enumerate(rules.value, 1))


def _rule(number: int, rule: "_Located") -> Rule:
    try:
        if not isinstance(rule.value, dict):
            raise _Invalid(rule.line, f'must be {{"recipe": ..., ...}}, got {rule.text}')
        _check_keys(rule, (*FIELDS, "note"), ("recipe",))
        fields = {}
        for name, given in rule.value.items():
            try:
                if name != "note":
                    fields[name] = _field(name, given)
            except ValueError as error:  # of a part of it, with a line, or of all
                raise _Invalid(getattr(error, "line", given.line), str(error)) from None
        found = Rule(**fields)
        if found.keep is not None and found.recipe in (names.AUTO, names.OFF):
            what = "beside keep, recipe must be the name of one"
            raise _Invalid(rule.value["recipe"].line, f"{what}, got {found.recipe!r}")
        return found
    except _Invalid as error:
        raise _Invalid(error.line, f"rule {number}: {error}") from None


def _field(name: str, given: "_Located"):
    """A field of Rule from what the file says."""
    value = given.to_python()
    if name == "recipe":
        return names.check_recipe(name, value)
    if name == "training":
        return names.check_training(name, value)
    if name == "stage":
        return stages.check(value)
    if name == "keep":
        return _keep(given)
    if name == "module":
        if not isinstance(value, str):
            raise ValueError(f"module must be a string, got {given.text}")
        return value
    if name == "head_dim":
        several = value if isinstance(value, list) else [value]
        if not several or not all(_is_integer(x, 1, HEAD_DIMS[-1]) for x in several):
            what = f"head_dim must be a number of 1 to {HEAD_DIMS[-1]}, or a list of such"
            raise ValueError(f"{what}, got {given.text}")
        return tuple(several)
    minimum, one = (0, "a number or ") if name == "layer" else (1, "")
    if name == "layer" and _is_integer(value, minimum):
        return value, value
    if not (
        isinstance(value, list)
        and len(value) == 2
        and all(x is None or _is_integer(x, minimum) for x in value)
    ):
        what = f"{name} must be {one}[from, to], numbers from {minimum} on or null"
        raise ValueError(f"{what}, got {given.text}")
    if None not in value and value[0] > value[1]:
        raise ValueError(f"{name} must not be an empty range, got {given.text}")
    return tuple(value)


def _keep(given: "_Located") -> Selection:
    fields = {"top_k": given}
    if isinstance(given.value, dict):
        _check_keys(given, Selection._fields, ())
        fields = given.value
    keep = Selection(**{name: each.value for name, each in fields.items()})
    fractions, tokens = keep[:3], keep[3:]
    valid = all(_is_number(x) and 0 <= x <= 1 for x in fractions) and keep[:2] != (0, 0)
    if not valid or not all(_is_integer(x, 0) for x in tokens):
        raise ValueError(
            f"keep must be a fraction above 0, or {{...}} of {', '.join(Selection._fields)}: three "
            f"fractions, the first two not both 0, and two numbers of tokens, got {given.text}"
        )
    return keep


def _check_keys(given: "_Located", valid: tuple[str, ...], needed: tuple[str, ...]) -> None:
    for name, each in given.value.items():
        if name not in valid:
            raise _Invalid(each.line, names.unknown(name, valid, ""))
        if (count := given.names.count(name)) > 1:
            raise _Invalid(each.line, f"{name} is given {count} times")
    for name in needed:
        if name not in given.value:
            raise _Invalid(given.line, f"{name} is missing")


def _is_integer(x, minimum: int, maximum: float = float("inf")) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and minimum <= x <= maximum


def _is_number(x) -> bool:
    return isinstance(x, float) or _is_integer(x, 0)


# -- JSON, with lines ----


@dataclasses.dataclass
class _Located:
    value: object  # lists and objects hold _Located
    line: int
    text: str  # as the file has it, in one line
    names: list[str]  # of an object's values, each as often as it is given

    def to_python(self):
        is_list = isinstance(self.value, list)
        return [x.to_python() for x in self.value] if is_list else self.value


def _parse(text: str) -> _Located:
    """JSON with the line of each value. Raises json.JSONDecodeError."""
    json.loads(text)  # raises for every mistake, so what follows looks for none
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,:]*")

    def skip(at: int) -> int:
        return between.match(text, at).end()

    def read(start: int) -> tuple[_Located, int]:
        keys, values = [], []
        if text[start] not in "{[":
            value, at = decoder.raw_decode(text, start)
        else:
            at = skip(start + 1)
            while text[at] not in "}]":
                if text[start] == "{":
                    key, at = decoder.raw_decode(text, at)
                    keys.append(key)
                each, at = read(skip(at))
                values.append(each)
                at = skip(at)
            value = values if text[start] == "[" else dict(zip(keys, values, strict=True))
            at += 1
        line, source = text.count("\n", 0, start) + 1, re.sub(r"\s*\n\s*", " ", text[start:at])
        return _Located(value, line, source, keys), at

    return read(skip(0))[0]
