"""The bundle that is measured: a random target and a draft that agrees with it, exported for the device."""

from pathlib import Path

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.dtypes import BYTES
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tandemrt.export.read.checkpoint import read_header
from tools.narrow_weights import Stored
from tools.random_checkpoint import Dtype, Family, Size
from tools.random_drafts import Kind, write_draft
from tools.random_pair import write_pair

BANDWIDTH = 4.3e12  # bytes per second that one H200 reads at best

_RECIPE = """
name = "bench"
[target]
checkpoint = "{folder}/target"
dtype = "{dtype}"
[draft]
kind = "{kind}"
checkpoint = "{folder}/{drafts}"
window = {window}
[reasoning]
start = "<think>"
ends = ["</think>"]
forced_end = "</think>"
[limits]
batch = {batch}
length = {length}
prefill_chunk = {chunk}
[backend]
{backend}
"""


def make_models(
    folder: Path,
    size: Size,
    *,
    device: str,
    acceptance: float | None,
    temperature: float,
    window: int,
    stored: Stored,
    family: Family = Family.LLAMA,
    layers: int | None = None,
) -> None:
    """Write target and draft into ``folder``, in bfloat16 for a GPU and float32 for a CPU; ``stored``: products.

    ``acceptance`` None: nobody asks how often the two agree. ``family`` and ``layers`` are the target's.
    """
    write_pair(
        folder,
        size,
        device=device,
        family=family,
        layers=layers,
        dtype=_dtype(device),
        acceptance=acceptance,
        scale=1.0,
        temperature=temperature,
        window=window,
        stored=stored,
    )


def make_draft(folder: Path, kind: Kind, *, device: str, float8: bool) -> None:
    """Write a draft of ``kind`` for the target in ``folder`` beside it; one of a model was written with it."""
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
    batch_invariant: bool = False,
    kv_dtype: str | None = None,
) -> Bundle:
    """Export the target in ``folder`` and its draft of ``kind`` to ``folder``/``name``; ``batch_invariant`` as in a
    recipe, for a GPU."""
    cuda = device.startswith("cuda")
    backend = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]' if cuda else 'name = "onnxruntime-cpu"'
    if batch_invariant:
        backend += "\nbatch_invariant = true"
    text = _RECIPE.format(
        folder=folder.resolve(),
        kind=kind.value,
        drafts="draft" if kind is Kind.MODEL else kind.value,
        dtype="bfloat16" if cuda else "float32",
        batch=batch,
        length=length,
        chunk=min(chunk, length),
        window=window,
        backend=backend,
    )
    recipe = folder / f"{name}.toml"
    recipe.write_text(text)
    return Bundle.open(build(Recipe.load(recipe, kv_dtype=kv_dtype), folder / name, progress=_say).folder)


def floor_ms(bundle: Bundle, rows: int, context: float, tokens: int) -> float:
    """Milliseconds to read all weights that a forward of the target reads, and ``context`` cached tokens per row.

    Of experts those that ``tokens`` choose among all alike, each by itself.
    """
    spec = bundle.manifest.specs["target"]
    files = (bundle.folder / "target").glob("*.safetensors")
    tensors = {name: tensor.nbytes for file in files for name, tensor in read_header(file).items()}
    weights = float(sum(tensors.values()) - (0 if spec["tied"] else tensors["model.embed_tokens.weight"]))
    if experts := spec["experts"]:
        unread = (1 - experts["per_token"] / experts["count"]) ** tokens
        weights -= unread * sum(nbytes for name, nbytes in tensors.items() if ".experts." in name)
    width = BYTES[bundle.contract("target")["past_key.0"].dtype]
    token: int = 2 * spec["layers"] * spec["kv_heads"] * spec["head_dim"] * width
    return 1e3 * (weights + rows * context * token) / BANDWIDTH


def _dtype(device: str) -> Dtype:
    return Dtype.BFLOAT16 if device.startswith("cuda") else Dtype.FLOAT32


def _say(title: str) -> None:
    print(f"  {title}", flush=True)
