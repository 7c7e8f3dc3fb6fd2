"""Our attention, under a name of another library's: ``sage_inductor.register("diffusers")``."""

from typing import Literal


def register(library: Literal["diffusers", "transformers"]) -> None:
    """Add ``sage_inductor.attention`` to `library`, which is imported. One call is enough.

        sage_inductor.register("diffusers")
        pipe.transformer.set_attention_backend("sage_inductor")

        sage_inductor.register("transformers")
        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="sage")

    Both work in eager and under every backend of ``torch.compile``; ``backend="sage"`` needs
    neither. ``import sage_inductor`` registers nothing: it would have to import the library, which
    takes seconds.

    Raises ValueError for another library, and ImportError where it is not installed or is of a
    version that registers attention in another way.
    """
    if library == "diffusers":
        from sage_inductor.integrations.diffusers import register_backend as register_with
    elif library == "transformers":
        from sage_inductor.integrations.transformers import register_implementation as register_with
    else:
        raise ValueError(f'register: must be "diffusers" or "transformers", got {library!r}')
    register_with()
