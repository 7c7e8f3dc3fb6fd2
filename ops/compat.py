"""Private and experimental names of torch and Triton. Each is taken here and nowhere else.

A row says where a name is (the first place that exists is taken), in which versions it was seen,
and what happens without it. A name is looked up when it is first asked for: `import sage_inductor`
loads neither torch's compiler nor DTensor. Without ``optional`` a name is needed: an ImportError
quotes the row. An optional one is None where it is missing, and who uses it says what is lost.
tests/ops/test_compat.py walks the rows on the torch that is there.
"""

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

try:
    import triton
except ImportError as error:
    raise ImportError(
        "sage_inductor needs Triton 3.6 or newer, which torch installs on Linux alone "
        f"(pip install 'triton>=3.6'): {error}"
    ) from error


class Private(NamedTuple):
    """One name of another library that its authors may move."""

    places: tuple[str, ...]  # "module" or "module:attribute.attribute"
    seen: str  # the versions of torch or Triton in which a test or a run used it
    without: str
    optional: bool

    def value(self):
        found = next((x for place in self.places if (x := _find(place)) is not None), None)
        if found is None and not self.optional:
            raise ImportError(
                f"sage_inductor: this torch ({torch.__version__}) has none of "
                f"{', '.join(self.places)} (seen in {self.seen}). Without it {self.without}"
            )
        return found


def _take(*places: str, without: str, seen: str = "", optional: bool = False) -> Any:
    """A row, in the place of what `__getattr__` finds by it."""
    seen = seen or (TRITON if places[0].startswith("triton") else TORCH)
    return Private(places, seen, without, optional)


# Rows of one fate.
_of_ranks = functools.partial(_take, seen="torch 2.11 and 2.13", optional=True)
_of_gluon = functools.partial(_take, without="as gluon", optional=True)
_of_replay = functools.partial(_take, without="as handles_of", optional=True)


def _find(place: str):
    module, _, path = place.partition(":")
    try:
        found = importlib.import_module(module)
        for name in filter(None, path.split(".")):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found


TORCH = "torch 2.11 to 2.15"
TRITON = "Triton 3.6 to 3.9"
GLUON = (3, 6), (3, 9)  # the oldest and newest Triton whose Gluon the Hopper kernels compile with
GLUON_VERSIONS = "{}.{} to {}.{}".format(*GLUON[0], *GLUON[1])
# torch -> the Triton it comes with, of the pairs in which the suite ran.
TESTED = {"2.11": "3.6", "2.13": "3.7", "2.15": "3.9"}


def untested(
    torch_version: str = torch.__version__, triton_version: str = triton.__version__
) -> str:
    """What to say of this torch with this Triton; nothing if the suite ran with both."""
    here = [".".join(version.split(".")[:2]) for version in (torch_version, triton_version)]
    if TESTED.get(here[0]) == here[1]:
        return ""
    pairs = ", ".join(f"{ours} with {theirs}" for ours, theirs in TESTED.items())
    return f"untested: torch {here[0]} with Triton {here[1]} (tested: {pairs})"


# fmt: off

# -- torch: compiling ----

InductorWrapper = _take("torch:_TorchCompileInductorWrapper",
    without="the backend cannot hand a graph and its options to Inductor")
ShortenTraceback = _take("torch._dynamo.exc:ShortenTraceback",
    without="Dynamo wraps errors of options, which should reach the user as they are")
CompileContext = _take("torch._guards:CompileContext",
    without="a report cannot say which graph a call is in")
TracingContext = _take("torch._guards:TracingContext",
    without="a policy with stages cannot be had: see tracing")
tracing = _take("torch._guards:tracing",
    without="backwards of a graph's stages mistake each other's tensors for their own")
cached_backends = _take("torch._dynamo.eval_frame:cached_backends",
    without="torch._dynamo.reset() does not empty the report")
counters = _take("torch._dynamo.utils:counters",
    without="rewritten and refused calls are not among Dynamo's counters")
graph_break_reasons = _take("torch._dynamo.utils:graph_break_reasons", optional=True,
    without="the report does not name attention that a graph break leaves to eager")
inductor_config = _take("torch._inductor:config",
    without='the pass for backend="inductor" cannot be installed')
CustomGraphPass = _take("torch._inductor.custom_graph_pass:CustomGraphPass",
    without='graphs of backend="inductor" with our pass are not cached')
virtualized = _take("torch._inductor.virtualized:V",
    without="the pass cannot tell that AOTInductor compiles a package")
default_store = _take("torch.distributed.distributed_c10d:_get_default_store", optional=True,
    without="each rank times recipes for itself, and ranks may choose different ones")
process_group = _of_ranks("torch.distributed.distributed_c10d:_resolve_process_group",
    without="sage::gather_sdpa cannot find its process group by name")
all_gather_single = _of_ranks(
    "torch.distributed:all_gather_single", "torch.distributed:all_gather_into_tensor",
    without="as process_group")
