"""``sage_inductor.gather_attention`` on two GPUs with NCCL: what one GPU computes, or an error. Each
case has processes of its own, for an error on the device ends them. The cases on CPU with gloo, and
all that ranks may disagree on, are in test_parallel.py."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import relative_l1

RECIPE, OTHER = "sage2-8b-rotated", "sage1-rotated"
WRITTEN = "rows", "heads"  # to the memory of the GPUs
SELECTED = "a tail", "cubes, segments", "sol"  # three of six: each compiles kernels of its own
TIMEOUT = 15  # seconds, of a collective
CALLS = 10  # on each of two streams
CYCLES = 20_000_000  # of a GPU, some 10 ms: more than the host takes for a call
UNLIKE = "the ranks were called with different arguments or unequal lengths"


def run(what: str, folder: Path) -> tuple[dict[int, dict], str]:
    """What the ranks found, of those that lived, and what was printed."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    start = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *start, __file__, what, folder], capture_output=True, text=True,
        env={**os.environ, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "PYTHONPATH": path}, timeout=120,
    )  # fmt: skip
    found = {r: folder / f"{r}.json" for r in range(2)}
    return {r: json.loads(f.read_text()) for r, f in found.items() if f.exists()}, done.stderr


@pytest.mark.gpu
def test_two_gpus_compute_what_one_does_and_a_graph_replays_it(tmp_path):
    found, printed = run("values", tmp_path)
    assert found == {
        r: {"equal": True, "replayed": True, "ways": [True, True], "near": True} for r in range(2)
    }, printed


@pytest.mark.gpu
def test_calls_on_two_streams_do_not_write_over_each_other(tmp_path):
    found, printed = run("streams", tmp_path)
    assert found == {r: {"equal": [True] * 2 * CALLS} for r in range(2)}, printed


@pytest.mark.gpu
def test_two_gpus_select_the_blocks_that_one_does(tmp_path):
    """By Ulysses' exchange. Where keys are gathered, a reason says that none are selected."""
    found, printed = run("selected", tmp_path)
    assert found == {r: {name: [True] * 3 for name in SELECTED} for r in range(2)}, printed


@pytest.mark.gpu
def test_a_line_of_two_timings_says_what_lies_between_takes_in_a_graph(tmp_path):
    """Of 8 MiB a rank. Everything is between the small and the large one, by half to twice."""
    found, printed = run("rates", tmp_path)
    for each in found.values():
        assert each["rates"] == found[0]["rates"]
        for name, (took, line) in each["between"].items():
            assert took / 2 < line < took * 2, (name, each)
        assert 0 < each["launch"] < 2e-5
    assert len(found) == 2, printed


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["recipes", "lengths"])
def test_ranks_that_disagree_are_told_by_the_device(what, tmp_path):
    found, printed = run(what, tmp_path)
    assert UNLIKE in printed
    assert all("device-side assert" in each["error"] for each in found.values()), found


@pytest.mark.gpu
def test_ranks_that_ask_for_lengths_are_told_which_of_them_is_wrong(tmp_path):
    found, printed = run("asked", tmp_path)
    for each in found.values():
        assert "ValueError" in each["error"] and "rank 1 has recipe" in each["error"]
    assert len(found) == 2, printed


@pytest.mark.gpu
def test_a_rank_that_does_not_come_is_an_error_on_the_other(tmp_path):
    found, printed = run("absent", tmp_path)
    assert "collective operation timeout" in printed and "completed" not in found.get(0, {}), found


@pytest.mark.gpu
def test_a_rank_that_ends_within_a_call_is_an_error_on_the_other(tmp_path):
    found, printed = run("late", tmp_path)
    assert "CUDA error" in found[0]["error"], printed


# -- the ranks ----


