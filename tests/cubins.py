"""What compiled kernels hold: instructions, loops, spilled registers. By CUDA's tools, as Triton
brings them."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas


def about(cubin: bytes, tool: str, *options) -> str:
    """What a tool of CUDA's, as Triton brings it, prints about the cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [tool, *options, file.name], capture_output=True, text=True, check=True
        )
    return run.stdout


def assembly_log(ptx: str) -> str:
    """What ptxas says of the kernel when asked (-v). Triton throws it away."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        run = subprocess.run(
            [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".o")],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    return run.stderr


def stack_bytes(cubin: bytes) -> int:
    """What ptxas spilled, from the resource report."""
    return int(re.search(r"STACK:(\d+)", about(cubin, "cuobjdump", "-res-usage")).group(1))


def loops_over_keys(cubin: bytes) -> list[list[str]]:
    """The instructions of each innermost loop with matrix products."""
    return [[text for text, _ in loop] for loop in _loops_over_keys(cubin)]


def held_up(cubin: bytes) -> list[str]:
    """In loops over keys, what waits for a barrier that it does not need: its own scoreboard, one
    of six, is that of a wait that was begun before and is asked for only later."""
    found = []
    for loop in _loops_over_keys(cubin):
        for i, (text, word) in enumerate(loop):
            if there := re.search(r"PHASECHK\S* (P\d)", text):
                scoreboard = word >> 46 & 7
                waits = next(x for x in loop[i + 1 :] if x[1] >> 52 & 1 << scoreboard)[0]
                found += [waits] * (not waits.startswith(f"@!{there.group(1)} BRA"))
    return found


def _loops_over_keys(cubin: bytes) -> list[list[tuple[str, int]]]:
    """Instructions and the upper halves of their encodings: bits 46 to 48 say which scoreboard is
    set, bits 52 to 57 for which it waits first."""
    instructions, labels, found = [], {}, []
    for line in about(cubin, "nvdisasm", "-c", "-hex").splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append([instruction.group(1), 0])
            jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if jump and jump.group(1) in labels:  # backwards
                found.append((labels[jump.group(1)], len(instructions)))
        elif word := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/", line):
            instructions[-1][1] = int(word.group(1), 16)
    inner = [
        (a, b)
        for a, b in found
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)
        and any("GMMA" in x for x, _ in instructions[a:b])
    ]
    return [[(text, word) for text, word in instructions[a:b]] for a, b in inner]


def spilled(loop: list[str]) -> int:
    """Loads and stores of spilled registers."""
    return sum(bool(re.search(r"\b(LDL|STL)\b", x)) for x in loop)