all_to_all_single = _of_ranks("torch.distributed:all_to_all_single", without="as process_group")
symmetric_empty = _of_ranks("torch.distributed._symmetric_memory:empty",
    without="GPUs exchange rows by collectives, which short calls take longer for")
symmetric_rendezvous = _of_ranks("torch.distributed._symmetric_memory:rendezvous",
    without="as symmetric_empty")
symmetric_backend = _take("torch.distributed._symmetric_memory:get_backend",
    seen="torch 2.13", optional=True,
    without="rows are written by NVSHMEM, if it was chosen, whose barrier is empty")
foreach_copy = _of_ranks("torch:_foreach_copy_", without="as symmetric_empty")
assert_async = _of_ranks("torch:_assert_async",
    without='gather_attention takes lengths="ask" only: ranks could not be told of a mistake')
register_effectful_op = _of_ranks("torch._higher_order_ops.effects:_register_effectful_op",
    without="Inductor may exchange two calls of sage::gather_sdpa on one rank alone")
EffectType = _of_ranks("torch._higher_order_ops.effects:_EffectType",
    without="as register_effectful_op")
register_sharding = _of_ranks("torch.distributed.tensor.experimental:register_sharding",
    without="torch.ops.sage takes no DTensors")
sharding_schemas = _take(
    "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.op_to_schema_info",
    seen="torch 2.13", optional=True,
    without="a call on DTensors gets the sharding of one before with another is_causal or out_bnhd")

is_any_autocast_enabled = _take("torch:_C._is_any_autocast_enabled",
    without="each eager call asks for the autocast of its device")

# -- torch: graphs ----

statically_known_true = _take("torch.fx.experimental.symbolic_shapes:statically_known_true",
    without="sizes cannot be compared without a guard")
enable_python_dispatcher = _take("torch._dispatch.python:enable_python_dispatcher",
    without="F.pad on a fake tensor specialises dynamic sizes")
unset_fake_temporarily = _take("torch._subclasses.fake_tensor:unset_fake_temporarily",
    without="constants cannot be evaluated while Dynamo traces")
functorch = _take("torch._C:_functorch",
    without="tensors inside torch.func transforms cannot be told from others")
encoder_layer = _take("torch:_transformer_encoder_layer_fwd",
    without="nn.TransformerEncoderLayer's fast path is not recognised")
InstructionTranslator = _take("torch._dynamo.symbolic_convert:InstructionTranslator", optional=True,
    without="the path of a module that an object holds (pipe.transformer) starts at the object")
FakeTensorMode = _take("torch._subclasses.fake_tensor:FakeTensorMode",
    without="sage_inductor.attention cannot decide what becomes of a call")
FakeTensor = _take("torch._subclasses.fake_tensor:FakeTensor", without="no tensor is a plain one")
detect_fake_mode = _take("torch._guards:detect_fake_mode",
    without="sage_inductor.attention cannot be traced with dynamic shapes")
disable_modes = _take("torch.utils._python_dispatch:_disable_current_modes",
    without="what sage_inductor.attention looks at ends up in the graph being traced")
proxy_mode = _take("torch.fx.experimental.proxy_tensor:get_proxy_mode",
    without="sage_inductor.attention decides while Dynamo only asks for shapes")
FunctionalTensor = _take("torch._subclasses.functional_tensor:FunctionalTensor",
    without="sage_inductor.attention stays SDPA under other backends")
OpOverload = _take("torch._ops:OpOverload", without="an aten op is not recognised")
OpOverloadPacket = _take("torch._ops:OpOverloadPacket", without="as OpOverload")
HigherOrderOperator = _take("torch._ops:HigherOrderOperator",
    without="flex_attention is not recognised")
kernel_side_table = _take("torch._higher_order_ops.triton_kernel_wrap:kernel_side_table",
    without="SLA's kernel is not recognised")

# -- torch: ops ----

register_lowering = _take("torch._inductor.lowering:register_lowering",
    without="as add_layout_constraint")
add_layout_constraint = _take("torch._inductor.lowering:add_layout_constraint",
    without="packages cannot hold kernels, and Inductor writes a RoPE's k twice")
constrain_to_fake_tensors = _take("torch._inductor.lowering:constrain_to_fake_tensors",
    without="as add_layout_constraint")
FallbackKernel = _take("torch._inductor.ir:FallbackKernel", without="as add_layout_constraint")
TensorBox = _take("torch._inductor.ir:TensorBox", without="as add_layout_constraint")
handles_of = _take("torch._C:_aoti.unsafe_alloc_void_ptrs_from_tensors", optional=True,
    without="calls in compiled models are submitted by Python, five times as slowly")
tensors_of = _of_replay("torch._C:_aoti.alloc_tensors_by_stealing_from_void_ptrs")
c_functions = _of_replay("torch:_C.__file__")
FunctionalTensorMode = _take("torch._subclasses.functional_tensor:FunctionalTensorMode",
    without="sage::sdpa does not open, and its kernels compile where they are first launched")
