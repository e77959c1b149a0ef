"""These tests run in a process of their own: ``tensorrt`` here is the real Python API over a stand-in's libraries."""

import tempfile
from pathlib import Path

from tests.tensorrt import standin

with tempfile.TemporaryDirectory() as _folder:
    standin.load(Path(_folder))
