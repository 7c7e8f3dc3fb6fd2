"""A checkout of ComfyUI, which COMFYUI names, on a CPU: none of its code is here. What its
requirements.txt asks for must be installed."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(os.environ["COMFYUI"]).resolve()
sys.path.insert(0, str(ROOT))
given, sys.argv = sys.argv, ["", "--cpu", "--use-pytorch-cross-attention"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.cli_args  # noqa: E402

sys.argv = given
import utils.extra_config  # noqa: E402, F401, I001  (before nodes, which hides ComfyUI's utils)
import comfy.model_patcher  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.supported_models  # noqa: E402
import execution  # noqa: E402
import folder_paths  # noqa: E402
import nodes  # noqa: E402
from comfy.ldm.flux.model import FluxParams  # noqa: E402

FILES = tempfile.TemporaryDirectory()
EXTRAS = "flux", "hunyuan", "images", "model_advanced", "sd3"
FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 32,
    "context_in_dim": 64, "hidden_size": 256, "mlp_ratio": 2.0, "num_heads": 2, "depth": 1,
    "depth_single_blocks": 1, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
    "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip


def load(folder: Path) -> dict:
    """The nodes that ComfyUI's loader finds in the folder, by their ids."""
    assert asyncio.run(nodes.load_custom_node(str(folder), module_parent="custom_nodes"))
    ours, all_nodes = f"custom_nodes.{folder.name}", nodes.NODE_CLASS_MAPPINGS.items()
    return {k: v for k, v in all_nodes if getattr(v, "RELATIVE_PYTHON_MODULE", "") == ours}


def load_diffusion_model(unet_path):
    """Flux of random weights, in bf16."""
    unet = {k: v for k, v in FLUX.items() if k in (*FluxParams.__annotations__, "image_model")}
    config = comfy.supported_models.Flux(unet)
    config.set_inference_dtype(torch.bfloat16, None)
    model = config.get_model({}, "", device=torch.device("cpu")).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for p in model.diffusion_model.parameters():
        filled = torch.randn(p.shape, generator=generator)
        p.data = (filled * 1.5 / p[0].numel() ** 0.5 if p.ndim > 1 else 1 + filled / 10).to(p.dtype)
    patcher = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    return patcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))


def sample(model, steps: int):
    """The latent after these steps of euler."""
    generator = torch.Generator().manual_seed(1)
    text, pooled = torch.randn(1, 20, 64, generator=generator), torch.randn(1, 32)
    noise = torch.randn(1, 16, 16, 24, generator=generator)
    conds = [[text, {"pooled_output": 0 * pooled}]]
    return comfy.sample.sample(
        model, noise, steps, 1.0, "euler", "simple", conds, conds, torch.zeros_like(noise), seed=5,
        disable_pbar=True,
    )  # fmt: skip


def shifted(model):
    """By a node that changes which sigma a percent is."""
    make = nodes.NODE_CLASS_MAPPINGS["ModelSamplingFlux"]()
    return make.patch(model, 1.15, 0.5, 512, 512)[0]


def errors_of(prompt: dict, models: dict[str, list[str]]) -> list[str]:
    """What ComfyUI's check says against a prompt where there are these files of models."""
    for kind, names in models.items():
        folder_paths.filename_list_cache.pop(kind, None)
        folder_paths.add_model_folder_path(kind, FILES.name)
        for name in names:
            Path(FILES.name, f"{name}.safetensors").touch()
    valid, error, _, of_nodes = asyncio.run(execution.validate_prompt("", prompt, None))
    found = [e["message"] + " " + e["details"] for n in of_nodes.values() for e in n["errors"]]
    return found or ([] if valid else [str(error)])


for each in EXTRAS:
    path = str(ROOT / "comfy_extras" / f"nodes_{each}.py")
    assert asyncio.run(nodes.load_custom_node(path, module_parent="comfy_extras"))
