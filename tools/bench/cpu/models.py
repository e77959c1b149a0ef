"""One model for all engines: a checkpoint, and its conversion for each engine."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tools.bench.cpu.environments import Environment
from tools.bench.cpu.gguf import Form, write_gguf
from tools.models.filler_tokenizer import write_tokenizer
from tools.models.random_checkpoint import Dtype, Family, Size, vocab_of, write_checkpoint

LENGTH, BATCH, WINDOW = 1024, 8, 4


@dataclass(frozen=True)
class Entrant:
    """An engine with one form of the model. ``form``: the engine's name for it. ``quantized``: below float32."""

    engine: str
    form: str

    @property
    def quantized(self) -> bool:
        return self.form not in ("float32", "fp32", "f32", "F32")

    def __str__(self) -> str:
        return f"{self.engine} {self.form}"


ENTRANTS = (
    Entrant("tandemrt", "float32"),
    Entrant("genai", "fp32"),
    Entrant("openvino", "f32"),
    Entrant("llama_cpp", "F32"),
    Entrant("transformers", "float32"),
    Entrant("tandemrt", "bfloat16"),
    Entrant("tandemrt", "int8"),
    Entrant("tandemrt", "int4"),
    Entrant("genai", "int4"),
    Entrant("openvino", "bf16"),
    Entrant("openvino", "Q8_0"),
    Entrant("llama_cpp", "Q8_0"),
    Entrant("llama_cpp", "Q4_1"),
)


def gguf_entrants(file: Path) -> tuple[Entrant, ...]:
    """Return the engines that read a GGUF file as it is."""
    return Entrant("tandemrt", file.name), Entrant("llama_cpp", file.name)


def random_checkpoint(folder: Path) -> Path:
    """Write a checkpoint of SmolLM2-135M's shape with random weights, once."""
    if not (folder / "tokenizer.json").is_file():
        write_checkpoint(folder, Family.LLAMA, Size.SMOLLM2, dtype=Dtype.FLOAT16)  # exact in every engine
        write_tokenizer(folder, vocab_of(Family.LLAMA, Size.SMOLLM2))
    return folder


def make(entrant: Entrant, environment: Environment, checkpoint: Path, folder: Path) -> str:
    """Return the model for the worker of ``entrant``, converted in ``folder`` if missing.

    ``checkpoint``: a folder, or a file for ``gguf_entrants``. Raises OSError or ValueError.
    """
    converters = {"tandemrt": _bundle, "genai": _genai, "openvino": _gguf, "llama_cpp": _gguf}
    if entrant.engine not in converters:
        return str(checkpoint)
    name = f"{checkpoint.resolve().name}-{entrant.engine}-{entrant.form}"
    return converters[entrant.engine](entrant.form, environment, checkpoint.resolve(), folder / name)


def _bundle(form: str, environment: Environment, checkpoint: Path, out: Path) -> str:
    recipe = out.with_suffix(".toml")
    recipe.write_text(
        f'name = "{out.name}"\n[target]\ncheckpoint = "{checkpoint}"\n'
        f'[draft]\nkind = "ngram"\nnum_draft_tokens = {WINDOW}\nngram_min = 2\nngram_max = 3\n'
        f'[limits]\nbatch = {BATCH}\nlength = {LENGTH}\n[backend]\nname = "onnxruntime-cpu"\n'
    )
    code = "from tandemrt.cli import main; main()"
    dtype = "int8" if checkpoint.is_file() else form
    build = ["export", "build", str(recipe), "--out", str(out), "--dtype", dtype]
    _run([str(environment.python), "-c", code, *build])
    return str(out)


def _genai(form: str, environment: Environment, checkpoint: Path, out: Path) -> str:
    if not (out / "genai_config.json").is_file():
        builder = ["-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(out)]
        _run([str(environment.python), *builder, "-p", form, "-e", "cpu", "-c", str(out.with_suffix(".cache"))])
    return str(out)


def _gguf(form: str, _environment: Environment, checkpoint: Path, out: Path) -> str:
    if checkpoint.is_file():
        return str(checkpoint)
    stored = cast("Form", form if form[0] in "QF" else "F16")  # OpenVINO cannot read float32
    file = out.parent / f"{checkpoint.name}-{stored}.gguf"
    if not file.is_file():
        write_gguf(checkpoint, file, stored)
    return f"{file}:f32" if form == "f32" else str(file)


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        lines = [line for line in (ran.stderr or ran.stdout).strip().splitlines() if line.strip()]
        raise OSError((lines or ["it failed without a word"])[-1][:200])
