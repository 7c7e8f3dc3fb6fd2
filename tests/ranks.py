"""Processes that run functions of a test's file together, on CPU with gloo."""

import io
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

TIMEOUT = 20  # seconds, of a collective
TO_BEGIN = 120  # seconds, in which the others have imported what they need


class Ranks:
    """Processes that run functions of a file, each with the same group of the first P ranks. The
    file ends with `serve(globals())`, where it is run as a program."""

    def __init__(self, count: int, file: str, folder: Path):
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, file, str(count), str(folder / "store")]
        self.processes = [
            subprocess.Popen([*command, str(rank)], stdin=-1, stdout=-1, env=environment)
            for rank in range(count)
        ]

    def __call__(self, function, *of_ranks, **given) -> list:
        """What function(group, *of_ranks[rank], **given) returns, or its error, on each rank."""
        asked = self.processes[: len(of_ranks)]
        for process, each in zip(asked, of_ranks):
            send(process.stdin, (function.__name__, len(asked), each, given))
        return [receive(process.stdout) for process in asked]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def send(file, message) -> None:
    buffer = io.BytesIO()  # torch.save: pickle alone has no FP8
    torch.save(message, buffer)
    pickle.dump(buffer.getvalue(), file)
    file.flush()


def receive(file):
    return torch.load(io.BytesIO(pickle.load(file)), weights_only=False)


def serve(functions: dict) -> None:
    """The loop of one of the processes. functions: by their names."""
    count, store, rank = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # conftest.poisoned
    torch.utils.deterministic.fill_uninitialized_memory = True
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(count),
        timeout=timedelta(seconds=TO_BEGIN),
    )  # fmt: skip
    groups = [dist.new_group(range(P), timeout=timeout) for P in range(1, int(count) + 1)]
    while True:
        name, P, args, given = receive(sys.stdin.buffer)
        try:
            found = functions[name](groups[P - 1], *args, **given)
        except Exception as error:
            found = SimpleNamespace(kind=type(error).__name__, text=str(error))
        send(replies, found)
