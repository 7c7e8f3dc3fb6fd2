"""Why calls stay as they were, and what to do about it: a row for each cause.

A reason is a sentence with a call's own numbers in it. What is the same for every call is the
`pattern` of its cause. tests/front/test_report.py holds every reason in the code to have a row.
"""

import functools
import re
from typing import NamedTuple


class Cause(NamedTuple):
    pattern: str  # a regular expression, searched for in a reason
    remedy: str
    short: str | None = None  # the reason in few words, with groups of the pattern; None: all of it
    asked: bool = False  # the user himself asked for it
    kind: str = ""  # of a reason: equal for those that are counted together


_AS_SDPA = "write this attention as one F.scaled_dot_product_attention call, if it is one"

# The first row that fits says it. An error's message may hold any words, so rows that quote one
# come first.
CAUSES = (
    Cause("could not be read, which is a fault of ours",
          "please report it with this message: the call itself is computed as it was"),
    Cause("could be timed",
          "see the errors in the reason; without max-autotune predicted times decide",
          "it could not be timed"),
    Cause(r"SDPA is (as fast|\w+)",
          "nothing to gain at this size; sage.force=True rewrites it all the same"),

    Cause("the recipe is 'off'", 'set sage.recipe="auto"', asked=True),
    Cause("the policy says off", "change that rule of the policy", r"\g<0>", asked=True),

    Cause("on CPU attention stays as it was",
          "move the model to a GPU; on CPU sage.emulate=True studies a recipe's accuracy",
          "no kernel runs there"),
    Cause("the Hopper kernel is tested with Triton (.*?), not",
          "install a Triton that it is tested with, or a newer sage_inductor",
          r"the Hopper kernel needs Triton \1"),
    Cause("in a package was not measured", "export with a Triton that it is tested with, or set "
          "options={'sage.force': True}", "no kernel that travels was measured"),
    Cause("run `python -m sage_inductor tune` there",
          "run `python -m sage_inductor tune`, leave sage.calibrate on, or set "
          "options={'sage.force': True}", "nothing was measured there"),
    Cause("flex_attention computes such a window itself",
          "set options={'sage.force': True}, and compare",
          "flex_attention's windows were not measured"),
    Cause("was not measured on", "see the error in the reason; "
          'sage.mode="max-autotune-no-cudagraphs" times each call while compiling',
          "measuring it failed"),
    Cause(r"wins from N=(\d+)",
          "nothing to gain at this length; sage.force=True rewrites it all the same", r"N < \1"),
    Cause(r"wins at no length|never slower: .* is \d+",
          "nothing to gain at this size; sage.force=True rewrites it all the same",
          "SDPA is predicted to be as fast"),
    Cause(r"fewer than (\d+) queries or keys",
          "nothing to gain at this length; sage.force=True rewrites it all the same", r"N < \1"),
    Cause("no kernel for", 'leave the choice of the recipe to sage.recipe="auto"; '
          "`python -m sage_inductor doctor` says which recipes run on this GPU"),
    Cause("q, k and v are fp32", "run the model in bfloat16 or float16, or under torch.autocast; "
          "sage.force=True quantizes fp32 as well", "fp32"),
    Cause("the output requires a gradient", "for inference, call the model under torch.no_grad(); "
          "to train in 8 bits set options={'sage.training': 'auto'}", "training"),

    Cause("which g rounds with k", "for inference, call the model under torch.no_grad(); to train "
          "it by g set sage.training='g', and look at diagnose_training",
          "training, causal with a bias"),
    Cause("trains (calls|causal calls|head_dims|in 16 bits|on compute|with the Hopper|from "
          "compute)",
          "for inference, call the model under torch.no_grad(); sage.force=True computes it in 8 "
          "bits all the same, with an exact backward", "training"),

    Cause("dropout_p must be 0|dropout is active", "call model.eval(), or set its dropout to 0"),
    Cause("scale must be a finite number|(is_causal|num_heads) must be known when compiling",
          "give a Python number that does not change between calls"),
    Cause("inside a torch.func transform", "call attention outside of vmap and grad"),
    Cause("the graph carries no shapes",
          'compile with backend="sage" or export with torch.export, which record shapes'),
    Cause("tensor subclasses are not supported", "hand attention plain tensors: to_local() of a "
          "DTensor, to_padded_tensor() of a nested one"),
    Cause("q, k and v must be|must have 3 or 4 dimensions|the input must have a batch",
          "reshape q, k and v to [B, H, N, D] before the call"),
    Cause("q, k or v is empty", "leave out the call where there is nothing to attend to"),
    Cause("depend on data", "pad to a length that is known before the model runs"),
    Cause("the device must be cuda", "move q, k, v and the mask to one CUDA device"),
    Cause("dtype must be one of|q, k and v must have one dtype|autocast: the graph has",
          "give q, k and v one dtype, bfloat16 or float16, before the call"),
    Cause("head_dim of q and k must be one number",
          "nothing to do: no kernel holds rows this wide, or of two widths"),
    Cause("batches, kv heads and lengths must be equal|q has .* heads and k",
          "give k and v q's batch, and a number of heads that divides q's (enable_gqa=True)"),
    Cause("attn_mask must be bool or floating", "give a bool mask, or one in q's dtype"),
    Cause("attn_mask must broadcast", "give attn_mask 2 to 4 dimensions that broadcast to "
          "[B, H, N_q, N_kv]"),
    Cause("the output must be contiguous", "hand attention contiguous q, k and v, or transposed "
          "views of such"),

    Cause("static_k and static_v are not supported", "hand over key and value themselves"),
    Cause("the output is not used, or as one with|is used as a tuple",
          "unpack it: out, _ = attention(...)"),
    Cause("the attention weights are used", "give need_weights=False, and do not read the weights"),

    Cause("an op of SDPA's backends is used for more than attention",
          "for inference, call F.scaled_dot_product_attention, or read no more than out and lse"),
    Cause("the logsumexp or the maxima are used", "do not ask flex_attention for them"),
    Cause("score_mod changes the scores", "nothing to do where the model needs its score_mod"),
    Cause("score_mod or mask_mod captures", "write mask_mod of b, h, q_idx, kv_idx and constants"),
    Cause("mask_mod is not full, causal or", "give other masks to F.scaled_dot_product_attention, "
          "as attn_mask"),
    Cause("a BlockMask must have blocks of",
          "give create_block_mask or from_kv_blocks one of these as BLOCK_SIZE"),
    Cause("block lists must be int32", "convert counts and indices: .to(torch.int32)"),
    Cause("block lists must (have|be for)", "give the lists q's batch and heads, or 1, and a row "
          "for each block of queries"),
    Cause("(block lists have|a learned sink has) no backward",
          "for inference, call the model under torch.no_grad()", "training"),
    Cause("by block lists was not measured", "set options={'sage.force': True}; make a causal or "
          "window BlockMask inside the compiled function"),
    Cause("blocks are selected (for|where)", 'give this call a rule of its own, without "keep" and '
          "before the one that the reason names", "keep is not for this call"),
    Cause("the example of a package's dynamic length", "export the model with a longer example"),
    Cause("diagnose knows no exact attention", "compare what the model returns with "
          "sage.force=True and without"),

    Cause("softcap", "nothing to do where the model needs its softcap"),
    Cause("a column of scores is added or dropped|a learned sink is scaled or masked|the scores "
          "are concatenated", "put one column of logits behind the scores when they are scaled and "
          "masked, and drop its weights", "other logits than a learned sink"),
    Cause(r"the (\w+) .* are also used by",
          "do not return or store them (transformers: output_attentions=False)",
          r"the \1 are also used"),
    Cause("softmax attention that could not be read", _AS_SDPA),
    Cause("(writes in place|may write to what it is given, and is) between|changes a mode between",
          "move it before or after the attention"),
    Cause("a mask is applied before the scale|masks hide with different values|masked scores are "
          "replaced|the condition of a mask is not bool|the mask is added with alpha",
          "hide scores with one bool mask and -inf, after the scale"),
    Cause("the scores are scaled by|beta=.* of baddbmm|^alpha=", "scale by a Python number"),
    Cause("is given out=", "assign what the call returns instead"),
    Cause("the weights pass through|softmax is over dimension|a product broadcasts|a product is "
          "not|the weights are (not|reshaped)|are reshaped (for|and)|is not over the keys|batch "
          "and heads are split|an operand is computed from|stands between the products|the scores "
          "are moved by|the output product adds", _AS_SDPA),

    Cause("was not run with these inputs", "give diagnose inputs that reach this call"),
    Cause("was not measured: it needs no gradient",
          "call model.train(), and let what it depends on require gradients"),
    Cause("was not measured: its gradient is 0",
          "give a loss that depends on this call, parameters before it that train, and weights "
          "behind it that are not 0"),
    Cause("was not measured: a batch of 1", "give inputs of 2 examples or more"),
)  # fmt: skip


@functools.lru_cache(1024)
def cause_of(reason: str) -> Cause:
    """The cause of a reason why a call stays, its `short` and `kind` filled in."""
    for cause in CAUSES:
        if match := re.search(cause.pattern, reason):
            short = cause.short and match.expand(cause.short)
            return cause._replace(short=short or reason, kind=short or cause.pattern)
    remedy = "please report it: this cause has no remedy yet"
    return Cause(reason, remedy, reason, kind=reason)
