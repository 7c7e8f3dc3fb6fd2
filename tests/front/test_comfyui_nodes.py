"""The folder that a user of ComfyUI copies: in a stand-in for ComfyUI and, where COMFYUI names a
checkout, in that (`make comfyui`). On a CPU, emulated."""

import inspect
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from support import op_by_op, relative_l1

import sage_inductor
from sage_inductor import config
from sage_inductor.integrations import comfyui
from sage_inductor.ops.recipe import TABLE

if "COMFYUI" in os.environ:
    import comfyui_real as engine
else:
    import comfyui_stand_in as engine

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "ComfyUI-SageInductor"
IDS = EAGER, COMPILE = "SageInductorAttention", "SageInductorCompile"  # saved workflows name them
MODELS = {
    "diffusion_models": ["flux1-dev", "wan2.1_t2v_1.3B_fp16"],
    "text_encoders": ["clip_l", "t5xxl_fp16", "umt5_xxl_fp8_e4m3fn_scaled"],
    "vae": ["ae", "wan_2.1_vae"],
}


@pytest.fixture(autouse=True, scope="module")
def nodes():
    """As ComfyUI's loader finds them, which happens once in a process."""
    library = logging.getLogger("sage_inductor")
    level = library.level
    with pytest.MonkeyPatch.context() as patched, config.patch(emulate=True, recipe="sage2-8b"):
        if hasattr(engine, "install"):
            engine.install(patched)
        yield engine.load(FOLDER)
    library.setLevel(level)


@pytest.fixture
def model():
    return engine.load_diffusion_model("")


@pytest.fixture
def patch(nodes):
    def patch(name, model, recipe="auto", start_percent=0.0, end_percent=1.0):
        (patched,) = nodes[name]().patch(model, recipe, start_percent, end_percent)
        return patched

    return patch


def sampled(model, steps: int = 2):
    torch._dynamo.reset()
    with op_by_op():
        return engine.sample(model, steps)


def test_the_loader_finds_nodes_that_say_what_they_are(nodes):
    assert nodes.keys() == {*IDS}
    for node in nodes.values():
        inputs = node.INPUT_TYPES()["required"]
        assert ["self", *inputs] == [*inspect.signature(getattr(node, node.FUNCTION)).parameters]
        choices, _ = inputs["recipe"]
        assert {*choices} == {"auto", *TABLE, "disabled"}
        assert all(more["tooltip"] and more.get("default") != "" for _, more in inputs.values())
        assert node.RETURN_TYPES == ("MODEL",) and node.CATEGORY and node.DESCRIPTION
        assert "sageattention" in node.SEARCH_ALIASES


@pytest.mark.parametrize("path", [*FOLDER.rglob("*.json")], ids=lambda path: path.stem)
def test_the_check_of_a_prompt_accepts_the_example_workflows(path):
    prompt = json.loads(path.read_text())
    assert not engine.errors_of(prompt, MODELS)
    (ours,) = (each for each in prompt.values() if each["class_type"] in IDS)
    ours["inputs"].update(recipe="sage4", end_percent=2.0)
    a, b = engine.errors_of(prompt, MODELS)
    assert "recipe" in a + b and "end_percent" in a + b


@pytest.mark.parametrize("name", IDS)
def test_a_clone_is_patched_and_one_line_of_the_log_says_so(name, patch, model, caplog):
    exact = sampled(model)
    caplog.set_level(logging.INFO)
    found = sampled(patch(name, model, "sage1"))
    assert 0 < relative_l1(found, exact) < 0.1
    (line,) = (x.message for x in caplog.records if "inductor" in x.name.lower())
    n = len(sage_inductor.report())
    assert n and line.endswith(f": {n} of {n} attention calls use sage1")
    assert torch.equal(sampled(model), exact)
    assert patch(name, model, "disabled") is model


def test_the_line_waits_for_a_step_with_calls_and_says_what_is_known_already(patch, model, caplog):
    caplog.set_level(logging.INFO, "ComfyUI-SageInductor")
    first = patch(EAGER, model, start_percent=0.5)
    engine.sample(first, 1)
    assert not caplog.messages
    engine.sample(first, 4)
    engine.sample(patch(EAGER, model), 1)
    seen, known = caplog.messages
    assert seen.endswith(" attention calls use sage2-8b") and known.endswith(seen.split(": ")[1])
    assert "that was not known before" in known


