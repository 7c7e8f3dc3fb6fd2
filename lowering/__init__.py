"""How Inductor spells a sage op. Importing this package registers it."""

from sage_inductor.lowering import accesses, sdpa  # noqa: F401
