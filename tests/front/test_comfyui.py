"""Our attention in ComfyUI, by a stand-in with its signatures: tests/comfyui_stand_in.py. On CPU
recipes are emulated. test_comfyui_nodes.py tests the nodes."""

import sys

import comfyui_stand_in as stand_in
import pytest
import torch
import torch.nn.functional as F
from support import op_by_op, random_qkv, relative_l1

import sage_inductor
from sage_inductor import config, stages
from sage_inductor.integrations import comfyui
from sage_inductor.ops.recipe import TABLE

RECIPE = "sage2-8b"


@pytest.fixture(autouse=True)
def comfy(monkeypatch):
    stand_in.install(monkeypatch)
    with config.patch(emulate=True, recipe=RECIPE):
        yield


def flat(x):
    """[B, H, N, D] -> [B, N, H * D]."""
    return x.transpose(1, 2).flatten(2)


# -- values ----


MASKS = {"": None, "2": (48, 80), "3": (2, 48, 80), "4": (2, 4, 48, 80), "keys": (2, 1, 80)}


def mask_of(kind: str):
    """Of 2, 3 or 4 dimensions; a bias is an additive one of 3."""
    if not kind:
        return None
    visible = torch.rand(MASKS.get(kind, MASKS["3"])) < 0.7
    return torch.where(visible, 0.0, -5.0) if kind == "bias" else visible


def with_heads(mask):
    """As SDPA reads it."""
    return mask[:, None] if mask is not None and mask.ndim == 3 else mask


@pytest.mark.parametrize("given", [{}, {"scale": 0.3}, {"H_kv": 2}], ids=["", "scale", "gqa"])
@pytest.mark.parametrize("mask", [*MASKS, "bias"])
def test_every_layout_has_the_bits_of_attention(mask, given):
    """And an error to SDPA within the one from which the recipe's kernel is wrong."""
    given, mask = dict(given), mask_of(mask)
    q, k, v = random_qkv(H_kv=given.pop("H_kv", 4), N=48, N_kv=80)
    if k.shape[1] < 4:
        given["enable_gqa"] = True
    same = sage_inductor.attention(q, k, v, with_heads(mask), **given)
    exact = F.scaled_dot_product_attention(q, k, v, with_heads(mask), **given)
    assert 0 < relative_l1(same, exact) < TABLE[RECIPE].wrong_from
    function = comfyui.override()
    for heads_first in (False, True):
        for keeps_heads in (False, True):
            inputs = (q, k, v) if heads_first else map(flat, (q, k, v))
            layout = {"skip_reshape": heads_first, "skip_output_reshape": keeps_heads}
            out = function(refuse, *inputs, 4, mask=mask, **layout, **given)
            assert torch.equal(out, same if keeps_heads else flat(same))


def refuse(*args, **kwargs):
    pytest.fail("a call that has a recipe was left to another function")


def test_arguments_may_come_by_position():
    q, k, v = random_qkv(N=48, N_kv=80)
    mask = mask_of("3")
    same = sage_inductor.attention(q, k, v, with_heads(mask))
    given = flat(q), flat(k), flat(v), 4, mask, None, False, True
    assert torch.equal(comfyui.override()(refuse, *given), same)


def test_k_and_v_may_come_with_their_heads_apart():
    """v in SD3, CogVideoX and Hunyuan3D, k and v in SD3's context processor."""
    q, k, v = random_qkv(N=48, N_kv=80)
    same = flat(sage_inductor.attention(q, k, v))
    for each in (flat(k), k.transpose(1, 2)):
        assert torch.equal(comfyui.override()(refuse, flat(q), each, v.transpose(1, 2), 4), same)


def test_the_recipe_is_the_overrides_and_unknown_arguments_are_ignored():
    q, k, v = random_qkv()
    given = q, k, v, 4
    found = comfyui.override(recipe="sage1")(refuse, *given, skip_reshape=True, seq_lens=None)
    same = sage_inductor.attention(q, k, v, recipe="sage1")
    assert torch.equal(found, flat(same))
    assert not torch.equal(same, sage_inductor.attention(q, k, v))


# -- what is left to another ----

LEFT = {
    "exact flag": ({"low_precision_attention": False}, {}),
    "precision": ({"attn_precision": torch.float32}, {}),
    "recipe off": ({}, {"recipe": "off"}),
    "policy": ({}, {"policy": [{"recipe": "off"}]}),
    "fp32": ({}, {"emulate": False}),
}


