"""How Inductor spells a sage op. Importing this package registers it."""

import torch

from sage_inductor.lowering import access_cache, package, replay  # noqa: F401
from sage_inductor.ops.compat import register_lowering


@register_lowering(torch.ops.sage.stored.default, type_promotion_kind=None)
def _(x):
    x.realize()
    return x
