"""The round: propose, fill, verify, commit. ``loop`` is the file to read first."""
