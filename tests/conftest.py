import pytest
import torch


def pytest_collection_modifyitems(items):
    """`gpu` tests without a GPU are deselected by ``-m "not gpu"``; asked for, they must fail."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.xfail(reason="no CUDA device", run=False, strict=True))


@pytest.fixture(autouse=True)
def fresh(request):
    """Every test starts from one seed and an empty Dynamo (and so an empty report)."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
