"""What of the bench of whole models needs no GPU: the models, their columns, gates, tables."""

import importlib.machinery
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from support import swept

import sage_inductor
from bench import harness, models

QUICK = "wan_1_3b", "hunyuan", "llama_16k"


@pytest.mark.models
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.sweep] * (x not in QUICK)) for x in models.MODELS]
)
@torch.no_grad()
def test_a_model_takes_its_inputs_at_its_size(name):
    model = models.MODELS[name]
    module, inputs = models.draw(model, "meta")
    tokens = []

    def attended(query, *_, **given):
        tokens.append(query.shape[2])
        return torch.empty_like(query)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attended)
        # It asks whether positions begin anew, which no tensor on "meta" tells.
        masks = "transformers.masking_utils.find_packed_sequence_indices"
        patch.setattr(masks, lambda *_: None)
        out = models.Column(module, inputs, "eager", model.repeated).call()
    assert out.dtype == torch.bfloat16 and max(tokens) == model.tokens
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.models
@torch.no_grad()
def test_hunyuan_videos_padded_text_is_masked_and_its_calls_are_rewritten(op_by_op):
    model = models.QUICK["hunyuan"]
    module, inputs = models.draw(model, "cpu")
    right = models.Column(module, inputs, "eager", model.repeated).call()
    with sage_inductor.config.patch(emulate=True):
        found = models.Column(module, inputs, "sage", model.repeated).call()
    masks = {site.mask for site in sage_inductor.report().rewritten}
    assert masks == {"bool[1, 2, 256, 256]", "bool[1, 1, 1, 304]"}  # the text's own blocks, and all
    assert 0 < models.error_of(found, right) < 0.02
    inputs["encoder_hidden_states"][:, 60:] = 1e3
    assert torch.equal(models.Column(module, inputs, "eager", model.repeated).call(), right)


class Block(torch.nn.Module):
    def forward(self, x):
        return x + F.scaled_dot_product_attention(x, x, x)


class Stack(torch.nn.Module):
    """Two blocks, compiled as diffusers' models compile theirs."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def compile_repeated_blocks(self, **how):
        for block in self.blocks:
            block.compile(**how)

    def forward(self, x, return_dict):
        for block in self.blocks:
            x = block(x)
        return (x,)


@pytest.mark.parametrize("repeated", [True, False])
def test_columns_share_a_model_and_each_runs_by_its_own_backend(repeated):
    module, inputs = Stack(), {"x": torch.randn(1, 2, 8, 4)}
    compiled = []

    def backend(name):
        def compiler(graph, _):
            return lambda *args: compiled.append(name) or graph.forward(*args)

        return compiler

    columns = {
        name: models.Column(module, inputs, "eager" if name == "eager" else backend(name), repeated)
        for name in ("eager", "a", "b")
    }
    right = module(**inputs, return_dict=False)[0]
    for name in ("a", "eager", "b", "a"):
        compiled.clear()
        assert torch.equal(columns[name].call(), right)
        calls = 0 if name == "eager" else 2 if repeated else 1
        assert compiled == [name] * calls
        assert all(block._compiled_call_impl is None for block in module.blocks)


def test_a_model_is_measured_by_each_column(monkeypatch, op_by_op):
    """By a clock and an allocator that are not there."""
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    monkeypatch.setattr(models, "burst", lambda call, repeats: float(len(call().shape)))
    for name in harness.CACHES:
        monkeypatch.setenv(name, "")
    args = of_plan("whole", device="cuda")
    given = models.Model("", 8, lambda _: Stack(), lambda: {"x": torch.randn(1, 2, 8, 64)})
    (row,) = models.measure("stack", given, args, "cpu")
    columns = models.PLANS["whole"].columns
    assert row["error"] is None and row["calls"] > 0 == row["rewritten"]  # on a CPU all stay
    assert row["ms"] == dict.fromkeys(columns, 4.0) and list(row["first_s"]) == list(columns)
    assert row["speed"]["eager"]["x"] == 1 and row["peak_bytes"]["sage"] == 7
    assert max(row["rel_l1"], row["of_eager"]) < 0.02
    nan = models.Model(
        "", 8, lambda _: Stack(), lambda: {"x": torch.full((1, 2, 8, 64), torch.nan)}
    )
    (row,) = models.measure("stack", nan, args, "cpu")
    assert "not near inductor's" in row["error"]


def of_plan(plan: str, device: str = "cpu"):
    args = harness.parser("", rounds=2, target_ms=4.0).parse_args([])
    args.plan, args.quick, args.device = plan, True, torch.device(device)
    return args


@pytest.fixture
def fa3(monkeypatch):
    """What fa3-fwd's wheel has, in the place of a GPU's kernels; the calls that it got."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    seen = []

    def attend(q, k, v, softmax_scale=None, causal=False, **_):
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, is_causal=causal)
        seen.append(k.shape[-2])
        return out.transpose(-2, -3).contiguous()

    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **given):
        assert cu_seqlens_q.tolist() == [0, len(q)] and cu_seqlens_k.tolist() == [0, len(k)]
        return attend(q, k, v, given["softmax_scale"], given["causal"])

    @dispatch._wrapped_flash_attn_3.register_kernel("cpu")
    def kernel(q, k, v, softmax_scale=None, causal=False, *_, **given):
        out = dispatch.flash_attn_3_func(q, k, v, softmax_scale, causal)
        return out, q.new_empty(q.shape[:3])

    found = types.ModuleType(models.peers.FA3)
    found.__spec__ = importlib.machinery.ModuleSpec(found.__name__, None)  # torchao asks for it
    found.flash_attn_func, found.flash_attn_varlen_func = attend, packed
    monkeypatch.setitem(sys.modules, models.peers.FA3, found)
    for name in ("flash_attn_3_func", "flash_attn_3_varlen_func"):
        monkeypatch.setattr(dispatch, name, None)
    monkeypatch.setattr(dispatch, "_CAN_USE_FLASH_ATTN_3", False)
    return seen


