"""Texts of single tokens, for logprobs. A token may be a part of a character, so it has bytes too."""

from typing import NamedTuple

from tandemrt.engines.text.tokenizer import Tokenizer


class TokenText(NamedTuple):
    """The text of a token and its bytes. A control token has a name and no bytes: it is no part of the text."""

    text: str
    utf8: bytes

    @property
    def characters(self) -> int:
        """Number of characters that begin in the token."""
        return sum(byte & 0xC0 != 0x80 for byte in self.utf8)


def token_text(tokenizer: Tokenizer, token: int, *, first: bool = False) -> TokenText:
    """Return the text of a token. ``first``: at the beginning of a text, where some decoders drop a blank.

    Bytes that are no text are written as OpenAI does: ``bytes:\\xf0\\x9f``.
    """
    utf8 = tokenizer.token_bytes(token)
    if not utf8:
        return TokenText(tokenizer.decode([token]), b"")
    if first and utf8.startswith(b" ") and not tokenizer.decode([token]).startswith(" "):
        utf8 = utf8[1:]
    try:
        return TokenText(utf8.decode(), utf8)
    except UnicodeDecodeError:
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8), utf8)
