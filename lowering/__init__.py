"""How Inductor spells a sage op. Importing this package registers it."""

from sage_inductor.lowering import package, replay  # noqa: F401
