"""The size of mask rows. A worker process imports this without the records of the contract, which take longer."""


def mask_words(vocab: int) -> int:
    """Return the int32 words of a mask row: bit ``token % 32`` of word ``token // 32`` allows that token."""
    return (vocab + 31) // 32
