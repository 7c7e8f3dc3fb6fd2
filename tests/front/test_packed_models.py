"""Packed documents in transformers: what the report says of them, and "sage_flash", which attends to
all of them at once.

Small models of random weights. On a CPU the packed call is SDPA with a mask of documents; the op
that a GPU would get is captured, not run.
"""

import itertools
import os
import random

import models
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import sage_inductor
from sage_inductor import config
from sage_inductor.integrations import transformers as ours
from sage_inductor.integrations.transformers import packed_attention_forward, sage_attention_forward

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
vision_utils = pytest.importorskip("transformers.vision_utils")  # 5.23
pytestmark = [pytest.mark.models, pytest.mark.usefixtures("graphs_run_op_by_op")]

SIZES = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=100,
)  # fmt: skip


def images(tower, n: int) -> tuple:
    """At least two merged patches an image: torch compiles what has one of anything anew."""
    sides = [[1, 2 * random.randint(2, 6), 2 * random.randint(1, 6)] for _ in range(n)]
    return of_sides(tower, *sides)


def of_sides(tower, *sides) -> tuple:
    grid, size = torch.tensor(sides), tower.config.patch_size
    return torch.randn(int(grid.prod(1).sum()), 3 * 2 * size * size), grid


def known_before(tower, grid) -> dict:
    """What depends on the images' sizes: transformers takes it as arguments, to be compiled whole."""
    given, size = {}, tower.config.spatial_merge_size
    given["cu_seqlens"] = vision_utils.get_vision_cu_seqlens(grid)
    given["position_ids"] = vision_utils.get_vision_position_ids(grid, size)
    if hasattr(tower, "fullatt_block_indexes"):
        window = tower.config.window_size, tower.config.patch_size
        found = vision_utils.get_vision_window_index(grid, size, *window)
        given["window_index"], given["cu_window_seqlens"] = found
        given["max_window_seqlen"] = int(found[1].diff().max())
    else:
        found = vision_utils.get_vision_interpolation_indices_and_weights(
            grid, 8, align_corners=True, spatial_merge_size=size
        )
        given["interp_indices"], given["interp_weights"] = found
    return given | {"max_seqlen": int(given["cu_seqlens"].diff().max())}


def notes() -> list[str]:
    return [x for x in str(sage_inductor.report()).splitlines() if "documents are" in x]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


# -- what the report says ----


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_tower_that_attends_to_images_one_by_one_is_told_what_breaks_its_graph(name):
    model = models.that_sees(transformers, name)
    tower = model.model.visual
    x, grid = images(tower, 3)
    with torch.no_grad():
        torch.compile(tower, backend="sage")(x, grid)
    assert len(sage_inductor.report()) >= 3  # a call an image
    (told,) = notes()
    assert told.split(": ", 1)[1] == (
        "packed documents are attended one after another, so a graph breaks at `.tolist()` and is "
        f"compiled for each number of them ({graphs()} graphs so far); after "
        'sage_inductor.register("transformers"), model.set_attn_implementation({"vision_config": '
        '"sage_flash"}); in code of your own call varlen_attn once'
    )
    assert f"modeling_{name.lower().replace('qwen3vl', 'qwen3_vl')}.py:" in told
    torch._dynamo.reset()
    sage_inductor.register("transformers")  # what it said
    model.set_attn_implementation({"vision_config": "sage_flash"})
    with torch.no_grad():
        torch.compile(tower, backend="sage")(x, grid)
    assert not notes() and len(sage_inductor.report()) == 2


def by_hand(q, k, v, cu):
    splits = [x.split(cu.diff().tolist(), dim=2) for x in (q, k, v)]
    return torch.cat([F.scaled_dot_product_attention(*each) for each in zip(*splits)], 2)


def sizes_only(q, cu):
    return q.split(cu.diff().tolist(), dim=2)[0] + 1


