"""What is measured: shapes, as rows, and how long each is looked at."""

import dataclasses

BUILT_IN = "cuDNN", "flash", "efficient", "flex", "inductor", "kernel", "tiles", "op", "apart"
PEERS = (  # where installed: peers.py
    "FA3", "FA3-fp8", "FA4", "sageattention", "cuDNN-fp8", "torchao-fp8", "comfy-kitchen",
)  # fmt: skip
ALL = (*BUILT_IN, *PEERS)
# Of efficient and flash, flash is the faster one there.
UNMASKED = ("cuDNN", "flash", "flex", "inductor", "kernel", "op")
MASKS = ("keys", "rows", "documents", "bias", "window")  # what each is: measure.py
KEYS = {"keys": "keys", "padding": "keys"}  # masks with one row for all queries


@dataclasses.dataclass(frozen=True)
class Case:
    """Self-attention forward in bf16: q [B, H_q, N, D], k and v [B, H_kv, N, D]."""

    B: int
    H_q: int
    H_kv: int
    N: int
    D: int
    is_causal: bool = False
    model: str = ""
    mask: str = ""  # one of MASKS, or "padding"; not with is_causal
    shared: bool = False  # k and v are of one batch, which the call expands to B

    @property
    def kind(self) -> str:
        """What sage_inductor/choose/cost.py calls it."""
        if self.mask:
            return {"window": "window", "bias": "bias", **KEYS}.get(self.mask, "mask")
        return "causal" if self.is_causal else "full"

    @property
    def masked(self) -> bool:
        """Whether the kernel reads a mask: a window is none."""
        return self.mask not in ("", "window")

    @property
    def flops(self) -> float:
        """Two products of 2 N^2 D per head; the causal half of them. Under a mask all of them."""
        return 4 * self.B * self.H_q * self.N**2 * self.D * (0.5 if self.is_causal else 1.0)

    @property
    def table(self) -> str:
        """The title of the table this case is a row of."""
        if self.model:
            return "models"
        return f"B={self.B} H={self.heads} {self.family}"

    @property
    def family(self) -> str:
        shared = ", one k and v" * self.shared
        return f"D={self.D}{', causal' * self.is_causal}{self.mask and f', {self.mask}'}{shared}"

    @property
    def row(self) -> str:
        return f"{self.model} {self.shape}" if self.model else str(self.N)

    @property
    def shape(self) -> str:
        return f"{self.B}x{self.heads}x{self.N}x{self.D}{' causal' * self.is_causal}"

    @property
    def heads(self) -> str:
        return f"{self.H_q}" if self.H_q == self.H_kv else f"{self.H_q}/{self.H_kv}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Cases with the providers they compare, and for how long: `rounds` times `target_ms` each."""

    cases: tuple[Case, ...]
    providers: tuple[str, ...] = UNMASKED
    rounds: int = 6
    target_ms: float = 40.0
    dynamic: bool = False  # compile once per table, with N symbolic, instead of once per case
    # provider -> the N at which it is measured, where that is not all of them
    only_at: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def grid(lengths: tuple[int, ...], head_dims: tuple[int, ...] = (64, 128)) -> tuple[Case, ...]:
    """B=4, H=32, not causal and causal."""
    return tuple(
        Case(4, 32, 32, N, D, is_causal)
        for D in head_dims
        for is_causal in (False, True)
        for N in lengths
    )


MASKS_N = (1024, 2048, 4096, 8192, 16384)
MODELS = (
    Case(1, 24, 24, 4608, 128, model="flux"),
    Case(2, 48, 48, 17776, 64, model="cogvideox"),
    Case(1, 40, 40, 75600, 128, model="wan14b_720p"),
    Case(1, 24, 24, 119056, 128, model="hunyuan"),
    Case(1, 32, 8, 8192, 128, is_causal=True, model="llama3_prefill"),
    Case(64, 16, 16, 577, 64, model="vit"),
)
SHORTER = tuple(case for case in MODELS if case.model not in ("hunyuan", "vit"))

PLANS = {
    "paper": Plan(grid((1024, 2048, 4096, 8192, 16384, 32768))),
    "models": Plan(MODELS),
    # Under load, where power limits the card: long turns, and nothing lighter than cuDNN between
    # them to cool it. What the rows of HOPPER in ops/attention/tiles.py are chosen by.
    "load": Plan(
        (
            *grid((1024, 2048, 4096, 8192, 32768)),
            *(Case(4, 16, 16, 8192, 256, is_causal) for is_causal in (False, True)),
            *SHORTER,
        ),
        providers=("cuDNN", "tiles"),
        rounds=3,
        target_ms=100.0,
    ),
    # Beside other packages, in turns long enough to warm the card.
    "peers": Plan(
        (
            *grid((1024, 2048, 4096, 8192, 32768), (128, 64)),
            *SHORTER,
            Case(3, 20, 20, 11111, 128),
            Case(2, 8, 2, 5003, 128, is_causal=True),
            Case(1, 16, 16, 6000, 96),
            Case(1, 12, 12, 20000, 80),
        ),
        providers=("cuDNN", *PEERS, "kernel", "op"),
        rounds=12,
        target_ms=60.0,
    ),
    # What batches gain that share k and v: "apart" is given as many k and v as q.
    "shared": Plan(
        tuple(Case(B, 24, 24, 4096, D, shared=True) for D in (64, 128) for B in (2, 4)),
        providers=("cuDNN", "flash", "apart", "op"),
    ),
    "masks": Plan(
        tuple(
            Case(4, 32, 32, N, D, mask=mask) for D in (64, 128) for mask in MASKS for N in MASKS_N
        ),
        providers=("cuDNN", "efficient", "flex", "inductor", "kernel", "op"),
        rounds=3,
        target_ms=15.0,
        dynamic=True,
        only_at={"flex": (4096,)},  # it compiles once per N, for seconds
    ),
    # Causal and not, both head_dims, a tail and grouped heads, in seconds: flex compiles longest.
    "quick": Plan(
        (Case(2, 8, 8, 1024, 128), Case(2, 8, 2, 1000, 64, is_causal=True)),
        providers=("cuDNN", "flash", "inductor", "kernel", "op"),
        rounds=3,
        target_ms=10.0,
    ),
}
