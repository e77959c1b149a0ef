"""Write a recipe for a checkpoint that comes without one: backend, dtype, draft and limits for this machine."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from tandemrt.engines.contract.calls import capacity, slack
from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.contract.dtypes import BITS, BYTES, COMPUTE, computed_in
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.recipe.backends import BACKENDS, CPU, CUDA
from tandemrt.engines.text.tokenizer import read_tokenizer
from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest, quoted
from tandemrt.export.bundle.default_reasoning import reasoning_lines
from tandemrt.export.bundle.gguf import gguf_file
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.converted_tokenizer import tokenizer_folder
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of, gpus

BATCH = {CPU: 4, CUDA: 32}
MEMORY_SHARE = {CPU: 0.5, CUDA: 0.85}  # of the free memory, for weights and caches
NUM_DRAFT_TOKENS = 4
LEAST_LENGTH = 256
_WEIGHT_BYTES = {"int8": 1.1, "int4": 0.65}  # per weight: scales, and embeddings that stay in 8 bits


@dataclass(frozen=True)
class Machine:
    """The backend that runs here, and its free memory in bytes."""

    backend: str
    memory: int

    @property
    def on_cpu(self) -> bool:
        """Whether the backend runs on a CPU, over a linear cache."""
        return BACKENDS[self.backend].device == "cpu"

    @classmethod
    def here(cls, backend: str | None = None) -> "Machine":
        """Return this machine with ``backend``; None: the GPU's if torch and onnxruntime can use one, else the CPU's.

        Raises BackendUnavailable for a GPU that is not here, and BadRequest for a backend that needs a recipe.
        """
        import onnxruntime

        if backend not in (None, CPU, CUDA):
            raise BadRequest(
                f"backend: a checkpoint without a recipe is built for {CPU} or {CUDA}, received {quoted(backend)}; "
                "write a recipe (docs/guide.md)"
            )
        has_gpu = bool(gpus()) and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        if backend == CUDA and not has_gpu:
            raise BackendUnavailable(
                f"backend: {CUDA} needs a GPU here, whose memory sets the limits; to build for another machine, write "
                "a recipe (docs/guide.md)"
            )
        if has_gpu and backend != CPU:
            return cls(CUDA, gpus()[0].free_memory())
        return cls(CPU, device_of(torch.device("cpu")).free_memory())


def default_recipe(folder: Path, name: str, checkpoint: str, options: BuildOptions, machine: Machine) -> str:
    """Return the TOML text of a recipe for the checkpoint in ``folder``.

    Args:
        folder: config.json, safetensors files and the tokenizer.
        name: the bundle's name.
        checkpoint: how the recipe names the checkpoint, a folder, a GGUF file or a name on the hub.
        options: the user's choices.
        machine: the machine that the recipe is for.

    The length is the model's, or what fits into ``MEMORY_SHARE`` of the memory with ``BATCH`` requests at once. Raises
    BadCheckpoint for a checkpoint that cannot be exported, and BadRequest for options that do not fit it.
    """
    opened = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(opened.config)
    dtype = options.dtype or _dtype(opened, machine, checkpoint)
    batch = BATCH[machine.backend]
    kind = draft_option(options.draft)[0]
    fitting = _fitting_tokens(opened, spec, dtype, machine)
    per_request = fitting // batch if machine.on_cpu else fitting  # a linear cache has full rows
    length = options.max_model_len or _rounded(min(spec.max_length, per_request - slack(kind, NUM_DRAFT_TOKENS) - 1))
    if length < LEAST_LENGTH and options.max_model_len is None:
        raise BadRequest(
            f"{quoted(checkpoint)}: must fit into memory with {LEAST_LENGTH} tokens for each of {batch} requests; "
            f"{machine.memory / 1e9:.1f} GB are free on {machine.backend}. Choose a smaller model or dtype, or write a "
            "recipe (docs/guide.md)"
        )
    lines = [
        f"name = {_text(name)}",
        "",
        "[target]",
        f"checkpoint = {_text(checkpoint)}",
        f"dtype = {_text(dtype)}",
        "",
        "[draft]",
        *_draft_lines(options.draft),
        *_reasoning_lines(folder),
        "",
        "[limits]",
        f"batch = {batch} # requests that run at once",
        f"length = {length} # tokens of prompt and output; the model allows {spec.max_length}",
        *_cache_lines(machine, fitting, batch * capacity(length, slack(kind, NUM_DRAFT_TOKENS))),
        "",
        "[backend]",
        f"name = {_text(machine.backend)}",
    ]
    return "\n".join(lines) + "\n"


def recipe_name(checkpoint: str) -> str:
    """Return a bundle's name for a checkpoint: the last part of its path or hub name, in lower case."""
    last = checkpoint.split("@")[0].rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("._-").lower() or "model"


