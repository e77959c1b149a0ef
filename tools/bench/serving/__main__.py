"""Measure servers under load.

    python -m tools.bench.serving load http://127.0.0.1:8000/v1 --clients 1,16,64
    python -m tools.bench.serving load http://127.0.0.1:8000/v1 --start 'tandemrt serve my-model' --rates 2,8
    python -m tools.bench.serving compare openai engines/built/demo --requests 256 --concurrency 64

``load`` drives any server that speaks OpenAI's protocol, several in one run. ``compare`` measures a server against the
Python API; ``triton`` needs the environment of ``make test-serve``.
"""

import typer

from tools.bench.serving.compare import compare
from tools.bench.serving.load import load

app = typer.Typer(help="Measure servers under load.", no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(load)
app.command()(compare)

if __name__ == "__main__":
    app()
