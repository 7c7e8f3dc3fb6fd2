"""Why calls stay as they were, and what to do about it: a row for each cause.

    reasons.DROPOUT(0.1)                   "dropout_p must be 0, got 0.1", a `Reason`
    reasons.DROPOUT(0.1).cause.remedy      "call model.eval(), or set its dropout to 0"

What needs the cause of a reason, such as ``sage.strict``, asks the reason for it, and never reads
its text.
"""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Reason:
    """The sentence that says why a call stays as it was, with the call's own numbers in it. It is
    no str: what an f-string makes of it has no cause, and a Site does not take that."""

    text: str
    cause: "Cause"
    short: str  # the same in few words

    def __str__(self):
        return self.text

    def __add__(self, more: str) -> "Reason":
        text = self.text + more
        return Reason(text, self.cause, self.short if self.cause.short else text)

    @property
    def kind(self) -> object:
        """Equal for reasons that are counted together."""
        return self.short if self.cause.short else self.cause


@dataclasses.dataclass(frozen=True)
class Cause:
    """Called with what the text's fields stand for, it is the reason."""

    text: str
    remedy: str
    short: str | None = None  # the text in few words, of the same fields; None: all of it
    requested: bool = False  # stays on purpose: no warning, no remedy, nothing for sage.strict

    def __call__(self, *given) -> Reason:
        return self.worded(self.text.format(*given), *given)

    def worded(self, text: str, *given) -> Reason:
        """The reason in words of its own."""
        return Reason(text, self, self.short.format(*given) if self.short else text)


def joined(reasons: list[Reason]) -> Reason:
    """All of them, for the first one's cause."""
    first, *others = reasons
    return first + "".join(f"; {each}" for each in others)


# fmt: off
UNREADABLE = Cause("could not be read, which is a fault of ours: {}: {}",
    "please report it with this message: the call itself is computed as it was")

# -- what the user asked for (choose/decide.py) ----

IS_OFF = Cause("the recipe is 'off'", 'set sage.recipe="auto"', requested=True)
POLICY_OFF = Cause("the policy says off ({})", "change that rule of the policy",
    "the policy says off", requested=True)

# -- no kernel (choose/decide.py) ----

ON_CPU = Cause("on CPU attention stays as it was (sage.emulate=True studies the accuracy)",
    "move the model to a GPU; on CPU sage.emulate=True studies a recipe's accuracy",
    "no kernel runs on a CPU")
NO_KERNEL = Cause("no kernel for {}",
    'leave the choice of the recipe to sage.recipe="auto", on sm_80 or newer; `python -m '
    'sage_inductor doctor` says which recipes run on this GPU')
HOPPER_LOST = Cause("the Hopper kernel is tested with Triton {}, not {}",
    "install a Triton that it is tested with, or a newer sage_inductor",
    "the Hopper kernel needs Triton {}")
FP32 = Cause("q, k and v are fp32, which is quantized only by sage.force=True",
    "run the model in bfloat16 or float16, or under torch.autocast; sage.force=True quantizes "
    "fp32 as well", "fp32")
SHORT_EXAMPLE = Cause("the example of a package's dynamic length must be more than {}, got {}",
    "export the model with a longer example")

# -- no gain (choose/decide.py) ----

_NO_GAIN = "nothing to gain at this size; sage.force=True rewrites it all the same"
_TOO_SHORT = "nothing to gain at this length; sage.force=True rewrites it all the same"
UNTIMED = Cause("{}: {} could be timed{}",
    "see the errors in the reason; without max-autotune predicted times decide",
    "it could not be timed")
TIMED_SLOWER = Cause("{}: SDPA is {} ({:.2f}x){}", _NO_GAIN)
NO_SPEEDUP = Cause("no known gain: {} is {}", _NO_GAIN, "SDPA is predicted to be as fast")
AT_NO_LENGTH = Cause("no known gain: {} wins at no length (sage.force=True overrides)", _NO_GAIN,
    "SDPA is predicted to be as fast")
FROM_LENGTH = Cause("no known gain: {} wins from N={} (sage.force=True overrides)", _TOO_SHORT,
    "N < {1}")
LISTS_FROM_LENGTH = Cause("no known gain: {} by block lists wins from N={}", _TOO_SHORT, "N < {1}")
TOO_SHORT = Cause("no known gain: a call with fewer than {} queries or keys", _TOO_SHORT, "N < {}")
NOT_IN_A_PACKAGE = Cause("with Triton {} no kernel can travel in a package",
    "export with a Triton that it is tested with")
