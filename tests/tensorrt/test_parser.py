"""The ONNX parser takes the plugin, not the function body, because the nodes of ``verify.onnx`` name its namespace.

Executed with the parser of TensorRT-RTX, which is built from the same source and, unlike TensorRT's, on the package
index. It refuses plugins of this form once it has found them, which is how it shows that it has.
"""

import onnx_ir as ir
import pytest
import tensorrt_rtx_bindings as rtx

from tandemrt.export.model.heads import build_verify
from tandemrt.plugins.operators import DOMAIN


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
        """How the parser said it would import the first node of ``operator``."""
        found = [line for line in self.lines if "Found registered" in line and f": {operator}." in line]
        return found[0].partition(" registered ")[2].partition(":")[0]


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
def test_a_registered_plugin_is_taken():
    assert parse(verify()) == "plugin"


def test_without_a_plugin_the_body_is_taken():
    assert parse(verify()) == "local function"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("flags", [(), (rtx.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE,)])
def test_a_node_that_does_not_name_the_namespace_gets_its_body(flags):
    """The control. The override flag does not help: it looks for plugins without a namespace."""
    model = verify()
    for node in model.graph:
        del node.attributes["plugin_namespace"]
    assert parse(model, *flags) == "local function"
