"""The command line with all commands, built once."""

from tandemrt.cli import application

app = application()
