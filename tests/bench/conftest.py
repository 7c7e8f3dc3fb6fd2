import instead
import pytest


@pytest.fixture
def op_by_op():
    """A bench's tests compile little: the library's tests do."""
    with instead.op_by_op():
        yield
