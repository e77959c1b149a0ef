"""Block hashes for prefix caching: each covers the tokens of its block and all tokens before it."""

from collections.abc import Sequence
from hashlib import sha256
from struct import pack

from tandemrt.engines.contract.contract import BLOCK_SIZE

_ID_BYTES = 8


class BlockHashes:
    """The hashes of the full blocks of one growing text, each computed once.

    A hash is SHA-256 over the previous block's hash and BLOCK_SIZE token ids, so equal hashes mean equal texts up to
    the end of the block. The first hash is chained to ``digest`` (of the bundle, because other weights give other keys
    and values) and to ``salt``. Texts with different salts never share a block, so timing reveals nothing about the
    text of another salt. All requests without a salt (None) share blocks.

    ``undrafted``: the request never drafts, so only the target's cache has its blocks. Their hashes differ from those
    of other requests, so that a draft model never relies on blocks that it has not processed.

    ``lookahead``: on how many tokens after a block its cache entries depend: 1 for draft heads, which combine the state
    of a position with the next token. The hash covers these tokens.

    ``images``: first token, end and digest of each image of the text. A hash covers the images of its block.
    """

    def __init__(
        self,
        digest: str,
        salt: str | None = None,
        lookahead: int = 0,
        *,
        undrafted: bool = False,
        images: Sequence[tuple[int, int, bytes]] = (),
    ) -> None:
        self._images = tuple(images)
        self.lookahead = lookahead
        salted = b"" if salt is None else b"\0" + salt.encode("utf-8", "surrogatepass")
        root = digest.encode() + b"\1" * undrafted + salted
        self._root = sha256(root).digest()
        self._hashes: list[bytes] = []

    def first(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """Return the hashes of the first ``blocks`` blocks. ``tokens`` must begin with those of earlier calls."""
        begin = len(self._hashes)
        if begin < blocks:
            block, own = _ID_BYTES * BLOCK_SIZE, _ID_BYTES * self.lookahead
            ids = tokens[begin * BLOCK_SIZE : blocks * BLOCK_SIZE + self.lookahead]
            values = memoryview(pack(f"{len(ids)}q", *ids))  # four times as fast as an array of them
            before = self._hashes[-1] if begin else self._root
            for at in range(0, (blocks - begin) * block, block):
                before = sha256(before + values[at : at + block + own] + self._seen(len(self._hashes))).digest()
                self._hashes.append(before)
        return self._hashes[:blocks]

    def _seen(self, block: int) -> bytes:
        """Return the digests of the images on which the cache entries of ``block`` depend, besides earlier blocks."""
        begin, end = block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE + self.lookahead
        return b"".join(digest for start, stop, digest in self._images if start < end and stop > begin)
