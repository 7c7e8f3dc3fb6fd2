"""Two nodes, each of which takes a model and gives a clone whose attention is quantized."""

import inspect
import logging
from collections.abc import Callable

import sage_inductor
from sage_inductor import stages
from sage_inductor.integrations import comfyui

sage_inductor.register("comfyui")

log = logging.getLogger("ComfyUI-SageInductor")
# ComfyUI shows INFO, at which the library has a line for each call: our one line sums them up.
library = logging.getLogger("sage_inductor")
library.setLevel(library.level or logging.WARNING)

DISABLED, EDGE = "disabled", "edge"
RECIPES = {
    "auto": "what is predicted to be fastest on this card, or exact attention if that is",
    "sage2-8b-rotated": "INT8 and FP8. Auto's on H100 and H200; some models need its rotation",
    "sage2-8b": "INT8 and FP8. Auto's on RTX 40, RTX 50 and L40",
    "sage2-8b-per-token": "INT8 and FP8, with less preparation. RTX 40 and later, H100",
    "sage2-8b-fp8qk": "FP8 alone. Auto's on B200",
    "sage1-rotated": "INT8 and 16 bits: the smallest error. RTX 30, A100 and later",
    "sage1-per-token": "INT8 and 16 bits, with less preparation. RTX 30, A100 and later",
    "sage1": "INT8 and 16 bits. Auto's on RTX 30 and A100",
    "sage2-4b": "INT4 and FP8, for experiments: the error is 5 times as large",
    "sage3": "FP4, for experiments: the error is 5 times as large, and no card was timed",
    DISABLED: "the model as it came, to compare with",
}
PERCENT = {"min": 0.0, "max": 1.0, "step": 0.01}


class Node:
    CATEGORY = "model/patch"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    SEARCH_ALIASES = ["sage attention", "sageattention", "int8 attention", "fp8 attention"]

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        recipes = "\n".join(f"{name}: {what}" for name, what in RECIPES.items())
        start, end = "Steps before it are exact: 0.1 is 10 %.", "Steps after it are exact."
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "Its clone is patched. Put this node last."}),
                "recipe": ([*RECIPES], {"default": "auto", "tooltip": recipes}),
                "start_percent": ("FLOAT", {"default": 0.0, **PERCENT, "tooltip": start}),
                "end_percent": ("FLOAT", {"default": 1.0, **PERCENT, "tooltip": end}),
            }
        }

    def patch(self, model, recipe: str, start_percent: float, end_percent: float) -> tuple:
        if recipe == DISABLED:
            return (model,)
        model = self.cloned(model)
        model.remove_wrappers_with_key("apply_model", comfyui.NAME)
        has_edge = start_percent > 0 or end_percent < 1
        if has_edge:
            in_stage = comfyui.by_percent(**{EDGE: (start_percent, end_percent)})
            model.add_wrapper_with_key("apply_model", comfyui.NAME, in_stage)
        model.add_wrapper_with_key("apply_model", comfyui.NAME, told_once())
        self.set_attention(model, recipe, has_edge)
        return (model,)


class Attention(Node):
    DESCRIPTION = (
        "Sage Inductor: the model's attention in INT8 and FP8, without torch.compile. Calls that "
        "would not be faster stay as they are; one line of the log says how many are quantized. To "
        "see what it changes, choose the recipe disabled."
    )

    def cloned(self, model):
        return model.clone()

    def set_attention(self, model, recipe: str, has_edge: bool) -> None:
        options = model.model_options["transformer_options"]
        previous = options.get("optimized_attention_override")
        options["optimized_attention_override"] = comfyui.override(previous, recipe, exact=EDGE)


class Compile(Node):
    DESCRIPTION = (
        'Sage Inductor: the model compiled by torch.compile(backend="sage"), its attention in INT8 '
        "and FP8. The first step takes minutes. ComfyUI must run with pytorch attention, and no "
        "other node may override attention or compile the model. One line of the log says how many "
        "calls are quantized."
    )

    def cloned(self, model):
        takes = inspect.signature(model.clone).parameters  # ComfyUI 0.8 has no such argument
        return model.clone(**{"disable_dynamic": True} if "disable_dynamic" in takes else {})

    def set_attention(self, model, recipe: str, has_edge: bool) -> None:
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        options = {"guard_filter_fn": without_options}
        if recipe != "auto":
            options["sage.recipe"] = recipe
        if has_edge:
            options["sage.policy"] = [{"stage": EDGE, "recipe": "off"}]
        set_torch_compile_wrapper(model, "sage", options=options)


def told_once() -> Callable:
    """A wrapper that logs, once, what became of the calls of the first step that has some."""
    told = False

    def tell(executor, *args, **kwargs):
        nonlocal told
        if told:
            return executor(*args, **kwargs)
        before = len(sage_inductor.report())
        out = executor(*args, **kwargs)
        report = sage_inductor.report()
        new = report[before:]
        # In an exact step the first node's calls are not in the report.
        if told := bool(new) or stages.current() != EDGE:
            again = f"no attention call that was not known before. All models: {report.verdict}"
            name = type(executor.class_obj).__name__
            log.info("Sage Inductor, %s: %s", name, new.verdict if new else again)
        return out

    return tell


def without_options(guards) -> list[bool]:
    """transformer_options is another dict in each step, and no reason to compile again."""
    return ["transformer_options" not in guard.name for guard in guards]


NODE_CLASS_MAPPINGS = {"SageInductorAttention": Attention, "SageInductorCompile": Compile}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SageInductorAttention": "Sage Inductor",
    "SageInductorCompile": "Sage Inductor (torch.compile)",
}
