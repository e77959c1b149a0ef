"""Contracts of engines: the name, dtype and symbolic shape of every input and output.

Graph builders declare inputs and outputs from a contract, engines are checked against it when they open, and the
runtime allocates buffers from it. Shapes mix integers and symbols:

=============  ==========================================================================
symbol         meaning
=============  ==========================================================================
batch          rows of this call, one per request
query          new tokens per row in this call; over a linear cache
rows           tokens per row that get logits
tokens         new tokens of a packed call, those of prompts included; over a paged cache
prompt_tokens  tokens of a packed call that belong to runs of prompts
prompts        runs of prompts in a packed call
blocks         blocks of a paged cache, as many as the memory holds
slots          slots of a paged cache, each of which holds the states of one request's recurrent layers
window         drafted tokens per round (K); ``window+1`` rows are verified
entries        tokens of a request whose logits are adjusted
patches        patches of one image
image_tokens   tokens that stand for one image, or for the images of a call and one row of zeros
=============  ==========================================================================

Integers are properties of the engine: layers, heads, ``capacity`` (tokens a cache row can hold), ``vocab`` (width of
the logits) and ``words`` = ceil(vocab / 32).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from tandemrt.engines.contract.binding import Binding, Dim
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.contract.operators import SCHEMAS, Schema
from tandemrt.engines.contract.vision import VisionEntry

CacheKind = Literal["linear", "paged"]
BLOCK_SIZE = 64  # tokens in one block of a paged cache
VISION_DTYPE = "float32"  # of a vision tower: it runs once per image, and its values reach far


def num_snapshots(slots: int, cache: CacheKind) -> int:
    """Return how many copies of the states of a slot the prefix cache holds. On a GPU, each may take 100 MB."""
    return 2 * slots if cache == "linear" else 2 + slots // 4


@dataclass(frozen=True)
class Contract:
    """Inputs, outputs, and the outputs that share memory with an input."""

    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    aliases: tuple[tuple[str, str], ...] = ()  # (output, input): same memory, updated in place

    def __getitem__(self, name: str) -> Binding:
        for binding in (*self.inputs, *self.outputs):
            if binding.name == name:
                return binding
        raise KeyError(name)

    def differences(self, other: "Contract") -> list[str]:
        """Return one line for each difference of ``other`` from this contract. Order does not matter."""
        lines = []
        for kind, mine, theirs in (("input", self.inputs, other.inputs), ("output", self.outputs, other.outputs)):
            wanted = {b.name: b for b in mine}
            actual = {b.name: b for b in theirs}
            lines += [f"{kind} {wanted[name]} is missing" for name in wanted if name not in actual]
            lines += [f"{kind} {actual[name]} is not in the contract" for name in actual if name not in wanted]
            lines += [
                f"{kind} {actual[n]} should be {wanted[n]}"
                for n in wanted
                if n in actual and not _same(wanted[n], actual[n])
            ]
        return lines

    def to_json(self) -> dict[str, Any]:
        def rows(bindings: tuple[Binding, ...]) -> list[dict[str, Any]]:
            return [{"name": b.name, "dtype": b.dtype, "shape": list(b.shape)} for b in bindings]

        return {"inputs": rows(self.inputs), "outputs": rows(self.outputs), "aliases": [list(a) for a in self.aliases]}


@dataclass(frozen=True)
class RecurrentState:
    """What a recurrent layer keeps per slot in place of keys and values.

    ``state``: shape of its float32 state; () for a layer that is only a convolution. ``width``: size of one token's
    inputs, of which it keeps the most recent.
    """

    state: tuple[int, ...]
    width: int


def decoder(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    vocab: int,
    dtype: str,
    cache: CacheKind = "linear",
    kv_dtype: str | None = None,
    features: int = 0,
    heads: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    recurrent: Mapping[int, RecurrentState] = MappingProxyType({}),
    history: int = 0,
    latent: bool = False,
    position_rows: int = 0,
    image_width: int = 0,
    image_ends: bool = False,
) -> Contract:
    """Return the contract of a target or of an independent draft model.

    ``write_index`` counts the tokens that a row's cache already holds. The graph derives positions from it. Rejected
    tokens are rolled back by not advancing it. ``present_*`` is bound to the memory of ``past_*``.

    ``position_rows``: with 3, the input ``positions`` has the position of each token in time, height and width for the
    rotary embedding, below ``capacity``; cache entries and masks still follow from ``write_index``. 0: no such input.

    ``image_width``: width of the states of an image token, outputs of ``vision``; 0: the model reads no images.
    ``image_rows`` has the row of ``image_states`` that a token takes in place of its embedding. Row 0 is zeros and
    stands for tokens of text, which keep theirs.

    ``image_ends``: the input of this name has the position after the image that a token belongs to, and 0 for text. The
    tokens of an image attend to each other, also to later ones; all of them are in the cache, or in the same call.

    A *linear* cache has a row of ``capacity`` tokens per row of the call: ``token_ids`` is a rectangle, and
    ``score_rows`` selects the new tokens of a row that get logits.

    A *paged* cache has blocks of BLOCK_SIZE tokens that all rows share: position p of row b is at p % BLOCK_SIZE of
    block block_table[b, p // BLOCK_SIZE]. Its calls are packed (``packed``): ``score_rows`` selects the tokens of the
    call that get logits, counted from the first.

    ``kv_dtype``: dtype of keys and values; None: ``dtype``.

    ``heads``: the KV heads and the head size of layers where they are not ``kv_heads`` and ``head_dim``.

    ``latent``: a key is a latent vector for all heads, and the value as well, so there are no caches of values.

    ``features``: width of the hidden states that a target outputs per token for its draft; 0: no such output.

    ``recurrent`` layers keep no keys and values unless ``heads`` names them. They keep the state after the first
    ``state_index`` tokens of a row, and the inputs of its tokens, that of position p at p % ``history``. A call replays
    the tokens between ``state_index`` and ``write_index``, and leaves the state after ``commit_index`` tokens; see
    ``linear_attention`` (docs/operators.md). With a paged cache a call gets the states of all slots: row r is slot r,
    and ``prompt_slots`` and ``prompt_state_index`` are those of the prompt runs.
    """
    paged = cache == "paged"
    fed: tuple[Dim, ...] = ("tokens",) if paged else ("batch", "query")
    slots = "slots" if paged else "batch"
    kinds = ("key",) if latent else ("key", "value")
    caches: dict[str, tuple[str, tuple[Dim, ...]]] = {}
    for layer in range(layers):
        if layer not in recurrent or layer in heads:
            shape = _cache_shape(cache, *heads.get(layer, (kv_heads, head_dim)), capacity)
            caches |= {f"{kind}.{layer}": (kv_dtype or dtype, shape) for kind in kinds}
        if layer not in recurrent:
            continue
        if recurrent[layer].state:
            caches[f"state.{layer}"] = "float32", (slots, *recurrent[layer].state)
        caches[f"recent.{layer}"] = dtype, (slots, history, recurrent[layer].width)
    indices = ("state_index", "commit_index") if recurrent else ()
    run_indices = ("prompt_slots", "prompt_state_index") if recurrent and paged else ()
    return Contract(
        inputs=(
            Binding("token_ids", "int64", fed),
            Binding("write_index", "int64", ("batch",)),
            *((Binding("positions", "int64", (position_rows, *fed)),) if position_rows else ()),
            *(_images(fed, image_width, dtype) if image_width else ()),
            *((Binding("image_ends", "int64", fed),) if image_ends else ()),
            *(Binding(index, "int64", ("batch",)) for index in indices),
            Binding("score_rows", "int64", ("batch", "rows")),
            *(packed(table_width(capacity)) if paged else ()),
            *(Binding(index, "int64", ("prompts",)) for index in run_indices),
            *(Binding(f"past_{name}", *each) for name, each in caches.items()),
        ),
        outputs=(
            Binding("logits", dtype, ("batch", "rows", vocab)),
            *((Binding("features", dtype, (*fed, features)),) if features else ()),
            *(Binding(f"present_{name}", *each) for name, each in caches.items()),
        ),
        aliases=tuple((f"present_{name}", f"past_{name}") for name in caches),
    )


def _cache_shape(cache: CacheKind, kv_heads: int, head_dim: int, capacity: int) -> tuple[Dim, ...]:
    if cache == "paged":
        return "blocks", kv_heads, BLOCK_SIZE, head_dim
    return "batch", kv_heads, capacity, head_dim


def _images(fed: tuple[Dim, ...], width: int, dtype: str) -> tuple[Binding, ...]:
    return Binding("image_rows", "int64", fed), Binding("image_states", dtype, ("image_tokens", width))


def vision(entry: VisionEntry, width: int) -> Contract:
    """Return the contract of a vision tower, always in float32: one image in patches, the states of its tokens out.

    ``pixels``: the colours of each patch. ``positions``: its row and column. ``corners``: rows of a table of learned
    positions that it adds, with ``corner_weights``. ``windows`` has the patches of each window, ``window_mask`` 1 for
    those and 0 for the padding after them, and ``window_places`` the place of each patch in all windows. ``width``: see
    ``image_width`` of ``decoder``. ``padding`` is -1 for patches that no patch attends to, and 0 for others.
    """
    return Contract(
        (
            Binding("pixels", "uint8", ("patches", 3 * entry.patch_size**2)),
            Binding("positions", "int64", ("patches", 2)),
            *([Binding("padding", VISION_DTYPE, ("patches",))] if entry.padded else []),
            *(_corners() if entry.grid_side else ()),
            *(_windows(entry.window_patches) if entry.window_side else ()),
        ),
        (Binding("image_states", VISION_DTYPE, ("image_tokens", width)),),
    )


def _corners() -> tuple[Binding, ...]:
    dims = ("patches", "corners")
    return Binding("corners", "int64", dims), Binding("corner_weights", VISION_DTYPE, dims)


def _windows(patches: int) -> tuple[Binding, ...]:
    dims, places = ("windows", patches), Binding("window_places", "int64", ("patches",))
    return Binding("windows", "int64", dims), Binding("window_mask", "int32", dims), places


def image_token_bytes(target: Contract) -> int:
    """Return the bytes of the states of an image token that a target with this contract reads."""
    states = target["image_states"]
    return int(states.shape[-1]) * BYTES[states.dtype]


def draft_head(*, hidden: int, dtype: str, parallel: bool = False, further: bool = False, **sizes: Any) -> Contract:
    """Return the contract of a draft head that reads the target's states; ``sizes`` are those of ``decoder``.

    A token is fed with a state [hidden]: the output of ``fuse`` for the target's features of the previous token, or,
    for a drafted token, ``next_states`` of the row that it was drafted from. A ``parallel`` head is fed masks in place
    of drafted tokens; their state is in the graph. Chained layers (``further``, MTP) output ``next_states`` of every
    token for the next layer.
    """
    base = decoder(dtype=dtype, **sizes)
    fed = base["token_ids"].shape
    next_states = Binding("next_states", dtype, (*(fed if further else ("batch", "rows")), hidden))
    return Contract(
        (*base.inputs, Binding("states", dtype, (*fed, hidden))),
        (*base.outputs, *(() if parallel else (next_states,))),
        base.aliases,
    )


def assistant(
    *,
    caches: Mapping[int, tuple[int, int]],
    hidden: int,
    capacity: int,
    vocab: int,
    dtype: str,
    cache: CacheKind = "linear",
) -> Contract:
    """Return the contract of a draft head that reads keys and values of its target, and has none.

    ``caches``: the KV heads and the head size of those layers of the target. ``write_index`` is the position of the
    text's newest token, whose keys and values are not cached yet, for all tokens of a draft window. Operators over a
    paged cache update it in place, here by nothing.
    """
    sizes: dict[str, Any] = {"capacity": capacity, "vocab": vocab, "dtype": dtype, "cache": cache}
    base = draft_head(hidden=hidden, layers=0, kv_heads=0, head_dim=0, **sizes)
    shapes = {
        f"{kind}.{layer}": _cache_shape(cache, *heads, capacity)
        for layer, heads in caches.items()
        for kind in ("key", "value")
    }
    updated = shapes if cache == "paged" else {}
    return Contract(
        (*base.inputs, *(Binding(f"past_{name}", dtype, shape) for name, shape in shapes.items())),
        (*base.outputs, *(Binding(f"present_{name}", dtype, shape) for name, shape in updated.items())),
        aliases=tuple((f"present_{name}", f"past_{name}") for name in updated),
    )


def fuse(*, features: int, hidden: int, dtype: str) -> Contract:
    """Return the contract of the engine that projects target features to a head's states, for any number of tokens."""
    return Contract(
        (Binding("features", dtype, ("tokens", features)),), (Binding("states", dtype, ("tokens", hidden)),)
    )


def context(*, features: int, **sizes: Any) -> Contract:
    """Return the contract of the engine that writes the target's ``features`` into a block draft's KV cache.

    ``sizes`` are those of ``decoder``. ``features`` are [batch, query, width] over a linear cache, and [tokens, width]
    of a packed call over a paged one.
    """
    base = decoder(**sizes)
    fed = base["token_ids"].shape
    return Contract(
        (
            Binding("features", str(sizes["dtype"]), (*fed, features)),
            *(binding for binding in base.inputs if binding.name not in ("token_ids", "score_rows")),
        ),
        tuple(binding for binding in base.outputs if binding.name != "logits"),
        base.aliases,
    )


def block(*, row_states: int = 0, **sizes: Any) -> Contract:
    """Return the contract of a block draft; ``sizes`` are those of ``decoder``.

    ``row_states``: width of the states of scored tokens that a Markov head reads; 0: no such output.
    """
    base = decoder(**sizes)
    more = (Binding("row_states", str(sizes["dtype"]), ("batch", "rows", row_states)),) if row_states else ()
    return Contract(base.inputs, (*base.outputs, *more), base.aliases)


def markov(*, vocab: int, dtype: str, row_states: int = 0, memory: int = 0) -> Contract:
    """Return the contract of a Markov head: logits of one row of a block, given the token before the predicted one.

    ``row_logits`` and ``row_states`` are outputs of ``block``. ``memory``: width of a state that the head passes from
    row to row, zeros at the start of a block; 0: none.
    """
    states = (Binding("row_states", dtype, ("batch", 1, row_states)),) if row_states else ()
    remembered = (Binding("memory", dtype, ("batch", memory)),) if memory else ()
    return Contract(
        (
            Binding("token_ids", "int64", ("batch",)),
            Binding("row_logits", dtype, ("batch", 1, vocab)),
            *states,
            *remembered,
        ),
        (
            Binding("logits", dtype, ("batch", 1, vocab)),
            *(Binding(f"next_{binding.name}", dtype, binding.shape) for binding in remembered),
        ),
    )


def packed(max_blocks: int) -> tuple[Binding, ...]:
    """Return the bindings that locate the tokens of a packed call, with tables of ``max_blocks`` blocks.

    The call begins with the windows of ``batch`` rows (at least one row), all of one length, which may be 0. Then come
    ``prompt_tokens`` tokens: runs of prompts, then padding. ``prompt_rows`` is the run of each token; -1 is padding,
    which is not written to the cache and whose results are undefined. A call without runs has no padding. Run r has the
    tokens from ``prompt_starts[r]`` up to ``prompt_starts[r + 1]``, counted from the first prompt token; a run may be
    empty. ``prompt_index`` counts the tokens of a run's text that its cache already holds; ``prompt_table`` lists its
    blocks.

    Prompts are written and attend before windows are written. One text may therefore be in a call as a run followed by
    a window.
    """
    operator = SCHEMAS["window_attention"]
    names = ("block_table", "prompt_rows", "prompt_starts", "prompt_index", "prompt_table")
    return operator.resolved(tuple(operator[name] for name in names), dtype="", max_blocks=max_blocks)


def verify(*, vocab: int, dtype: str, draft_probs: bool) -> Contract:
    """Return the contract of the verification engine: mask, filter, sample and accept for a batch.

    ``dtype`` is that of the target's logits. ``draft_probs`` adds the distributions that the drafts were sampled from,
    which only the *rejection* rule reads.
    """
    operator = SCHEMAS["verify_draft_probs" if draft_probs else "verify_draft"]
    logits, *rest = operator.inputs
    return _resolved(operator, (logits, SCHEMAS["token_bitmask"]["bitmask"], *rest), operator.outputs, vocab, dtype)


def adjust(*, vocab: int, dtype: str) -> Contract:
    """Return the contract of the engine that adds biases and penalties to the target's logits in place.

    The first ``entry_len`` columns of a request's row are tokens with their count in the output, whether they are in
    the prompt, and their bias. A row with entry_len 0 is not changed.
    """
    operator = SCHEMAS["adjust_logits"]
    return _resolved(operator, operator.inputs, operator.outputs, vocab, dtype)


def propose(*, vocab: int, dtype: str, draft_probs: bool, target_ids: bool = False) -> Contract:
    """Return the contract of the drafting engine: one drafted token per row from the draft's last logits row.

    ``vocab`` is the width of the draft's logits and distributions. ``target_ids``: the draft covers a part of the
    target's vocabulary, and an input has the target's id of each of its tokens, ascending.
    """
    operator = SCHEMAS["sample_draft"]
    inputs = tuple(b for b in operator.inputs if target_ids or b.name != "target_ids")
    outputs = tuple(b for b in operator.outputs if draft_probs or b.name != "draft_probs")
    return _resolved(operator, inputs, outputs, vocab, dtype)


def logits_width(contract: Contract) -> int:
    """Return the width of the engine's logits."""
    return int(contract["logits"].shape[2])


def blocks_of(tokens: int) -> int:
    """Return the blocks of a paged cache that hold ``tokens`` tokens of one row."""
    return -(-tokens // BLOCK_SIZE)


def table_width(capacity: int) -> int:
    """Return the entries of a row's block table: an even number, because cuDNN reads two at a time."""
    return -(-blocks_of(capacity) // 2) * 2


def _resolved(
    operator: Schema, inputs: tuple[Binding, ...], outputs: tuple[Binding, ...], vocab: int, dtype: str
) -> Contract:
    """Return the contract of an engine that is one operator, perhaps with an input of a preceding operator."""
    sizes = {"vocab": vocab, "words": mask_words(vocab)}
    return Contract(
        operator.resolved(inputs, dtype=dtype, **sizes),
        operator.resolved(outputs, dtype=dtype, **sizes),
        tuple(operator.in_place.items()),
    )


def _same(mine: Binding, theirs: Binding) -> bool:
    # Symbols may be renamed by a compiler (or come back as -1); ranks and integers may not differ.
    if mine.dtype != theirs.dtype or len(mine.shape) != len(theirs.shape):
        return False
    pairs = zip(mine.shape, theirs.shape, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int) and b != -1)