NEVER_TUNED = Cause(
    "no known gain: {} was not measured on {}: run `python -m sage_inductor tune` there",
    "run `python -m sage_inductor tune`, leave sage.calibrate on, or set options={'sage.force': "
    "True}", "nothing was measured there")
FLEX_WINDOW = Cause(
    "no known gain: {} was not measured on {}: flex_attention computes such a window itself",
    "set options={'sage.force': True}, and compare", "flex_attention's windows were not measured")
NOT_MEASURABLE = Cause("no known gain: {} was not measured on {}: {}",
    'see the error in the reason; sage.mode="max-autotune-no-cudagraphs" times each call while '
    'compiling', "measuring it failed")
UNREPEATED = Cause("SDPA, heads not repeated: {} of k and v for {} of q; {}",
    "nothing to do: SDPA computes the same in less time", "SDPA, heads not repeated",
    requested=True)
DECODE_UNTIMED = Cause("sage::decode for N_q={} was never timed",
    "set options={'sage.force': True} and compare the times: it is exact")
REPEATED = Cause("{} heads of k and v are copied to {} at each call, for N_q={}",
    "in transformers TRANSFORMERS_SDPA_FORCE_GQA=1 leaves the copies out: compare the times; in "
    "code of your own give SDPA enable_gqa=True",
    "heads of k and v are copied")
CODES = Cause("k is decoded from {} codes by `{}` before the call",
    "a cache in 16 bits is faster where it fits: codes save memory, and decoding reads them and "
    "writes all of k and v at each call", "k is decoded from {} codes")
LISTS_UNMEASURED = Cause("no known gain: {} by block lists was not measured",
    "set options={'sage.force': True}; make a causal or window BlockMask inside the compiled "
    "function")

# -- gradients (choose/decide.py, eligible.py) ----

_NO_GRAD = "for inference, call the model under torch.no_grad()"
_FORCED = f"{_NO_GRAD}; sage.force=True computes it in 8 bits all the same, with an exact backward"
EXACT_BACKWARD = Cause("the output requires a gradient, and sage.training is 'off'",
    f"{_NO_GRAD}; to train in 8 bits set options={{'sage.training': 'auto'}}", "training")
BIASED_K = Cause(
    "training: causal, and k's channels have a bias, which the FP8 backward rounds with k "
    "(sage.training='fp8-backward' overrides)",
    f"{_NO_GRAD}; to train it by the FP8 backward set sage.training='fp8-backward', and look at "
    "diagnose_training", "training, causal with a bias")
_trains = functools.partial(Cause, remedy=_FORCED, short="training")
TRAINS_UNMASKED = _trains("{} trains calls without a mask but the causal one, got {}")
TRAINS_SQUARE = _trains(
    "the FP8 backward trains causal calls of as many queries as keys, got {} and {}")
TRAINS_WITHOUT_LSE = _trains("{} trains calls that return no logsumexp")
TRAINS_HEAD_DIMS = _trains("{} trains head_dims up to {}, one of q, k and v, got {} and {}")
TRAINS_POSITIVE_SCALE = _trains("the FP8 backward trains calls whose scale is more than 0, got {}")
TRAINS_16_BITS = _trains("the FP8 backward trains in 16 bits on a GPU, got float32")
TRAINS_ON_HOPPER = _trains("the FP8 backward trains on compute capability 9.0, got {}.{}")
TRAINS_FROM_8_0 = _trains("sagebwd trains from compute capability 8.0 on, got {}.{}")
TRAINS_BY_HOPPER_KERNEL = Cause("the FP8 backward trains with the Hopper kernel: {}",
    HOPPER_LOST.remedy, "the Hopper kernel needs Triton {1}")
LISTS_IN_TRAINING = Cause("training: block lists have no backward here", _NO_GRAD, "training")
SINK_IN_TRAINING = Cause("training: a learned sink has no backward here", _NO_GRAD, "training")
WRITTEN_IN_TRAINING = Cause("training: an input is written to after the call",
    "write to a copy of q, k, v or the mask", "training")

# -- what sage::sdpa cannot stand for (eligible.py) ----

NO_SHAPES = Cause("the graph carries no shapes for this call",
    'compile with backend="sage" or export with torch.export, which record shapes')