@torch.no_grad()
def main(what: str, folder: Path) -> None:
    from sage_inductor import attention, config, gather_attention
    from sage_inductor.ops.distributed import exchange, peers, transport
    from sage_inductor.ops.recipe import NAMED
    from sage_inductor.ops.sdpa import SdpaCall, compose

    dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT))
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    qkv = [torch.randn(1, 4000, 8, 128, device="cuda").bfloat16().transpose(1, 2) for _ in range(3)]
    mine = [x.chunk(2, 2)[rank] for x in qkv]

    def gather(*of_rank, **given):
        out = gather_attention(*of_rank, **{"recipe": RECIPE, **given})
        torch.cuda.synchronize()
        return out

    def values():
        call = SdpaCall.of(*qkv, 128**-0.5, NAMED[RECIPE].encode(), out_bnhd=True)
        out, alone = gather(*mine), compose(call)[0].chunk(2, 2)[rank]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            replayed = gather_attention(*mine, recipe=RECIPE)
        mine[0].mul_(0.5)
        graph.replay()
        eager = gather(*mine)
        written = [by_way(way) for way in WRITTEN]
        with mock.patch.object(peers, "of", lambda *_: None):
            sent = [by_way(way) for way in WRITTEN]
        ways = [x.equal(y) for x, y in zip(written, sent)]
        near = all(relative_l1(x, eager) < 0.01 for x in written)
        replayed = replayed.equal(eager)
        return {"equal": out.equal(alone), "replayed": replayed, "ways": ways, "near": near}

    def by_way(way):
        asked = False, 128**-0.5, NAMED[RECIPE].encode(), None, way
        memory = peers.of(dist.group.WORLD, mine[0].device)
        out = torch.ops.sage.gather_sdpa(*mine, dist.group.WORLD.group_name, *asked)[0]
        assert memory is None or memory.bytes > 2 * mine[1].nbytes
        return out

    def selected():
        import test_parallel  # which does the same with all of them on CPUs

        found = {}
        for name in SELECTED:
            keep = test_parallel.KEEPS[name]
            N = 440 if "dense_last" in keep else 512
            whole = [x[:, :, :N].contiguous() for x in qkv]
            policy = [{"recipe": test_parallel.RECIPE, "keep": keep}]
            with config.patch(force=True, policy=policy):
                alone = attention(*whole).chunk(2, 1)[rank]
            part = [x.chunk(2, 2)[rank] for x in whole]
            out, *reasons, _ = test_parallel.selected(dist.group.WORLD, *part, keep, emulate=False)
            found[name] = [
                out.equal(alone), "keep {" in reasons[0], "for self-attention" in reasons[1]
            ]  # fmt: skip
        return found

    def rates():
        group, lengths = dist.group.WORLD, (2**15,) * 2
        x = torch.zeros(2**15, 1, 2, 64, device="cuda").half().permute(1, 2, 0, 3)
        measured, memory = transport.rates_of(group, x.device), peers.of(group, x.device)
        by = exchange.Collectives(group, lengths)
        calls = {"gather": (by.rows, x.nbytes), "exchange": (by.heads, x.nbytes / 2)}
        if measured.put:
            put = lambda xs: exchange.Peers(memory, lengths).heads(xs)  # noqa: E731
            calls["put"] = put, x.nbytes / 2
        between = {}
        for name, (call, received) in calls.items():
            line, graph = getattr(measured, name), torch.cuda.CUDAGraph()
            call((x,))
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(20):
                    call((x,))
            took = [transport._clock(graph.replay, lambda: None, x.device) / 20 for _ in range(3)]
            between[name] = min(took), line.start + received / line.rate
        return {"rates": measured, "between": between, "launch": measured.launch}

    def streams():
        """Calls that differ in size, so that what one writes is where another reads. A long one is
        held up between the meeting and its reads, so that the next would write before them."""
        short = [x[:, :, :700].contiguous() for x in mine]
        expected = [gather(*x) for x in (mine, short)]
        both = [torch.cuda.Stream() for _ in range(2)]
        found, arrive = [], peers.PeerMemory.arrive

        def arrive_and_wait(memory):
            arrive(memory)
            if torch.cuda.current_stream() == both[0]:
                torch.cuda._sleep(CYCLES)

        with mock.patch.object(peers.PeerMemory, "arrive", arrive_and_wait):
            for _ in range(CALLS):
                for stream, x in zip(both, (mine, short)):
                    with torch.cuda.stream(stream):
                        found.append(gather_attention(*x, recipe=RECIPE))
        torch.cuda.synchronize()
        return {"equal": [x.equal(y) for x, y in zip(found, expected * CALLS)]}

    def late():
        """A rank takes part in the first collective, and does not come to the meeting after."""
        skipped = mock.patch.object(peers.PeerMemory, "arrive", lambda _: time.sleep(TIMEOUT))
        with mock.patch.object(peers, "TIMEOUT", 3000), skipped if rank else nullcontext():
            gather(*mine)
        return {"completed": True}

    def absent():
        if rank:
            time.sleep(3 * TIMEOUT)
            return {}
        gather(*mine)
        return {"completed": True}

    cases = {
        "values": values,
        "recipes": lambda: {"out": gather(*mine, recipe=OTHER if rank else RECIPE).shape},
        "lengths": lambda: {"out": gather(*(x[:, :, : 1900 - 64 * rank] for x in mine)).shape},
        "asked": lambda: {"out": gather(*mine, recipe=OTHER if rank else RECIPE, lengths="ask")},
        "absent": absent,
        "streams": streams,
        "selected": selected,
        "rates": rates,
        "late": late,
    }
    gather(*mine)  # the group is measured
    try:
        found = cases[what]()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
