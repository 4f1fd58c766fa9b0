"""Fixtures for all tests of the package."""

import pytest

from small_run import folder_in_memory


@pytest.fixture
def path():
    """A place for a store, in memory where there is such, removed afterwards."""
    with folder_in_memory() as folder:
        yield str(folder / "store")
