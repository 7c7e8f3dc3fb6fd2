"""bench/decode.py, without a GPU."""

import argparse

import pytest
import torch
import transformers

import sage_inductor
from bench import capture, decode, harness, trained
from bench.decoding import by_hand, run_parts
from bench.measure import relative_l1
from sage_inductor.choose import tables
from sage_inductor.ops import gpus


def test_all_that_is_timed_computes_one_thing_and_the_table_says_how_near():
    torch.manual_seed(0)
    shape = decode.Shape(1, 2, 3, 200, 64, 4, 0.5)
    inputs = decode.draw(shape, torch.device("cpu"))
    exact, errors = by_hand(*inputs[:4]), {}
    for x in decode.PROVIDERS:
        errors[x.name] = relative_l1(x.call(*x.prepare(*inputs)).double(), exact)
    assert errors.pop("SDPA") > 0.1  # it sees all keys
    assert (
        max(errors[x] for x in ("SDPA, mask", "bf16, mask", "bf16")) < 0.005 < errors["INT8"] < 0.02
    )
    assert errors["INT8"] < errors["E4M3"] < 0.06
    names = [x.name for x in decode.PROVIDERS]
    row = {
        "part": "calls", "shape": shape._asdict(), "rel_l1": errors, "times": dict.fromkeys(names, {"ms": 0.05}),
        "speed": dict.fromkeys(names, {"x": 1.5, "x_min": 1.4, "x_max": 1.6}),
    }  # fmt: skip
    head, _, line, _, last = decode.table([row]).splitlines()
    assert head.startswith(
        "| B | H_kv | G | N | D | N_q | filled | SDPA, mask | SDPA | bf16, mask |"
    )
    assert line.startswith("| 1 | 2 | 3 | 200 | 64 | 4 | 0.5 | 50.0 | 50.0, 1.50x (1.40 to 1.60) |")
    assert f"INT8 {errors['INT8']:.2%}" in last


# -- random calls ----


def test_random_calls_are_decided_by_the_pass_and_those_that_are_slower_are_listed(monkeypatch):
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tables, "gpu_name", lambda device: tables.H200)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    assert decode.drawn(40)[:7] == decode.drawn(7) != decode.drawn(7, seed=1)
    cuda, rows = torch.device("cuda", 0), []
    for shape, repeats, became in [
        (decode.Shape(1, 8, 4, 4096), True, "decode"),
        (decode.Shape(4, 8, 4, 777, 64, 16, 0.25), False, "decode"),
        (decode.Shape(32, 8, 4, 4096), True, None),
    ]:
        site = decode.decided(decode.Drawn(shape, torch.float16, repeats), cuda)
        assert site.recipe == became and site.decision.unrepeats == (became is None)
        became = became or "SDPA, heads not repeated"
        rows.append({"shape": shape._asdict(), "dtype": "torch.float16", "became": became})
    for row, x in zip(rows, (1.5, 0.98, 0.9), strict=True):
        row |= {"part": "random", "speed": {"x": x, "x_min": x, "x_max": x}}
    stays = {"part": "random", "became": ""}
    assert "None is slower than 0.97x." in decode.table([stays, *rows[:2]])
    first, *_, last = decode.table([stays, *rows]).splitlines()
    assert first.startswith("4 random calls, of which 2 become decode: 0.98x to 1.50x; 1 become")
    assert last.startswith("| 32 | 8 | 4 | 4096 | 128 | 1 | 1 | float16 | SDPA, heads not repeated")


# -- decoders ----


