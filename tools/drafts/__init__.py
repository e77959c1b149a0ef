"""Train drafts on text that their target generates: EAGLE-3 and P-EAGLE heads, MTP layers, PARD and DFlash drafts."""
