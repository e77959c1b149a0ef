"""Write a random target and a draft with a chosen acceptance: speculation at scale without trained models.

The draft is the target's embedding, first layer and lm_head. The target's later layers are scaled down until a round
gives ``acceptance`` tokens (tools/models/agreement.py). Both get a tokenizer (tools/models/filler_tokenizer.py). The
logits spread as those of a language model, so that a sample has an entropy of a few nats.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoConfig

from tools.models.agreement import Shape, Weights, tune
from tools.models.filler_tokenizer import require_room, write_tokenizer
from tools.models.quantized_weights import WeightFormat, quantize_matmuls, write_quantization_config
from tools.models.random_checkpoint import GAINS, Dtype, Family, Size, safetensors_header, vocab_of, write_config

console = Console()
SPREAD = 3.0  # standard deviation of the logits
_ROUTERS = (".mlp.gate.weight", ".router.weight")
_AT_ONCE = 4  # files that are written at the same time
_PART_BYTES = 1 << 24  # copied to the host at a time, so that the next copy uses the same memory


def write_pair(
    out: Path,
    size: Size,
    *,
    device: str,
    family: Family = Family.LLAMA,
    layers: int | None = None,
    dtype: Dtype = Dtype.BFLOAT16,
    acceptance: float | None = 3.0,
    scale: float = 0.0,
    temperature: float = 0.7,
    window: int = 4,
    seed: int = 0,
    weight_format: WeightFormat = WeightFormat.UNQUANTIZED,
    router_skew: float = 0.0,
    shard_bytes: int = 2_000_000_000,
) -> float:
    """Write ``out``/target and ``out``/draft; return the scale of the target's later layers.

    ``acceptance``: the wanted mean of tokens per round with ``window`` drafted tokens. None uses ``scale``, which a
    ``family`` with experts requires. ``layers``: layers of the target; None for those of the size. A quantized
    ``weight_format`` lowers the acceptance a little. ``router_skew``: standard deviation of the logarithm of an
    expert's router weights, so that some experts are chosen more often. Each file holds at most ``shard_bytes`` of
    weights (or a single tensor). The same arguments give the same files on the same kind of device. Raises ValueError,
    before writing, if the vocabulary of ``size`` is too small for a tokenizer.
    """
    target, draft = out / "target", out / "draft"
    vocab = vocab_of(family, size)
    require_room(vocab)
    ids = special_ids(vocab)
    shapes = write_config(target, family, size, layers=layers, dtype=dtype, **ids)
    draft_shapes = write_config(draft, family, size, layers=1, dtype=dtype, **ids)
    stored = getattr(torch, dtype.value)
    with torch.inference_mode():
        if acceptance is not None:
            config = AutoConfig.from_pretrained(target)
            shape = Shape(
                config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
            )
            weights = dict(random_tensors(shapes, stored, device, seed))
            for tried in tune(weights, shape, length=acceptance, temperature=temperature, window=window):
                scale = tried.scale
                console.print(f"scale {scale:.5f}: {tried.same:.3f} equal samples, {tried.length:.2f} tokens a round")
            del weights
        begin = time.perf_counter()
        skews = torch.Generator(device).manual_seed(seed + 1)
        kept: Weights = {}  # what the draft shares with its target

        def scaled() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in random_tensors(shapes, stored, device, seed):
                adds = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                if adds and not name.startswith("model.layers.0."):
                    tensor.mul_(scale)
                if router_skew and name.endswith(_ROUTERS):
                    tensor.mul_(torch.empty_like(tensor[:, :1]).normal_(generator=skews).mul_(router_skew).exp_())
                stored_as = quantize_matmuls({name: tensor}, weight_format)
                if draft_shapes.get(name) == shapes[name]:
                    kept.update(stored_as)
                    del draft_shapes[name]
                yield from stored_as.items()

        nbytes = write_tensors(target, scaled(), shard_bytes)
        # A draft's only layer may be of another kind than the target's first: the last of Gemma 4 attends fully.
        kept |= quantize_matmuls(dict(random_tensors(draft_shapes, stored, device, seed)), weight_format)
        nbytes += write_tensors(draft, kept.items(), shard_bytes)
    for folder in (target, draft):
        write_tokenizer(folder, vocab)
        write_quantization_config(folder, weight_format)
    console.print(f"{nbytes / 1e9:.1f} GB made and written in {time.perf_counter() - begin:.1f} s")
    return scale


def special_ids(vocab: int) -> dict[str, int | None]:
    """Return the fields of config.json for the special tokens of tools/models/filler_tokenizer.py."""
    return {"bos_token_id": None, "eos_token_id": vocab - 3, "pad_token_id": vocab - 4}


def random_tensors(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: str, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights for a residual stream of unit variance, and for logits that spread like a language model's."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith(GAINS):
            yield name, torch.ones(shape, dtype=dtype, device=device)
            continue
        # The residual stream has unit variance, and matmuls keep the variance of their input.
        std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": SPREAD / math.sqrt(shape[-1])}
        tensor = torch.empty(shape, dtype=dtype, device=device)
        yield name, tensor.normal_(0, std.get(name, 1 / math.sqrt(shape[-1])), generator=generator)


def write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = 2_000_000_000) -> int:
    """Write the weights and their index in files of at most ``shard_bytes`` (or one tensor); return the bytes.

    Four files are written at once, and others are not held. So a model may be larger than the memory of a device.
    """
    files: list[list[str]] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        written: list[Future[int]] = []
        for shard in _shards(tensors, shard_bytes):
            if len(written) >= _AT_ONCE:
                written[-_AT_ONCE].result()
            written.append(pool.submit(_write_shard, folder / str(len(files)), shard))
            files.append(list(shard))
        nbytes = sum(each.result() for each in written)
    places: dict[str, str] = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        (folder / str(i)).rename(folder / file)
        places |= dict.fromkeys(names, file)
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return nbytes


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[Weights]:
    shard: Weights = {}
    for name, tensor in tensors:
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _write_shard(path: Path, shard: Weights) -> int:
    dtypes = {name: tensor.dtype for name, tensor in shard.items()}
    with path.open("wb") as stream:
        stream.write(safetensors_header(dtypes, {name: tuple(tensor.shape) for name, tensor in shard.items()}))
        for tensor in shard.values():
            data = tensor.contiguous().view(torch.uint8).flatten()
            for part in data.split(_PART_BYTES):  # type: ignore[no-untyped-call]
                stream.write(part.cpu().numpy().data)
    return path.stat().st_size
