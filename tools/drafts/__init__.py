"""Drafts trained on text that their target writes: EAGLE-3 heads, PARD and DFlash drafts, in torch."""