def quantized_sigmas(model, steps: int) -> list[float]:
    """Of the steps whose calls the node's override does not leave to ComfyUI's function."""
    model, quantized = model.clone(), {}
    options = model.model_options["transformer_options"]
    inner = options["optimized_attention_override"]

    def look(function, *args, **kwargs):
        sigma = round(float(kwargs["transformer_options"]["sigmas"][0]), 4)

        def left(*args, **kwargs):
            quantized[sigma] = False
            return function(*args, **kwargs)

        quantized.setdefault(sigma, True)
        return inner(left, *args, **kwargs)

    options["optimized_attention_override"] = look
    engine.sample(model, steps)
    return [sigma for sigma in quantized if quantized[sigma]]


def test_percents_are_of_the_schedule_that_is_sampled(patch, model):
    plain, before, after = (
        quantized_sigmas(patched, 10)
        for patched in (
            patch(EAGER, model, "auto", 0.3, 0.7),
            patch(EAGER, engine.shifted(model), "auto", 0.3, 0.7),
            engine.shifted(patch(EAGER, model, "auto", 0.3, 0.7)),
        )
    )
    assert 3 <= len(after) <= 5 and before == after != plain


@pytest.mark.parametrize("start, end, steps", [(0, 0, 0), (1, 1, 0), (0, 1, 4), (0.5, 1, 2)])
def test_the_ends_of_the_range_leave_all_steps_or_none(start, end, steps, patch, model):
    assert len(quantized_sigmas(patch(EAGER, model, "auto", start, end), 4)) == steps


@pytest.mark.parametrize("name", IDS)
def test_a_range_is_replaced_by_a_later_nodes_and_refused_where_it_ends_first(name, patch, model):
    both = patch(name, patch(name, model, "auto", 0.25, 0.75), "auto", 0.5, 1.0)
    always = patch(name, both)
    wrappers = [len(each.wrappers["apply_model"][comfyui.NAME]) for each in (both, always)]
    assert wrappers == [2, 1]  # the range, and what logs; nothing waits for sigma
    with pytest.raises(ValueError, match="must start at or before its end.* start 0.6 and end 0.4"):
        patch(name, model, "auto", 0.6, 0.4)


def test_the_compile_node_leaves_the_first_and_last_steps_exact(patch, model):
    """Both kinds of steps are compiled in the first, and no guard looks at transformer_options."""
    exact = sampled(model, 1)
    errors = [
        relative_l1(sampled(patch(COMPILE, model, "sage1", *ends), 1), exact)
        for ends in ((0.5, 1.0), (0.0, 0.5))
    ]
    assert errors[0] < 1e-4 < errors[1] < 0.1
    with torch._dynamo.config.patch(error_on_recompile=True):
        sampled(patch(COMPILE, model, "sage1", 0.25, 0.75), 4)
    assert {site.stage for site in sage_inductor.report()} == {None, "edge"}


@pytest.mark.parametrize("recipe", ["auto", "sage1"])
def test_the_compile_node_leaves_to_the_settings_what_it_is_not_told(recipe, patch, model):
    if older := getattr(engine, "OlderModelPatcher", None):
        model = older(model.model)
    sampled(patched := patch(COMPILE, model, recipe), 1)
    first, *others = {site.module for site in sage_inductor.report()}
    with config.patch(policy=[{"module": first, "recipe": "off"}]):
        sampled(patched, 1)
    expected = "sage2-8b" if recipe == "auto" else recipe
    found = {site.module: site.recipe for site in sage_inductor.report()}
    assert others and found == {first: None, **dict.fromkeys(others, expected)}


def test_the_earlier_override_gets_the_exact_steps(patch, model):
    calls = []

    def previous(function, *args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = previous
    engine.sample(model, 2)
    n = len(calls)
    engine.sample(patch(EAGER, model, "auto", 0.5, 1.0), 2)
    assert n and len(calls) == n + n // 2


def test_the_folder_has_the_library_s_license_and_version():
    root = FOLDER.parents[2]
    assert (FOLDER / "LICENSE").read_text() == (root / "LICENSE").read_text()
    about = (FOLDER / "pyproject.toml").read_text()
    assert f'\nversion = "{sage_inductor.__version__}"\n' in about
