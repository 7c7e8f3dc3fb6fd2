"""1 to 16 queries against a cache: ``sage::decode`` over 16 bits, INT8 and E4M3, and SDPA.

$ python bench/decode.py --json    # on a GPU about six minutes
$ python bench/decode.py --parts random --rounds 3 --target-ms 4 --json    # about one
$ python bench/decode.py --perplexity --json    # on a CPU about ten: DATE-perplexity.json

A row of "calls" is one layer's attention, over enough caches that L2 holds none, as CUDA graphs. A
cache has room for N keys and is filled to a part of it. SDPA gets the heads as they are, with the
mask that a static cache needs, and without one: then each query sees all N keys.

A row of "random" is a call of a static cache as the pass decides it, and what it replaces.

A row of "fp8" is a layer of transformers' FP8 cache, compiled: a token is appended, and one query
sees all.

A row of "decoders" is a step of Llama 3 8B with random weights, as a CUDA graph: "inductor" and
"sage" over transformers' static cache, "sage" over sage_inductor.Int8Cache, and both over layers of
transformers' FP8 cache, which begins each step as long. REGION layers are compiled, once; what is
outside of layers is eager. peak: weights, cache and what a step allocates.
fit: sequences that 80 GB hold by that peak. append: the share of a step that writes a token.

--perplexity: of held-out texts instead, by a model that is trained here first and computes in bf16.
Each layer's k and v are what a cache gives back, from the first token on; query i sees keys 0 to i.
Two more columns have keys that are harder to round, where exact attention stays what it is.

Shapes: B batch, H_kv heads of k and v, of which each is read by G of q, N keys, D head_dim, N_q
queries.
"""

import concurrent.futures
import dataclasses
import gc
import inspect
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import cache_utils
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import sage_inductor
from bench import harness, trained
from bench.capture import attending
from bench.decoding import by_hand, bytes_of, repeated, run_parts, unrepeated
from bench.measure import Provider, Runner, burst, in_turns, interleave, relative_l1, summary
from bench.tables import gain, groups, markdown, show, speed_of
from sage_inductor import options
from sage_inductor.backend import op_by_op
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops import gpus
from sage_inductor.ops.compile import compile_elsewhere
from sage_inductor.ops.decode_call import CODES, DecodeCall
from sage_inductor.ops.formats import QK
from sage_inductor.ops.launch import noted
from sage_inductor.ops.quantize.cache import append_kv, read_kv
from sage_inductor.ops.reference import decode as reference
from sage_inductor.patterns.call import Site

# The name of a layer's argument, from transformers 5.24 on "cache".
CACHE = next(x for x in inspect.signature(LlamaDecoderLayer.forward).parameters if x in (
    "cache", "past_key_values",
))  # fmt: skip
FP8 = getattr(cache_utils, "Fp8QuantizedLayer", None)  # not in older versions
DECODERS = ["1x8192", "16x8192", "1x32768", "16x32768", "1x131072"]  # B x N
LAYERS, REGION = 32, 4  # of a decoder, and of what is compiled once for it
ROOM = 1024  # tokens: a step appends one
STEPS = 200  # that are compared with eager's
CARD = 80e9  # bytes, in which as many sequences as `fit` lie beside the weights
SLOWER = 0.97  # of what is replaced
NEAR = 0.05  # relative L1 of logits to eager's: Inductor's differ by 0.02 of 8 layers
AS_FAR = 1.2  # of 32 layers of random weights Inductor's own differ by 0.05 to 0.06
FP8_TOKENS = 2**18  # of more the caches of a row do not fit together
OF_FP8 = "FP8 cache, inductor", "FP8 cache, sage"
WRONG = 0.1  # relative L1; a frozen scale's error is less


class Shape(NamedTuple):
    B: int
    H_kv: int
    G: int
    N: int
    D: int = 128
    N_q: int = 1
    filled: float = 1.0


