"""Models whose weights are quantized: attention gets q, k and v in 16 bits, and is rewritten as ever.

A small Flux of random weights. Packages that nothing else needs: `make weights`. On CPU recipes are
emulated, on a GPU they are forced.
"""

import functools
import re
from types import SimpleNamespace

import models
import pytest
import torch
from models import library
from support import op_by_op, swept

import sage_inductor
from sage_inductor import config
from sage_inductor.policy import Rule

pytestmark = pytest.mark.models
pytest.importorskip("diffusers")
PATHS = {"transformer_blocks.0.attn", "single_transformer_blocks.0.attn"}


# -- who quantizes ----


def torchao(name: str, model, **given) -> None:
    quantization = library("torchao.quantization")
    given = {key: getattr(quantization, of)() for key, of in given.items()}
    # Not torchao's settings of Inductor, which would be those of later tests, too.
    quantization.quantize_(model, getattr(quantization, name)(set_inductor_config=False, **given))


def replaced(model, make) -> None:
    """By `make`, each linear whose rows are of whole blocks of 32."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, torch.nn.Linear) and child.in_features % 32 == 0:
                setattr(module, name, make(child))


def nf4(model) -> None:
    nn = library("bitsandbytes").nn

    def make(linear):
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        found = nn.Linear4bit(*sizes, compute_dtype=torch.bfloat16, quant_type="nf4")
        found.weight = nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        found.bias = linear.bias
        return found.to(linear.weight.device)

    replaced(model, make)


def int8(model) -> None:
    nn = library("bitsandbytes").nn

    def make(linear):
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        found = nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        found.weight = nn.Int8Params(linear.weight.data, requires_grad=False)
        found.bias = linear.bias
        return found.to(linear.weight.device)

    replaced(model, make)


def gguf(model) -> None:
    """Q8_0, as files of 8 bits have."""
    lib = library("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = lib.GGMLQuantizationType.Q8_0

    def make(linear):
        codes = torch.from_numpy(lib.quants.quantize(linear.weight.float().cpu().numpy(), kind))
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        found = GGUFLinear(*sizes, compute_dtype=torch.bfloat16)
        found.weight = GGUFParameter(codes.to(linear.weight.device), quant_type=kind)
        found.bias = linear.bias
        return found

    replaced(model, make)


def cast(model) -> None:
    """Weights lie in FP8, and are cast before each use."""
    model.enable_layerwise_casting(torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


ON_CPU = {
    "torchao int8": functools.partial(torchao, "Int8WeightOnlyConfig"),
    "torchao int8 dynamic": functools.partial(torchao, "Int8DynamicActivationInt8WeightConfig"),
    "torchao fp8": functools.partial(torchao, "Float8WeightOnlyConfig"),
    "bitsandbytes nf4": nf4,
    "bitsandbytes int8": int8,
    "gguf": gguf,
}
weights = pytest.mark.weights


# -- what is computed ----


def small(quantize, device="cpu") -> SimpleNamespace:
    """The model, its inputs, and what it gives in eager, before and after `quantize`."""
    model, inputs = models.flux()
    model = model.eval().to(device, torch.bfloat16)
    kinds = {name: torch.bfloat16 if x.is_floating_point() else None for name, x in inputs.items()}
    inputs = {name: x.to(device, kinds[name]) for name, x in inputs.items()}
    before = model(**inputs)[0]
    quantize(model)
    return SimpleNamespace(model=model, inputs=inputs, before=before, eager=model(**inputs)[0])


def relative_l1(out, exact) -> float:
    return ((out.float() - exact.float()).abs().sum() / exact.float().abs().sum()).item()


def check(of: SimpleNamespace, run, right, paths=PATHS) -> None:
    found = run(**of.inputs)[0]
    assert relative_l1(of.eager, of.before) > 1e-3  # weights are other numbers
    assert 0 < relative_l1(found, right) < 5e-3
    sites = sage_inductor.report()
    assert len(sites) == len(sites.rewritten) == 2, str(sites)
    assert {site.module for site in sites} == paths


@pytest.fixture(autouse=True)
def emulated():
    with config.patch(emulate=True), torch.no_grad():
        yield


@weights
@pytest.mark.parametrize("kind", ON_CPU)
def test_attention_between_quantized_linears_is_rewritten_in_one_graph(kind):
    of = small(ON_CPU[kind])
    with op_by_op():
        check(of, torch.compile(of.model, backend="sage", fullgraph=True), of.eager)


@weights
@pytest.mark.parametrize("kind", [swept(kind) for kind in ON_CPU])
def test_a_model_with_quantized_linears_is_as_near_inductors(kind):
    of = small(ON_CPU[kind])
    right = torch.compile(of.model, fullgraph=True)(**of.inputs)[0]
    check(of, torch.compile(of.model, backend="sage", fullgraph=True), right)


@weights
def test_quantized_linears_are_diagnosed():
    of = small(ON_CPU["torchao fp8"])
    found = sage_inductor.diagnose(of.model, recipes="sage2-8b")(**of.inputs)
    assert {row.site.module for row in found.rows} == PATHS
    assert all(0 < row.relative_l1 < 0.1 for row in found.rows)


def test_attention_under_layerwise_casting_is_rewritten():
    """Dynamo breaks the graph at each hook, and does not know in which module it resumes. All layers
    share what it compiles there. A policy that names modules is told of it."""
    of = small(cast)
    assert of.model.transformer_blocks[0].attn.to_q.weight.dtype == torch.float8_e4m3fn
    policy = [Rule("off", module="*.attn")]
    of.model.compile_repeated_blocks(backend="sage", options={"sage.policy": policy})
    with op_by_op():
        check(of, of.model, of.eager, paths={""})
    assert re.search(
        r"\nno call of graph \d+/\d+, .* has a module's path: ", str(sage_inductor.report())
    )


@pytest.mark.gpu
@weights
def test_attention_between_linears_that_multiply_in_fp8_is_rewritten():
    """Activations are quantized as they come: sm_89 or newer. By rows: torchao 0.18 takes a weight of
    128 x 128 with one scale for a block of 128 x 128."""
    name = "Float8DynamicActivationFloat8WeightConfig"
    quantize = functools.partial(torchao, name, granularity="PerRow")
    with config.patch(emulate=False, force=True):
        of = small(quantize, "cuda")
        right = torch.compile(of.model, fullgraph=True)(**of.inputs)[0]
        run = torch.compile(of.model, backend="sage", fullgraph=True)
        assert relative_l1(run(**of.inputs)[0], right) < 0.02
        assert {site.module for site in sage_inductor.report().rewritten} == PATHS
