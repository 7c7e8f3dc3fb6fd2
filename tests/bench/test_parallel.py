"""bench/parallel.py on two processes with gloo: what it measures, computes and counts."""

import functools
import json

import models as zoo
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, serve
from support import op_by_op

from bench import harness, parallel, ring
from bench.models import Model
from bench.parallel import Case, communication, interpolated, received
from sage_inductor import config
from sage_inductor.ops.distributed import gather

CASE = Case("small", 256, 4, 32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    ranks = Ranks(2, __file__, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


def small() -> None:
    parallel.SIZES = 4, 6
    parallel.CASES, parallel.SHARDS = (CASE, Case("odd", 251, 4, 32)), (2**14, 2**15)


def run(group, file: str) -> int:
    small()
    return parallel.main(["--rounds", "2", "--target-ms", "1", "--calls", "3", "--json", file])


@pytest.mark.sweep
def test_two_processes_are_measured_and_more_are_computed(pair, tmp_path):
    files = tmp_path / "0.json", tmp_path / "1.json"
    assert pair(run, *[(str(file),) for file in files]) == [0, 0]
    assert not files[1].exists()
    result = json.loads(files[0].read_text())
    assert result["world"] == 2 and result["machine"] == {"gpu": "cpu"}
    assert [(row["collective"], row["shard"]) for row in result["bandwidth"]] == [
        (name, shard) for shard in (2**14, 2**15) for name in ("all_gather", "all_to_all")
    ]
    for row in result["bandwidth"]:
        bytes_ = row["shard"] / (1 if row["collective"] == "all_gather" else 2)
        assert row["GBs"] * row["ms"] * 1e6 == pytest.approx(bytes_)
    rows = {(row["P"], row["provider"]): row for row in result["rows"]}
    assert set(rows) == {(P, name) for P in (2, 4) for name in parallel.PROVIDERS}
    for (P, name), row in rows.items():
        measured = P == 2
        assert {row[x] is not None for x in ("ms", "eager_ms", "rel_l1")} == {measured}
        assert row["computed_ms"] == row["local_ms"] + row["collectives_ms"]
        assert min(row["local_ms"], row["collectives_ms"], row["sdpa_ms"]) > 0
        ms = row["ms"] if measured else row["computed_ms"]
        assert row["efficiency"] == pytest.approx(row["one_device_ms"] / P / ms)
        shard = 256 * 4 * 32 * 2 // P  # of one tensor, in bf16
        facts = gather.FACTS * (P - 1)
        if name == "heads":  # q, k, v, the output, and its logsumexp in fp32
            assert row["received_bytes"] == facts + (4 * shard + shard // 16) * (P - 1) / P
        elif name in ("rows", "SDPA"):
            assert row["received_bytes"] == facts * (name == "rows") + 2 * shard * (P - 1)
        else:  # the sample weighs here
            assert facts + shard * (P - 1) < row["received_bytes"]
    assert sum(row["chosen"] for row in result["rows"]) == 2
    errors = [rows[2, name]["rel_l1"] for name in parallel.PROVIDERS]
    assert max(errors[:3]) < 1e-3 and errors[2] == 0
    assert len(result["calls"]) == 3 and all(row["rel_l1"] < 0.05 for row in result["calls"])


def wrong(group, name: str) -> str:
    small()
    parallel.PROVIDERS = {name: lambda link, q, k, v: torch.zeros_like(q)}
    try:
        return str(parallel.main(["--rounds", "1", "--target-ms", "1"]))
    except SystemExit as error:
        return str(error)


def test_a_wrong_output_is_not_timed(pair):
    for told in pair(wrong, ("zero",), ("zero",)):
        assert told.startswith("zero of Case(name='small'") and "wrong: relative L1 1.0" in told


def test_one_process_computes_without_collectives(gloo):
    clock = parallel.Clock(torch.device("cpu"), 1, 1.0)
    with torch.no_grad():
        rows = parallel.measure(CASE, clock, dist.get_world_size(), 0, [])
    assert {row["P"] for row in rows} == {2, 4}
    assert all(row["ms"] is None and row["collectives_ms"] == 0 for row in rows)
    assert "~" in parallel.case_table(CASE, rows).splitlines()[-1]


def test_the_collectives_of_more_ranks_are_computed_from_measured_ones():
    rows = [("all_gather", 1000, 1.5, 1e-6), ("all_gather", 100_000, 2.0, 9e-6),
            ("all_to_all", 1000, 1.0, 1e-6)]  # fmt: skip
    bandwidth = [dict(zip(("collective", "shard", "ms", "GBs"), row)) for row in rows]
    assert received("all_gather", 80, 4) == 240 and received("all_to_all", 80, 4) == 60
    # 30,000 bytes at 5e-6 GB/s: 6 s. The shortest takes 1.5 ms, whatever its size.
    assert communication([("all_gather", 10_000)], 4, bandwidth) == pytest.approx(6000)
    assert communication([("all_gather", 1)] * 2, 2, bandwidth) == pytest.approx(3.0)
    both = [("all_to_all", 4000), ("all_gather", 10_000)]
    assert communication(both, 4, bandwidth) == pytest.approx(3000 + 6000)
    assert interpolated(5, [10, 100], [1, 2]) == 1 and interpolated(500, [10, 100], [1, 2]) == 2


@pytest.mark.parametrize(
    ("told", "plan"),
    [
        ({}, "parallel"), ({"NCCL_SHM_DISABLE": "1"}, "parallel"),
        ({"NCCL_P2P_DISABLE": "0"}, "parallel"), ({"NCCL_P2P_DISABLE": "1"}, "parallel-host"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "parallel-sockets"),
    ],
)  # fmt: skip
def test_a_result_is_named_after_what_the_gpus_exchange_by(told, plan, monkeypatch):
    for name in harness.NCCL:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert parallel.plan() == plan


# -- diffusers' ring ----


def ring_of_two(group, file: str) -> int:
    """A small Wan; on CPU there is no cuDNN, so both rings are ours."""
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and CPUs are none
    config.emulate = True
    ring.ATTENTION, ring.WAYS = (256, 4, 32), {x: ("sage_inductor", "sage") for x in ring.WAYS}
    small = functools.partial(zoo.wan, heads=4, head_dim=32, ffn_dim=64)
    ring.BLOCK = Model("small Wan", 192, lambda: small()[0], lambda: small()[1])
    with op_by_op():
        return ring.main(["--rounds", "1", "--target-ms", "1", "--json", file])


@pytest.mark.sweep
def test_two_processes_run_the_ring_and_a_block_that_uses_it(pair, tmp_path):
    files = tmp_path / "0.json", tmp_path / "1.json"
    assert pair(ring_of_two, *[(str(file),) for file in files]) == [0, 0]
    assert not files[1].exists()
    rows = json.loads(files[0].read_text())["rows"]
    assert [(row["what"], row["way"], row["gpus"]) for row in rows] == [
        (what, way, gpus) for what in ("attention", "block") for way in ring.WAYS for gpus in (1, 2)
    ]
    assert all(row["ms"] > 0 and 0.999 < row["similarity"] < 1.0001 for row in rows)


if __name__ == "__main__":
    serve(globals())
