"""Models of diffusers and transformers over several devices, on CPU with gloo: context parallelism of
diffusers, tensor and sequence parallelism, FSDP2.

What two processes compute together is what one computes alone with the same recipe.
"""

import functools
import os
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, serve
from support import op_by_op, relative_l2, swept
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import sage_inductor
from sage_inductor import config
from sage_inductor.integrations.diffusers import sage_attention

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.models
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

RECIPE = "sage2-8b-per-token"
OPTIONS = {"sage.emulate": True, "sage.recipe": RECIPE}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    ranks = Ranks(2, __file__, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


def made(make):
    """The same weights and inputs in every process."""
    torch.manual_seed(0)
    model, inputs = make()
    return model.eval(), inputs


@torch.no_grad()
def run(model, inputs):
    return model(**inputs)[0]


def check(found, expected, exact, order_kept=True) -> None:
    """With the keys in the same order few codes differ, for each rank multiplies other rows. In
    another order other keys share a scale."""
    assert isinstance(found, torch.Tensor), found
    difference, error = relative_l2(expected, exact), relative_l2(found, exact)
    assert 1e-5 < difference
    assert 0.5 * difference < error < 1.5 * difference, (error, difference)
    if order_kept:
        assert relative_l2(found, expected) < 0.2 * difference, relative_l2(found, expected)


# -- diffusers ----


def wan():
    model, inputs = models.wan(heads=4, head_dim=32, ffn_dim=64, layers=2, text=15)
    return model, {**inputs, "return_dict": False}


def flux(text=16):
    model, inputs = models.flux(heads=4, head_dim=32, B=2, patches=100, text=text)
    return model, {**inputs, "return_dict": False}


MODELS = {"Wan": wan, "Flux": flux, "Flux, odd": functools.partial(flux, text=15)}
ATTENTION = {
    "Wan": {"blocks.0.attn1", "blocks.0.attn2", "blocks.1.attn1", "blocks.1.attn2"},
    "Flux": {"transformer_blocks.0.attn", "single_transformer_blocks.0.attn"},
}


def parallel(make, backend="sage_inductor", **degrees):
    """A model and inputs under context parallelism."""
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and CPUs are none
    torch._dynamo.reset()
    config.emulate, config.recipe = True, RECIPE
    sage_inductor.register("diffusers")
    model, inputs = made(make)
    model.set_attention_backend(backend)
    model.enable_parallelism(config=diffusers.ContextParallelConfig(**degrees))
    return model, inputs


def eager(group, name: str, recipe=RECIPE, **degrees):
    model = parallel(MODELS[name], **degrees)
    config.recipe = recipe
    return run(*model)


def natively(group, name: str, **degrees):
    """By diffusers' own backend, which the compiler's finds: the output and the report's verdict."""
    model, inputs = parallel(MODELS[name], "native", **degrees)
    model.compile(backend="sage", options=OPTIONS)
    with op_by_op():
        return run(model, inputs), sage_inductor.report().verdict


def gradients(group, name: str, backend: str, **degrees):
    """Of what enters the model."""
    model, inputs = parallel(MODELS[name], backend, **degrees)
    x = inputs["hidden_states"].requires_grad_()
    model(**inputs)[0].square().sum().backward()
    return x.grad


def compiled(group, name: str, how: str, by_inductor: bool, **degrees):
    """The output, and what the report says of each call."""
    model, inputs = parallel(MODELS[name], **degrees)
    # The hooks of Wan log, and ask for a signature: graph breaks.
    given = {"backend": "sage", "options": OPTIONS, "fullgraph": name != "Wan"}
    if how == "whole":
        model.compile(**given)
    else:
        model.compile_repeated_blocks(**given)
    with op_by_op(not by_inductor):
        return run(model, inputs), sage_inductor.report().to_dicts()


@functools.cache
def alone(make):
    """What one process computes with sage, and exactly."""
    model, inputs = made(make)
    exact = run(model, inputs)
    sage_inductor.register("diffusers")
    model.set_attention_backend("sage_inductor")
    with config.patch(emulate=True, recipe=RECIPE):
        return run(model, inputs), exact


RING, ULYSSES = {"ring_degree": 2}, {"ulysses_degree": 2}
DEGREES = [
    *((name, degrees) for name in MODELS if name != "Flux, odd" for degrees in (RING, ULYSSES)),
    ("Flux, odd", {**RING, "ring_anything": True}),
    ("Flux, odd", {**ULYSSES, "ulysses_anything": True}),
]


@pytest.mark.parametrize(
    "name, degrees",
    # Wan's, compiled, are in the next test.
    [swept(*x, unless=x[0] != "Wan") for x in DEGREES],
    ids=str,
)
def test_context_parallelism_of_diffusers(pair, name, degrees):
    for found in pair(eager, *[(name,)] * 2, **degrees):
        check(found, *alone(MODELS[name]), order_kept=name == "Wan")


@pytest.mark.parametrize(
    "name, how, degrees",
    [
        swept("Wan", "whole", RING),
        ("Wan", "blocks", RING),
        swept("Wan", "whole", ULYSSES),
        swept("Flux", "whole", RING),
        swept("Flux", "whole by Inductor", RING),
        swept("Flux", "blocks", RING),
        swept("Flux", "blocks", ULYSSES),
    ],
    ids=str,
)
def test_context_parallelism_of_diffusers_compiled(pair, name, how, degrees):
    how, _, by_inductor = how.partition(" by ")
    for told in pair(compiled, *[(name, how, bool(by_inductor))] * 2, **degrees):
        assert isinstance(told, tuple), told
        found, calls = told
        check(found, *alone(MODELS[name]), order_kept=name == "Wan")
        # Dynamo resumes after Wan's hooks, in a block.
        whole = how == "whole" and name != "Wan"
        modules, known = (
            {path if whole else path.split(".")[-1] for path in paths}
            for paths in (ATTENTION[name], [call["module"] for call in calls])
        )
        assert known == modules
        for call in calls:
            gathers = "ring_degree" in degrees and not call["module"].endswith("attn2")
            by = "sage_inductor.gather_attention" if gathers else "sage_inductor.attention"
            assert (call["recipe"], call["spelling"]) == (RECIPE, by), call


def test_ulysses_of_diffusers_own_backend_is_rewritten(pair):
    for found, told in pair(natively, *[("Flux",)] * 2, **ULYSSES):
        check(found, *alone(MODELS["Flux"]), order_kept=False)
        assert told == f"2 of 2 attention calls use {RECIPE}"


class SmallPipeline:
    """Of FluxPipeline, what the page reads."""

    @classmethod
    def from_pretrained(cls, name: str, torch_dtype):
        pipe = cls()
        pipe.transformer, pipe.inputs = made(flux)
        return pipe

    def to(self, device: str):
        pass

    def __call__(self, prompt: str, height: int, width: int):
        return SimpleNamespace(images=run(self.transformer, self.inputs))


def run_snippet(group, code: str):
    torch.accelerator.device_count = lambda: 1
    torch._dynamo.reset()
    config.emulate, config.recipe = True, "auto"
    dist.init_process_group, torch.cuda.set_device = print, print  # this process has a group
    diffusers.FluxPipeline = SmallPipeline
    scope = {}
    with op_by_op():
        exec(code, scope)
    return scope["image"], sage_inductor.report().verdict


def test_the_snippet_of_the_page(pair):
    page = (Path(__file__).parents[2] / "docs" / "guide" / "multi-gpu.md").read_text()
    _, _, code = page.partition("`flux.py`:\n\n```python\n")
    code = code[: code.index("```")]
    _, exact = alone(flux)
    for image, told in pair(run_snippet, (code,), (code,)):
        assert 1e-5 < relative_l2(image, exact[0]) < 0.1
        assert told == "2 of 2 attention calls use sage2-8b-rotated"


def test_training_by_exchanged_heads_is_sdpas(pair):
    found, expected = (
        pair(gradients, *[("Flux", backend)] * 2, **ULYSSES)
        for backend in ("sage_inductor", "native")
    )
    for x, y in zip(found, expected):
        assert x.abs().max() > 0 and torch.equal(x, y)


def test_a_ring_is_not_trained(pair):
    for found in pair(gradients, *[("Wan", "sage_inductor")] * 2, **RING):
        assert found.kind == "RuntimeError" and "has no gradient" in found.text


def test_a_ring_is_not_computed_where_the_recipe_is_off(pair):
    for found in pair(eager, *[("Wan", "off")] * 2, **RING):
        assert found.kind == "SageOptionError" and "got 'off'" in found.text


@pytest.mark.parametrize(
    "degrees, given",
    [
        ((2, 1), {"attn_mask": torch.ones(8, 8, dtype=torch.bool)}),
        ((2, 1), {"is_causal": True}),
        ((2, 1), {"dropout_p": 0.5}),
        ((1, 2), {"enable_gqa": True}),
        ((1, 2), {"dropout_p": 0.5}),
        ((1, 2), {"return_lse": True}),
    ],
    ids=str,
)
def test_what_context_parallelism_does_not_compute_is_refused(degrees, given):
    ring, ulysses = degrees
    parallel = SimpleNamespace(ring_degree=ring, ulysses_degree=ulysses)
    asked = SimpleNamespace(context_parallel_config=parallel)
    (name,) = given
    with pytest.raises(ValueError, match=f"context parallelism does not support {name}"):
        sage_attention(*[torch.randn(1, 8, 2, 64)] * 3, **given, _parallel_config=asked)


# -- transformers ----


def decoder(kind: str):
    sizes = dict(hidden_size=128, num_hidden_layers=2, head_dim=32)
    return models.decoder(transformers, kind, **sizes), tokens()


def padded(kind: str):
    """On the left: a mask."""
    mask = torch.ones(2, 96, dtype=torch.long)
    mask[1, :10] = 0
    model, inputs = decoder(kind)
    return model, {**inputs, "attention_mask": mask}


def tokens() -> dict:
    ids = torch.randint(1, 64, (2, 96))
    return {"input_ids": ids, "use_cache": False, "return_dict": False}


def by_heads(model) -> dict:
    """The plan of a decoder's layer."""
    colwise = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    plan = {f"self_attn.{name}": how for name, how in colwise.items()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    return plan | {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}


def tensor_parallel(model, mesh) -> None:
    for layer in model.model.layers:
        parallelize_module(layer, mesh, by_heads(model))


def sequence_parallel(model, mesh) -> None:
    """Between its products of heads a layer has some of the rows."""
    rows, all_rows = Shard(1), Replicate()
    gathered = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": rows},
        desired_input_kwarg_layouts={"hidden_states": all_rows},
    )
    for layer in model.model.layers:
        parallelize_module(layer, mesh, by_heads(model) | {
            "input_layernorm": SequenceParallel(),
            "self_attn": gathered,
            "self_attn.o_proj": RowwiseParallel(output_layouts=rows),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=rows, desired_input_layouts=all_rows),
            "mlp.down_proj": RowwiseParallel(output_layouts=rows),
        })  # fmt: skip
    parallelize_module(model, mesh, {
        "model.layers.0": PrepareModuleInput(
            input_layouts=all_rows, desired_input_layouts=rows, use_local_output=True
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=all_rows),
    })  # fmt: skip