disable_compiled_autograd = _take("torch._dynamo.compiled_autograd:_disable",
    without="what a GPU is measured by would be compiled, by the thread that waits")
exporting = _take("torch.export._trace:custom_triton_ops_decomposition_disabled",
    without="torch.export opens sage::sdpa, and a program holds kernels instead of the op")
AsyncCompile = _take("torch._inductor.async_compile:AsyncCompile", optional=True,
    without="kernels compile where they are first launched, one after the other")
fused_sdp_choice = _take("torch:_fused_sdp_choice",
    optional=True, without="doctor does not name the backend that SDPA runs")
DispatchKey = _take("torch._C:DispatchKey", without="autocast has no rule for our ops")
DispatchKeySet = _take("torch._C:DispatchKeySet", without="as DispatchKey")
ExcludeDispatchKeyGuard = _take("torch._C:_ExcludeDispatchKeyGuard", without="as DispatchKey")

# -- Triton ----

TensorDescriptor = _take("triton.tools.tensor_descriptor:TensorDescriptor",
    without="the portable kernel cannot be launched with TMA")
gdc_wait = _take("triton.language.extra.cuda.gdc:gdc_wait", optional=True,
    without="kernels of the preparation do not overlap (programmatic dependent launch)")
gdc_launch_dependents = _take("triton.language.extra.cuda.gdc:gdc_launch_dependents",
    without="as gdc_wait", optional=True)
gluon = _take("triton.experimental.gluon",
    without="the Hopper kernel is lost: calls run in the portable one", optional=True)
gluon_barrier = _of_gluon(
    "triton.experimental.gluon.language:barrier",
    "triton.experimental.gluon.language:thread_barrier")
tma_load = _of_gluon(
    "triton.experimental.gluon.language.nvidia.hopper:tma.async_load",
    "triton.experimental.gluon.language.nvidia.hopper:tma.async_copy_global_to_shared")
reinterpret = _of_gluon(
    "triton.experimental.gluon.language:shared_memory_descriptor.reinterpret",
    "triton.experimental.gluon.language:shared_memory_descriptor._reinterpret")
aggregate = _of_gluon("triton.language.core:_aggregate")
GluonDescriptor = _of_gluon("triton.experimental.gluon.nvidia.hopper:TensorDescriptor")
GluonJITFunction = _of_gluon("triton.experimental.gluon._runtime:GluonJITFunction",
    without="as gluon, in packages")
GluonASTSource = _of_gluon("triton.experimental.gluon._runtime:GluonASTSource",
    without="as gluon, in packages")
ASTSource = _take("triton.compiler:ASTSource",
    without="packages cannot hold kernels", optional=True)
GPUTarget = _take("triton.backends.compiler:GPUTarget", without="as ASTSource", optional=True)
ptxas_version = _take("triton.backends.nvidia.compiler:get_ptxas_version",
    without="as AsyncCompile", optional=True)
triton_build = _of_replay("triton.runtime.build:_build")
cache_manager = _of_replay("triton.runtime.cache:get_cache_manager")
load_module = _of_replay("triton.runtime.build:_load_module_from_path")
cuda_library_dirs = _of_replay("triton.backends.nvidia.driver:library_dirs")

# fmt: on

TABLE = {name: row for name, row in globals().items() if isinstance(row, Private)}
for _name in TABLE:
    del globals()[_name]


def __getattr__(name: str):
    if name not in TABLE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, TABLE[name].value())


def after_import(theirs: str, ours: str) -> None:
    """Import our module, which tells theirs of our ops, once somebody imports theirs. We do not:
    it takes seconds, and few programs need it."""
    if theirs in sys.modules:
        importlib.import_module(ours)
        return

    def find_spec(name: str, path=None, target=None):
        if name != theirs:
            return None
        sys.meta_path.remove(finder)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_both(module):
            load(module)
            importlib.import_module(ours)

        spec.loader.exec_module = load_both
        return spec

    finder: Any = types.SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)


def folds_constants() -> bool:
    """Whether Inductor, if it is there, computes what it can of constants while compiling."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and config.freezing


@contextlib.contextmanager
def called_instead(module: torch.nn.Module, call: Callable | None) -> Iterator[Callable]:
    """Calls of the module are calls of `call` in the block (None: of what the module itself is,
    also if it was compiled). Gives what the module itself is."""
    before = module._compiled_call_impl  # by Module.compile
    module._compiled_call_impl = call
    try:
        yield module._call_impl
    finally:
        del module._compiled_call_impl
        if before is not None:
            module._compiled_call_impl = before


def keep_out_of_precompile(gm: torch.fx.GraphModule) -> None:
    """Graphs that torch._dynamo.config.caching_precompile keeps on disk are found again by the
    user's source alone: with another policy, or in another stage, they would be taken too."""
    vars(gm).pop("_backend_id", None)


def forget_regions(context) -> None:
    """What AOTAutograd keeps by the names of nested_compile_region is not that of the context that
    this one is a copy of."""
    context.hop_dispatch_set_cache = type(context.hop_dispatch_set_cache)()