@pytest.mark.models
@pytest.mark.parametrize("kind", ["StaticCache", "Int8Cache"])
def test_a_decoder_compiles_one_region_for_all_and_computes_what_the_model_does(kind, monkeypatch):
    monkeypatch.setattr(decode, "REGION", 2)
    monkeypatch.setattr(decode, "ROOM", 8)
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, vocab_size=50)
    sizes |= dict(num_key_value_heads=2, head_dim=16)
    model = decode.llama(6, "cpu", **sizes)
    cache = decode.full_cache(kind, model.config, 3, 32, "cpu")
    tokens, graphs = torch.randint(50, (3, 1)), []

    def backend(gm, _):
        graphs.append(gm)
        return gm.forward

    found = []
    with torch.no_grad():
        for run in (decode.in_turn, torch.compile(decode.in_turn, backend=backend, fullgraph=True)):
            step = decode.stepping(model, cache, run, tokens)
            decode.rewind(cache, 32)
            found.append([step(), step()])
        layers = [layer for region in model.model.layers for layer in region.layers]
        for i, layer in enumerate(layers):
            layer.self_attn.layer_idx = i
        model.model.layers = torch.nn.ModuleList(layers)
        decode.rewind(cache, 32)
        found.append([model(tokens, **{decode.CACHE: cache}).logits for _ in range(2)])
    assert len(graphs) == 1
    for expected, *others in zip(*found, strict=True):
        assert all(x.equal(expected) for x in others) and expected.std() > 0
    assert all(layer.cumulative_length == 26 for layer in cache.layers)
    assert not found[0][0].equal(found[0][1])


@pytest.mark.models
@pytest.mark.skipif(not decode.FP8, reason="transformers is older")
def test_a_step_over_transformers_fp8_cache_begins_as_long_and_is_compiled_once(monkeypatch):
    monkeypatch.setattr(decode, "REGION", 2)
    monkeypatch.setattr(decode, "ROOM", 8)
    torch._dynamo.reset()
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, vocab_size=50)
    model = decode.llama(4, "cpu", **sizes, num_key_value_heads=2, head_dim=16)
    cache, tokens = decode.full_cache("FP8", model.config, 3, 32, "cpu"), torch.tensor([[1]] * 3)
    graphs, found = [], []
    backend = lambda gm, _: graphs.append(gm) or gm.forward  # noqa: E731
    with torch.no_grad():
        for run in (decode.in_turn, torch.compile(decode.in_turn, backend=backend, fullgraph=True)):
            step = decode.stepping(model, cache, run, tokens)
            found += [step(), step()]
            assert {x._quantized_keys[0].shape[2] for x in cache.layers} == {25}
    assert len(graphs) == 1 and all(x.equal(found[0]) for x in found) and found[0].std() > 0


def test_a_layer_of_an_fp8_cache_is_attention_to_its_codes():
    torch.manual_seed(0)
    inputs = decode.draw(decode.Shape(2, 2, 3, 65, 64), torch.device("cpu"))
    q, k, k_scale, v, v_scale = given = decode.in_fp8(*inputs)
    assert k.shape[2] == v.shape[2] == 64 and k.dtype == v.dtype == torch.float8_e4m3fn
    out, *codes = decode.by_codes(*given)
    assert [x.float().equal(y.float()[:, :, [*range(64), 0]]) for x, y in zip(codes, (k, v))] == [
        True
    ] * 2
    numbers = (x.double() * y for x, y in zip((x.float() for x in codes), (k_scale, v_scale)))
    assert relative_l1(out.double(), by_hand(q, *numbers)) < 0.01
    row = {
        "part": "fp8", "shape": decode.FP8_CALLS[0]._asdict(), "reason": "exact: k and v are read as codes",
        "times": {"inductor": {"ms": 0.03}, "sage": {"ms": 0.02}}, "speed": {"x": 1.5, "x_min": 1.4, "x_max": 1.6},
    }  # fmt: skip
    line = decode.table([row, row | {"reason": "no"}]).splitlines()
    assert line[2] == "| 1 | 8 | 4 | 256 | 128 | 30.0 | 20.0, 1.50x (1.40 to 1.60) | yes |"
    assert line[3].endswith("| no |")


@pytest.mark.parametrize("parts, name", [(["a", "b"], "decode"), (["b"], "decode-b")])
def test_a_result_of_some_parts_does_not_hide_that_of_all(parts, name, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "gpu", lambda args: args.device)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    of_device = {"device": torch.device("cpu"), "json": "", "rounds": 1, "target_ms": 1.0}
    made = dict.fromkeys(["a", "b"], lambda *_: [{"shape": {}}])
    given = argparse.Namespace(parts=parts, **of_device)
    assert run_parts("decode", given, made, lambda rows: str(len(rows))) == 0
    (path,) = tmp_path.glob("*/*.json")
    assert path.stem.endswith(f"-{name}")


