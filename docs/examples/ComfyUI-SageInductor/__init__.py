"""Sage Inductor's nodes for ComfyUI. Copy the folder of this file into ComfyUI/custom_nodes."""

try:
    from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
except ImportError as error:
    raise ImportError(
        "ComfyUI-SageInductor: ComfyUI's own Python must have sage_inductor, torch 2.11 or newer "
        f"and Triton, which torch brings on Linux alone. README.md says how to install it ({error})"
    ) from error

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
