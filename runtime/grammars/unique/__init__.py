"""Enforce ``uniqueItems``, which llguidance lacks: mask rows without the tokens that would repeat an item.

``places`` finds the arrays with unique items in a schema, ``reader`` follows the text of a value byte by byte,
``token_index`` finds the tokens that may matter, and ``matcher`` combines them with another matcher.
"""
