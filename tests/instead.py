"""What stands in the place of Inductor's code and of a second process, where neither is the point."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterator
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx

import sage_inductor


@contextlib.contextmanager
def op_by_op(partitioned: bool = False) -> Iterator[None]:
    """What Inductor is given, by its own backend or ours, runs op by op: functions are captured and
    rewritten as ever. partitioned: AOTAutograd and Inductor split it into a forward and a backward.
    No code is generated, and nothing comes from a cache."""
    compile_graph = compile_fx.compile_fx

    def run(gm, example_inputs, **_):
        def call(inputs):  # and empties the list, as what is compiled does
            given = list(inputs)
            inputs.clear()
            return gm(*given)

        call._boxed_call = True
        return call

    def compile_without_code(gm, example_inputs, **given):
        if not partitioned:
            return gm.forward
        return compile_graph(gm, example_inputs, **{**given, "inner_compile": run})

    uncached = functorch_config.patch(enable_autograd_cache=False)
    with uncached, mock.patch.object(compile_fx, "compile_fx", compile_without_code):
        yield


class InThisProcess:
    """subprocess, of which a Python script runs in this process: that takes no seconds to import
    torch. With a process's arguments, environment, output and exit status, and with Dynamo's caches
    empty; not with modules of its own."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def run(self, command, env, text, check=False, **_) -> subprocess.CompletedProcess:
        python, script, *arguments = command
        assert python == sys.executable and text
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        torch._dynamo.reset()
        counters.clear()
        with (
            mock.patch.dict(os.environ, env, clear=True),
            mock.patch.object(sys, "argv", [script, *arguments]),
            sage_inductor.config.patch(rewrite_inductor=sage_inductor.config.rewrite_inductor),
            torch.set_grad_enabled(True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                runpy.run_path(script, run_name="__main__")
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
                print(end.code, file=sys.stderr)
            except Exception:
                traceback.print_exc()
                code = 1
        said = (each.buffer.getvalue().decode() for each in (out, err))
        done = subprocess.CompletedProcess(command, code, *said)
        if check:
            done.check_returncode()
        return done