CALLS = [
    *(Shape(B, 8, 4, N) for B, N in ((1, 8192), (1, 32768), (1, 131072), (16, 8192), (16, 32768))),
    *(Shape(B, 8, 4, N) for B, N in ((1, 256), (1, 1024), (1, 2048), (32, 1024), (128, 512))),
    Shape(1, 32, 1, 2048), Shape(8, 32, 1, 2048), Shape(1, 2, 7, 4096), Shape(4, 8, 4, 2048, N_q=2),
    *(Shape(1, 8, 4, 32768, N_q=N_q) for N_q in (2, 4, 8, 16)), Shape(16, 8, 4, 8192, N_q=4),
    Shape(1, 8, 4, 32768, filled=1 / 8), Shape(16, 8, 4, 8192, filled=1 / 8),
    Shape(1, 8, 4, 32768, 64), Shape(1, 8, 4, 32768, 256), Shape(1, 1, 16, 32768),
    Shape(1, 4, 8, 32768), Shape(1, 8, 8, 32768), Shape(1, 8, 4, 512, N_q=16),
]  # fmt: skip


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=8, target_ms=20.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", nargs="+", choices=DECODERS, default=DECODERS, help="of decoders")
    parser.add_argument("--draws", type=harness.positive, default=100, help="random calls")
    parser.add_argument("--perplexity", action="store_true", help="nothing else")
    args = parser.parse_args(argv)
    if args.perplexity:
        return measure_perplexity(args)
    more = "; errors of the first sequence against float64 by hand"
    return run_parts("decode", args, PARTS, table, more)


def calls(args, device) -> Iterator[dict]:
    return (measure(shape, args, device) for shape in CALLS)


def draw_sets(shape: Shape, device, dtype: torch.dtype = torch.bfloat16) -> list[tuple]:
    count = max(2, min(40, int(2**28 / bytes_of(shape)) + 1))
    return [draw(shape, device, dtype) for _ in range(count)]


