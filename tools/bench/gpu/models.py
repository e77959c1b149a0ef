"""Build the measured bundle: a random target and a draft that agrees with it."""

import hashlib
import json
import math
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.calls import longest_chunk
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.options.build_listener import BuildListener
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.export.read.checkpoint import read_header
from tools.bench.kernels.replay import bandwidth
from tools.models.quantized_weights import WeightFormat, write_quantization_config
from tools.models.random_checkpoint import Dtype, Family, Size, vocab_of, write_config
from tools.models.random_drafts import Kind, write_draft
from tools.models.random_pair import special_ids, write_pair

_RECIPE = """
# target: config.json {target}
# draft: config.json {draft}
name = "bench"
[target]
checkpoint = "{folder}/target"
dtype = "{dtype}"
{kv_dtype}
[draft]
kind = "{kind}"
checkpoint = "{folder}/{drafts}"
num_draft_tokens = {window}
[reasoning]
think_start = "<think>"
think_ends = ["</think>"]
forced_end = "</think>"
[limits]
batch = {batch}
length = {length}
prefill_chunk = {chunk}
[backend]
{backend}
"""
# Of later layers, where the pair is not tuned: some drafts agree with their target. Random routers let none agree.
_SCALES = {Family.QWEN3_5: 0.1}
_AT_LEAST = ("batch", "length")  # an existing bundle may have larger ones


def make_models(
    folder: Path,
    size: Size,
    *,
    device: str,
    acceptance: float | None,
    temperature: float,
    window: int,
    weight_format: WeightFormat,
    family: Family = Family.LLAMA,
    layers: int | None = None,
    router_skew: float = 0.0,
) -> Path:
    """Write target and draft into ``folder``, in bfloat16 for a GPU and float32 for a CPU; return the target's folder.

    ``acceptance``: wanted tokens per round; None if it does not matter. ``family`` and ``layers`` are those of the
    target. ``router_skew``: of experts, see ``write_pair``. Existing models are kept. Raises ValueError if ``folder``
    holds other models.
    """
    target = folder / "target"
    if (folder / "draft" / "tokenizer.json").is_file():  # the last file that is written
        _require_same(target, family, size, layers=layers, dtype=_dtype(device), weight_format=weight_format)
        return target
    write_pair(
        folder,
        size,
        device=device,
        family=family,
        layers=layers,
        dtype=_dtype(device),
        acceptance=acceptance,
        scale=_SCALES.get(family, 1.0),
        temperature=temperature,
        window=window,
        weight_format=weight_format,
        router_skew=router_skew,
    )
    return target


def make_draft(folder: Path, kind: Kind, *, device: str, float8: bool) -> None:
    """Write a draft of ``kind`` for the target in ``folder``; ``make_models`` writes a draft of kind model."""
    if kind is not Kind.MODEL:
        write_draft(folder / kind, kind, folder / "target", device=device, dtype=_dtype(device), float8=float8)


def make_bundle(
    folder: Path,
    name: str,
    *,
    device: str,
    batch: int,
    length: int,
    chunk: int,
    window: int,
    kind: Kind = Kind.MODEL,
    batch_invariant: bool | None = None,
    kv_dtype: str | None = None,
    tensor_parallel: int = 1,
    reuse: bool = False,
) -> Bundle:
    """Export the target in ``folder`` and its draft of ``kind`` to ``folder``/``name``.

    ``batch_invariant`` and ``tensor_parallel``: options of recipes, for a GPU; None: their default. ``reuse``: open an
    existing bundle; its ``batch`` and ``length`` may be larger. Raises ValueError if it was built from other models or
    with other arguments.
    """
    cuda = device.startswith("cuda")
    backend = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]' if cuda else 'name = "onnxruntime-cpu"'
    if batch_invariant is not None:
        backend += f"\nbatch_invariant = {str(batch_invariant).lower()}"
    if tensor_parallel > 1:
        backend += f"\ntensor_parallel = {tensor_parallel}"
    drafts = "draft" if kind is Kind.MODEL else kind.value
    text = _RECIPE.format(
        target=_digest(folder / "target" / "config.json"),
        draft=_digest(folder / drafts / "config.json"),
        folder=folder.resolve(),
        kind=kind.value,
        drafts=drafts,
        kv_dtype=f'kv_dtype = "{kv_dtype}"' if kv_dtype else "",
        dtype="bfloat16" if cuda else "float32",
        batch=batch,
        length=length,
        chunk=min(chunk, longest_chunk(batch, length, "paged" if cuda else "linear")),
        window=window,
        backend=backend,
    )
    recipe = folder / f"{name}.toml"
    if reuse and (folder / name).is_dir():
        bundle = Bundle.open(folder / name)
        _require_recipe(bundle, recipe, text)
        return bundle
    recipe.write_text(text)
    return Bundle.open(build(Recipe.load(recipe), folder / name, listener=_Steps()).folder)