IN_A_TRANSFORM = Cause("inside a torch.func transform", "call attention outside of vmap and grad")
_EVAL = "call model.eval(), or set its dropout to 0"
DROPOUT = Cause("dropout_p must be 0, got {}", _EVAL)
DROPOUT_IN_TRAINING = Cause("dropout_p must be 0, got {}, and the output requires a gradient",
    f"{_EVAL}; {_NO_GRAD}")
_NUMBER = "give a Python number that does not change between calls"
SCALE = Cause("scale must be a finite number known when compiling, got {}", _NUMBER)
SUBCLASS = Cause("tensor subclasses are not supported, got {}",
    "hand attention plain tensors: to_local() of a DTensor, to_padded_tensor() of a nested one")
_BHND = "reshape q, k and v to [B, H, N, D] before the call"
DIMENSIONS = Cause("q, k and v must be [B, H, N, D], got {}, {} and {} dimensions", _BHND)
EMPTY = Cause("q, k or v is empty, got {}, {}, {}",
    "leave out the call where there is nothing to attend to")
OF_DATA = Cause("heads, lengths and head_dim depend on data, got {}, {}, {}",
    "pad to a length that is known before the model runs")
DEVICE = Cause("the device must be cuda (or cpu, emulated), got {}",
    "move q, k, v and the mask to one CUDA device")
AMD = Cause("the GPU must be NVIDIA's, got AMD's: this torch is built for ROCm {}",
    "nothing to do: no kernel was ever run on an AMD GPU")
_ONE_DTYPE = "give q, k and v one dtype, bfloat16 or float16, before the call"
DTYPE = Cause("dtype must be one of {}, got {}", _ONE_DTYPE)
HEAD_DIM = Cause("head_dim of q and k must be one number up to {}, as v's, got {}, {}, {}",
    "nothing to do: no kernel holds rows this wide, or of two widths")
_ONE_BATCH = "give k and v q's batch, and a number of heads that divides q's (enable_gqa=True)"
BATCHES = Cause("batches, kv heads and lengths must be equal, got {}, {}, {}", _ONE_BATCH)
HEADS = Cause("q has {} heads and k {}, with enable_gqa={}", _ONE_BATCH)
MASK_DTYPE = Cause("attn_mask must be bool or floating, got {}",
    "give a bool mask, or one in q's dtype")
MASK_SHAPE = Cause("attn_mask must broadcast to [B, H_q, N_q, N_kv], got {}",
    "give attn_mask 2 to 4 dimensions that broadcast to [B, H, N_q, N_kv]")
STORED = Cause(
    "the output must be contiguous in some order, but for gaps between rows: strides {}",
    "hand attention contiguous q, k and v, or transposed views of such")
LISTS_DTYPE = Cause("block lists must be int32, got {}",
    "convert counts and indices: .to(torch.int32)")
_LISTS = "give the lists q's batch and heads, or 1, and a row for each block of queries"
LISTS_SHAPE = Cause("block lists must have q's batch and heads, or 1, got {}, q {}", _LISTS)
LISTS_OF_ALL = Cause("block lists must be for all queries, got {}, q {}", _LISTS)
_NOT_KEPT = 'give this call a rule of its own, without "keep" and before the one that the reason ' \
            "names", "keep is not for this call"
KEEP_UNMASKED = Cause("blocks are selected where there is no mask, got {}", *_NOT_KEPT)
KEEP_SELF = Cause("blocks are selected for self-attention, got {} queries and {} keys", *_NOT_KEPT)
KEEP_WITHOUT_LSE = Cause("blocks are selected where no logsumexp is returned", *_NOT_KEPT)
KEEP_SCALE = Cause("rule {} selects blocks where scale is above 0, got {}", *_NOT_KEPT)
KEEP_HEADS = Cause("keep must have a fraction for each of q's {} heads, or one for all, got {}",
    "give a layer's rule as many fractions as it has heads; where ranks divide the heads, each "
    "rank those of its own",
    "keep is for another number of heads")
LAYOUT = Cause("layout {} must be of {} tokens, with dense ones around it, got {}",
    "give attention's own frames, rows and columns, and other tokens as dense ones or segments; "
    'compile with static lengths, or a rule of "length": [N, N]',
    "the layout has another number of tokens")

# -- who makes the call (sdpa.py, modules.py, sdpa_backends.py, flex.py) ----

