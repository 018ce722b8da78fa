from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    collect_ignore_glob = ["*"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU for kernels in the interpreter."""
    from proa.kernels.triton_import import INTERPRETED

    if torch.cuda.is_available():
        return torch.device("cuda")
    if not INTERPRETED:
        pytest.skip("the kernels were imported before the interpreter was chosen")
    _convert_bounds_of_loops()
    return torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def one_thread_of_torch() -> None:
    """For the references: the threads of tests that run side by side would wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def _convert_bounds_of_loops() -> None:
    """Triton 3.6 makes integers of arrays of one element, which numpy 2.4 has ended."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_all(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_all
