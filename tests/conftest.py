import pytest
import torch


@pytest.fixture(autouse=True)
def fresh():
    """Every test starts from one seed and an empty Dynamo (and so an empty report)."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
