"""The ``tandemrt`` commands that use a bundle."""