IS_CAUSAL = Cause("is_causal must be known when compiling, got {}", _NUMBER)
NUM_HEADS = Cause("num_heads must be known when compiling, got {}", _NUMBER)
STATIC_KV = Cause("static_k and static_v are not supported", "hand over key and value themselves")
_UNPACK = "unpack it: out, _ = attention(...)"
OUT_UNUSED = Cause("the output is not used, or as one with the attention weights", _UNPACK)
OUT_AS_TUPLE = Cause("(out, weights) is used as a tuple, by {}", _UNPACK)
UNBATCHED = Cause("the input must have a batch, got {} dimensions", _BHND)
OTHER_DTYPE = Cause("autocast: the graph has {} and the projections {}", _ONE_DTYPE)
WEIGHTS_USED = Cause("the attention weights are used",
    "give need_weights=False, and do not read the weights")
MORE_THAN_ATTENTION = Cause("an op of SDPA's backends is used for more than attention: {}",
    "for inference, call F.scaled_dot_product_attention, or read no more than out and lse")
LSE_USED = Cause("the logsumexp or the maxima are used",
    "do not ask flex_attention or SLA's kernel for them, and read none but the first output of "
    "FastVideo's op")
SCORE_MOD = Cause("score_mod changes the scores",
    "nothing to do where the model needs its score_mod")
MOD_CAPTURES = Cause("score_mod or mask_mod captures tensors or symbolic lengths",
    "write mask_mod of b, h, q_idx, kv_idx and constants")
MASK_MOD = Cause("mask_mod is not full, causal or a sliding window",
    "give other masks to F.scaled_dot_product_attention, as attn_mask")
BLOCK_SIZE = Cause("a BlockMask must have blocks of {}, got {}",
    "give create_block_mask or from_kv_blocks one of these as BLOCK_SIZE")

# -- other libraries' ops (packed.py) ----

PACKED = Cause("no known gain: packed documents in 8 bits {}; here {} tokens in {}",
    "sage.force=True rewrites the call; a long document gains as a call of "
    "F.scaled_dot_product_attention of its own", "packed documents")
PACKED_WITH = Cause("packed attention with {} has no 8-bit kernel",
    "leave it out, or call F.scaled_dot_product_attention once for each document")
PACKED_TRAINING = Cause("packed documents have no 8-bit backward",
    "call it under torch.no_grad(), or train by F.scaled_dot_product_attention")
PAGES = Cause("the keys lie in pages", "give contiguous keys; servers have kernels of their own")
CHUNKED = Cause("packed documents are attended one after another, so a graph breaks at `.tolist()` "
    "and is compiled for each number of them ({} graphs so far)",
    'after sage_inductor.register("transformers"), model.set_attn_implementation({"vision_config": '
    '"sage_flash"}); in code of your own call varlen_attn once')
FROM_POSITIONS = Cause(
    "documents are looked for in position_ids, at which a graph breaks ({} graphs so far)",
    "give cu_seq_lens, by DataCollatorWithFlattening(return_flash_attn_kwargs=True); or take "
    'attn_implementation="sdpa", whose mask breaks no graph')
ANOTHER_KERNEL = Cause("`{}` is another library's kernel",
    'call F.scaled_dot_product_attention (attn_implementation="sdpa" in transformers)')
ANOTHERS_LISTS = Cause("`{}` is another library's kernel for lists of blocks",
    "call video_sparse_attention or sparse_linear_attention of sage_inductor.functional; for lists "
    "of your own compile flex_attention with a BlockMask")
SPARGE = Cause("a graph breaks at a kernel of SpargeAttn's ({} graphs so far)",
    "for SLA call sage_inductor.functional.sparse_linear_attention with the layer's proj_l; else "
    'give F.scaled_dot_product_attention a policy with "keep"')

# -- attention that is written out by hand (softmax/) ----

_AS_SDPA = "write this attention as one F.scaled_dot_product_attention call, if it is one"
UNREAD = Cause("softmax attention that could not be read: `{}` between the products", _AS_SDPA)
SOFTCAP = Cause("softcap: the scores pass through tanh",
    "nothing to do where the model needs its softcap")
_A_SINK = (
    "put one column of logits behind the scores when they are scaled and masked, and drop its "
    "weights",
    "other logits than a learned sink",
)
OTHER_LOGITS = Cause("the scores are concatenated with other logits than a column behind them",
    *_A_SINK)
