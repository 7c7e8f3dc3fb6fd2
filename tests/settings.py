"""What holds in every process of the tests, imported for its effects."""

import functools
import gc
import logging
import os

import torch
import torch._inductor.config as inductor
import triton.language as tl
from torch._dynamo import guards
from torch._inductor import graph
from torch._inductor.virtualized import V
from triton.runtime import interpreter

# What a GPU does not know yet stays SDPA: a test asks for seconds of measuring where it means to.
os.environ.setdefault("SAGE_INDUCTOR_CALIBRATE", "0")

# Inductor's C++ is compiled, not timed: without vectors it takes two thirds of the time.
inductor.cpp.simdlen = 1

# Nor is it compiled unless a test asks for it (`generated`): Inductor calls each of aten's ops. It
# compiles our own lowerings, C++ wrappers and packages as for users, and everything on a GPU.
if hasattr(inductor, "fallback_by_default") and not torch.cuda.is_available():
    falls_back = graph.should_fallback_by_default
    graph.should_fallback_by_default = lambda node: (
        falls_back(node)
        and node.target.namespace in ("aten", "prims")
        and not (V.graph.cpp_wrapper or V.aot_compilation)
    )
    inductor.fallback_by_default = True

# Dynamo makes many objects and few cycles: collected this often they take 2 % of a test, not 9 %.
gc.set_threshold(50_000, 20, 100)
# After each compilation it collects once more, and times its guards for a log, for which it writes
# 32 MB to empty the cache: most of what compiling a small function takes.
torch._dynamo.config.run_gc_after_compile = False
if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = lambda *_: 0.0

# pytest gives its handlers to every logger that does not pass records on. With one, torch writes each
# graph, its guards and its code out for this log, which otherwise nobody reads.
if "TORCH_TRACE" not in os.environ:
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.addHandler = lambda handler: None


# For each function that a kernel calls Triton's interpreter looks at all of tl again, for what it must
# replace; for each tensor it makes a table of types. Both took two fifths of the time.
if os.environ.get("TRITON_INTERPRET") == "1":
    replace, launch, np_dtype = (
        interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    )  # fmt: skip
    replaced, np_dtypes = set(), {}

    @functools.cache
    def languages(function) -> set:
        return {x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core}

    def replace_once(function):
        if languages(function) <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(languages(function))
        return replace(function)

    def launch_anew(self, *args, **kwargs):
        replaced.clear()
        return launch(self, *args, **kwargs)

    def np_dtype_of(x):
        if x.name not in np_dtypes:
            np_dtypes[x.name] = np_dtype(x)
        return np_dtypes[x.name]

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, np_dtype_of
    interpreter.GridExecutor.__call__ = launch_anew