@pytest.mark.parametrize("given, settings", LEFT.values(), ids=LEFT)
def test_what_is_left_goes_to_the_previous_override_or_the_function(given, settings):
    q, k, v = map(flat, random_qkv())
    exact = stand_in.attention_pytorch(q, k, v, 4)
    calls = []

    def previous(function, *args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    with config.patch(**settings):
        for override in (comfyui.override(), comfyui.override(previous)):
            out = override(stand_in.attention_pytorch, q, k, v, 4, None, scale=None, **given)
            assert torch.equal(out, exact)
    assert calls == [{"scale": None, **given}]  # by the second alone, with all that came


def test_half_precision_that_is_not_float32_is_no_reason():
    q, k, v = map(flat, random_qkv())
    comfyui.override()(refuse, q, k, v, 4, attn_precision=torch.float16)
    comfyui.override()(refuse, q, k, v, 4, low_precision_attention=None)


# -- layers and stages ----

PATHS = [
    ({}, ""),
    ({"block_index": 3}, "block.3"),
    ({"block_type": "single", "block_index": 0}, "single.0"),
    ({"block": ("input", 4), "block_index": 1}, "input.4.1"),
]


@pytest.mark.parametrize("options, path", PATHS, ids=[path for _, path in PATHS])
def test_the_report_and_a_policy_know_the_block(options, path):
    q, k, v = map(flat, random_qkv())

    def attend():
        return comfyui.override()(
            stand_in.attention_pytorch, q, k, v, 4, transformer_options=options
        )

    attend()
    (site,) = sage_inductor.report()
    assert site.module == path and site.rewritten and site.spelling == "sage_inductor.attention"
    exact = stand_in.attention_pytorch(q, k, v, 4)
    for rule in ({"module": path}, {"layer": int(path.split(".")[1]) if path else 0}):
        with config.patch(policy=[{**rule, "recipe": "off"}]):
            assert torch.equal(attend(), exact) == (path != "" or "module" in rule)


@pytest.fixture
def model():
    return stand_in.load_diffusion_model("flux1-dev.safetensors")


@pytest.fixture
def x():
    return torch.randn(1, 64, 128)


def test_steps_are_in_stages_by_their_place(model, x):
    edge_and_late = comfyui.by_percent(edge=(0.2, 0.8), late=(0, 0.6), none=(0, 1))
    model.add_wrapper_with_key("apply_model", "", edge_and_late)
    seen = []

    def override(function, *args, **kwargs):
        seen.append(stages.current())
        return function(*args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = override
    for sigma in (1.0, 0.8, 0.5, 0.3, 0.2, 0.1):
        model.step(x, sigma)
    assert seen[::2] == seen[1::2] == ["edge", None, None, "late", "late", "edge"]
    assert stages.current() is None


@pytest.mark.parametrize("bounds", [(0.6, 0.4), (-0.1, 1), (0, 1.1)])
def test_a_range_that_is_none_is_refused(bounds):
    with pytest.raises(ValueError, match=f"edge: .* got start {bounds[0]} and end {bounds[1]}"):
        comfyui.by_percent(edge=bounds)


# -- the registered function ----


def test_the_function_is_registered_once_and_computes(model, x, caplog):
    for _ in range(2):
        sage_inductor.register("comfyui")
    assert not caplog.records
    exact = model.step(x, 0.5)
    patched = model.clone()
    patched.set_model_optimized_attention(stand_in.get_attention_function(comfyui.NAME))
    assert 0 < relative_l1(patched.step(x, 0.5), exact) < 0.1
    assert [site.module for site in sage_inductor.report()] == ["double.0", "double.1"]


def test_the_function_called_by_name_honours_a_models_override_and_the_exact_flag():
    sage_inductor.register("comfyui")
    function = stand_in.get_attention_function(comfyui.NAME)
    q, k, v = map(flat, random_qkv())
    exact = stand_in.attention_pytorch(q, k, v, 4)
    assert not torch.equal(function(q, k, v, 4), exact)
    assert torch.equal(function(q, k, v, 4, low_precision_attention=False), exact)
    options = {"optimized_attention_override": lambda *args, **kwargs: "the override's"}
    assert function(q, k, v, 4, transformer_options=options) == "the override's"


def test_another_function_of_the_name_is_told_of(caplog):
    stand_in.register_attention_function(comfyui.NAME, refuse)
    sage_inductor.register("comfyui")
    assert "another attention function 'sage_inductor', and keeps it" in caplog.text
    assert stand_in.get_attention_function(comfyui.NAME) is refuse


@pytest.mark.parametrize("name", ["", *stand_in.NAMES["comfy.ldm.modules.attention"]])
def test_without_comfyui_or_with_another_the_error_says_what_must_hold(name, monkeypatch):
    path = "comfy.ldm.modules.attention"
    if name:
        monkeypatch.delattr(sys.modules[path], name)
    else:
        for each in [each for each in sys.modules if each.split(".")[0] == "comfy"]:
            monkeypatch.delitem(sys.modules, each)
        monkeypatch.setitem(sys.modules, "comfy", None)
    with pytest.raises(ImportError, match=rf"{path} must be importable.* wrap_attn .*{name}"):
        sage_inductor.register("comfyui")


# -- compiled ----

OPTIONS = {"guard_filter_fn": stand_in.skip_torch_compile_dict}


@pytest.mark.parametrize("backend", ["sage", "aot_eager"])
def test_an_override_may_be_compiled(backend, model, x):
    """The recipe is the override's under any backend; exact steps are not known while it is traced."""
    exact = model.step(x, 0.5)
    patched = model.clone()
    override = comfyui.override(recipe="sage1", exact="edge")
    patched.model_options["transformer_options"]["optimized_attention_override"] = override
    options = OPTIONS if backend == "sage" else None
    stand_in.set_torch_compile_wrapper(patched, backend, options=options, fullgraph=True)
    with op_by_op():
        found = patched.step(x, 0.5)
    assert 0 < relative_l1(found, exact) < 0.1
    sites = sage_inductor.report()
    assert {site.module for site in sites} == (
        {"blocks.0", "blocks.1"} if backend == "sage" else {""}
    )
    assert {site.recipe for site in sites} == {"sage1"}
    assert {site.spelling for site in sites} == {"sage_inductor.attention"}


def test_what_is_exact_by_its_model_is_exact_compiled():
    q, k, v = map(flat, random_qkv())
    function = comfyui.override()

    def attend(flag):
        return function(stand_in.attention_pytorch, q, k, v, 4, low_precision_attention=flag)

    run = torch.compile(attend, backend="aot_eager", fullgraph=True)
    exact = stand_in.attention_pytorch(q, k, v, 4)
    assert torch.equal(run(False), exact) and not torch.equal(run(True), exact)
