import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """These tensors are small: sharing them out over threads costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
