"""Two nodes of ComfyUI. Copy this file into its folder custom_nodes; sage_inductor has to be
installed in ComfyUI's Python. docs/guide/comfyui.md says what they do, and what they do not.

They were run with a stand-in for ComfyUI of November 2026, and never inside ComfyUI.
"""

import sage_inductor
from sage_inductor.integrations import comfyui
from sage_inductor.names import AUTO
from sage_inductor.ops.recipe import NAMED

sage_inductor.register("comfyui")
PERCENT = {"min": 0.0, "max": 1.0, "step": 0.01}


class Node:
    CATEGORY = "model/patch"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {
            "required": {
                "model": ("MODEL",),
                "recipe": ([AUTO, *NAMED], {"default": AUTO}),
                "start_percent": ("FLOAT", {"default": 0.0, **PERCENT}),  # exact before it,
                "end_percent": ("FLOAT", {"default": 1.0, **PERCENT}),  # and after it
            }
        }


class SageAttention(Node):
    """The model without torch.compile: attention goes through the model's override."""

    def patch(self, model, recipe: str, start_percent: float, end_percent: float) -> tuple:
        model = model.clone()
        set_edge(model, start_percent, end_percent)
        options = model.model_options["transformer_options"]
        previous = options.get("optimized_attention_override")
        options["optimized_attention_override"] = comfyui.override(previous, recipe, exact="edge")
        return (model,)


class SageCompile(Node):
    """The model compiled with backend="sage", which finds the calls of "pytorch attention"."""

    def patch(self, model, recipe: str, start_percent: float, end_percent: float) -> tuple:
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        model = model.clone(disable_dynamic=True)
        options = {"guard_filter_fn": without_options}
        if recipe != AUTO:
            options["sage.recipe"] = recipe
        if set_edge(model, start_percent, end_percent):
            options["sage.policy"] = [{"stage": "edge", "recipe": "off"}]
        set_torch_compile_wrapper(model, "sage", options=options)
        return (model,)


def set_edge(model, start_percent: float, end_percent: float) -> bool:
    """Steps before and after these points of the denoising run in the stage "edge"; whether there
    can be any."""
    model.remove_wrappers_with_key("apply_model", comfyui.NAME)
    if start_percent <= 0 and end_percent >= 1:
        return False
    sigma_of = model.get_model_object("model_sampling").percent_to_sigma
    in_stage = comfyui.by_sigma(edge=(sigma_of(start_percent), sigma_of(end_percent)))
    model.add_wrapper_with_key("apply_model", comfyui.NAME, in_stage)
    return True


def without_options(guards) -> list[bool]:
    """transformer_options is another dict in each step, and no reason to compile again."""
    return ["transformer_options" not in guard.name for guard in guards]


NODE_CLASS_MAPPINGS = {"SageInductorAttention": SageAttention, "SageInductorCompile": SageCompile}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SageInductorAttention": "Sage attention",
    "SageInductorCompile": "Sage attention (torch.compile)",
}
