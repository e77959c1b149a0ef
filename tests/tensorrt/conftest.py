"""These tests run in their own process: ``tensorrt`` here is the real Python API on a stand-in's libraries."""

import tempfile
from pathlib import Path

from tests.tensorrt import standin

with tempfile.TemporaryDirectory() as _folder:
    standin.load(Path(_folder))
