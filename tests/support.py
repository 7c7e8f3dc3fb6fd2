"""What tests of several rooms share: inputs in the layout that models give them, and measures."""

import torch
import torch.nn.functional as F
from torch import Tensor


def relative_l1(actual: Tensor, expected: Tensor) -> float:
    """sum |error| / sum |expected|, the papers' measure."""
    error = (actual.double() - expected.double()).abs().sum()
    return (error / expected.double().abs().sum()).item()


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|error| / |expected|, in the Euclidean norm."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def cos_sim(actual: Tensor, expected: Tensor) -> float:
    return F.cosine_similarity(actual.double().flatten(), expected.double().flatten(), 0).item()


def heads(B: int, H: int, N: int, D: int, dtype=torch.float32, device="cpu") -> Tensor:
    """Random [B, H, N, D], stored as [B, N, H, D]: what a projection's output is viewed as."""
    return torch.randn(B, N, H, D, device=device).to(dtype).transpose(1, 2)