def test_the_table_of_decoders_has_results_of_before_too():
    names = "inductor", "sage", "Int8Cache"
    speed = {"x": 2.0, "x_min": 1.9, "x_max": 2.1}
    old = {
        "part": "decoders", "shape": {"B": 1, "N": 8}, "times": dict.fromkeys(names, {"ms": 4.0}),
        "speed": dict.fromkeys(names, speed), "cache_gib": dict.fromkeys(names, 0.5),
    }  # fmt: skip
    new = old | {
        "shape": {"B": 16, "N": 8, "layers": 32}, "over_bf16": speed, "append_ms": 0.1,
        "peak_gib": dict.fromkeys(names, 17.04), "fit": dict.fromkeys(names, 14),
        "steps": {"steps": 200, "equal": 200, "rel_l1": 0.031},
    }  # fmt: skip
    by_fp8 = new | {
        "times": new["times"] | {decode.OF_FP8[1]: {"ms": 5.0}},
        "speed": new["speed"] | {decode.OF_FP8[1]: speed},
    }
    *_, last, _, said = decode.table([old, by_fp8]).splitlines()
    assert last.endswith("| 14, 14, 14 | 5.00, 2.00x (1.90 to 2.10) |")
    failed = {"part": "decoders", "shape": old["shape"], "error": "out of memory"}
    *_, before, after, _, said = decode.table([old, new, failed]).splitlines()
    times = "4.00 | 4.00, 2.00x (1.90 to 2.10) | 4.00, 2.00x (1.90 to 2.10)"
    assert before == f"| 8 | 1 | 8 | {times} |  |  | 0.50, 0.50 |  |  |"
    more = "2.00x (1.90 to 2.10) | 2.5% | 0.50, 0.50 | 17.0, 17.0, 17.0 | 14, 14, 14"
    assert after == f"| 32 | 16 | 8 | {times} | {more} |"
    assert said.startswith("200 steps of replays: 200 equal") and "3.1% from eager's" in said


# -- perplexity ----

# In torch 2.11 what is too large for E4M3 becomes NaN, in transformers' cache, too.
SATURATES = not torch.tensor(1e3).to(torch.float8_e4m3fn).float().isnan()


def keys_and_values(B: int = 2, H: int = 3, N: int = 75, D: int = 64):
    """q, k and v [B, H, N, D] as a model has them, in bf16. Later keys are larger, k has a bias."""
    q, k, v = torch.randn(3, B, N, H, D).transpose(2, 3)
    size = torch.linspace(1, 3, N)[:, None]
    return (x.bfloat16() for x in (q, k * size + 4 * torch.randn(H, 1, D), v))


@pytest.mark.parametrize("first", decode.FIRST)
def test_int8_gives_what_an_int8_cache_gives_token_by_token(first):
    torch.manual_seed(1)
    _, k, v = keys_and_values()
    config = transformers.LlamaConfig(num_hidden_layers=1)
    layer = sage_inductor.Int8Cache(config, max_cache_len=k.shape[2]).layers[0]
    layer.update(k[:, :, :first], v[:, :, :first])
    for n in range(first, k.shape[2]):
        expected = layer.update(k[:, :, n : n + 1], v[:, :, n : n + 1])
    for x, y in zip(decode.int8(k, v, first, True), expected, strict=True):
        assert x.equal(y)


def test_codes_and_the_numbers_that_they_stand_for_are_one_attention_and_causal():
    torch.manual_seed(2)
    q, k, v = keys_and_values()
    exact = decode.ATTENTION["bf16, attention in fp32"](q, k, v).double()
    numbers = decode.ATTENTION["Int8Cache, mean of 1 token"](q, k, v).double()
    codes = decode.ATTENTION["the same, codes by `sage::decode`"](q, k, v).double()
    assert relative_l1(codes, numbers) < 0.005 < relative_l1(numbers, exact) < 0.04
    k, v = (torch.cat([x[:, :, :66], torch.randn_like(x[:, :, 66:])], 2) for x in (k, v))
    for name, attention in decode.ATTENTION.items():
        if "FP8" in name and not SATURATES:
            continue
        before, after = (attention(q[:, :, :n], k[:, :, :n], v[:, :, :n]) for n in (66, 75))
        assert torch.allclose(before, after[:, :, :66], atol=0.02), name