def draw(shape: Shape, device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """q [B, H_kv G, N_q, D], k and v [B, H_kv, N, D], a mask [B, 1, N_q, N] and end [1]. k has a
    bias in each channel, and tokens are of different size."""
    B, H, G, N, D, N_q, filled = shape
    make = {"device": device, "dtype": dtype}
    q = torch.randn(B, H * G, N_q, D, **make)
    k, v = (torch.randn(B, H, N, D, **make) * torch.rand(B, H, N, 1, **make) for _ in range(2))
    end = torch.tensor([int(N * filled)], device=device)
    place = end - N_q + torch.arange(N_q, device=device)
    mask = (torch.arange(N, device=device) <= place.unsqueeze(1)).expand(B, 1, N_q, N)
    return q, k + torch.randn(H, 1, D, **make), v, mask, end


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and a scale a token and head."""
    largest = QK["int8" if dtype == torch.int8 else "fp8"].largest
    scale = x.abs().amax(3).float().clamp(min=1e-20) / largest
    x = (x / scale[..., None]).clamp(-largest, largest)
    return (x.round() if dtype == torch.int8 else x).to(dtype), scale


def over(codes: torch.dtype | None, name: str) -> Provider:
    def prepare(q, k, v, _, end):
        (k, k_scale), (v, v_scale) = (
            (x, None) if codes is None else quantized(x, codes) for x in (k, v)
        )
        return q, k, v, torch.zeros_like(end), end, q.shape[3] ** -0.5, k_scale, v_scale

    return Provider(name, lambda *given: torch.ops.sage.decode(*given)[0], prepare)


def by_mask(q, k, v, mask, start, end, is_run) -> Tensor:
    """As the pass calls it. A model makes the last three once for all layers."""
    call = DecodeCall(q, k, v, start, end, q.shape[3] ** -0.5, mask=mask, is_run=is_run)
    return torch.ops.sage.decode(*call)[0]


def with_range(q, k, v, mask, _) -> tuple[Tensor, ...]:
    return q, k, v, mask[:, 0], *torch.ops.sage.seen_range(mask[:, 0])


PROVIDERS = [
    Provider("SDPA, mask", unrepeated, lambda *inputs: inputs[:4]),
    Provider("SDPA", unrepeated, lambda *inputs: inputs[:3]),
    Provider("bf16, mask", by_mask, with_range),
    over(None, "bf16"), *map(over, CODES, ("INT8", "E4M3")),
]  # fmt: skip


def measure(shape: Shape, args, device) -> dict:
    sets = draw_sets(shape, device)
    row = {"shape": shape._asdict(), "error": None}
    runners = {x.name: Runner(x, sets) for x in PROVIDERS}
    exact = by_hand(*(x[:1] for x in sets[-1][:4]))
    row["rel_l1"] = {n: relative_l1(x.output()[:1].double(), exact) for n, x in runners.items()}
    wrong = [n for n, x in row["rel_l1"].items() if n != "SDPA" and not x < WRONG]
    if wrong:
        row["error"] = f"not near float64: {', '.join(wrong)}"
    times = interleave(runners, args.rounds, args.target_ms)
    row["times"] = {name: summary(each) for name, each in times.items()}
    row["speed"] = {name: speed_of(each, times["SDPA, mask"]) for name, each in times.items()}
    return row


# -- random calls ----


class Drawn(NamedTuple):
    shape: Shape
    dtype: torch.dtype
    repeats: bool  # heads of k and v, as transformers' repeat_kv does


def drawn(count: int, seed: int = 0) -> list[Drawn]:
    """Random calls of a static cache of at most a GiB. From short lists, so that kernels are
    few."""
    choice, found = random.Random(seed).choice, []
    while len(found) < count:
        N = choice([2**n for n in range(8, 17)]) + choice((0, 0, 0, 8, 57))
        D, N_q, filled = choice((64, 128, 256)), choice((1, 1, 1, 2, 4, 8, 16)), choice((0.25, 1.0))
        heads = choice((1, 2, 4, 8, 16, 32)), choice((1, 2, 4, 8, 16)), choice(range(1, 9))
        call = Shape(*heads, N, D, N_q, filled), choice((torch.bfloat16, torch.float16))
        if bytes_of(call[0]) <= 2**30:
            found.append(Drawn(*call, choice((False, True))))
    return found


def decided(call: Drawn, device) -> Site:
    """What the pass makes of a call, on tensors without memory."""
    graphs = []
    with FakeTensorMode(), op_by_op(graphs.append) as run:
        inputs = draw(call.shape, device, call.dtype)[:4]
        run(repeated if call.repeats else unrepeated, inputs, {})
    (site,) = rewrite(graphs[0], options.resolve({}))
    return site


def random_calls(args, device) -> Iterator[dict]:
    """Of each call that is rewritten: its time, and that of what is replaced, with repeats that are
    copied by eager code. The borders of the mask are made before, as for all layers of a model."""
    calls = {call: decided(call, device) for call in drawn(args.draws)}
    with noted() as launches:
        for call, site in calls.items():
            if site.decision.decodes:
                by_mask(*with_range(*draw(call.shape, device, call.dtype)))
    concurrent.futures.wait(compile_elsewhere(launches, gpus.capability(device)))
    for call, site in calls.items():
        yield against_replaced(call, site, args, device)


def against_replaced(call: Drawn, site: Site, args, device) -> dict:
    became = site.recipe or "SDPA, heads not repeated" * site.decision.unrepeats
    row = {
        "shape": call.shape._asdict(), "dtype": str(call.dtype), "repeats": call.repeats,
        "became": became, "reason": site.reason, "error": None,
    }  # fmt: skip
    if not became:
        return row
    new = PROVIDERS[2] if site.decision.decodes else PROVIDERS[0]
    old = dataclasses.replace(PROVIDERS[0], call=repeated if call.repeats else unrepeated)
    sets = draw_sets(call.shape, device, call.dtype)
    runners = {"new": Runner(new, sets), "old": Runner(old, sets)}
    row["rel_l1"] = relative_l1(*(x.output().double() for x in runners.values()))
    if not row["rel_l1"] < NEAR:
        row["error"] = f"not near what is replaced: {row['rel_l1']}"
    times = interleave(runners, args.rounds, args.target_ms)
    row["times"] = {name: summary(each) for name, each in times.items()}
    return row | {"speed": speed_of(times["new"], times["old"])}


# -- transformers' FP8 cache ----

FP8_CALLS = [
    *(Shape(1, 8, 4, N) for N in (256, 1024, 2048, 4096, 8192, 32768)), Shape(4, 8, 4, 1024),
    *(Shape(16, 8, 4, N) for N in (256, 512, 1024, 8192)), Shape(64, 8, 4, 256),
    Shape(64, 8, 4, 512), Shape(8, 32, 1, 1024), Shape(8, 32, 1, 2048), Shape(1, 1, 16, 32768),
    Shape(1, 8, 4, 8192, 64), Shape(16, 8, 4, 1024, 64), Shape(16, 8, 4, 8192, 64),
]  # fmt: skip


def by_codes(q, k, k_scale, v, v_scale) -> tuple[Tensor, ...]:
    """q [B, H_kv G, 1, D], k and v codes [B, H_kv, N - 1, D], a scale each: the output and all
    codes. The new token is the first's."""
    codes = [torch.cat([x, x[:, :, :1]], 2) for x in (k, v)]
    k, v = ((x.float() * y).to(q.dtype) for x, y in zip(codes, (k_scale, v_scale), strict=True))
    return sdpa(q, k, v, enable_gqa=True), *codes


def in_fp8(q, k, v, *_) -> tuple[Tensor, ...]:
    scales = [x.abs().amax().float() / 448 for x in (k, v)]
    k, v = ((x[:, :, 1:] / y).to(torch.float8_e4m3fn) for x, y in zip((k, v), scales, strict=True))
    return q, k, scales[0], v, scales[1]


def fp8_calls(args, device) -> Iterator[dict]:
    for shape in FP8_CALLS:
        torch._dynamo.reset()
        runners, before = {}, len(sage_inductor.report())
        sets = draw_sets(shape, device)
        for name in ("inductor", "sage"):
            run = torch.compile(by_codes, backend=name, dynamic=False, fullgraph=True)
            first = lambda *given, run=run: run(*given)[0]  # noqa: E731
            runners[name] = Runner(Provider(name, first, in_fp8), sets)
        (site,) = sage_inductor.report()[before:]
        error = relative_l1(*(x.output().double() for x in runners.values()))
        times = interleave(runners, args.rounds, args.target_ms)
        yield {
            "shape": shape._asdict(), "reason": site.reason, "rel_l1": error,
            "error": None if error < NEAR else f"not near what is replaced: {error}",
            "times": {name: summary(each) for name, each in times.items()},
            "speed": speed_of(times["sage"], times["inductor"]),
        }  # fmt: skip


# -- decoders ----

LLAMA = dict(
    hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, num_attention_heads=32,
    head_dim=128, vocab_size=128256, max_position_embeddings=2**18,
)  # fmt: skip


def llama(layers: int, device, **sizes) -> torch.nn.Module:
    """By regions, in bf16, with random weights; of Llama 3 8B's sizes but for these."""
    config = transformers.LlamaConfig(num_hidden_layers=layers, **LLAMA | sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(before)
    parts = (model.model.layers[i : i + REGION] for i in range(0, layers, REGION))
    model.model.layers = torch.nn.ModuleList(map(Region, parts))
    return model


class Region(torch.nn.Module):
    """REGION layers of a model in the place of one. What `run` compiles for one runs all regions:
    their layers and their part of a cache differ in tensors alone."""

    def __init__(self, layers: torch.nn.ModuleList):
        super().__init__()
        self.layers, self.cache, self.run = layers, None, in_turn
        for i, layer in enumerate(layers):
            layer.self_attn.layer_idx = i

    def forward(self, x: Tensor, **given) -> Tensor:
        del given[CACHE]  # as long as that of all layers
        return self.run(self.layers, self.cache, x, given)


def in_turn(layers, cache, x: Tensor, given: dict) -> Tensor:
    for layer in layers:
        x = layer(x, **{CACHE: cache}, **given)
    return x


def stepping(model, cache, run: Callable, tokens: Tensor) -> Callable[[], Tensor]:
    """A step of the model over the cache, by `run`, until another one is made."""
    for i, region in enumerate(model.model.layers):
        part = cache.layers[i * REGION : (i + 1) * REGION]
        region.cache, region.run = transformers.Cache(layers=part), run

    def step() -> Tensor:
        if FP8 and isinstance(cache.layers[0], FP8):
            rewind(cache, 0)
        return model(tokens, **{CACHE: cache}).logits

    return step


def decoders(args, device) -> Iterator[dict]:
    model = llama(LAYERS, device)
    for text in args.rows:
        for region in model.model.layers:
            region.cache = None  # that of the row before is large
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        B, N = map(int, text.split("x"))
        row = {"shape": {"B": B, "N": N, "layers": LAYERS}}
        try:
            yield row | decoder(model, B, N, args, device)
        except Exception as error:  # a row that fails must not cost the others
            yield row | {"error": harness.in_a_line(error)}


def decoder(model, B: int, N: int, args, device) -> dict:
    """ms of a step, of caches that are full but for ROOM tokens."""
    weights = torch.cuda.memory_allocated()
    tokens = torch.randint(model.config.vocab_size, (B, 1), device=device)
    caches, runners, row = {}, {}, {"error": None}
    row |= {what: {} for what in ("rel_l1", "cache_gib", "peak_gib", "fit")}
    before = len(sage_inductor.report())
    ways = [("Int8Cache", "sage", "Int8Cache")]
    if FP8 and B * N <= FP8_TOKENS:
        ways += [(OF_FP8[0], "inductor", "FP8"), (OF_FP8[1], "sage", "FP8")]
    for name, backend, kind in (*ways, *((x, x, "StaticCache") for x in ("sage", "inductor"))):
        if kind not in caches:
            torch.cuda.empty_cache()
            at_first = torch.cuda.memory_allocated()
            caches[kind] = cache = full_cache(kind, model.config, B, N, device)
            held = torch.cuda.memory_allocated() - at_first
            right = stepping(model, cache, in_turn, tokens)().double()
        compiled = torch.compile(in_turn, backend=backend, dynamic=False, fullgraph=True)
        step = stepping(model, cache, compiled, tokens)
        runners[name] = runner = Runner(Provider(name, step), [()])  # a CUDA graph
        peak = weights + held + runner.peak_bytes()
        row["cache_gib"][name], row["peak_gib"][name] = held / 2**30, peak / 2**30
        row["fit"][name] = int((CARD - weights) / (peak - weights) * B)
        rewind(cache, N)
        row["rel_l1"][name] = relative_l1(runner.output().double(), right)
        if not runner.captured:
            row["error"] = f"{name} is not captured"
        if kind == "Int8Cache":
            row["append_ms"] = time_append(cache, N, args)
            if [B, N] == [1, 8192]:
                row["steps"] = many_steps(model, cache, N, tokens, runner, step)
    report = sage_inductor.report()[before:]
    most = max(NEAR, AS_FAR * row["rel_l1"]["inductor"])
    far = [name for name, error in row["rel_l1"].items() if not error < most]
    if far:
        row["error"] = f"not near eager's logits: {far} of {row['rel_l1']}"

    def clock(run: Callable, repeats: int) -> float:
        for each in caches.values():
            rewind(each, N)
        return burst(run, repeats)

    calls = {name: each.run for name, each in runners.items()}
    times = in_turns(calls, args.rounds, 5 * args.target_ms, clock)
    return row | {
        "times": {name: summary(each) for name, each in times.items()},
        "speed": {name: speed_of(each, times["inductor"]) for name, each in times.items()},
        "over_bf16": speed_of(times["Int8Cache"], times["sage"]),
        "decodes": sum(site.decision.decodes for site in report), "sites": len(report),
    }  # fmt: skip


def full_cache(kind: str, config, B: int, N: int, device):
    """Random keys and values, in the place of a prompt. No address is fixed, which would compile
    each region anew."""
    if kind == "FP8":
        cache, shape = transformers.Cache(layers=[]), (B, config.num_key_value_heads, N - ROOM)
        for _ in range(config.num_hidden_layers):
            layer, k = FP8(), torch.randn(*shape, config.head_dim, device=device).bfloat16()
            k[:, :, 0] = 0
            k[:, :, 0, 0] = 16  # else a later token is beyond the scale, and its codes are NaN
            layer.update(k, k)
            layer.first = layer._quantized_keys, layer._quantized_values, layer.cumulative_length
            cache.layers.append(layer)
        return cache
    of = sage_inductor.Int8Cache if kind == "Int8Cache" else transformers.StaticCache
    cache = of(config, max_cache_len=N)
    with mock.patch("torch._dynamo.mark_static_address"):
        heads, dtype = config.num_key_value_heads, torch.bfloat16
        cache.early_initialization(B, heads, config.head_dim, dtype, device)
    for layer in cache.layers:
        if kind != "Int8Cache":
            layer.keys.normal_()
            layer.values.normal_()
        else:
            layer.key_codes.random_(-127, 128)
            layer.value_codes.random_(-127, 128)
            layer.key_scale.uniform_(1 / 64, 1 / 32)
            layer.value_scale.uniform_(1 / 64, 1 / 32)
            layer.anchor.normal_()
            layer.is_anchored = True
    rewind(cache, N)
    return cache


def rewind(cache, N: int) -> None:
    for layer in cache.layers:
        if FP8 and isinstance(layer, FP8):
            layer._quantized_keys, layer._quantized_values, layer.cumulative_length = layer.first
        else:
            layer.cumulative_length.fill_(N - ROOM)


def time_append(cache, N: int, args) -> float:
    """ms to append a token in all layers, of a step's."""
    k, v = (x.keys[:, :, :1].bfloat16() for x in cache.layers[:2])

    def append() -> Tensor:
        for x in cache.layers:
            codes = x.key_codes, x.key_scale, x.value_codes, x.value_scale
            append_kv(*codes, k, v, x.anchor, x.cumulative_length, True)
        return k

    rewind(cache, N)
    times = interleave({"append": Runner(Provider("append", append), [()])}, args.rounds, 5.0)
    return summary(times["append"])["ms"]


def many_steps(model, cache, N: int, tokens: Tensor, runner: Runner, step: Callable) -> dict:
    """STEPS tokens one after the other. equal: steps of which the CUDA graph's logits are those of
    the same kernels launched, to the bit; rel_l1: the most to eager's."""
    texts = torch.randint_like(tokens.expand(STEPS, *tokens.shape), model.config.vocab_size)

    def replay() -> Tensor:
        runner.run()
        return runner.out

    def logits(run: Callable[[], Tensor]) -> list[Tensor]:
        found = []
        rewind(cache, N)
        for text in texts:
            tokens.copy_(text)
            found.append(run().clone())
        return found

    graphed, launched = logits(replay), logits(step)
    eager = logits(stepping(model, cache, in_turn, tokens))
    errors = [relative_l1(x.double(), y.double()) for x, y in zip(graphed, eager, strict=True)]
    equal = sum(x.equal(y) for x, y in zip(graphed, launched, strict=True))
    return {"steps": STEPS, "equal": equal, "rel_l1": max(errors)}


PARTS = {"calls": calls, "random": random_calls, "fp8": fp8_calls, "decoders": decoders}


# -- perplexity ----

GPT = trained.Size(2, 2, 128, 512, 4, steps=600, evaluated=64, rate=2e-3)
TEXTS = 8  # of a batch
FIRST = 1, 64  # tokens, whose mean or largest value a cache keeps


def encode(k: Tensor, v: Tensor, first: int, rotated: bool) -> tuple[Tensor, ...]:
    """Codes and scales of k, then of v, and what is taken off k: the mean of the `first` tokens'
    keys, or 0."""
    (B, H, N, D), device = k.shape, k.device
    shapes = (B, H, N, D), (B, H, N), v.shape, (B, H, N)
    dtypes = (torch.int8, torch.float32) * 2
    cache = [
        torch.zeros(shape, dtype=dtype, device=device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    anchor = k[:, :, :first].float().mean(2) if first else torch.zeros(B, H, D, device=device)
    append_kv(*cache, k, v, anchor, torch.tensor(0, device=device), rotated)
    return *cache, anchor


def int8(k: Tensor, v: Tensor, first: int, rotated: bool) -> tuple[Tensor, Tensor]:
    """k and v as eager code gets them; with `first` and `rotated`, from an Int8Cache."""
    k_codes, k_scale, v_codes, v_scale, anchor = encode(k, v, first, rotated)
    return (
        read_kv(k_codes, k_scale, anchor, rotated, k.dtype),
        read_kv(v_codes, v_scale, None, False, v.dtype),
    )


def fp8(k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """By transformers: one scale for a layer's k and one for its v, which fit the `first` tokens of
    the batch. What is larger saturates."""
    layer = cache_utils.Fp8QuantizedLayer()  # not in older versions
    layer.update(k[:, :, :first], v[:, :, :first])
    return layer.update(k[:, :, first:], v[:, :, first:])


def fp8_by_token(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    made = ((x, *quantized(x, torch.float8_e4m3fn)) for x in (k, v))
    return tuple((codes.float() * scale[..., None]).to(x.dtype) for x, codes, scale in made)


def over_codes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``sage::decode`` of an Int8Cache, emulated, with all queries in one call."""
    k, k_scale, v, v_scale, _ = encode(k, v, FIRST[0], True)
    start = torch.zeros(1, dtype=torch.int64, device=q.device)
    call = DecodeCall(
        q, k, v, start, start + k.shape[2], q.shape[3] ** -0.5, k_scale, v_scale, rotated=True
    )
    return reference.decode(call)[0]


def given(cache: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    return lambda q, k, v: sdpa(q, *cache(k, v), is_causal=True)


ATTENTION = {
    "bf16": partial(sdpa, is_causal=True),
    "bf16, attention in fp32": lambda q, k, v: sdpa(
        q.float(), k.float(), v.float(), is_causal=True
    ).to(q.dtype),
    "Int8Cache, mean of 1 token": given(partial(int8, first=FIRST[0], rotated=True)),
    "the same, codes by `sage::decode`": over_codes,
    "Int8Cache, mean of 64 tokens": given(partial(int8, first=FIRST[1], rotated=True)),
    "INT8, rotated, no mean": given(partial(int8, first=0, rotated=True)),
    "INT8, mean of 1 token, not rotated": given(partial(int8, first=FIRST[0], rotated=False)),
    "INT8, neither": given(partial(int8, first=0, rotated=False)),
    "E4M3, a scale a token and head": given(fp8_by_token),
    "transformers' FP8, scale of 1 token": given(partial(fp8, first=FIRST[0])),
    "transformers' FP8, scale of 64 tokens": given(partial(fp8, first=FIRST[1])),
}


def strong_channels(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Two channels of k times 16, and of q by 16: all products are as before, in bf16 too."""
    factor = torch.ones(k.shape[3], dtype=k.dtype, device=k.device)
    factor[:2] = 16
    return q / factor, k * factor


def biased(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """4 N(0, 1) is added to each channel of k: softmax does not see it, but bf16 rounds the sum."""
    bias = 4 * torch.randn(k.shape[1], 1, k.shape[3], generator=torch.Generator().manual_seed(0))
    return q, k + bias.to(k)


KEYS = {
    "as trained": lambda q, k: (q, k),
    "two channels x16": strong_channels,
    "bias of 4 N(0, 1)": biased,
}


def measure_perplexity(args) -> int:
    device = harness.current(args)
    subject = trained.gpt(GPT, device)
    size = f"{GPT.layers} layers of {GPT.heads} heads, head_dim {GPT.head_dim}"
    method = (
        f"A GPT of bytes ({size}, of bench/trained.py) on {GPT.evaluated} held-out texts of "
        f"{GPT.N} bytes, {TEXTS} a batch, in bf16; change: of the perplexity to bf16's, of all, "
        "least and most of the batches"
    )
    result = harness.Result("perplexity", method, args, model=subject.note)
    for row in perplexities(subject):
        result.add([row])
    show(perplexity_table(result["rows"]))
    return result.end()


@torch.no_grad()
def perplexities(subject: trained.Subject, texts: int = TEXTS) -> Iterator[dict]:
    """Of each cache and keys. change: of perplexity to bf16's with keys as trained. by_token: mean
    of a token's |change of its loss|, nats."""

    def losses(attention, keys) -> Tensor:
        """[batches, tokens], of batches of so many texts."""
        with attending(lambda q, k, v, _: attention(*keys(q, k), v)):
            return subject.run(
                lambda tokens: torch.cat([subject.model(x) for x in tokens.split(texts)])
            ).unflatten(0, (-1, texts * subject.example[0].shape[1]))

    usual = losses(ATTENTION["bf16"], KEYS["as trained"])
    for name, keys in KEYS.items():
        for cache, attention in ATTENTION.items():
            more = losses(attention, keys) - usual
            changes = more.mean(1).expm1()
            yield {
                "keys": name, "cache": cache, "perplexity": (more + usual).mean().exp().item(),
                "change": more.mean().expm1().item(), "change_min": changes.min().item(),
                "change_max": changes.max().item(), "by_token": more.abs().mean().item(),
            }  # fmt: skip


def perplexity_table(rows: list[dict]) -> str:
    """Changes of perplexity with their range, then of a token's loss, with all KEYS."""
    lines = [["k and v", "perplexity", *KEYS]]
    for cache, its in groups(rows, "cache").items():
        changes = (
            f"{row['change']:+.3%} ({row['change_min']:+.3%} to {row['change_max']:+.3%}), "
            f"{row['by_token']:.4f}"
            for row in its
        )
        lines.append([cache, f"{its[0]['perplexity']:.4f}", *changes])
    return markdown(lines)


# -- the tables ----


def table(rows: list[dict]) -> str:
    """us a call, and the gain over SDPA with the mask, with its range; the same of decoders' ms."""
    parts = groups(rows, "part")
    tables = {"calls": calls_table, "random": random_table, "fp8": fp8_table}
    tables |= {"decoders": decoders_table}
    return "\n".join(tables[part](its) for part, its in parts.items())


def calls_table(rows: list[dict]) -> str:
    names = [x.name for x in PROVIDERS]
    lines = [["B", "H_kv", "G", "N", "D", "N_q", "filled", *names]]
    for row in rows:
        sizes = [f"{x:g}" for x in row["shape"].values()]
        us = (f"{row['times'][name]['ms'] * 1e3:.1f}" for name in names[:1])
        others = (
            f"{row['times'][name]['ms'] * 1e3:.1f}, {gain(row['speed'][name])}"
            for name in names[1:]
        )
        lines.append([*sizes, *us, *others])
    errors = (
        f"{name} {max(row['rel_l1'][name] for row in rows):.2%}" for name in names if name != "SDPA"
    )
    return markdown(lines) + f"\nLargest relative L1 to float64: {', '.join(errors)}.\n"


def random_table(rows: list[dict]) -> str:
    """How many of the calls are rewritten, and each that is slower than what it replaces."""
    lines = [["slower: B", "H_kv", "G", "N", "D", "N_q", "filled", "dtype", "became", "gain"]]
    timed, found = [row for row in rows if "speed" in row], {}
    for row in timed:
        found.setdefault(row["became"], []).append(row["speed"]["x"])
        if row["speed"]["x"] < SLOWER:
            sizes = [f"{x:g}" for x in row["shape"].values()]
            lines.append([*sizes, row["dtype"][6:], row["became"], gain(row["speed"])])
    gains = (f"{len(x)} become {name}: {min(x):.2f}x to {max(x):.2f}x" for name, x in found.items())
    slower = markdown(lines) if lines[1:] else f"None is slower than {SLOWER:g}x.\n"
    return f"{len(rows)} random calls, of which {'; '.join(gains)}.\n\n{slower}"


def fp8_table(rows: list[dict]) -> str:
    lines = [["FP8 cache: B", "H_kv", "G", "N", "D", "inductor, us", "sage", "as codes"]]
    for row in rows:
        sizes = (str(row["shape"][x]) for x in ("B", "H_kv", "G", "N", "D"))
        us = {name: f"{each['ms'] * 1e3:.1f}" for name, each in row["times"].items()}
        is_read = "yes" if "as codes" in row["reason"] else "no"
        lines.append([*sizes, us["inductor"], f"{us['sage']}, {gain(row['speed'])}", is_read])
    return markdown(lines)


def decoders_table(rows: list[dict]) -> str:
    lines = [
        ["decoder: layers", "B", "N", "inductor, ms", "sage", "Int8Cache", "Int8Cache over sage"]
        + ["append", "GiB of caches", "peak GiB", "fit"]
    ]
    names = "inductor", "sage", "Int8Cache"
    timed = [row for row in rows if "times" in row]
    more = [name for name in OF_FP8 if any(name in row["times"] for row in timed)]
    lines[0] += more
    for row in timed:
        ms = {name: each["ms"] for name, each in row["times"].items()}
        gains = (f"{ms[x]:.2f}, {gain(row['speed'][x])}" for x in names[1:])
        memory = f"{row['cache_gib']['sage']:.2f}, {row['cache_gib']['Int8Cache']:.2f}"
        layers = str(row["shape"].get("layers", 8))
        sizes = layers, str(row["shape"]["B"]), str(row["shape"]["N"])
        line = [*sizes, f"{ms['inductor']:.2f}", *gains, "", "", memory, "", ""]
        if "peak_gib" in row:
            line[6:8] = gain(row["over_bf16"]), f"{row['append_ms'] / ms['Int8Cache']:.1%}"
            line[9] = ", ".join(f"{row['peak_gib'][x]:.1f}" for x in names)
            line[10] = ", ".join(str(row["fit"][x]) for x in names)
        gains = (f"{ms[x]:.2f}, {gain(row['speed'][x])}" if x in ms else "" for x in more)
        lines.append([*line, *gains])
    said = (
        f"{x['steps']} steps of replays: {x['equal']} equal those of launches to the bit, and are "
        f"at most {x['rel_l1']:.1%} from eager's.\n"
        for row in rows
        if (x := row.get("steps"))
    )
    filled = [x for x in zip(*lines, strict=True) if any(x[1:]) or not lines[1:]]
    return "\n".join([markdown([*map(list, zip(*filled, strict=True))]), *said])


if __name__ == "__main__":
    harness.run(main)
