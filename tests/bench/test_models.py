"""What of the bench of whole models needs no GPU: the models, their columns, gates, tables."""

import pytest
import torch
import torch.nn.functional as F

import sage_inductor
from bench import harness, models
from bench.tables import speed_of

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
    diffusers = pytest.importorskip("diffusers")
    small = dict(num_attention_heads=2, num_layers=1, num_single_layers=1, num_refiner_layers=1)
    model = models.Model(
        "", 304, lambda: diffusers.HunyuanVideoTransformer3DModel(**small),
        lambda: models.of_hunyuan(64, 64, 9, words=60),
    )  # fmt: skip
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
    args = harness.parser("", rounds=2, target_ms=4.0).parse_args([])
    given = models.Model("", 8, Stack, lambda: {"x": torch.randn(1, 2, 8, 64)})
    row = models.measure("stack", given, args, "cpu")
    assert row["error"] is None and row["calls"] > 0 == row["rewritten"]  # on a CPU all stay
    assert row["ms"] == dict.fromkeys(models.COLUMNS, 4.0) == dict(zip(row["first_s"], [4.0] * 3))
    assert row["speed"]["eager"]["x"] == 1 and row["peak_bytes"]["sage"] == 7
    assert max(row["rel_l1"], row["of_eager"]) < 0.02
    nan = models.Model("", 8, Stack, lambda: {"x": torch.full((1, 2, 8, 64), torch.nan)})
    assert "not near inductor's" in models.measure("stack", nan, args, "cpu")["error"]


def test_the_table_has_seconds_ranges_and_no_row_that_failed():
    times = dict(eager=3.0, inductor=2.0, sage=1000.0)
    row = dict(
        model="flux", tokens=4608, error=None, ms=times, rel_l1=0.01, of_eager=0.02,
        first_s=dict.fromkeys(times, 9.4), peak_bytes=dict.fromkeys(times, 2**30),
        speed=dict(
            eager=speed_of([2.0, 2.0], [3.0, 3.3]), inductor=speed_of([2.0, 2.0], [1.0, 3.0])
        ),
    )  # fmt: skip
    _, _, line = models.table([row, {"error": "it failed"}]).splitlines()
    assert line == (
        "| Flux, 1024 px | 4,608 | 3.0 ms | 2.0 ms | 1.00 s | 1.57x (1.50 to 1.65) | no change "
        "(0.50 to 1.50) | 1.00% (2.00%) | 9 and 9 | 1.0 and 1.0 |"
    )
    with pytest.raises(ValueError, match="not near inductor's: relative L1 nan"):
        models.error_of(torch.full((2,), torch.nan), torch.ones(2))
