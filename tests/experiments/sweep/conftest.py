import multiprocessing.forkserver
import sys
from pathlib import Path

import pytest

# The runs of these tests are carried out by functions of a module in this folder; the fork server takes the search path along.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _fork_server_of_ones_own():
    """The server's preloaded modules and threads are fixed when it starts: other tests want other ones."""
    multiprocessing.forkserver._forkserver._stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # a run's output is buffered, as it is for most people
        yield
    multiprocessing.forkserver._forkserver._stop()