def _dtype(checkpoint: Checkpoint, machine: Machine, named: str) -> str:
    """Return the dtype: 4-bit weights on a CPU, the checkpoint's dtype on a GPU. Quantized weights stay as they are.

    Weights of a GGUF file, which were rounded before, get 8 bits on a CPU, unless they have 4 or 8.
    """
    if machine.on_cpu and gguf_file(Path(named)) is not None:
        return "int8"
    if read_quantization(checkpoint.config, checkpoint.folder) is not None:
        return "float32" if machine.on_cpu else "bfloat16"
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return "int4" if machine.on_cpu else str(stored) if stored in COMPUTE else "bfloat16"


def _fitting_tokens(checkpoint: Checkpoint, spec: ModelSpec, dtype: str, machine: Machine) -> int:
    """Return how many tokens of keys and values fit into memory next to the weights."""
    compute = computed_in(dtype, paged=not machine.on_cpu)
    keeps_floats = read_quantization(checkpoint.config, checkpoint.folder) is not None and dtype not in BITS
    width = _WEIGHT_BYTES[dtype] if dtype in BITS else BYTES.get(compute, 4)
    weights = sum(
        t.nbytes if keeps_floats or t.dtype not in COMPUTE else math.prod(t.shape) * width
        for t in checkpoint.tensors.values()
    )
    values = sum(heads.kv * heads.dim for heads in map(spec.heads_of, spec.caching_layers))
    token = max(1, 2 * values * BYTES.get(compute, 4))
    return max(0, int((machine.memory * MEMORY_SHARE[machine.backend] - weights) / token))


def draft_option(draft: str | None) -> tuple[str, str | None]:
    """Return the kind of a draft option and its checkpoint, if it has one. Raises BadRequest."""
    draft = "ngram" if draft is None else draft
    kinds = [name for name, needs in DRAFT_KINDS.items() if needs.engines]
    modelless = [name for name in DRAFT_KINDS if name not in kinds]
    if draft in modelless:
        return draft, None
    kind, colon, checkpoint = draft.partition(":")
    if not colon:
        return "model", kind
    if kind not in kinds or not checkpoint:
        raise BadRequest(
            f"draft: must be {', '.join(modelless)}, a checkpoint, or KIND:CHECKPOINT with a kind of "
            f"{', '.join(kinds)}, received {quoted(draft)}"
        )
    return kind, checkpoint


def _draft_lines(draft: str | None) -> list[str]:
    kind, checkpoint = draft_option(draft)
    lines = [f"kind = {_text(kind)}"]
    if checkpoint is not None:
        folder = Path(checkpoint)
        lines.append(f"checkpoint = {_text(str(folder.resolve()) if folder.is_dir() else checkpoint)}")
    return lines if checkpoint is not None else [*lines, f"num_draft_tokens = {NUM_DRAFT_TOKENS}"]


def _reasoning_lines(folder: Path) -> list[str]:
    tokenizer = read_tokenizer(tokenizer_folder(folder))

    def has_token(text: str) -> bool:
        return tokenizer.token_to_id(text) is not None

    return reasoning_lines(has_token, "".join(tokenizer.chat_templates.values()))


def _cache_lines(machine: Machine, fitting: int, most: int) -> list[str]:
    if machine.on_cpu or fitting >= most:
        return []
    return [f"cache_tokens = {fitting // BLOCK_SIZE * BLOCK_SIZE} # of all requests together, within the free memory"]


def _rounded(length: int) -> int:
    return length if length < LEAST_LENGTH else length // LEAST_LENGTH * LEAST_LENGTH


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