def floor_ms(bundle: Bundle, rows: int, context: float, tokens: int) -> float:
    """Return milliseconds to read the weights for one forward of the target, and ``context`` cached tokens per row.

    States of recurrent layers are read and written once. Over several ranks each reads its part. Of the experts it
    counts the expected number that ``tokens`` choose, uniformly and independently.
    """
    spec = bundle.manifest.specs["target"]
    ranks = 1 + len(bundle.manifest.ranks)
    files = (bundle.folder / "target").glob("model*.safetensors")  # columns of ranks are in them, too
    tensors = {name: tensor.nbytes for file in files for name, tensor in read_header(file).items()}
    weights = float(sum(tensors.values()) - (0 if spec["tied"] else tensors["model.embed_tokens.weight"]))
    if experts := spec["experts"]:
        unread = (1 - experts["per_token"] / experts["count"]) ** tokens
        weights -= unread * sum(nbytes for name, nbytes in tensors.items() if ".experts." in name)
    token = state = 0  # bytes of a row: those of a token's keys and values, and those of its states
    for binding in bundle.contract("target").inputs:
        if not binding.name.startswith("past_"):
            continue
        shape = binding.resolve({"blocks": 1, "slots": 1, "batch": 1})
        size = math.prod(shape) * BYTES[binding.dtype]
        if binding.name.startswith(("past_key.", "past_value.")):
            token += size // shape[2]
        elif binding.name.startswith("past_state."):
            state += 2 * size
    return 1e3 * (weights + ranks * rows * (context * token + state)) / ranks / bandwidth()


def _require_same(
    target: Path, family: Family, size: Size, *, layers: int | None, dtype: Dtype, weight_format: WeightFormat
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        wanted = Path(temporary)
        write_config(wanted, family, size, layers=layers, dtype=dtype, **special_ids(vocab_of(family, size)))
        write_quantization_config(wanted, weight_format)
        config, asked = _config(target), _config(wanted)
    differ = sorted(name for name in {*asked, *config} if asked.get(name) != config.get(name))
    if differ:
        name = differ[0]
        raise ValueError(
            f"the target in {target} must be the requested model, {family} {size} in {dtype}, "
            f"{weight_format}; got a model whose {name} is {config.get(name)!r:.80}, "
            f"not {asked.get(name)!r:.80}. Name another folder or request that model"
        )


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in config.items() if name != "transformers_version"}


def _require_recipe(bundle: Bundle, recipe: Path, text: str) -> None:
    """Check that ``bundle`` was built from ``recipe``, and that its text agrees with ``text``."""
    if not recipe.is_file() or _digest(recipe) != bundle.manifest.provenance.recipe:
        raise ValueError(f"the bundle in {bundle.folder} was not built from {recipe.name}. Build it: drop --reuse")
    for had, asked in zip_longest(recipe.read_text().splitlines(), text.splitlines(), fillvalue=""):
        (name, _, value), (_, _, least) = had.partition(" = "), asked.partition(" = ")
        if had != asked and not (name in _AT_LEAST and int(value) >= int(least)):
            raise ValueError(
                f"the bundle in {bundle.folder} must have the requested options to be reused, "
                f"{asked or 'no ' + name!r}; got {had or 'none'!r}. "
                "Drop --reuse, or request the options that it was built with"
            )


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _dtype(device: str) -> Dtype:
    return Dtype.BFLOAT16 if device.startswith("cuda") else Dtype.FLOAT32


class _Steps(BuildListener):
    def begin(self, title: str) -> None:
        print(f"  {title}", flush=True)
