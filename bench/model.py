"""Whole transformer blocks, compiled: backend="sage" beside backend="inductor".

$ python bench/model.py --json              # bench/results/GPU/DATE-model.json
$ python bench/model.py --models flux_double wan14b_480p
$ python bench/model.py --plan selected --json    # a policy's `keep`: DATE-selected.json
$ python bench/model.py --plan cubes --json       # cubes of a video and a tail: DATE-cubes.json

Each block's row also has the share of its time that attention takes. Speed is the median of the
rounds' ratios, with their range. It is reported behind two gates: the kernel must agree with its
emulation, and the block's output must be near that of backend="inductor", unless blocks of keys are
left out.
"""

import dataclasses

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import sage_inductor
from bench import harness
from bench.blocks import MODELS, SHARP, Model, draw, first
from bench.measure import Provider, Runner, draw_sets, interleave, relative_l1, summary
from bench.providers import GATE_TOLERANCE, backend_of, build, gate
from bench.tables import gain, markdown, show, speed_of

# CosSim of a block's output with inductor's, below which it is wrong: it was 0.9998 and more for
# every block in emulation (N=512), 0.88 to 0.986 with uniform weights instead of softmax's, 0.997
# and less with the last sixteenth of attention's rows zeroed (but for HunyuanVideo's, where these
# are the text's, whose stream is not compared).
NEAR = 0.999
COLUMNS = {"inductor": {"backend": "inductor"}, "sage": {"backend": "sage"}}


def keeping(top_k: float, **more) -> dict:
    """Arguments of torch.compile: this fraction of the blocks of keys, in self-attention."""
    keep = {"top_k": top_k, "similarity": 0, **more}
    rules = [
        {"module": "*.attn2", "recipe": "auto"},
        {"recipe": "sage2-8b-per-token", "keep": keep},
    ]
    return {"backend": "sage", "options": {"sage.policy": rules}}


SELECTED = {f"keep {top_k:g}": keeping(top_k) for top_k in (1, 0.5, 0.3, 0.2)}
CUBES = {
    f"cubes, keep {top_k:g}": keeping(top_k, tail=True, layout=[21, 45, 80]) for top_k in (0.2, 0.1)
}  # of 75,600 tokens
KEEPING = SELECTED | CUBES
LEAVING_OUT = [column for column in KEEPING if column != "keep 1"]
LONG = {
    f"wan14b_{N}": dataclasses.replace(MODELS["wan14b_720p"], name=f"wan14b_{N}", N=N)
    for N in (75600, 32768)
}
# The columns of each plan, and what it times unless --models says it.
PLANS = {
    "model": (COLUMNS, MODELS),
    "selected": (COLUMNS | SELECTED, LONG),
    "cubes": (COLUMNS | CUBES, ["wan14b_75600"]),
}
KEEP_IS = (
    "the part of the blocks of keys that is computed (but for some on the diagonal), with "
    '"similarity": 0: random tokens do not resemble each other, so that by the default nearly all '
    "blocks would be computed; cross-attention is decided by auto"
)


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=3, target_ms=20.0)
    parser.add_argument("--plan", choices=PLANS, default="model")
    parser.add_argument("--models", nargs="+", choices=MODELS | LONG, help="default: the plan's")
    args = parser.parse_args(argv)
    device = harness.gpu(args)
    torch.manual_seed(0)
    result = harness.Result(args.plan, method(args), args)
    torch.set_grad_enabled(False)
    sage_inductor.config.rewrite_inductor = False  # it would rewrite the baseline
    for name in args.models or PLANS[args.plan][1]:
        row = measure((MODELS | LONG)[name], args.plan, args, device)
        torch.cuda.empty_cache()
        result.add([row])
        shown = others([row]) or table([row]) if args.plan == "model" else selected_table([row])
        show(f"\n{shown}")
        if launched := [name for name, x in row.get("times", {}).items() if not x["captured"]]:
            print(f"could not be captured, launched: {', '.join(launched)}")
    return result.end("model", "shape")


def method(args) -> dict[str, str]:
    return {
        "units": "ms a call; x: inductor's time over a column's in one round (median, least, most);"
        " share: the attention's time alone, by SDPA's fastest backend, of inductor's block",
        "time": f"median of {args.rounds} rounds, in which each column runs CUDA graphs for "
        f"{args.target_ms * 4 / 3:g} ms, the first quarter untimed; they take turns",
        "blocks": "one block, inference, bf16, random weights; scores of attention with a "
        f"deviation of {SHARP:g}; SDPA's fastest backend first for all of them",
        "accuracy": "of the timed graph's output, poisoned with NaN before, beside inductor's: of "
        f"two streams the image's or video's. CosSim above {NEAR} or no speed, but where keys are "
        "left out: there it is finite and not opposite",
        "memory": "peak_bytes: what one call has allocated at most, beside inputs and weights",
        **({} if args.plan == "model" else {"keep": KEEP_IS}),
    }


# -- the measurement ----


