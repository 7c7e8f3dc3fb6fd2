"""What people get wrong, most of all those who come from other libraries, and what they are told."""

import logging

import pytest
import torch
import torch.nn.functional as F
from support import config_anew
from torch import nn

import sage_inductor
from sage_inductor import Policy, Rule, SageOptionError, SageRefused, attention, config

q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
linear = nn.Linear(2, 2)


def compiled(**options):
    given = {f"sage.{name}": value for name, value in options.items()}
    return torch.compile(F.scaled_dot_product_attention, backend="sage", options=given)(q, k, v)


MISTAKES = {
    "numpy": (lambda: attention(q.numpy(), k.numpy(), v.numpy()), TypeError,
        "attention: q, k, v and attn_mask must be tensors, got ndarray, ndarray, ndarray"),
    "a list": (lambda: attention([q], k, v), TypeError, "must be tensors, got list, Tensor, Tensor"),
    "none": (lambda: attention(q, k, None), TypeError, "must be tensors, got Tensor, Tensor, NoneType"),
    "a list for a mask": (lambda: attention(q, k, v, [1]), TypeError, "must be tensors, got .*, list$"),
    "a tensor for scale": (lambda: attention(q, k, v, scale=torch.tensor(0.1)), TypeError,
        r"scale must be a number, got a tensor: give scale.item\(\)"),
    "a mask of other keys": (lambda: attention(q, k, v, torch.ones(127, 128)), ValueError,
        r"attn_mask must broadcast to \[1, 2, 128, 128\], got \[127, 128\]"),
    "a mask of other queries": (
        lambda: attention(q[:, :, :9], k, v, torch.ones(128, 128)), ValueError,
        r"attn_mask must broadcast to \[1, 2, 9, 128\], got \[128, 128\]"),
    "a mask of other heads": (lambda: attention(q, k, v, torch.ones(3, 128, 128)), ValueError,
        r"attn_mask must broadcast to \[1, 2, 128, 128\], got \[3, 128, 128\]"),
    "a mask of other batches": (lambda: attention(q, k, v, torch.ones(2, 1, 1, 128)), ValueError,
        r"attn_mask must broadcast to \[1, 2, 128, 128\], got \[2, 1, 1, 128\]"),
    "an integer mask": (lambda: attention(q, k, v, torch.ones(128, 128, dtype=torch.int32)), ValueError,
        "attn_mask must be bool or floating, got torch.int32"),
    "SageAttention's names": (lambda: attention(q, k, v, tensor_layout="NHD", sm_scale=0.1), TypeError,
        r"unexpected keyword argument 'tensor_layout': transpose .*, 'sm_scale': it is called scale \(docs"),
    "FlashAttention's names": (lambda: attention(q, k, v, causal=True, window_size=(9, 0)), TypeError,
        "'causal': it is called is_causal, 'window_size': give a mask of positions as attn_mask"),
    "a misspelled name": (lambda: attention(q, k, v, is_casual=True), TypeError,
        "'is_casual': is_casual does not exist: did you mean is_causal"),
    "a recipe for a policy": (lambda: compiled(policy="sage1"), SageOptionError,
        "sage.policy: must be a path of rules, got 'sage1', a recipe: did you mean recipe?"),
    "the same in config": (lambda: config.patch(policy="sage2-8b"), ValueError, "did you mean recipe?"),
    "inputs beside the model": (lambda: sage_inductor.explain(linear, q, k), TypeError,
        r"explain\(model\)\(\*inputs\): give the inputs to what explain\(model\) returns"),
    "inputs to diagnose": (lambda: sage_inductor.diagnose(linear, q), TypeError, r"diagnose\(model\)\(\*inputs\)"),
    "inputs to diagnose_training": (
        lambda: sage_inductor.diagnose_training(linear, q, loss=torch.sum), TypeError, "_training.model..*inputs"),
    "a folder that is not there": (
        lambda: sage_inductor.diagnose(linear, path="/nowhere/p.json"), FileNotFoundError,
        "diagnose: path cannot be written: No such file or directory: '/nowhere/p.json'"),
    "per cent": (lambda: sage_inductor.diagnose(linear, tolerance=5), ValueError,
        "diagnose: tolerance must be a fraction, as 0.05 for 5 %, got 5"),
    "per cent in words": (lambda: sage_inductor.diagnose(linear, tolerance="5%"), ValueError,
        "diagnose: tolerance must be a fraction, as 0.05 for 5 %, got '5%'"),
    "one rule for a policy": (lambda: Policy(Rule("sage1")), ValueError,
        r"Policy: rules must be a list of Rules, got Rule\(recipe='sage1'"),
    "a recipe for rules": (lambda: Policy("sage1"), ValueError, "must be a list of Rules, got 'sage1'"),
    "a model to package": (lambda: sage_inductor.aoti_compile_and_package(linear), TypeError,
        r"takes a program, what torch.export.export\(model, inputs\) returns, got Linear"),
    "one call": (lambda: compiled(strict=True), SageRefused, "1 attention call stays as it was: "),
    "an assigned config": (lambda: setattr(sage_inductor, "config", {"recipe": "sage1"}), AttributeError,
        "sage_inductor.config cannot be replaced, got .*: assign to its settings"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_what_to_do(mistake):
    make, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        make()


def test_a_mask_that_broadcasts_is_taken():
    """Of q, k and v of which one has the batches, and another the heads."""
    wide, mask = torch.randn(3, 2, 128, 16), torch.randn(3, 1, 128, 128)
    for given in (
        (wide, k, v),
        (q, wide, wide),
        (wide[:, :1], k, v),
        (q, wide[:, :1], wide[:, :1]),
    ):
        expected = F.scaled_dot_product_attention(*given, mask)
        torch.testing.assert_close(attention(*given, mask), expected, rtol=0, atol=0)


def test_python_is_given_what_it_needs_to_tell_a_near_name():
    with pytest.raises(AttributeError, match="has no attribute 'atention'") as told:
        sage_inductor.atention  # noqa: B018
    assert (told.value.name, told.value.obj) == ("atention", sage_inductor)
    assert "attention" in dir(sage_inductor)


def test_under_a_compiler_the_other_librarys_name_is_told_too():
    call = torch.compile(lambda q, k, v: attention(q, k, v, sm_scale=0.1), backend="eager")
    with pytest.raises(Exception, match="'sm_scale': it is called scale"):
        call(q, k, v)


def test_a_bad_variable_is_told_without_the_frames_of_how_it_was_read(monkeypatch):
    with pytest.raises(ValueError, match="SAGE_INDUCTOR_RECIPE: recipe must be one of") as told:
        config_anew(monkeypatch, RECIPE="sage2")
    assert told.value.__suppress_context__ and len(told.traceback) < 12


def test_a_module_in_training_is_told_of_its_dropout_and_of_its_gradient():
    x = torch.randn(1, 2, 128, 16, requires_grad=True)

    def model(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    found = sage_inductor.explain(model, options={"sage.emulate": True})(x)
    assert found[0].reason == "dropout_p must be 0, got 0.1, and the output requires a gradient"
    assert "model.eval()" in str(found) and "torch.no_grad()" in str(found)
    trained = {"sage.emulate": True, "sage.training": "sagebwd"}
    found = sage_inductor.explain(model, options=trained)(x)
    assert found[0].reason == "dropout_p must be 0, got 0.1"


def test_a_misspelled_stage_is_warned_of_once(caplog):
    rules = [{"stage": "edge", "recipe": "off"}, {"recipe": "sage1"}]
    told = 'stage "egde" is named by no rule of a policy: did you mean "edge"?'
    options = {"sage.policy": rules, "sage.emulate": True}
    run = torch.compile(F.scaled_dot_product_attention, backend="sage", options=options)
    sage_inductor.stages.warn_if_misspelled.cache_clear()
    with caplog.at_level(logging.WARNING, "sage_inductor"):
        for stage in (None, "edge", "another", "egde", "egde"):
            with sage_inductor.stage(stage):
                run(q, k, v)
        assert [record.message for record in caplog.records] == [told]
        assert told in str(sage_inductor.report())
        sage_inductor.stages.warn_if_misspelled.cache_clear()
        with config.patch(policy=rules), sage_inductor.stage("egde"):
            attention(q, k, v)
        assert [record.message for record in caplog.records].count(told) == 2


class Block(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(self.weight(x), x, x)

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(16, 16)


@pytest.mark.parametrize(
    "make, needs_grad, infers",
    [(lambda: Block().eval(), False, True), (lambda: Block().eval(), True, False),
     (Block, False, False), (lambda: Block().eval().forward, False, False)],
    ids=["eval", "eval, and an input needs gradients", "training", "a function"],
)  # fmt: skip
def test_explain_of_a_module_in_eval_mode_shows_what_inference_sees(make, needs_grad, infers):
    x = torch.randn(1, 2, 128, 16, requires_grad=needs_grad)
    options = {"sage.emulate": True, "sage.training": "sagebwd"}
    for given, named in (((x,), {}), ((), {"x": x})):
        (site,) = sage_inductor.explain(make(), options=options)(*given, **named)
        assert ("backward" in site.reason) != infers and site.rewritten
    with torch.no_grad():
        (site,) = sage_inductor.explain(make(), options=options)(x)
    assert "backward" not in site.reason


def test_explain_finds_the_fast_path_that_inference_of_an_encoder_layer_takes():
    """Rules of a policy name these modules: with gradients nn.MultiheadAttention would make the call."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, batch_first=True), 1).eval()
    x = torch.randn(2, 20, 32)
    explained = [site.module for site in sage_inductor.explain(encoder)(x)]
    with torch.no_grad():
        torch.compile(encoder, backend="sage")(x)
    assert explained == [site.module for site in sage_inductor.report()] == ["layers.0"]
