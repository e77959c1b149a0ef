"""The ONNX parser uses the plugin instead of the function body because nodes of ``verify.onnx`` name its namespace.

The test uses the parser of TensorRT-RTX, which has the same source as TensorRT's and is on the package index. It
rejects plugins of this form after it has found them, which proves that it found them.
"""

import onnx_ir as ir
import pytest
import tensorrt_rtx_bindings as rtx

from tandemrt.export.model.weightless import build_verify
from tandemrt.plugins.operators.constants import DOMAIN


class Creator(rtx.IPluginCreatorV3Quick):
    def __init__(self, name):
        rtx.IPluginCreatorV3Quick.__init__(self)
        self.name, self.plugin_namespace, self.plugin_version = name, DOMAIN, "1"
        self.field_names = rtx.PluginFieldCollection([])


class Log(rtx.ILogger):
    def __init__(self):
        rtx.ILogger.__init__(self)
        self.lines = []

    def log(self, _, message):
        self.lines.append(message)

    def importing(self, operator):
        """Return how the parser reports the import of the first node of ``operator``."""
        registrations = [line for line in self.lines if "Found registered" in line and f": {operator}." in line]
        return registrations[0].partition(" registered ")[2].partition(":")[0]


@pytest.fixture
def registered():
    creator = Creator("token_bitmask")
    assert rtx.get_plugin_registry().register_creator(creator, DOMAIN)
    yield
    rtx.get_plugin_registry().deregister_creator(creator)


def parse(model, *flags):
    log = Log()
    builder = rtx.Builder(log)
    network = builder.create_network()
    parser = rtx.OnnxParser(network, log)
    for flag in flags:
        parser.set_flag(flag)
    parser.parse(ir.to_proto(model).SerializeToString())
    return log.importing("token_bitmask")


def verify():
    return build_verify(vocab=1000, dtype="float16", draft_probs=False)


@pytest.mark.usefixtures("registered")
def test_the_parser_uses_a_registered_plugin():
    assert parse(verify()) == "plugin"


def test_without_a_plugin_the_parser_uses_the_function_body():
    assert parse(verify()) == "local function"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("flags", [(), (rtx.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE,)])
def test_without_the_namespace_the_parser_uses_the_function_body(flags):
    """Control. The override flag does not help, because it looks for plugins without a namespace."""
    model = verify()
    for node in model.graph:
        del node.attributes["plugin_namespace"]
    assert parse(model, *flags) == "local function"
