"""Our attention, under a name of another library's: ``sage_inductor.register("diffusers")``."""

import importlib
from typing import Literal

LIBRARIES = "comfyui", "diffusers", "transformers"  # a module each, with a `register`


def register(library: Literal["comfyui", "diffusers", "transformers"]) -> None:
    """Add ``sage_inductor.attention`` to `library`, which is imported. One call is enough.

        sage_inductor.register("diffusers")
        pipe.transformer.set_attention_backend("sage_inductor")

        sage_inductor.register("transformers")
        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="sage")

        sage_inductor.register("comfyui")
        model.set_model_optimized_attention(get_attention_function("sage_inductor"))

    The name "sage_inductor" works in all of them and as ``torch.compile``'s backend; transformers
    and ``torch.compile`` take "sage", too.

    All work in eager and under every backend of ``torch.compile``; ``backend="sage"`` needs
    none. ``import sage_inductor`` registers nothing: it would have to import the library, which
    takes seconds.

    Raises ValueError for another library, and ImportError where it is not installed or is of a
    version that registers attention in another way.
    """
    if library not in LIBRARIES:
        raise ValueError(
            f'register: must be "comfyui", "diffusers" or "transformers", got {library!r}'
        )
    importlib.import_module(f"{__name__}.{library}").register()