def measure(model: Model, plan: str, args, device) -> dict:
    """A row; where it failed or is wrong, with an error instead of times."""
    columns, _ = PLANS[plan]
    row = {"plan": plan, "model": model.name, "shape": model.case.shape, "sites": {}, "error": None}
    torch._dynamo.reset()
    try:
        block, inputs = draw(model, device)
        sets = draw_sets(model.case, device, dynamic=False)
        alone = backends(model.case, sets, args.target_ms)
        priority = list(map(backend_of, alone))
        runners = {}
        for column, given in columns.items():
            call = compiled(block, given, priority)
            before = len(sage_inductor.report())
            runners[column] = Runner(Provider(column, call), [inputs])
            row["sites"][column] = sites(sage_inductor.report(), before)
            if column in KEEPING:
                kernel_recipe(model, {column: row["sites"][column]})
        row["accuracy"] = check({name: runner.output() for name, runner in runners.items()})
        if any(site["recipe"] for site in row["sites"]["sage"]):
            recipe = kernel_recipe(model, row["sites"])
            error = gate(model.case, recipe, device)
            if not error < GATE_TOLERANCE:
                raise Wrong(f"the {recipe} kernel is {error:.2e} from its emulation")
        times = interleave(runners, args.rounds, args.target_ms)
        row["times"] = {
            name: {
                **summary(each),
                "captured": runners[name].captured,
                "peak_bytes": runners[name].peak_bytes(),
            }
            for name, each in times.items()
        }
        row.update(attention=next(iter(alone)), speed=speeds(times))
        row["share"] = alone[row["attention"]] / row["times"]["inductor"]["ms"]
    except Exception as error:  # a row that fails must not cost the others
        row["error"] = harness.in_a_line(error)
    return row


class Wrong(Exception):
    """What is timed does not compute what it should."""


def backends(case, sets, target_ms: float) -> dict[str, float]:
    """ms of SDPA's backends that run this attention, the fastest first."""
    runners = {}
    for provider in build(case, ("cuDNN", "efficient" if case.mask else "flash"), ()):
        try:
            runners[provider.name] = Runner(provider, sets)
        except RuntimeError:
            continue  # it does not have this shape
    times = interleave(runners, 1, target_ms)
    return {name: ms for name, (ms,) in sorted(times.items(), key=lambda item: item[1])}


def compiled(block, given: dict, priority: list):
    """(*inputs) -> the block's output, of two the first, compiled as `given` says, where SDPA takes
    the first of `priority` that it can."""
    run = torch.compile(block, fullgraph=True, **given)

    def call(*inputs):
        with sdpa_kernel(priority, set_priority=True):
            return first(run(*inputs))

    return call


def sites(report, before: int = 0) -> list[dict]:
    """What the report says of the calls that were compiled since it had `before` of them."""

    def sizes(shape) -> list[int | str]:  # or the names of those that are not known
        return [x if isinstance(x, int) else str(x) for x in shape]

    return [
        {"q": sizes(x.q), "k": sizes(x.k), "recipe": x.recipe, "reason": x.reason}
        for x in list(report)[before:]
    ]


def kernel_recipe(model: Model, found: dict[str, list[dict]]) -> str:
    """What the block's self-attention runs with where it is rewritten."""
    for site in (site for column in found.values() for site in column):
        if site["recipe"] and site["q"][2] == site["k"][2] == model.N:
            return site["recipe"]
    raise Wrong(f"no column rewrites the self-attention: {found}")


def check(outputs: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Each output's CosSim with inductor's and relative L1; raises Wrong if one is not near it, or
    where keys are left out, is not finite."""
    right = outputs["inductor"].float()
    found = {}
    for name, out in outputs.items():
        out = out.float()
        found[name] = {
            "cos_sim": (out * right).sum().div(out.norm() * right.norm()).item(),
            "rel_l1": relative_l1(out, right),
        }
        if not found[name]["cos_sim"] > (0 if name in LEAVING_OUT else NEAR):  # a NaN is not
            raise Wrong(f"{name} is not near inductor: {found[name]}")
    return found


def speeds(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of each column's ms in each round: how much faster than inductor it was in the same round."""
    others = {name: each for name, each in times.items() if name != "inductor"}
    return {name: speed_of(each, times["inductor"]) for name, each in others.items()}


# -- the tables ----


def table(rows: list[dict]) -> str:
    """A line for each block in which a call is rewritten."""
    lines = [[
        "block", "B x H x N x D", '`"inductor"`', '`"sage"`', "faster", "attention", "relative L1",
    ]]  # fmt: skip
    for row in rewritten(rows)[0]:
        inductor, sage = (row["times"][name]["ms"] for name in ("inductor", "sage"))
        lines.append([
            title_of(row), row["shape"], f"{inductor:#.4g} ms", f"{sage:#.4g} ms",
            gain(row["speed"]["sage"], "**"),
            f"{row['share']:.0%}", f"{row['accuracy']['sage']['rel_l1']:.2%}",
        ])  # fmt: skip
    return markdown(lines)


def others(rows: list[dict]) -> str:
    """The blocks of which all calls stay; nothing where there are none."""
    _, found = rewritten(rows)
    if not found:
        return ""
    speeds = [row["speed"]["sage"][end] for row in found for end in ("x_min", "x_max")]
    names = "; ".join(map(title_of, found))
    return f"All calls stay SDPA ({min(speeds):.3f}x to {max(speeds):.3f}x) in: {names}.\n"


def rewritten(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """The blocks in which a call is rewritten for a user, and the others; none that failed."""
    found = [], []
    for row in (row for row in rows if not row["error"]):
        found[not any(site["recipe"] for site in row["sites"]["sage"])].append(row)
    return found


def title_of(row: dict) -> str:
    return MODELS[row["model"]].title


def selected_table(rows: list[dict]) -> str:
    """A line per block and way to compile it."""
    lines = [["B x H x N x D", "compiled by", "ms", "over inductor", "over sage", "peak, GiB"]]
    for row in rows:
        for name in () if row["error"] else row["sites"]:
            its, ms = row["times"][name], row["times"][name]["ms"]
            ratios = (row["times"][of]["ms"] / ms for of in ("inductor", "sage"))
            lines.append([
                row["shape"], name, f"{ms:#.4g}", *(f"{x:.2f}x" for x in ratios),
                f"{its['peak_bytes'] / 2**30:.2f}",
            ])  # fmt: skip
    return markdown(lines)


if __name__ == "__main__":
    harness.run(main, fresh=harness.CACHES[:1])