def fsdp(model, mesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def spread(group, name: str, how: str, by_inductor: bool):
    """The output of a compiled model, and what the report says of each call."""
    torch._dynamo.reset()
    model, inputs = made(DECODERS[name])
    globals()[how](model, DeviceMesh.from_group(group, "cpu"))
    model = torch.compile(model, backend="sage", options=OPTIONS, fullgraph=how != "fsdp")
    with op_by_op(not by_inductor, split=True):  # of local tensors
        return run(model, inputs), sage_inductor.report().to_dicts()


DECODERS = {
    "Llama": functools.partial(decoder, "Llama"), "Qwen": functools.partial(padded, "Qwen2")
}  # fmt: skip


@functools.cache
def compiled_alone(make):
    """What one process computes, compiled, and exactly."""
    model, inputs = made(make)
    torch._dynamo.reset()
    with op_by_op():
        found = run(torch.compile(model, backend="sage", options=OPTIONS), inputs)
    return found, run(model, inputs)


@pytest.mark.parametrize(
    "name, how",
    [
        swept("Llama", "tensor_parallel"),
        swept("Llama", "tensor_parallel by Inductor"),
        swept("Llama", "sequence_parallel"),
        swept("Qwen", "sequence_parallel"),
        swept("Qwen", "fsdp"),
    ],
)  # lowering/test_compile.py has FSDP2, test_parallel.py tensor parallelism
def test_decoders_over_two_processes(pair, name, how):
    how, _, by_inductor = how.partition(" by ")
    for told in pair(spread, *[(name, how, bool(by_inductor))] * 2):
        assert isinstance(told, tuple), told
        found, calls = told
        check(found, *compiled_alone(DECODERS[name]))
        # FSDP2's hooks break the graph, and one graph serves both layers.
        count, heads = (1, 4) if how == "fsdp" else (2, 2)
        assert [(call["recipe"], call["q"]) for call in calls] == [
            (RECIPE, [2, heads, 96, 32])
        ] * count


if __name__ == "__main__":
    serve(globals())
