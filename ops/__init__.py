"""What a sage op means, and its kernels. Importing this package registers ``torch.ops.sage``."""

# compat first: it says what is missing. The others register.
from sage_inductor.ops import compat, lse  # noqa: F401
from sage_inductor.ops.attention import decode  # noqa: F401
from sage_inductor.ops.distributed import gather  # noqa: F401
from sage_inductor.ops.quantize import cache  # noqa: F401
from sage_inductor.ops.sparse import selector  # noqa: F401
from sage_inductor.ops.training import rowscaled, sagebwd  # noqa: F401

compat.after_import("torch.distributed.tensor", "sage_inductor.ops.distributed.sharding")
