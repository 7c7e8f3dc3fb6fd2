"""Which module makes a call: Dynamo's path of it, in the words of the model's named_modules()."""

import re

import torch

from sage_inductor.ops import compat


def module_path(node) -> str:
    """``layers.0.attn``, as the model's named_modules() says, of the innermost module entered: its
    path within the outermost module that the compiled code reaches it by.

    Dynamo says ``L['self'].layers.0.attn``, ``G['model'].layers.0.attn`` where a function calls the
    model, ``L['pipe'].parts['model'].layers.0.attn`` where an object holds it, or
    ``L['self'].__dict__['_modules']['layers'].0.attn`` under a __getattr__."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    path = re.sub(HOOKED, "", list(stack.values())[-1][0])
    count = 1
    while count:
        path, count = re.subn(GETATTR, r"\1['\2']", path)
    steps = re.findall(STEP, path)
    names = ["".join(step) for step in steps]
    if path.startswith(("L[", "G[")):
        names = names[_length_of_root(steps) :]
    return ".".join(name for name in names if name not in UNNAMED)


# A step of Dynamo's path: an attribute, a key or an index. For a name that is no identifier, like
# "self-attn", it says getattr(L['self'].layers.0, 'self-attn').
STEP = r"(?:^|\.)([^.\[\]]+)|\[(?:'([^']*)'|(\d+))\]"
GETATTR = r"getattr\(((?:(?!getattr\().)*?), '([^']*)'\)"
# Where hooks of diffusers or accelerate have replaced a module's forward, which they then call.
HOOKED = r"\.forward\.func\.__closure__.*?\.__self__"
# What Dynamo's path goes through, and named_modules() of the module as it was written does not.
UNNAMED = (
    "__dict__", "_modules", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module",
)  # fmt: skip


def _length_of_root(steps: list[tuple[str, str, str]]) -> int:
    """How many steps of Dynamo's path lead to the outermost module in it: the scope, the variable,
    and what lies between that and a module, looked up in the frame that is being compiled."""
    try:
        output = compat.InstructionTranslator.current_tx().output
        value = {"L": output.local_scope, "G": output.global_scope}[steps[0][0]]
        for i, (attribute, key, index) in enumerate(steps[1:], 2):
            value = getattr(value, attribute) if attribute else value[int(index) if index else key]
            if isinstance(value, torch.nn.Module):
                return i
    except (AttributeError, LookupError, TypeError):  # no frame is compiled, or another path's form
        pass
    return 2