def test_a_loop_over_documents_by_hand_is_one_and_a_split_of_something_else_is_none():
    q, cu = torch.randn(1, 2, 24, 16), torch.tensor([0, 7, 24])
    found = sage_inductor.explain(by_hand)(q, q, q, cu)
    (told,) = (x for x in str(found).splitlines() if "documents are" in x)
    assert told.startswith(f"{__file__}:")
    assert "documents are" not in str(sage_inductor.explain(sizes_only)(q, cu))


@pytest.fixture(autouse=True)
def counted():
    counters.clear()


@pytest.fixture
def flash(monkeypatch):
    """flash-attn's functions for transformers, which are not installed: documents by a mask."""
    fa = pytest.importorskip("transformers.modeling_flash_attention_utils")

    def varlen(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
               causal=False, softmax_scale=None, dropout_p=0.0, window_size=None):  # fmt: skip
        return q * 1

    monkeypatch.setattr(fa, "_loaded_implementation", "flash_attention_2")
    monkeypatch.setattr(fa, "_flash_fn", varlen)
    monkeypatch.setattr(fa, "_flash_varlen_fn", varlen)
    made = fa._lazy_define_process_function(varlen)
    monkeypatch.setattr(fa, "_process_flash_kwargs_fn", made)
    monkeypatch.setattr(fa, "_process_with_kvcache_kwargs_fn", dict)


def documents(*lengths: int, kwargs: bool = True) -> dict:
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=kwargs)
    batch = collate([{"input_ids": torch.randint(1, 100, (n,)).tolist()} for n in lengths])
    return {name: x for name, x in batch.items() if name != "labels"}


def llama(attention: str, kind: str = "Llama", **sizes):
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    model.config._attn_implementation = attention
    return model


def test_documents_that_flash_looks_for_in_position_ids_are_told_and_given_ones_are_not(flash):
    model = llama("flash_attention_2").bfloat16()
    with torch.no_grad():
        torch.compile(model, backend="sage")(**documents(5, 3, kwargs=False), use_cache=False)
    (told,) = notes()
    assert "modeling_flash_attention_utils.py:" in told and told.split(": ", 1)[1] == (
        f"documents are looked for in position_ids, at which a graph breaks ({graphs()} graphs so far); "
        "give cu_seq_lens, by DataCollatorWithFlattening(return_flash_attn_kwargs=True); or take "
        'attn_implementation="sdpa", whose mask breaks no graph'
    )
    for attention, given in [("flash_attention_2", True), ("sdpa", False)]:  # what it said
        torch._dynamo.reset()
        model.config._attn_implementation = attention
        with torch.no_grad():
            whole = torch.compile(model, backend="sage", fullgraph=True)
            whole(**documents(5, 3, kwargs=given), use_cache=False)
        assert not notes()


def test_documents_of_position_ids_are_a_mask_of_sdpa():
    with torch.no_grad(), config.patch(emulate=True):
        whole = torch.compile(llama("sdpa"), backend="sage", fullgraph=True)
        whole(**documents(5, 3, kwargs=False), use_cache=False)
    found = sage_inductor.report()
    assert [site.mask for site in found.rewritten] == ["bool[1, 1, 8, 8]"] * 2 and not notes()


# -- "sage_flash" ----


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_tower_is_one_graph_whatever_the_images_and_gives_what_the_loop_gives(name):
    model = models.that_sees(transformers, name)
    tower = model.model.visual
    first = [1, 2, 10], [1, 2, 4]  # of the next batch every number is another, and then known to be
    second = [1, 4, 4], [1, 12, 8], [1, 6, 10]
    drawn = [images(tower, n) for n in random.sample(range(1, 6), 5)]
    given = [of_sides(tower, *first), of_sides(tower, *second), *drawn]
    with torch.no_grad():
        expected = [tower(*each) for each in given]  # SDPA, an image at a time
        sage_inductor.register("transformers")
        model.set_attn_implementation({"vision_config": "sage_flash"})
        whole = torch.compile(tower, backend="sage", fullgraph=True)
        for (x, grid), same in zip(given, expected):
            for found in (tower(x, grid), whole(x, grid, **known_before(tower, grid))):
                torch.testing.assert_close(found.pooler_output, same.pooler_output)
                torch.testing.assert_close(found.last_hidden_state, same.last_hidden_state)
    assert graphs() <= 2 + (torch.__version__ < "2.12")


