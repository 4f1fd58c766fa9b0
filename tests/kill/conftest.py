"""What tests of kills and faults share: where trainers come from, and the figures at the end."""

import pytest

import nursery
from zygote import Zygote

FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def trainers(tmp_path_factory):
    """Where lives of trainer.py come from."""
    zygote = Zygote(tmp_path_factory.mktemp("nursery") / "stderr", nursery.SCRIPT)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def torch_trainers(tmp_path_factory):
    """Where lives of torch_trainer.py come from."""
    zygote = Zygote(tmp_path_factory.mktemp("nursery") / "stderr", nursery.TORCH_SCRIPT)
    yield zygote
    zygote.close()


@pytest.fixture
def figure(request):
    """Take a line that is printed when all tests are through."""
    return request.config.stash.setdefault(FIGURES, []).append


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(FIGURES, []):
        terminalreporter.write_line(line)
