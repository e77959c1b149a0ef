"""Every binding between graph, engine, runtime and server: name, dtype, symbolic shape.

Graph builders declare their inputs and outputs from here, engines are checked against it when they open, and the
runtime allocates its buffers from it. Shapes mix integers and symbols:

=============  ==========================================================================
symbol         meaning
=============  ==========================================================================
batch          rows of this call, one per request
query          new tokens per row in this call; over a linear cache
rows           tokens per row that get logits
tokens         new tokens of a packed call, those of prompts included; over a paged cache
prompt_tokens  tokens of a packed call that belong to runs of prompts
prompts        runs of prompts in a packed call
blocks         blocks of a paged cache, as many as the memory has room for
window         drafted tokens per round (K); ``window+1`` rows are verified
entries        tokens of a request whose logits are adjusted
=============  ==========================================================================

Integers are properties of the engine: layers, heads, ``capacity`` (tokens a cache row can hold), ``vocab`` (width of
the logits) and ``words`` = ceil(vocab / 32).
"""

from dataclasses import dataclass
from typing import Any, Literal

from tandemrt.engines.binding import Binding, Dim
from tandemrt.engines.operators import SCHEMAS, Schema

CacheKind = Literal["linear", "paged"]
BLOCK_SIZE = 64  # tokens in one block of a paged cache


@dataclass(frozen=True)
class Contract:
    """What goes in, what comes out, and which outputs share memory with which input."""

    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    aliases: tuple[tuple[str, str], ...] = ()  # (output, input): same memory, updated in place

    def __getitem__(self, name: str) -> Binding:
        for binding in (*self.inputs, *self.outputs):
            if binding.name == name:
                return binding
        raise KeyError(name)

    def differences(self, other: "Contract") -> list[str]:
        """Say, one line each, where ``other`` departs from this contract. Empty means equal; order does not matter."""
        lines = []
        for kind, mine, theirs in (("input", self.inputs, other.inputs), ("output", self.outputs, other.outputs)):
            ours = {b.name: b for b in mine}
            found = {b.name: b for b in theirs}
            lines += [f"{kind} {ours[name]} is missing" for name in ours if name not in found]
            lines += [f"{kind} {found[name]} is not in the contract" for name in found if name not in ours]
            lines += [
                f"{kind} {found[n]} should be {ours[n]}" for n in ours if n in found and not _same(ours[n], found[n])
            ]
        return lines

    def to_json(self) -> dict[str, Any]:
        def rows(bindings: tuple[Binding, ...]) -> list[dict[str, Any]]:
            return [{"name": b.name, "dtype": b.dtype, "shape": list(b.shape)} for b in bindings]

        return {"inputs": rows(self.inputs), "outputs": rows(self.outputs), "aliases": [list(a) for a in self.aliases]}


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
) -> Contract:
    """The contract of a target or of an independent draft model.

    ``write_index`` counts the tokens of a row that are already in its cache: positions follow from it inside the
    graph, and rolling back is not advancing it. ``present_*`` is bound to the memory of ``past_*``.

    A *linear* cache has a row of ``capacity`` tokens for every row of the call: ``token_ids`` is a rectangle, and
    ``score_rows`` says which of a row's new tokens get logits.

    A *paged* one has blocks of BLOCK_SIZE tokens that all rows share: position p of row b lies at p % BLOCK_SIZE of
    block block_table[b, p // BLOCK_SIZE]. Its calls are packed (``packed``): ``score_rows`` says which tokens of the
    call get logits, counted from its first.

    Keys and values are held in ``kv_dtype``, None: in ``dtype``.

    A target whose draft reads its states gives ``features`` of every token, so many numbers wide.
    """
    paged = cache == "paged"
    fed: tuple[Dim, ...] = ("tokens",) if paged else ("batch", "query")
    shape: tuple[Dim, ...] = (
        ("blocks", kv_heads, BLOCK_SIZE, head_dim) if paged else ("batch", kv_heads, capacity, head_dim)
    )
    kinds = [f"{kind}.{layer}" for layer in range(layers) for kind in ("key", "value")]
    return Contract(
        inputs=(
            Binding("token_ids", "int64", fed),
            Binding("write_index", "int64", ("batch",)),
            Binding("score_rows", "int64", ("batch", "rows")),
            *(packed(table_width(capacity)) if paged else ()),
            *(Binding(f"past_{kind}", kv_dtype or dtype, shape) for kind in kinds),
        ),
        outputs=(
            Binding("logits", dtype, ("batch", "rows", vocab)),
            *((Binding("features", dtype, (*fed, features)),) if features else ()),
            *(Binding(f"present_{kind}", kv_dtype or dtype, shape) for kind in kinds),
        ),
        aliases=tuple((f"present_{kind}", f"past_{kind}") for kind in kinds),
    )


def draft_head(*, hidden: int, dtype: str, parallel: bool = False, further: bool = False, **sizes: Any) -> Contract:
    """The contract of a head that drafts from the target's states; ``sizes`` are those of ``decoder``.

    A token is fed with a state [hidden]: what ``fuse`` made of the target's features of the token before it,
    or, for a drafted one, ``next_states`` of the row that it was drafted from. A ``parallel`` head is fed masks in the
    place of drafted tokens, whose state it knows. Of layers that predict ``further`` on one behind the other, each
    gives ``next_states`` of every token that it is fed, which the next layer is fed with.
    """
    base = decoder(dtype=dtype, **sizes)
    fed = base["token_ids"].shape
    made = Binding("next_states", dtype, (*(fed if further else ("batch", "rows")), hidden))
    return Contract(
        (*base.inputs, Binding("states", dtype, (*fed, hidden))),
        (*base.outputs, *(() if parallel else (made,))),
        base.aliases,
    )


