"""bench/sparse_peers.py: what each peer is given, by fakes that read it as the real ones do."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench import sparse_peers as bench

CPU = torch.device("cpu")


class AtOnce:
    """bench.measure.Runner without a clock; fastvideo's graphs are empty."""

    def __init__(self, provider, sets):
        self.captured, self.empty = provider.captures, provider.name == "fastvideo"
        self.out = provider.call(*provider.prepare(*sets[0]))

    def output(self):
        return torch.full_like(self.out, math.nan) if self.captured and self.empty else self.out


def by_lists(q, k, v, index, count, block, tile=None):
    """[1, H, N, D] by index [1, H, N / tile, width], of which each row has count. tile: block."""
    tile = tile or block
    seen = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    for h, m in torch.cartesian_prod(*map(torch.arange, index.shape[1:3])).tolist():
        for j in index[0, h, m, : count[0, h, m]].tolist():
            seen[0, h, tile * m : tile * (m + 1), block * j : block * (j + 1)] = True
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), seen).bfloat16()


@pytest.fixture
def installed(monkeypatch):
    """All but comfy-kitchen."""

    def quantize(q, k, v, *, v_layout):
        assert v_layout == "bhds" and all(x.is_contiguous() for x in (q, k, v))
        return q / 2, k / 4, v.mT / 8, 2, 4, 8

    def kernel(block):
        def call(q, k, v, q_scale, k_scale, v_scale, index, n):
            assert index.is_contiguous() and index.dtype == torch.int32 and n == index.shape[3]
            x = q * q_scale, k * k_scale, v.mT * v_scale
            return by_lists(*x, index, torch.full(index.shape[:3], n), block), "lse"

        return call

    def op(q, k, v, index, *, block_sparse_num, sparse_block_size):
        six = quantize(q, k, v, v_layout="bhds")
        return {"o_tensor": kernel(sparse_block_size)(*six, index, block_sparse_num)[0]}

    def fastvideo(q, k, v, index, count, sizes):
        assert count.dtype == sizes.dtype == torch.int32 and {*sizes.tolist()} <= {16, 64}
        assert len(sizes) == k.shape[2] // 64
        return by_lists(q, k, v, index, count, 64), "lse"

    def sla(q, k, v, sparse_map, lut, topk, block_m, block_n):
        assert lut.is_contiguous() and topk == lut.shape[3]
        return by_lists(q, k, v, lut, torch.full(lut.shape[:3], topk), block_n, block_m)

    name = "cudnn.block_sparse_attention"
    given = {
        "cudnn": {}, name: {"block_sparse_attention_fp8_forward": op},
        f"{name}._fp8_quant": {"_quantize_sage_bhsd": quantize},
        f"{name}._interface": {f"_bsa_attn_fwd_sm90_fp8_blk{n}": kernel(n) for n in (64, 128)},
        "fastvideo_kernel": {}, "comfy_kitchen": None, "sparse_linear_attention": {},
        "sparse_linear_attention.kernel": {"_attention": SimpleNamespace(apply=sla)},
    }  # fmt: skip
    for module, names in given.items():
        made = None if names is None else ModuleType(module)
        vars(made).update(names) if names else None
        monkeypatch.setitem(sys.modules, module, made)
    ops = {f"block_sparse_attn_{of}": fastvideo for of in ("sm90", "triton")}
    monkeypatch.setattr(torch.ops, "fastvideo_kernel", SimpleNamespace(**ops), raising=False)
    monkeypatch.setattr(bench, "Runner", AtOnce)
    monkeypatch.setattr(bench, "interleave", lambda runners, *_: {x: [2.0, 3.0] for x in runners})


@pytest.mark.parametrize("size", [(128, 128), (64, 64)])
def test_peers_compute_the_blocks_that_are_drawn(size, installed):
    case, without = bench.Case(512, size, 0.5, 2), ["op"]
    args = SimpleNamespace(rounds=1, target_ms=1.0, without=without, own=False)
    row = bench.measure(case, CPU, args)
    names = [x for x in row["times"] if not x.startswith("kernel")]
    fastvideo = ["fastvideo TK", "fastvideo Triton"] * (size[0] == 64)
    of_64 = [f"SLA{bench.OTHER}", *fastvideo, "SLA"] * (size[0] == 64)
    assert names == ["cuDNN kernel", "cuDNN op", *of_64] and not row["errors"]
    for name in (x for x in names if not x.endswith(bench.OTHER)):
        its = row["times"][name]
        assert its["of_lists"] < 0.01 < 0.2 < its["of_dense"]
        assert its["captured"] == (name not in fastvideo)
    assert row["listed"] == 0.5


def test_who_is_not_installed_is_named_below_the_table(installed):
    without = ["selected", "tail"]
    case = bench.Case(512, None, 0.5, 2)
    row = bench.measure(
        case, CPU, SimpleNamespace(rounds=1, target_ms=1.0, without=without, own=False)
    )
    assert "failed: sol_attn: ModuleNotFoundError: import of comfy_kitchen" in bench.table([row])


def test_calls_of_peers_are_timed_with_what_becomes_of_them(installed):
    """Without a GPU nothing becomes of them. A cut block is another kernel's mask."""
    args = SimpleNamespace(rounds=1, target_ms=1.0, without=["rewritten"], own=True)
    row = bench.measure(bench.Case(512, (64, 64), 0.5, 2), CPU, args)
    assert not row["errors"] and [*row["times"]] == [
        f"SLA{bench.OTHER}", "fastvideo TK", "fastvideo Triton", "cut fastvideo", "SLA",
    ]  # fmt: skip
    for name in ("SLA", f"SLA{bench.OTHER}", "fastvideo"):
        row["times"][f"rewritten {name}"] = {"ms": 2.0}
    del row["times"]["cut fastvideo"]
    assert bench.of_own([row]).splitlines()[-1] == "| 512 | 50% |" + " 2.500 | 1.25 |" * 3


@pytest.mark.parametrize("size", [(128, 128), (64, 64), (128, 64)])
def test_each_row_names_as_many_blocks(size):
    blocks = bench.equal(bench.Case(1024, size, 0.3, 2), size, CPU)
    index = bench.indices(blocks)
    assert index.shape == (1, 2, 1024 // size[0], round(0.3 * 1024 / size[1]))
    rows = torch.arange(index.shape[2])
    assert blocks[:, :, rows, rows * size[0] // size[1]].all()
    count = torch.full(index.shape[:3], index.shape[3])
    others = torch.arange(blocks.shape[3]).expand_as(blocks)[~blocks].view(*index.shape[:3], -1)
    assert torch.equal(bench.named_by(count, torch.cat([index, others], 3)), blocks)
