"""Pitfalls of TensorRT's attention, checked on the network that its own parser makes of our graph.

The operator multiplies its own scale into query and cache. TensorRT refuses a causal flag together with a mask, and
alone the flag is aligned to the wrong corner for a draft window. Cache lengths made TensorRT 11.1 and 11.2 read after
the end of the cache. A cache that is not the input of its update would be copied.
"""

import math

import numpy as np
import pytest

from tandemrt.export.compile.tensorrt.network import parse
from tandemrt.export.compile.tensorrt.worker import layers
from tandemrt.export.graph.builder import save_model
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.tensorrt.modules import load, logger
from tests.engine.decoding import make_checkpoint

CAPACITY = 64
trt = load("tensorrt-rtx")


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """The network, the spec, and the objects that keep the network alive."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", folder)
    checkpoint = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(checkpoint.config)
    graph = build_decoder(spec, checkpoint, dtype="float16", capacity=CAPACITY, lowering="mask")
    save_model(graph, folder / "model.onnx")
    builder = trt.Builder(logger(trt))
    return parse(trt, builder, folder / "model.onnx"), spec, builder


def attentions(network):
    """Every attention of the network."""
    for layer in layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionBoundaryLayer
            yield layer.attention


def maker(network, tensor):
    """The layer that makes ``tensor``, as the class of its kind; None for an input of the network."""
    for layer in layers(network):
        if any(layer.get_output(i).name == tensor.name for i in range(layer.num_outputs)):
            kinds = {"CONSTANT": trt.IConstantLayer, "ELEMENTWISE": trt.IElementWiseLayer}
            layer.__class__ = kinds.get(layer.type.name, type(layer))
            return layer
    return None


def factor(network, tensor):
    """The constant factor of the multiplication that made ``tensor``, and the other one. Skips casts and reshapes."""
    multiply = maker(network, tensor)
    assert multiply.op == trt.ElementWiseOperation.PROD
    constant = maker(network, multiply.get_input(1))
    while constant.type.name in ("CAST", "SHUFFLE"):
        constant = maker(network, constant.get_input(0))
    return float(np.ravel(constant.weights)[0]), multiply.get_input(0)


def test_visibility_is_an_explicit_mask_and_nothing_else(parsed):
    network, spec, _ = parsed
    layers = list(attentions(network))
    assert len(layers) == spec.layers
    for attention in layers:
        assert attention.mask.dtype == trt.DataType.BOOL
        assert tuple(attention.mask.shape) == (-1, 1, -1, CAPACITY)
        assert not attention.causal
        assert attention.causal_kind == trt.CausalMaskKind.NONE
        assert attention.key_value_lengths is None
        assert not attention.decomposable


def test_the_scale_is_multiplied_into_the_query_and_never_into_the_cache(parsed):
    network, spec, _ = parsed
    for attention in attentions(network):
        by_parser, query = factor(network, attention.get_input(0))
        ours, _ = factor(network, query)
        into_cache, cache = factor(network, attention.get_input(1))
        assert (by_parser, into_cache) == (1.0, 1.0)
        assert math.isclose(ours, spec.head_dim**-0.5, rel_tol=1e-2)
        assert cache.name.startswith("present_key.")


def test_every_cache_is_an_input_and_its_update_an_output_of_the_network(parsed):
    network, spec, _ = parsed
    inputs = {network.get_input(i).name for i in range(network.num_inputs)}
    outputs = {network.get_output(i).name for i in range(network.num_outputs)}
    updates = [layer for layer in layers(network) if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    assert len(updates) == 2 * spec.layers
    for update in updates:
        past, present = update.get_input(0).name, update.get_output(0).name
        assert past.replace("past_", "present_") == present
        assert past in inputs
        assert present in outputs
