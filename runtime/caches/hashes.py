"""What names the content of a block of a cache: a hash of its tokens and of all tokens before them."""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from tandemrt.engines.contract import BLOCK_SIZE


class BlockHashes:
    """The hashes of the full blocks of one growing text, each computed once.

    A hash is SHA-256 over the hash of the block before and the BLOCK_SIZE token ids, so equal hashes mean equal texts
    up to the end of the block. The first one is chained to ``digest`` (of the bundle: other weights, other keys and
    values) and to ``salt``: texts with different salts never share a block, and so cannot tell by their timing what
    the other one was. None is a salt of its own, shared by all who give none.

    ``undrafted``: only the target's cache holds these blocks, because the request never drafts. They have names of
    their own, so that no draft model goes on behind what it was not fed.

    ``behind`` is how many tokens behind a block what the caches hold of it depends on: 1 where a draft head pairs a
    token with the state of the one before. They are part of its name.
    """

    def __init__(self, digest: str, salt: str | None = None, behind: int = 0, *, undrafted: bool = False) -> None:
        self.behind = behind
        salted = b"" if salt is None else b"\0" + salt.encode("utf-8", "surrogatepass")
        root = digest.encode() + b"\1" * undrafted + salted
        self._root = sha256(root).digest()
        self._hashes: list[bytes] = []

    def first(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """Return the hashes of the first ``blocks`` blocks of ``tokens``, the text that it was asked of before."""
        for at in range(len(self._hashes), blocks):
            block = array("q", tokens[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE + self.behind])
            self._hashes.append(sha256((self._hashes[-1] if at else self._root) + block.tobytes()).digest())
        return self._hashes[:blocks]