@pytest.mark.parametrize("kind, window", [("Llama", None), ("Mistral", 6)])
def test_a_packed_decoder_gives_what_its_documents_give_one_by_one(kind, window):
    sizes = {"sliding_window": window} if window else {}
    model = llama("sdpa", kind, **sizes)
    batches = [documents(*lengths) for lengths in [(9, 1, 17), (3, 8, 2, 2, 20), (13,)]]
    sage_inductor.register("transformers")
    with torch.no_grad():
        for each in (model, torch.compile(model, backend="sage", fullgraph=True)):
            for batch in batches:
                model.set_attn_implementation("sdpa")
                cu, ids = batch["cu_seq_lens_q"].tolist(), batch["input_ids"]
                alone = [model(ids[:, a:b]).logits for a, b in itertools.pairwise(cu)]
                model.set_attn_implementation("sage_packed")
                found = each(**batch, use_cache=False).logits
                torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


class Module(torch.nn.Module):
    is_causal, num_key_value_groups = True, 2


def drawn(lengths_q, lengths_k, H=4, D=16, D_v=16, B=1):
    """Query, key and value of B batches, and the documents' arguments."""
    ends = [[0, *itertools.accumulate(x)] for x in (lengths_q, lengths_k)]
    q = torch.randn(B, H, ends[0][-1] // B, D)
    k, v = (torch.randn(B, H // 2, ends[1][-1] // B, d) for d in (D, D_v))
    names = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
    cu = dict(zip(names[0], (torch.tensor(x, dtype=torch.int32) for x in ends)))
    return (q, k, v), cu | dict(zip(names[1], (max(lengths_q), max(lengths_k))))


def one_by_one(q, k, v, documents, causal, window, scale):
    """[T, H, D_v] in fp64, by hand."""
    q, k, v = (x.double().transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    spans = [itertools.pairwise(documents[f"cu_seq_lens_{x}"].tolist()) for x in "qk"]
    outs = []
    for (a, b), (c, d) in zip(*spans, strict=True):
        scores = torch.einsum("ihd,jhd->hij", q[a:b], k[c:d]) * scale
        far = torch.arange(d - c) - torch.arange(b - a)[:, None] - (d - c) + (b - a)
        hidden = (far > 0) & causal | (far.abs() >= window if window else torch.tensor(False))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hij,jhd->ihd", weights, v[c:d]))
    return torch.cat(outs)


@pytest.mark.parametrize("seed", range(12))
def test_documents_of_any_lengths_see_their_own_keys(seed):
    """Also empty ones, several batches, fewer queries than keys, windows and another D_v."""
    rng = random.Random(seed)
    keys = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
    queries = keys if seed % 2 else [rng.randint(0, n) for n in keys] + [0]
    keys = keys if seed % 2 else [*keys, 0]
    if seed == 1:
        queries = keys = [4, 8, 12]
    qkv, given = drawn(queries, keys, D_v=rng.choice([16, 24]), B=2 if seed == 1 else 1)
    causal, window, scale = rng.random() < 0.5, rng.choice([None, 1, 3]), rng.random()
    window = window if queries is keys else None  # a row without a key is no number
    found, _ = packed_attention_forward(
        Module(), *qkv, None, scaling=scale, is_causal=causal, sliding_window=window, **given
    )
    assert found.shape[:3] == (qkv[0].shape[0], qkv[0].shape[2], 4)
    expected = one_by_one(*qkv, given, causal, window, scale)
    torch.testing.assert_close(found.flatten(0, 1).double(), expected, rtol=1e-4, atol=1e-5)


def test_a_module_says_whether_it_is_causal_if_the_call_does_not():
    qkv, given = drawn([3, 5], [3, 5])
    given["is_causal"] = None
    found, _ = packed_attention_forward(Module(), *qkv, None, scaling=0.25, **given)
    expected = one_by_one(*qkv, given, True, None, 0.25)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_without_documents_it_is_what_sage_is():
    qkv, _ = drawn([40], [40])
    with config.patch(emulate=True), torch.no_grad():
        found, same = (
            f(Module(), *qkv, None, scaling=0.5, is_causal=False)[0]
            for f in (packed_attention_forward, sage_attention_forward)
        )
        other = sage_attention_forward(Module(), *qkv, None)[0]
    assert torch.equal(found, same) and not torch.equal(found, other)
    assert len(sage_inductor.report().rewritten) == len(sage_inductor.report())


@pytest.mark.parametrize("name", ["softcap", "s_aux", "cache", "position_bias"])
def test_what_packed_calls_cannot_compute_is_refused(name):
    qkv, given = drawn([3, 5], [3, 5])
    with pytest.raises(ValueError, match=f"packed attention does not support {name}"):
        packed_attention_forward(Module(), *qkv, None, scaling=0.25, **given, **{name: 1.0})


class Seen(TorchDispatchMode):
    """Which attention ops are called, and how."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attn" in str(func) or "attention" in str(func):
            self.calls.append((str(func), args))
        return func(*args, **(kwargs or {}))


def called_on_a_gpu(dtype=torch.bfloat16, D_v=16, **given) -> list:
    qkv, documents = drawn([3, 5], [4, 7], D_v=D_v)
    with FakeTensorMode(), Seen() as seen:
        qkv = [torch.empty(x.shape, device="cuda", dtype=dtype) for x in qkv]
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            documents[name] = torch.empty(3, device="cuda", dtype=torch.int32)
        out, _ = packed_attention_forward(Module(), *qkv, None, scaling=0.25, **documents, **given)
    assert out.shape == (1, 8, 4, D_v) and out.dtype == dtype
    return seen.calls


@pytest.mark.parametrize(
    "given, causal, window",
    [({}, True, [-1, 0]), ({"is_causal": False}, False, [-1, -1]), ({"sliding_window": 4}, False, [3, 0]),
     ({"sliding_window": 4, "is_causal": False}, False, [3, 3])],
)  # fmt: skip
def test_a_gpu_gets_torchs_varlen_op_once(given, causal, window):
    ((name, args),) = called_on_a_gpu(**given)
    assert name == "torch_attn._varlen_attn.default"
    q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, found, *_ = args
    assert [tuple(x.shape) for x in (q, k, v)] == [(8, 4, 16), (11, 2, 16), (11, 2, 16)]
    assert (max_q, max_k, scale, is_causal, list(found)) == (5, 7, 0.25, causal, window)
    assert len(cu_q) == len(cu_k) == 3


@pytest.mark.parametrize(
    "given", [{"dtype": torch.float32}, {"D_v": 24}, {"dropout": 0.5}], ids=str
)
def test_what_the_op_does_not_compute_is_sdpa_with_a_mask(given, monkeypatch):
    def places(cu, x):  # indexing takes no fake tensors of a GPU which is not there
        raise InterruptedError

    monkeypatch.setattr(ours, "_places", places)
    with pytest.raises(InterruptedError):
        called_on_a_gpu(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 5)])
def test_torchs_op_gives_what_the_mask_gives(causal, window):
    qkv, given = drawn([30, 1, 70], [30, 1, 70], D=64, D_v=64)
    qkv = [x.bfloat16().cuda() for x in qkv]
    cuda = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    found, _ = packed_attention_forward(
        Module(), *qkv, None, scaling=0.125, is_causal=causal, sliding_window=window, **cuda
    )
    expected = one_by_one(*(x.cpu() for x in qkv), given, causal, window, 0.125)
    torch.testing.assert_close(found[0].cpu().double(), expected, rtol=2e-2, atol=2e-2)


def test_both_names_are_registered():
    sage_inductor.register("transformers")
    known = transformers.AttentionInterface()
    assert all(known[name] is packed_attention_forward for name in ours.PACKED)
    assert all(known[name] is sage_attention_forward for name in ours.NAMES)
