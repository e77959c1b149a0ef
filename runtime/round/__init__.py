"""The round: propose, score, fill, verify, commit. ``loop`` is the file to read first."""
