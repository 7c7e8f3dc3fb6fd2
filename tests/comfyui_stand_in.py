"""A stand-in for ComfyUI: not ComfyUI, and none of its code. Its names, signatures and the rules by
which overrides and wrappers are called are those of ComfyUI's source of November 2026. What it
computes with them is a small transformer of random weights, on the CPU.

    comfy.ldm.modules.attention    this module's functions up to `attention_pytorch`
    comfy.sd                       load_diffusion_model, which reads no file
    comfy_api.torch_helpers        set_torch_compile_wrapper
"""

import copy
import functools
import importlib.util
import logging
import sys
from types import ModuleType

import torch
import torch.nn.functional as F

# -- comfy.ldm.modules.attention ----

REGISTERED: dict = {}


def register_attention_function(name, func):
    if name in REGISTERED:
        logging.warning("%s is registered already", name)
    else:
        REGISTERED[name] = func


def get_attention_function(name, default=...):
    return REGISTERED[name] if default is ... else REGISTERED.get(name, default)


def wrap_attn(func):
    """Calls the override of a model once, in the place of `func`."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        outermost = "_inside_attn_wrapper" not in kwargs
        kwargs.pop("preferred_attention", None)
        kwargs["_inside_attn_wrapper"] = True
        options = kwargs.get("transformer_options") or {}
        if outermost and "optimized_attention_override" in options:
            return options["optimized_attention_override"](func, *args, **kwargs)
        return func(*args, **kwargs)

    return wrapper


@wrap_attn
def attention_pytorch(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False,
    **kwargs,
):  # fmt: skip
    if not skip_reshape:
        D = q.shape[-1] // heads
        q, k, v = (x.reshape(*x.shape[:2], -1, D).transpose(1, 2) for x in (q, k, v))
    while mask is not None and mask.ndim < 4:
        mask = mask.unsqueeze(0 if mask.ndim == 2 else 1)
    given = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **given)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


# -- the model ----


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x, transformer_options):
        q, k, v = self.qkv(x).chunk(3, -1)
        given = {"transformer_options": transformer_options, "preferred_attention": None}
        return x + self.out(attention_pytorch(q, k, v, self.heads, **given))


class DiffusionModel(torch.nn.Module):
    def __init__(self, blocks: int = 2, width: int = 128, heads: int = 2):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(blocks))

    def forward(self, x, t, transformer_options):
        # Models read what differs from step to step: a guard on it would compile them again.
        self.rows = len(x) // len(transformer_options["cond_or_uncond"])
        transformer_options["block_type"] = "double"
        for i, block in enumerate(self.blocks):
            transformer_options["block_index"] = i
            x = block(x, transformer_options)
        return x


class Flow:
    """ModelSampling of a flow: sigma goes from 1 to 0, by a shift that another node may set."""

    def __init__(self, shift: float = 1.0):
        self.shift = shift

    def percent_to_sigma(self, percent):
        sigma = min(max(1.0 - percent, 0.0), 1.0)
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)


class BaseModel:
    def __init__(self):
        self.diffusion_model, self.model_sampling = DiffusionModel().eval(), Flow()

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None,
                    transformer_options=None, **kwargs):  # fmt: skip
        wrappers = transformer_options.get("wrappers", {}).get("apply_model", {})
        return Executor(self, sum(wrappers.values(), []))(
            x, t, c_concat, c_crossattn, control, transformer_options, **kwargs
        )

    def _apply_model(self, x, t, c_concat, c_crossattn, control, transformer_options, **kwargs):
        return self.diffusion_model(x, t, transformer_options=transformer_options)


class Executor:
    """What a wrapper is called with: the wrappers that follow, and the model."""

    def __init__(self, class_obj, wrappers: list):
        self.class_obj, self.wrappers = class_obj, wrappers

    def __call__(self, *args, **kwargs):
        if not self.wrappers:
            return self.class_obj._apply_model(*args, **kwargs)
        return self.wrappers[0](Executor(self.class_obj, self.wrappers[1:]), *args, **kwargs)


class ModelPatcher:
    def __init__(self, model):
        self.model, self.model_options = model, {"transformer_options": {}}
        self.wrappers, self.object_patches = {}, {}

    def clone(self, disable_dynamic=False):
        clone = copy.copy(self)
        clone.model_options, clone.wrappers = copy.deepcopy((self.model_options, self.wrappers))
        clone.object_patches = {**self.object_patches}
        return clone

    def get_model_object(self, name):
        return self.object_patches.get(name, getattr(self.model, name))

    def add_object_patch(self, name, obj):
        self.object_patches[name] = obj

    def set_model_optimized_attention(self, optimized_attention):
        def override(_, *args, **kwargs):
            return optimized_attention(*args, **kwargs)

        self.model_options["transformer_options"]["optimized_attention_override"] = override

    def add_wrapper_with_key(self, wrapper_type, key, wrapper):
        self.wrappers.setdefault(wrapper_type, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, wrapper_type, key):
        self.wrappers.get(wrapper_type, {}).pop(key, None)

    @torch.inference_mode()
    def step(self, x, sigma: float):
        """What a sampler does at each step: the patches are on the model while it runs, and the
        wrappers in transformer_options. ComfyUI has no such method."""
        options = {**self.model_options["transformer_options"], "wrappers": self.wrappers}
        options["cond_or_uncond"] = [0, 1][: 1 + (sigma < 0.5)]
        t = options["sigmas"] = torch.full((len(x),), sigma)
        before = {name: getattr(self.model, name) for name in self.object_patches}
        try:
            vars(self.model).update(self.object_patches)
            return self.model.apply_model(x, t, transformer_options=options)
        finally:
            vars(self.model).update(before)


class OlderModelPatcher(ModelPatcher):
    """Before 0.18.1."""

    def clone(self):
        return super().clone()


def load_diffusion_model(unet_path, model_options=None):
    return ModelPatcher(BaseModel())


# -- what tests/front/test_comfyui_nodes.py calls of an engine, as in comfyui_real.py ----


def load(folder):
    """As ComfyUI's loader: a module whose name is the folder's path, which need not be a name."""
    spec = importlib.util.spec_from_file_location(str(folder), folder / "__init__.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()
    LOADED.update(module.NODE_CLASS_MAPPINGS)
    return module.NODE_CLASS_MAPPINGS


LOADED: dict = {}


def sample(model, steps: int):
    x = torch.randn(1, 64, 128, generator=torch.Generator().manual_seed(1))
    for i in range(steps):
        sigma = model.get_model_object("model_sampling").percent_to_sigma(i / steps)
        x = (x + model.step(x, sigma)) / 2
    return x


def shifted(model):
    model = model.clone()
    model.add_object_patch("model_sampling", Flow(2.0))
    return model


def errors_of(prompt: dict, models: dict) -> list[str]:
    """Of our own nodes alone."""
    found = []
    for node in (each for each in prompt.values() if each["class_type"] in LOADED):
        inputs = LOADED[node["class_type"]].INPUT_TYPES()["required"]
        assert inputs.keys() == node["inputs"].keys()
        for (name, (kind, more)), value in zip(inputs.items(), node["inputs"].values()):
            if value not in kind if isinstance(kind, list) else not more.get("max", value) >= value:
                found.append(f"{name} {value}")
    return found


# -- comfy_api.torch_helpers ----


def set_torch_compile_wrapper(model, backend, options=None, mode=None, fullgraph=False,
                              dynamic=None):  # fmt: skip
    """What the stock node TorchCompileModel calls: its model is compiled while apply_model runs."""
    compiled = torch.compile(
        model.get_model_object("diffusion_model"), backend=backend, options=options, mode=mode,
        fullgraph=fullgraph, dynamic=dynamic,
    )  # fmt: skip

    def apply_compiled(executor, *args, **kwargs):
        base = executor.class_obj
        base.diffusion_model, eager = compiled, base.diffusion_model
        try:
            return executor(*args, **kwargs)
        finally:
            base.diffusion_model = eager

    model.remove_wrappers_with_key("apply_model", "torch.compile")
    model.add_wrapper_with_key("apply_model", "torch.compile", apply_compiled)


def skip_torch_compile_dict(guard_entries):
    return ["transformer_options" not in entry.name for entry in guard_entries]


# -- as modules ----

NAMES = {
    "comfy.ldm.modules.attention": (
        "register_attention_function", "get_attention_function", "wrap_attn", "attention_pytorch",
    ),
    "comfy.sd": ("load_diffusion_model",),
    "comfy_api.torch_helpers": ("set_torch_compile_wrapper",),
}  # fmt: skip


def install(monkeypatch) -> None:
    """Until the test is over, `import comfy` finds this stand-in, with "pytorch" registered."""
    monkeypatch.setattr(sys.modules[__name__], "REGISTERED", {"pytorch": attention_pytorch})
    for path, names in NAMES.items():
        parts, parent = path.split("."), None
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if not isinstance(sys.modules.get(name), ModuleType):
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
            if parent is not None:
                setattr(parent, parts[i - 1], sys.modules[name])
            parent = sys.modules[name]
        for each in names:
            setattr(parent, each, globals()[each])
