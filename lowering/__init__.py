"""How Inductor spells a sage op. Importing this package registers it."""

from sage_inductor.lowering import access_cache, package, replay  # noqa: F401
