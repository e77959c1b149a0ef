"""The log level of onnxruntime belongs to the process: opening and running a bundle leaves it as it was.

onnxruntime has no function that reads the level, so a session of the host process shows it: it warns about an unused
weight. Each test runs in a process of its own.
"""

import subprocess
import sys
from pathlib import Path

ANSWER = """
import sys
from tandemrt import LLM, SamplingParams
with LLM(sys.argv[1], threads=1) as llm:
    llm.generate("the text", SamplingParams(max_tokens=2))
"""

WARN = """
import numpy as np
import onnx
import onnxruntime
from onnx import helper

value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
unused = onnx.numpy_helper.from_array(np.zeros(1, np.float32), "unused_weight")
graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "g", value[:1], value[1:], [unused])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
"""


def errors_of(script: str, bundle: Path) -> str:
    ended = subprocess.run([sys.executable, "-c", script, str(bundle)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_a_session_of_the_host_process_still_warns_after_a_bundle_ran(ngram_bundle: Path) -> None:
    assert "unused_weight" in errors_of(WARN, ngram_bundle)
    assert "unused_weight" in errors_of(ANSWER + WARN, ngram_bundle)


def test_a_bundle_opens_and_runs_without_warnings(ngram_bundle: Path) -> None:
    before = errors_of("import onnxruntime", ngram_bundle)
    assert errors_of(ANSWER, ngram_bundle) == before
