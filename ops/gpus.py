"""What is asked of a GPU, or of one that is not here."""

import functools
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """A GPU that need not be here, in a device's place: what a package is compiled for."""

    capability: tuple[int, int]
    processors: int

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        return cls(capability(device), processors(device))

    @property
    def type(self) -> str:
        return "cuda"


def capability(device: torch.device | Gpu) -> tuple[int, int]:
    return device.capability if isinstance(device, Gpu) else _capability(device)


def processors(device: torch.device | Gpu) -> int:
    return device.processors if isinstance(device, Gpu) else _multiprocessors(device)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph is captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