def beside(name: str, model: models.Model) -> dict:
    with torch.no_grad(), sage_inductor.config.patch(emulate=True):
        row = next(models.measure(name, model, of_plan("beside"), "cpu"))
    assert row["error"] is None, row["error"]
    assert row["ms"].keys() == {"inductor", "fa3", "sage"} - row["without"].keys()
    assert row["speed"].keys() == row["ms"].keys() - {"sage"} and row["rel_l1"] < 0.02
    return row


@pytest.mark.models
@pytest.mark.parametrize(
    "name, keys", [("wan_14b_480p", {16 * 3, 512}), swept("hunyuan", {304 - 256 + 60})]
)
def test_flash_attention_3_is_a_column_of_diffusers_models(name, keys, fa3, op_by_op, monkeypatch):
    """It reads all keys, or those that the mask shows; the other columns call it not."""
    calls = {}

    def clocked(_, call, repeats):
        before = len(fa3)
        call()
        calls.setdefault(len(fa3) > before, []).append(call)
        return 1.0

    monkeypatch.setattr(models, "wall", clocked)
    row = beside(name, models.QUICK[name])
    assert set(fa3) == keys and not row["without"] and row["of_fa3"] < 0.01 < 100 * row["rel_l1"]
    assert len({*calls[True]}) == 1 and len({*calls[False]}) == 2
    assert row["rewritten"] and "-" not in models.beside_table([row]).splitlines()[2].split(" | ")


def test_a_row_without_flash_attention_3_says_why(op_by_op, monkeypatch):
    """Where it is missing, and where the model's call fails."""
    given = models.Model("", 8, lambda _: Stack(), lambda: {"x": torch.randn(1, 2, 8, 64)})
    monkeypatch.setitem(sys.modules, models.peers.FA3, None)
    missing = beside("flux", given)
    assert "flash_attn" in missing["without"]["fa3"] or "diffusers" in missing["without"]["fa3"]

    class Refused(torch.nn.Module):
        def compile_repeated_blocks(self, **_):
            pass

        set_attention_backend = compile_repeated_blocks

        def forward(self, x, return_dict):
            raise ValueError("FA3 refuses\n\n  a mask")

    def column(name, model, module, inputs):
        module = Refused() if name == "fa3" else module
        return models.Column(module, inputs, "inductor", model.repeated)

    monkeypatch.setattr(models, "column", column)
    with torch.no_grad():
        refused = next(models.measure("hunyuan", given, of_plan("beside"), "cpu"))
    assert refused["without"] == {"fa3": "ValueError: FA3 refuses a mask"}


@pytest.mark.models
def test_fp8_linears_are_a_row_of_their_own(op_by_op, monkeypatch):
    """torchao's are tried where it is installed: tests/front/test_quantized_weights.py."""

    def quantized(module):
        for each in module.blocks.modules():
            if isinstance(each, torch.nn.Linear):
                each.weight.data = each.weight.to(torch.float8_e4m3fn).to(each.weight.dtype)

    monkeypatch.setattr(models, "quantize", quantized)
    with torch.no_grad(), sage_inductor.config.patch(emulate=True):
        name = "wan_14b_480p"
        rows = [*models.measure(name, models.QUICK[name], of_plan("beside"), "cpu")]
    assert [row["linears"] for row in rows] == ["bf16", "fp8"]
    assert "of_fp8" not in rows[0] and 0 < rows[0]["rel_l1"] < rows[1]["of_fp8"] < 0.1
    assert [row["error"] for row in rows] == [None] * 2
    _, _, *lines = models.beside_table(rows).splitlines()
    assert "| bf16 |" in lines[0] and f"| {rows[1]['of_fp8']:.2%} |" in lines[1]


@pytest.mark.models
def test_a_plan_names_models_of_which_a_part_has_blocks():
    for plan in models.PLANS.values():
        assert {*plan.models, *plan.fp8} <= models.MODELS.keys() and set(
            plan.fp8
        ) <= plan.models.keys()
        for name, part in plan.models.items():
            if models.MODELS[name].repeated:
                module, _ = models.draw(models.MODELS[name], "meta", part)
                blocks = [
                    x for x in module.modules() if type(x).__name__.endswith("TransformerBlock")
                ]
                assert len(blocks) == models.MODELS[name].blocks // part
