"""How to install an extra of this project, for error messages."""


def pip_install(*extras: str) -> str:
    """Return the commands that install one of ``extras``: in a checkout, and from a package index."""
    checkout, index = (" or ".join(f"'{name}[{extra}]'" for extra in extras) for name in (".", "tandemrt"))
    return f"pip install {checkout} in a checkout, else pip install {index}"