def test_rotation_and_mean_are_worth_something_and_scales_that_are_kept_saturate():
    torch.manual_seed(3)
    q, k, v = keys_and_values()
    q, k = decode.strong_channels(q, k)
    exact = decode.ATTENTION["bf16, attention in fp32"](q, k, v).double()
    both, alone, neither = (
        [relative_l1(decode.ATTENTION[name](q, k, v).double(), exact) for name in names]
        for names in (
            ["Int8Cache, mean of 1 token", "Int8Cache, mean of 64 tokens"],
            ["INT8, rotated, no mean", "INT8, mean of 1 token, not rotated"],
            ["INT8, neither"],
        )
    )
    assert max(both) < 0.7 * min(alone) < max(alone) < 0.7 * neither[0]
    for first in decode.FIRST:
        largest = decode.fp8(k, v, first)[0].float().abs().max()
        of_first = k[:, :, :first].float().abs().max()
        assert largest == of_first < k.float().abs().max() if SATURATES else largest.isnan()


def test_keys_that_are_harder_to_round_are_the_same_attention():
    torch.manual_seed(4)
    q, k, v = keys_and_values()
    attention = decode.ATTENTION["bf16, attention in fp32"]
    expected = attention(q, k, v)
    for name, keys in decode.KEYS.items():
        changed = attention(*keys(q, k), v)
        assert relative_l1(changed.double(), expected.double()) < 0.02, name
        assert keys(q, k)[1].equal(k) == (name == "as trained")
    assert attention(*decode.strong_channels(q, k), v).equal(expected)


def test_perplexity_is_of_the_model_with_a_cache_in_each_layer(monkeypatch):
    size = trained.Size(2, 2, 64, 70, 4, steps=30, evaluated=4)
    subject = trained.gpt(size, torch.device("cpu"))

    def forgetful(q, k, v):
        return v

    def by_two(tokens):
        return torch.cat([subject.model(x) for x in tokens.split(2)])

    monkeypatch.setitem(decode.ATTENTION, "forgetful", forgetful)
    rows = [*decode.perplexities(subject, texts=2)]
    found = {(row["keys"], row["cache"]): row for row in rows}
    assert len(found) == len(rows) == len(decode.KEYS) * len(decode.ATTENTION)
    usual, worse = (found["as trained", name] for name in ("bf16", "forgetful"))
    with torch.no_grad():
        losses = subject.run(by_two)
        with capture.attending(lambda q, k, v, _: forgetful(q, k, v)):
            more = subject.run(by_two) - losses
    changes = more.view(2, -1).mean(1).expm1().sort().values.tolist()
    assert usual["change"] == usual["by_token"] == 0
    assert usual["perplexity"] == pytest.approx(losses.mean().exp().item())
    assert worse["change"] == pytest.approx(more.mean().expm1().item(), rel=1e-4)
    assert [worse["change_min"], worse["change_max"]] == pytest.approx(changes, rel=1e-4)
    assert worse["by_token"] == pytest.approx(more.abs().mean().item())
    cache = found["as trained", "Int8Cache, mean of 1 token"]
    assert 0 < cache["by_token"] < 0.1 * worse["by_token"]

    lines = decode.perplexity_table(rows).splitlines()
    assert len(lines) == 2 + len(decode.ATTENTION)
    assert lines[0] == f"| k and v | perplexity | {' | '.join(decode.KEYS)} |"
    shown = "+0.000% (+0.000% to +0.000%), 0.0000"
    assert lines[2].startswith(f"| bf16 | {usual['perplexity']:.4f} | {shown} | {shown} | ")
