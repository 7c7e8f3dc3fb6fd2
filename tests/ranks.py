"""Processes that run functions of a test's file together, on CPU with gloo."""

import ast
import contextlib
import io
import os
import pickle
import select
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import settings  # noqa: F401
import torch
import torch.distributed as dist

# Seconds, after which something hangs. Compiled models take up to 20 here, and longer on a machine
# that is busy.
TIMEOUT = 300  # of a collective
TO_BEGIN = 300
TO_ANSWER = 900


class Ranks:
    """Processes that run functions of a file, each with the same group of the first P ranks. The
    file ends with `serve(globals())`, where it is run as a program: one process imports what they
    need, and they are its forks. apart: so many more are the ranks, from 0 on, of another world."""

    def __init__(self, count: int, file: str, folder: Path, apart: int = 0):
        tests = Path(__file__).parent
        path = os.pathsep.join(map(str, [tests, tests.parent, os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        asked, replies = ([os.pipe() for _ in range(count + apart)] for _ in range(2))
        theirs = [(a[0], b[1]) for a, b in zip(asked, replies)]
        self.of_ranks = [
            (os.fdopen(a[1], "wb"), os.fdopen(b[0], "rb")) for a, b in zip(asked, replies)
        ]
        self.process = subprocess.Popen(
            [sys.executable, file, str(folder / "store"), repr(theirs), str(count)],
            stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            pass_fds=[file for pair in theirs for file in pair],
        )  # fmt: skip
        for pair in theirs:
            for file in pair:
                os.close(file)

    def __call__(self, function, *of_ranks, **given) -> list:
        """What function(group, *of_ranks[rank], **given) returns, or its error, on each rank."""
        for rank, each in enumerate(of_ranks):
            self.send(rank, (function.__name__, len(of_ranks), each, given))
        return [self.receive(rank) for rank in range(len(of_ranks))]

    def send(self, rank: int, message) -> None:
        _send(self.of_ranks[rank][0], message)

    def receive(self, rank: int):
        """Raises TimeoutError where it hangs, as it may where ranks disagree, and ends all."""
        file = self.of_ranks[rank][1]
        if not select.select([file], [], [], TO_ANSWER)[0]:
            self.stop()
            raise TimeoutError(f"rank {rank} said nothing for {TO_ANSWER} s")
        return _receive(file)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it was stopped before
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()
        for pair in self.of_ranks:
            for file in pair:
                with contextlib.suppress(BrokenPipeError):
                    file.close()


def _send(file, message) -> None:
    buffer = io.BytesIO()  # torch.save: pickle alone has no FP8
    torch.save(message, buffer)
    pickle.dump(buffer.getvalue(), file)
    file.flush()


def _receive(file):
    return torch.load(io.BytesIO(pickle.load(file)), weights_only=False)


def serve(functions: dict) -> None:
    """Fork a process for each rank, and wait for their ends. functions: by their names."""
    store, theirs, count = sys.argv[1], ast.literal_eval(sys.argv[2]), int(sys.argv[3])
    os.dup2(2, 1)  # what is printed
    # What the first compilation of a process imports and looks up, all of them have from here.
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    torch._dynamo.reset()
    children = []
    worlds = [(store, rank, count) for rank in range(count)]
    worlds += [(f"{store} apart", rank, len(theirs) - count) for rank in range(len(theirs) - count)]
    for world, pair in zip(worlds, theirs):
        child = os.fork()
        if not child:
            for file in {file for each in theirs for file in each} - {*pair}:
                os.close(file)
            _run(functions, *world, *(os.fdopen(x, y) for x, y in zip(pair, ("rb", "wb"))))
        children.append(child)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the group: ranks end by it
    for pair in theirs:
        for file in pair:
            os.close(file)
    for child in children:
        os.waitpid(child, 0)


def _run(functions: dict, store: str, rank: int, count: int, requests, replies) -> None:
    """The loop of one of the processes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # conftest.poisoned
    torch.utils.deterministic.fill_uninitialized_memory = True
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count,
        timeout=timedelta(seconds=TO_BEGIN),
    )  # fmt: skip
    groups = [dist.new_group(range(P), timeout=timeout) for P in range(1, count + 1)]
    while True:
        name, P, args, given = _receive(requests)
        try:
            found = functions[name](groups[P - 1], *args, **given)
        except Exception as error:
            found = SimpleNamespace(kind=type(error).__name__, text=str(error))
        _send(replies, found)
