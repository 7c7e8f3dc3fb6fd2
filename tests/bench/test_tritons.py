"""What bench/tritons.py compiles and launches is what the library does."""

import json
from types import SimpleNamespace

import pytest
import torch

from bench import tritons


@pytest.mark.parametrize(
    "row, split", tritons.VARIANTS, ids=[tritons.name_of(*each) for each in tritons.VARIANTS]
)
def test_a_length_has_each_variant(row, split):
    call, launches, _ = tritons.launches_of(row, split, torch.device("meta"))
    assert call.q.shape[3] == row[1]
    (launch,) = (each for each in launches if each.kernel is tritons.kernel._hopper_kernel)
    given = dict(zip(launch.kernel.arg_names, launch.arguments))
    assert given["SPLIT"] == split and given["FP8"] == (row[0] == "fp8")
    assert given["WARPGROUPS"] == row[4].warpgroups and given["RIGHT"] == (0 if row[2] else -1)


def test_each_variant_is_kept_with_what_a_launch_has_to_know(tmp_path, monkeypatch):
    ptx = ".visible .entry _hopper_kernel(\n.param .u64 a, // Q\n.param .u32 b\n)"
    compiled = SimpleNamespace(
        asm={"ptx": ptx, "cubin": b"abc"}, metadata=SimpleNamespace(shared=7)
    )
    monkeypatch.setattr(tritons, "compiled_of", lambda launches: compiled)
    monkeypatch.setattr(tritons, "VARIANTS", tritons.VARIANTS[:2])
    assert tritons.save(tmp_path / "3.9") == 0
    for variant in tritons.VARIANTS:
        file = tmp_path / "3.9" / tritons.name_of(*variant)
        assert file.with_name(f"{file.name}.cubin").read_bytes() == b"abc"
        about = json.loads(file.with_name(f"{file.name}.json").read_text())
        assert about == {"entry": "_hopper_kernel( .param .u64 a, .param .u32 b", "shared": 7}
