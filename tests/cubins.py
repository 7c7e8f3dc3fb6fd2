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
    instructions, labels, found = [], {}, []
    for line in about(cubin, "nvdisasm", "-c").splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction.group(1))
            jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if jump and jump.group(1) in labels:  # backwards
                found.append((labels[jump.group(1)], len(instructions)))
    inner = [
        (a, b)
        for a, b in found
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)
        and any("GMMA" in x for x in instructions[a:b])
    ]
    return [instructions[a:b] for a, b in inner]


def spilled(loop: list[str]) -> int:
    """Loads and stores of spilled registers."""
    return sum(bool(re.search(r"\b(LDL|STL)\b", x)) for x in loop)
