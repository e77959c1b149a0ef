"""Write a recipe for a checkpoint that comes without one: backend, dtype, draft and limits for this machine."""

import json
import math
from functools import cache
from pathlib import Path
from typing import get_args

from tandemrt.engines.contract.calls import capacity, slack
from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.contract.draft_kinds import ModelKind
from tandemrt.engines.contract.dtypes import BITS, BYTES, COMPUTE, computed_in
from tandemrt.engines.options.build_options import BuildOptions, draft_option
from tandemrt.engines.text.tokenizer import read_chat_templates, read_tokenizer
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.export.bundle.default_reasoning import reasoning_lines
from tandemrt.export.bundle.gguf import gguf_file
from tandemrt.export.bundle.machine import Machine
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.converted_tokenizer import tokenizer_folder
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.spec import ModelSpec

NUM_DRAFT_TOKENS = 4
_COPIED_ON_CPU = 8  # where a round is as wide as its copies; edits are 3 times as fast (docs/data/lookup-runs.csv)
LEAST_LENGTH = 256
_WEIGHT_BYTES = {"int8": 1.1, "int4": 0.65}  # per weight: scales, and embeddings that stay in 8 bits


def default_recipe(folder: Path, name: str, checkpoint: str, options: BuildOptions, machine: Machine) -> str:
    """Return the TOML text of a recipe for the checkpoint in ``folder``.

    Args:
        folder: config.json, safetensors files and the tokenizer.
        name: the bundle's name.
        checkpoint: how the recipe names the checkpoint, a folder, a GGUF file or a name on the hub.
        options: the user's choices.
        machine: the machine that the recipe is for.

    The length is the model's, or what fits into memory with the default batch of the backend (DefaultLimits). Raises
    BadCheckpoint for a checkpoint that cannot be exported, and BadRequest for options that do not fit it.
    """
    opened = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(opened.config)
    dtype = options.dtype or _dtype(opened, machine, checkpoint)
    batch = machine.limits.batch
    kind = draft_option(options.draft)[0]
    window = _COPIED_ON_CPU if kind == "ngram" and machine.on_cpu else NUM_DRAFT_TOKENS
    fitting = _fitting_tokens(opened, spec, dtype, machine)
    per_request = fitting // batch if machine.on_cpu else fitting  # a linear cache has full rows
    length = options.max_model_len or _rounded(min(spec.max_length, per_request - slack(kind, window) - 1))
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
        *_draft_lines(options.draft, window, rounds=machine.on_cpu and options.dtype is None),
        *_reasoning_lines(folder),
        "",
        "[limits]",
        f"batch = {batch} # requests that run at once",
        f"length = {length} # tokens of prompt and output; the model allows {spec.max_length}",
        *_cache_lines(machine, fitting, batch * capacity(length, slack(kind, window))),
        "",
        "[backend]",
        f"name = {_text(machine.backend)}",
    ]
    return "\n".join(lines) + "\n"


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
    return max(0, int((machine.memory * machine.limits.memory_share - weights) / token))


def _draft_lines(draft: str | None, window: int, *, rounds: bool) -> list[str]:
    """Return the section; ``rounds``: a draft with a dtype of its own gets the quickest, because no text shows it."""
    kind, checkpoint = draft_option(draft)
    lines = [f"kind = {_text(kind)}"]
    if checkpoint is None:
        return [*lines, f"num_draft_tokens = {window}"]
    folder = Path(checkpoint)
    lines.append(f"checkpoint = {_text(str(folder.resolve()) if folder.exists() else checkpoint)}")
    return [*lines, 'dtype = "int4"'] if rounds and kind in get_args(ModelKind) else lines


def _reasoning_lines(folder: Path) -> list[str]:
    folder = tokenizer_folder(folder)
    opened = cache(read_tokenizer)  # once, and only if templates write delimiters: it takes long

    def has_token(text: str) -> bool:
        return opened(folder).token_to_id(text) is not None

    return reasoning_lines(has_token, "".join(read_chat_templates(folder).values()))


def _cache_lines(machine: Machine, fitting: int, most: int) -> list[str]:
    if machine.on_cpu or fitting >= most:
        return []
    return [f"cache_tokens = {fitting // BLOCK_SIZE * BLOCK_SIZE} # of all requests together, within the free memory"]


def _rounded(length: int) -> int:
    return length if length < LEAST_LENGTH else length // LEAST_LENGTH * LEAST_LENGTH


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
