"""What the package asks of ``torch.cuda``. Goal: no GPU is waited for, or used, that has nothing to
do with the run. Method: GPUs that are told of, and streams that note that they were waited for.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch

from lightckpt import gpus
from lightckpt.capture import Run
from lightckpt.structure import Structure

CUBLAS = "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the..."


@pytest.fixture
def waited(monkeypatch):
    """Ordinals of the GPUs whose streams were waited for; of four, the third has been used."""
    noted = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(gpus, "has_context", lambda ordinal: ordinal == 2)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda ordinal: SimpleNamespace(synchronize=lambda: noted.append(ordinal)),
    )
    return noted


@pytest.mark.parametrize(("held", "expected"), [([], [2]), ([0, 0, gpus.HOST], [0, 2])])
def test_gpus_that_nobody_uses_are_not_waited_for(waited, held, expected):
    gpus.synchronize(held)
    assert waited == expected


def test_a_boundary_with_pinned_memory_waits_for_the_gpus_of_the_run(waited, monkeypatch):
    monkeypatch.setattr(gpus, "is_pinned", lambda tensor: tensor.shape == (1,))
    monkeypatch.setattr(gpus, "ordinal_of", lambda tensor: 1 if len(tensor) == 3 else gpus.HOST)
    run = Run(tensors={"pinned": torch.zeros(1), "on a GPU": torch.zeros(3)})
    Structure(run, "test").pack()
    assert waited == [1, 2]


def test_any_number_that_is_not_zero_is_seen():
    tiny = torch.tensor([0, 1e-45])
    cases = {
        "zeros": (torch.zeros(3), False),
        "nothing": (torch.zeros(0), False),
        "tiny": (tiny, True),
        "tiny in sixteen bits": (torch.tensor([6e-8], dtype=torch.float16), True),
        "tiny in sixty-four": (torch.tensor([1e-320], dtype=torch.float64), True),
        "beyond all bounds": (torch.tensor([3e38, 3e38]), True),
        "no number": (torch.tensor([0, float("nan")]), True),
        "imaginary": (torch.tensor([1e-30j]), True),
        "of opposite signs": (torch.tensor([1.0, -1.0]), True),
        "wanting a gradient": (torch.zeros((), requires_grad=True), False),
    }
    tensors, expected = map(list, zip(*cases.values(), strict=True))
    assert gpus.are_nonzero(tensors).tolist() == expected
    assert gpus.Answer(tensors).get() == expected


def test_what_torch_says_of_cublas_in_a_backward_is_no_failure():
    def warn(module):
        warnings.warn_explicit(CUBLAS, UserWarning, "graph.py", 829, module=module)

    warn("torch.autograd.graph")
    with pytest.raises(UserWarning, match="cuBLAS"):
        warn("torch.nn.functional")
