"""Where it is measured: GPU, driver, versions, and the card's clocks and power."""

import platform
import subprocess

import torch
import triton

from sage_inductor.ops.recipe import source_tag


def describe(device: torch.device) -> dict:
    gpu = torch.cuda.get_device_properties(device)
    return {
        "gpu": gpu.name,
        "capability": [gpu.major, gpu.minor],
        "sms": gpu.multi_processor_count,
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "l2_mib": round(getattr(gpu, "L2_cache_size", 0) / 2**20, 1),
        "driver": nvidia_smi(device, "driver_version"),
    }


def versions() -> dict:
    cudnn = torch.backends.cudnn.version()
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "none",
        "python": platform.python_version(),
        "sage_inductor": source_tag(),
    }


def state(device: torch.device) -> str:
    """Clocks, power and temperature now."""
    return nvidia_smi(device, "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu")


def nvidia_smi(device: torch.device, query: str) -> str:
    """The queried fields of `device`, found by its UUID: nvidia-smi numbers GPUs its own way."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", uuid]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return found.stdout.strip()