NO_SINK = Cause("a column of scores is added or dropped, which is no learned sink", *_A_SINK)
SINK_CHANGED = Cause("a learned sink is scaled or masked with the scores", *_A_SINK)
SINK_SHIFTED = Cause("the row maximum is subtracted before a learned sink is put behind the scores",
    *_A_SINK)
STANDS_BETWEEN = Cause("`{}` stands between the products", _AS_SDPA)
MOVED = Cause("the scores are moved by `{}`", _AS_SDPA)
OUTPUT_ADDS = Cause("the output product adds or scales", _AS_SDPA)
WEIGHTS_CHANGED = Cause("the weights pass through `{}`", _AS_SDPA)
DROPS_WEIGHTS = Cause("dropout is active", _EVAL)
_SCALE = "scale by a Python number"
SCALED_BY = Cause("the scores are scaled by {}", _SCALE)
ALPHA = Cause("alpha={}", _SCALE)
BETA = Cause("beta={} of baddbmm", _SCALE)
_HIDE = "hide scores with one bool mask and -inf, after the scale"
MASK_ALPHA = Cause("the mask is added with alpha={}", _HIDE)
FILLED_BY_TENSOR = Cause("masked scores are replaced by a tensor", _HIDE)
FILLED_BY = Cause("masked scores are replaced by {}, which does not hide them", _HIDE)
NOT_BOOL = Cause("the condition of a mask is not bool", _HIDE)
MASK_BEFORE_SCALE = Cause("a mask is applied before the scale", _HIDE)
DIFFERENT_FILLS = Cause("masks hide with different values, {}", _HIDE)
GIVEN_OUT = Cause("`{}` is given out=", "assign what the call returns instead")
RANKS = Cause("q, k and v must have 3 or 4 dimensions, got {}", _BHND)
ALSO_USED = Cause("the {} `{}` are also used by `{}`",
    "do not return or store them (transformers: output_attentions=False)", "the {} are also used")
OF_THE_SCORES = Cause("an operand is computed from the scores", _AS_SDPA)
DTYPES = Cause("q, k and v must have one dtype, got {}", _ONE_DTYPE)
NO_PRODUCT = Cause("a product is not [*batch, N, D] by [*batch, D, M]", _AS_SDPA)
TWO_ORDERS = Cause("the weights are not [..., N_q, N_k] in both products: reshaped in two orders",
    _AS_SDPA)
NOT_IN_BOTH = Cause("the weights are not [..., N_q, N_k] in both products", _AS_SDPA)
SOFTMAX_DIM = Cause("softmax is over dimension {} of {}", _AS_SDPA)
RESHAPED = Cause("the weights are reshaped to {}", _AS_SDPA)
RESHAPED_TRANSPOSED = Cause("the weights are reshaped to {} and transposed", _AS_SDPA)
NOT_OVER_KEYS = Cause("`{}` is not over the keys of a query", _AS_SDPA)
SPLIT = Cause("batch and heads are split, and dynamic or transposed: {}", _AS_SDPA)
SPLIT_TWICE = Cause("batch and heads are split in two ways: {}, {}", _AS_SDPA)
BROADCASTS = Cause("a product broadcasts: q {}, k {}, v {}", _AS_SDPA)
RESHAPED_FOR = Cause("scores of dynamic sizes are reshaped for `{}`", _AS_SDPA)
TRANSPOSED_FOR = Cause("scores are reshaped and transposed for `{}`", _AS_SDPA)
_MOVE = "move it before or after the attention"
MAY_WRITE = Cause("`{}` may write to what it is given, and is between the products", _MOVE)
MODE = Cause("`{}` changes a mode between the products", _MOVE)

# -- what is studied (study/measure.py, study/diagnose_training.py) ----

NOT_RUN = Cause("was not run with these inputs", "give diagnose inputs that reach this call")
NO_EXACT = Cause("was not run: diagnose knows no exact attention {}",
    "compare what the model returns with sage.force=True and without")
NO_GRADIENT = Cause("was not measured: it needs no gradient",
    "call model.train(), and let what it depends on require gradients")
NO_EXAMPLES = Cause("was not measured: a batch of 1 has no gradient noise",
    "give inputs of 2 examples or more")
ZERO_GRADIENT = Cause("was not measured: its gradient is 0",
    "give a loss that depends on this call, parameters before it that train, and weights behind "
    "it that are not 0")
# fmt: on

CAUSES = tuple(x for x in globals().values() if isinstance(x, Cause))
