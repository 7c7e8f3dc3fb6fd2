"""Models with another attention: q, k and v of their attention calls, and what each recipe does to
the whole model.

Shapes: B batch, H heads, N sequence, D head_dim.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import sage_inductor
from bench import harness
from bench.laboratory import Technique, attend
from bench.trained import Subject
from sage_inductor.ops.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Call:
    """What one attention call is given: q [B, H, N_q, D], k and v [B, H, N_kv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool


@contextlib.contextmanager
def attending(function: Callable[[Tensor, Tensor, Tensor, bool], Tensor]) -> Iterator[None]:
    """function(q, k, v, is_causal) in the place of F.scaled_dot_product_attention. A call with a
    mask, dropout, another scale or fewer heads of k raises ValueError."""

    def attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_
    ):
        plain = attn_mask is None and not dropout_p and query.shape[1] == key.shape[1]
        if not plain or scale not in (None, query.shape[3] ** -0.5):
            raise ValueError("attending: calls must have no mask, dropout, scale or grouped heads")
        return function(query, key, value, is_causal)

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


@torch.no_grad()
def capture(model: torch.nn.Module, inputs: tuple[Tensor, ...]) -> list[Call]:
    """What each attention call of one forward pass is given, in order."""
    found, sdpa = [], F.scaled_dot_product_attention

    def record(q, k, v, is_causal):
        found.append(Call(q, k, v, is_causal))
        return sdpa(q, k, v, is_causal=is_causal)

    with attending(record):
        model(*inputs)
    return found


@torch.no_grad()
def end_to_end(
    subject: Subject, techniques: dict[str, Technique | Recipe | None]
) -> Iterator[tuple[str, dict[str, float | None] | None, str | None]]:
    """Yields (name, `Subject.score`, None) for each name -> technique (None: SDPA as it is); or
    (name, None, why not), where the device has no kernels for a recipe, say."""
    exact = run(subject, "", Technique())
    for name, technique in techniques.items():
        try:
            yield name, subject.score(run(subject, name, technique), exact), None
        except Exception as error:  # one that fails must not cost the others
            yield name, None, harness.in_a_line(error)


def run(subject: Subject, name: str, technique: Technique | Recipe | None) -> Tensor:
    """What `Subject.run` gives: with a technique in the place of SDPA, or with a recipe that is
    shipped under this name as a user gets it. Raises SageRefused where the device cannot run it."""
    if technique is None:
        return subject.run(subject.model)
    if isinstance(technique, Technique):
        with attending(lambda q, k, v, is_causal: attend(q, k, v, technique, is_causal)):
            return subject.run(subject.model)
    on_cpu = next(subject.model.parameters()).device.type == "cpu"
    options = {"sage.recipe": name, "sage.force": True, "sage.strict": True, "sage.emulate": on_cpu}
    torch._dynamo.reset()  # also the report
    compiled = torch.compile(
        subject.model, backend="sage", fullgraph=True, dynamic=False, options=options
    )
    out = subject.run(compiled)
    report = sage_inductor.report()
    if [site.recipe for site in report] != [name] * subject.calls:
        raise RuntimeError(f"run: {subject.calls} calls must become {name}, got\n{report}")
    return out
