"""A stand-in for an open engine of TensorRT, with memory of the host, that holds its caller to the rules of the API.

Real engines open on GPUs that no test machine has. The rules are those that TensorRT's documentation gives for
IExecutionContext: profile, then shapes, then memory and addresses, then enqueue; everything by name.
It computes logits = token id + 0.5 and writes the token ids into the cache at write_index.
"""

import ctypes
from types import SimpleNamespace

import numpy as np

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract

CAPACITY, VOCAB = 8, 3
CONTRACT = Contract(
    inputs=(
        Binding("token_ids", "int64", ("batch", "query")),
        Binding("write_index", "int64", ("batch",)),
        Binding("past_key.0", "float32", ("batch", CAPACITY)),
    ),
    outputs=(
        Binding("logits", "float32", ("batch", "query", VOCAB)),
        Binding("present_key.0", "float32", ("batch", CAPACITY)),
    ),
    aliases=(("present_key.0", "past_key.0"),),
)
MEMORY = 4096
PROFILES = [((1, 1), (1, 6), (4, 6)), ((1, 1), (4, 3), (4, 3))]  # of token_ids: prefill, window


class Engine:
    """``log`` hears what it complains of; the other arguments make it depart from the contract.

    ``narrow``: it has no int64, as before TensorRT 10. ``pairs``: neither, and it reads int64 as pairs of int32.
    """

    device_memory_size_v2 = MEMORY
    num_optimization_profiles = len(PROFILES)
    num_io_tensors = len(CONTRACT.inputs) + len(CONTRACT.outputs)

    def __init__(self, log, *, in_place=True, host=(), dtype="FLOAT", capturable=True, narrow=False, pairs=False):
        self.log, self.in_place, self.host, self.dtype, self.capturable = log, in_place, host, dtype, capturable
        self.integers = "INT32" if narrow else "INT64"
        self.pairs = pairs
        self.contexts = []

    def get_tensor_name(self, index):
        return (*CONTRACT.inputs, *CONTRACT.outputs)[index].name

    def get_tensor_dtype(self, name):
        integers = "INT32" if self.pairs else self.integers
        return SimpleNamespace(name=integers if CONTRACT[name].dtype == "int64" else self.dtype)

    def get_tensor_mode(self, name):
        return SimpleNamespace(name="OUTPUT" if CONTRACT[name] in CONTRACT.outputs else "INPUT")

    def get_tensor_shape(self, name):
        return [*(dim if isinstance(dim, int) else -1 for dim in CONTRACT[name].shape), *self._pair(name)]

    def _pair(self, name):
        return (2,) if self.pairs and CONTRACT[name].dtype == "int64" else ()

    def get_tensor_location(self, name):
        return SimpleNamespace(name="HOST" if name in self.host else "DEVICE")

    def get_aliased_input_tensor(self, name):
        return dict(CONTRACT.aliases).get(name) if self.in_place else None

    def get_tensor_profile_shape(self, name, profile):
        widths = {"token_ids": lambda s: s, "write_index": lambda s: s[:1], "past_key.0": lambda s: (s[0], CAPACITY)}
        return [(*widths[name](shape), *self._pair(name)) for shape in PROFILES[profile]]

    def create_runtime_config(self):
        return RuntimeConfig()

    def create_execution_context(self, how):
        context = Context(self, how)
        self.contexts.append(context)
        return context


class Context:
    """One execution context. Its attributes record the calls."""

    def __init__(self, engine, how):
        self.engine, self.how = engine, how
        self.profile, self.memory, self.shapes, self.addresses = None, None, {}, {}
        self.runs, self.refuses = 0, False

    def set_optimization_profile_async(self, profile, stream):
        assert isinstance(stream, int)
        self.profile = profile
        return 0 <= profile < len(PROFILES)

    def set_input_shape(self, name, shape):
        assert self.profile is not None, "shapes belong to a profile"
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name] = shape
        return all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))

    def set_device_memory(self, address, size):
        assert set(self.shapes) == {binding.name for binding in CONTRACT.inputs}
        self.memory = (address, size)

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return bool(address)

    def is_stream_capturable(self, stream):
        assert isinstance(stream, int)
        return self.engine.capturable

    def execute_async_v3(self, stream):
        assert isinstance(stream, int)
        assert self.memory is not None
        assert self.memory[1] >= MEMORY
        assert set(self.addresses) == {b.name for b in (*CONTRACT.inputs, *CONTRACT.outputs)}
        assert self.addresses["present_key.0"] == self.addresses["past_key.0"]
        if self.refuses:
            self.engine.log.errors.append("no such kernel")
            return False
        self.runs += 1
        integers = np.dtype(self.engine.integers.lower())
        tokens = self._at("token_ids", integers, self.shapes["token_ids"][:2])
        batch, query = tokens.shape
        index = self._at("write_index", integers, (batch,))
        keys = self._at("past_key.0", np.float32, (batch, CAPACITY))
        for row in range(batch):
            keys[row, index[row] : index[row] + query] = tokens[row]
        self._at("logits", np.float32, (batch, query, VOCAB))[:] = tokens[..., None] + 0.5
        return True

    def _at(self, name, dtype, shape):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(self.addresses[name]), dtype).reshape(shape)


class Runtime:
    """Opens an engine that was built to open in later releases: it holds code of its release, to be run here."""

    engine_host_code_allowed = False

    def __init__(self, log):
        self.log = log

    def deserialize_cuda_engine(self, data):
        if self.engine_host_code_allowed:
            return bytes(data)
        self.log.errors.append("the engine holds code that may not be run")
        return None


class RuntimeConfig:
    """The runtime configuration that TensorRT-RTX gets for its contexts."""

    def create_runtime_cache(self):
        return SimpleNamespace(deserialize=bool, serialize=lambda: b"kernels")

    def set_runtime_cache(self, cache):
        self.cache = cache

    def set_execution_context_allocation_strategy(self, strategy):
        self.strategy = strategy


TENSORRT = {"__name__": "tensorrt", "ExecutionContextAllocationStrategy": SimpleNamespace(USER_MANAGED="user managed")}
RTX = {
    "__version__": "1.7.1",
    "IRuntimeCache": object,
    "CudaGraphStrategy": SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole", DISABLED="disabled"),
    "DynamicShapesKernelSpecializationStrategy": SimpleNamespace(EAGER="eager"),
}
