"""What of the fingerprint needs no GPU: its cases, the op's arguments, what it calls equal."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from bench import fingerprint
from bench.fingerprint import BOTH, COMPILED, EAGER, Call, arguments, compare, tensors

CALLS = EAGER + BOTH + COMPILED


@pytest.mark.parametrize("names", [("q", "scale", "out_bnhd"), ("right", "younger", "portable")])
def test_arguments_are_those_of_the_schema_in_its_order(names, monkeypatch):
    """One that is younger than the cases takes its default."""
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=x, default_value=5) for x in names])
    op = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    monkeypatch.setattr(torch.ops, "sage", SimpleNamespace(sdpa=op))
    found = arguments("sage1", Call(63, 64, "causal"), "portable", ("q", "k", "v", None))
    assert found == (("q", 0.125, True) if names[0] == "q" else (0, 5, True))


@pytest.mark.parametrize(
    "call", [c for c in CALLS if 1 < c.N_q < 777 and c.N_kv < 777], ids=lambda c: c.name
)
def test_tensors_lie_as_the_layout_says(call):
    q, k, v, attn_mask = tensors(call, 0, "cpu")
    assert q.shape == (call.B, call.H_q, call.N_q, call.D) and k.shape[1] == v.shape[1] == call.H_kv
    stride = {
        "BNHD": call.H_q * call.D, "fused": 3 * call.H_q * call.D,
        "unaligned": call.H_q * (call.D + 1), "BHND": call.D,
    }  # fmt: skip
    assert q.stride(2) == stride[call.layout] and q.stride(3) == 1
    assert (attn_mask is not None) == (call.kind in fingerprint.MASKS)
    again = tensors(call, 0, "cpu")
    assert all(x is y is None or torch.equal(x, y) for x, y in zip((q, k, v, attn_mask), again))


@pytest.mark.parametrize("recipe", fingerprint.RECIPES)
def test_a_hash_is_of_the_call_and_of_all_bits(recipe, monkeypatch):
    call = Call(63, 40, "causal", layout="fused")
    other = dataclasses.replace(call, H_kv=2)
    cases = {"one": (recipe, call, "eager"), "other": (recipe, other, "eager")}
    monkeypatch.setattr(fingerprint, "cases", lambda: cases)
    one = fingerprint.fingerprint("one", "cpu")
    assert len(one) == 64 and one == fingerprint.fingerprint("one", "cpu")
    assert one != fingerprint.fingerprint("other", "cpu")
    compute, calls = fingerprint.compute, []

    def one_bit_off(*args):
        out, lse = compute(*args)
        lse.view(torch.int32)[0, 0, 0] ^= len(calls) >= late
        calls.append(args)
        return out, lse

    monkeypatch.setattr(fingerprint, "compute", one_bit_off)
    late = 0
    assert fingerprint.fingerprint("one", "cpu") not in (one, "changes from run to run")
    late, calls = 1, []
    assert fingerprint.fingerprint("one", "cpu") == "changes from run to run"


def test_what_differs_or_is_missing_is_said():
    before = {"a": "1", "b": "2", "c": "3", "d": "changes from run to run"}
    assert compare(before, before) == [
        "differs: d (changes from run to run -> changes from run to run)"
    ]
    assert compare(before, {"a": "1", "b": "4", "e": "5", "d": "6"}) == [
        "differs: b (2 -> 4)", "missing: c", "differs: d (changes from run to run -> 6)",
        "only after: e",
    ]  # fmt: skip


def test_compare_is_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        fingerprint, "in_processes", lambda names, *_: {name: f"hash of {name}" for name in names}
    )
    for file, edit in (("same", {}), ("other", {"sage1: gone": "0"})):
        path = str(tmp_path / file)
        assert fingerprint.main(["--out", path]) == 0
        (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | edit))
        assert fingerprint.main(["--compare", path]) == bool(edit)
    assert capsys.readouterr().out.splitlines()[-1] == "missing: sage1: gone"


@pytest.mark.sweep
def test_processes_share_the_cases():
    names = [name for name in fingerprint.cases() if ": 2x4/4x63/" in name][:3]
    found = fingerprint.in_processes(names, 2, "cpu")
    assert found == {name: fingerprint.fingerprint(name, "cpu") for name in names}
    assert list(found) == names and len({*found.values()}) > 1