def fuse(*, features: int, hidden: int, dtype: str) -> Contract:
    """The contract of what makes a head's states of the target's features, for any number of tokens."""
    return Contract(
        (Binding("features", dtype, ("tokens", features)),), (Binding("states", dtype, ("tokens", hidden)),)
    )


def context(*, features: int, **sizes: Any) -> Contract:
    """The contract of what writes the target's ``features`` into the cache of a draft that reads them there.

    ``sizes`` are those of ``decoder``, whose places its tokens have: over a linear cache ``features`` are [batch,
    query, width], over a paged one those of a packed call.
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
    """The contract of a block draft; ``sizes`` are those of ``decoder``.

    A Markov head may read its ``row_states``, so many numbers wide: what is scored, of every scored token.
    """
    base = decoder(**sizes)
    more = (Binding("row_states", str(sizes["dtype"]), ("batch", "rows", row_states)),) if row_states else ()
    return Contract(base.inputs, (*base.outputs, *more), base.aliases)


def markov(*, vocab: int, dtype: str, row_states: int = 0, memory: int = 0) -> Contract:
    """The contract of a Markov head: logits of one row of a block, given the token in front of what it foresees.

    ``row_logits`` and ``row_states`` are the block's (``block``). A head with a ``memory``, so many numbers, gives it
    on from row to row; a block begins with zeros.
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
    """Where the tokens of a packed call stand, by tables of ``max_blocks`` blocks.

    First come the windows of ``batch`` rows, at least one, equally long (0 tokens is a length), one behind the other.
    Then come ``prompt_tokens`` tokens: runs of prompts, one behind the other, and padding. ``prompt_rows`` says which
    run a token belongs to; -1 is padding, which is written nowhere, and what is computed for it means nothing. Without
    runs there is no padding either. Run r has the tokens from ``prompt_starts[r]`` up to ``prompt_starts[r + 1]``,
    counted from the first prompt token, where the first run begins; no tokens is a length. ``prompt_index`` counts the
    tokens of a run's text that are already in its cache, ``prompt_table`` lists its blocks.

    Prompts are written and attend before windows are written, so a text may be in one call as both: the window then
    stands behind the run.
    """
    operator = SCHEMAS["window_attention"]
    names = ("block_table", "prompt_rows", "prompt_starts", "prompt_index", "prompt_table")
    return operator.resolved(tuple(operator[name] for name in names), dtype="", max_blocks=max_blocks)


def verify(*, vocab: int, dtype: str, draft_probs: bool) -> Contract:
    """The contract of the verification engine: mask, filter, draw and accept for a whole batch.

    ``dtype`` is that of the target's logits. ``draft_probs`` adds the laws the drafts were drawn from, which only
    the *rejection* rule reads.
    """
    operator = SCHEMAS["verify_draft_probs" if draft_probs else "verify_draft"]
    logits, *rest = operator.inputs
    return _resolved(operator, (logits, SCHEMAS["token_bitmask"]["bitmask"], *rest), operator.outputs, vocab, dtype)


def adjust(*, vocab: int, dtype: str) -> Contract:
    """The contract of the engine that biases and penalizes the target's logits in place, before they are verified.

    A request lists its first ``entry_len`` columns: tokens, how often each is in the output, whether it is in the
    prompt, and its bias. A request that lists none is left alone.
    """
    operator = SCHEMAS["adjust_logits"]
    return _resolved(operator, operator.inputs, operator.outputs, vocab, dtype)


def propose(*, vocab: int, dtype: str, draft_probs: bool, target_ids: bool = False) -> Contract:
    """The contract of the drafting engine: one drafted token per row from the draft's last logits row.

    ``vocab`` is the width of the draft's logits, and of its laws. ``target_ids``: it knows a part of the target's
    vocabulary, and is told the target's id of each of its tokens, ascending.
    """
    operator = SCHEMAS["sample_draft"]
    inputs = tuple(b for b in operator.inputs if target_ids or b.name != "target_ids")
    outputs = tuple(b for b in operator.outputs if draft_probs or b.name != "draft_probs")
    return _resolved(operator, inputs, outputs, vocab, dtype)


def logits_width(contract: Contract) -> int:
    """How many values a row of the engine's logits has."""
    return int(contract["logits"].shape[2])


def blocks_of(tokens: int) -> int:
    """Blocks of a paged cache that hold ``tokens`` tokens of one row."""
    return -(-tokens // BLOCK_SIZE)


def table_width(capacity: int) -> int:
    """Blocks that a row's table has room for: an even number, because cuDNN looks two up at a time."""
    return -(-blocks_of(capacity) // 2) * 2


def mask_words(vocab: int) -> int:
    """int32 words in one mask row: bit ``token % 32`` of word ``token // 32`` allows that token."""
    return (vocab + 31) // 32


def _resolved(
    operator: Schema, inputs: tuple[Binding, ...], outputs: tuple[Binding, ...], vocab: int, dtype: str
) -> Contract:
    """The contract of an engine that is an operator; inputs may come from another one in front of it."""
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
