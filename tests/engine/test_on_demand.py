"""A checkpoint without a recipe: its default recipe, and the bundle that is built once and found again."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.options.build_listener import SILENT
from tandemrt.engines.options.build_options import NO_CHOICES, BuildOptions
from tandemrt.engines.recipe.backends import CPU, CUDA
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadBundle, BadCheckpoint, BadRequest
from tandemrt.export.bundle import sources
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.cached_build import write_default_recipe
from tandemrt.export.bundle.default_recipe import LEAST_LENGTH, default_recipe
from tandemrt.export.bundle.machine import Machine
from tandemrt.export.bundle.sources import CheckpointSource, recipe_name
from tandemrt.plugins.onnxruntime.custom_operators import library
from tests.engine.gguf_files import write_gguf
from tests.makers import tiny_checkpoint, write_recipe

GB = 10**9
# Builds a model and prints the title of every step, then the folder. Its own steps wait for a file.
BUILDER = """
import sys, time
from pathlib import Path
from tandemrt.engines.options.build_options import NO_CHOICES
from tandemrt.export.cli.console_build import find_or_build
from tandemrt.export.cli.progress import ConsoleListener
def begin(listener, title):
    print(title, flush=True)
    while not title.startswith("Wait") and not Path(sys.argv[2]).exists():
        time.sleep(0.01)
ConsoleListener.begin = begin
print(find_or_build(sys.argv[1], NO_CHOICES))
"""
PARAMS = SamplingParams(max_tokens=8, seed=1)
# Runs the command line, then prints the libraries that only a build needs.
COMMAND = """
import atexit, sys
slow = {"gguf", "onnx", "onnx_ir", "pygments", "safetensors", "torch", "transformers"}
atexit.register(lambda: print("imported", sorted(slow & sys.modules.keys())))
from tandemrt.cli import main
main()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("on_demand") / "Tiny-Model", max_length=4000)


@pytest.fixture(scope="module")
def kernels() -> Path:
    """The folder of the compiled kernels in the user's cache."""
    library_file = library()
    assert library_file is not None
    return library_file.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where ``run`` runs commands."""
    return tmp_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Path) -> Path:
    """A cache without models. Its kernels are compiled, because processes that a test starts would do that again."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / kernels.name).symlink_to(kernels)
    monkeypatch.setenv("TANDEMRT_CACHE", str(folder))
    return folder


def recipe_of(folder: Path, machine: Machine, options: BuildOptions = NO_CHOICES) -> dict:
    return tomllib.loads(default_recipe(folder, "tiny", str(folder), options, machine))


def built(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "bundles").glob("*") if path.is_dir())


def test_a_checkpoint_is_built_once_and_found_again(checkpoint: Path, cache: Path, capfd) -> None:
    with LLM(checkpoint, dtype="float32", threads=1) as llm:
        assert (llm.bundle.name, llm.bundle.draft.kind, llm.bundle.limits.length) == ("tiny-model", "ngram", 3840)
        text = llm.generate("hello", PARAMS).text
    assert 'dtype = "float32"' in capfd.readouterr().err
    (folder,) = built(cache)
    before = (cache / "bundles" / folder / "bundle.json").stat().st_mtime_ns
    with LLM(str(checkpoint), dtype="float32", threads=1) as llm:
        assert llm.generate("hello", PARAMS).text == text
    assert (cache / "bundles" / folder / "bundle.json").stat().st_mtime_ns == before
    assert capfd.readouterr().err == ""


def test_run_imports_no_library_that_builds_for_a_bundle_in_the_cache(checkpoint: Path) -> None:
    """torch and onnx_ir take 3 s of a start."""
    LLM(checkpoint, dtype="float32", threads=1).close()
    arguments = ["run", str(checkpoint), "hello", "--raw", "--max-tokens", "2", "--dtype", "float32", "--threads", "1"]
    command = [sys.executable, "-c", COMMAND, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "imported []"
    assert ran.stderr == ""


def test_the_written_recipe_can_be_edited_and_built(checkpoint: Path, cache: Path, run, tmp_path: Path) -> None:
    assert run("export", "build", str(checkpoint), "--out", str(tmp_path / "a"), "--max-model-len", "300")[0] == 0
    (file,) = (cache / "bundles").glob("*.toml")
    recipe = Recipe.load(file)
    assert (recipe.target.dtype, recipe.limits.length, recipe.draft.kind) == ("int4", 300, "ngram")
    assert run("export", "build", str(file), "--out", str(tmp_path / "b"))[0] == 0


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("Tiny-Model", "./small"),
        ("./Tiny-Model/", "tiny.gguf"),
        ("../on_demand/Tiny-Model", "small"),
        ("tiny.gguf", "./tiny.gguf"),
        ("./tiny.gguf", "small"),
    ],
)
def test_a_recipe_names_a_relative_checkpoint_and_draft_so_that_it_finds_them(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, draft: str
) -> None:
    home = tmp_path / "on_demand"
    shutil.copytree(checkpoint, home / "Tiny-Model")
    shutil.copytree(checkpoint, home / "small")
    write_gguf(checkpoint, home / "tiny.gguf", "qwen3")
    monkeypatch.chdir(home)
    source = CheckpointSource.find(name, BuildOptions(draft=draft), SILENT)
    file = write_default_recipe(source, SILENT)
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load(file)
    assert recipe.target.checkpoint == (home / name).resolve()
    assert recipe.checkpoints()["draft"] == home / draft


def test_a_gguf_file_that_changed_is_another_model_in_a_recipe_and_as_a_draft(checkpoint: Path, tmp_path: Path) -> None:
    file, recipe = tmp_path / "tiny.gguf", tmp_path / "recipe.toml"
    recipe.write_text(f'name = "tiny"\n[target]\ncheckpoint = "{file}"\n')
    options = BuildOptions(draft=str(file))
    places = set()
    for modified_ns in (0, 10**9):
        file.write_bytes(b"GGUF")
        os.utime(file, ns=(modified_ns, modified_ns))
        places |= {sources.find_source(str(recipe), NO_CHOICES, SILENT).folder}
        places |= {CheckpointSource.find(str(checkpoint), options, SILENT).folder}
    assert len(places) == 4


def test_a_changed_checkpoint_or_another_choice_is_built_anew(tmp_path: Path, cache: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", layers=1)
    for options in ({}, {"max_model_len": 64}, {"draft": "none"}):
        LLM(folder, dtype="float32", threads=1, **options).close()
    tiny_checkpoint(folder, layers=1, seed=1)
    LLM(folder, dtype="float32", threads=1).close()
    assert len(built(cache)) == 4


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[Callable[[Path], "subprocess.Popen[str]"]]:
    """Start a process that builds a model. It goes on after its first step when ``tmp_path / "go"`` exists."""
    processes: list[subprocess.Popen[str]] = []

    def start(model: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", BUILDER, str(model), str(tmp_path / "go")]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("kind", ["folder", "GGUF file", "recipe", "recipe of a GGUF file"])
def test_a_missing_chat_template_is_reported_before_the_build(
    checkpoint: Path, cache: Path, tmp_path: Path, run, kind: str
) -> None:
    model = tmp_path / "plain"
    shutil.copytree(checkpoint, model)
    (model / "chat_template.jinja").unlink()
    if "GGUF file" in kind:
        write_gguf(checkpoint, model := tmp_path / "plain.gguf", "qwen3")  # without a template
    if "recipe" in kind:
        model = write_recipe(tmp_path / "mine.toml", target=model)
    for command in (("run", str(model), "hello"), ("chat", str(model))):
        code, _, err = run(*command)
        assert code != 0
        assert "must have a chat template named default" in " ".join(err.split())
    assert not built(cache)
    assert not list(cache.glob("checkpoints/**/*.safetensors")), "no weights are written"
    if kind == "GGUF file":
        template = checkpoint / "chat_template.jinja"
        arguments = ("--max-tokens", "2", "--threads", "1")
        assert run("run", str(model), "hello", "--raw", *arguments)[0] == 0
        assert run("run", str(model), "hello", "--chat-template", str(template), *arguments)[0] == 0


@pytest.mark.parametrize("kind", ["folder", "recipe"])
def test_an_unknown_architecture_is_reported_before_a_missing_tokenizer(
    checkpoint: Path, tmp_path: Path, run, kind: str
) -> None:
    model = tmp_path / "unknown"
    shutil.copytree(checkpoint, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Unheard"]}))
    (model / "tokenizer.json").unlink()
    named = write_recipe(tmp_path / "mine.toml", target=model) if kind == "recipe" else model
    for command in (("run", str(named), "hello"), ("chat", str(named)), ("run", str(named), "hello", "--raw")):
        code, _, err = run(*command)
        assert code != 0
        assert "Unheard is not exported" in " ".join(err.split())


def test_the_notes_of_a_build_are_printed(checkpoint: Path, tmp_path: Path, capfd) -> None:
    recipe = write_recipe(tmp_path / "mine.toml", target=checkpoint, dtype="int4")
    notes = build(Recipe.load(recipe), tmp_path / "bundle").notes
    assert notes
    capfd.readouterr()
    LLM(recipe, threads=1).close()
    printed = capfd.readouterr().err
    assert all(note in printed for note in notes)


def test_a_second_process_waits_for_the_build_of_the_first_and_uses_it(
    checkpoint: Path, cache: Path, tmp_path: Path, builder
) -> None:
    write_gguf(checkpoint, model := tmp_path / "mine.gguf", "qwen3")
    first = builder(model)
    assert first.stdout.readline().startswith("Unpack")
    second = builder(model)
    assert second.stdout.readline().startswith("Wait for another process that builds ")
    (tmp_path / "go").touch()
    (*steps, folder), (*other_steps, same) = (process.communicate()[0].splitlines() for process in (first, second))
    assert (first.returncode, second.returncode) == (0, 0)
    # Either process may be the first to build the bundle of a GGUF file that the first process has unpacked.
    assert sorted(title for title in steps + other_steps if title.startswith(("Unpack", "Take"))) == [
        "Take the digest of every file"
    ]
    assert folder == same
    assert built(cache) == [Path(folder).name]


def test_a_process_builds_when_the_one_that_it_waits_for_is_killed(
    checkpoint: Path, cache: Path, tmp_path: Path, builder
) -> None:
    first = builder(checkpoint)
    first.stdout.readline()
    second = builder(checkpoint)
    assert second.stdout.readline().startswith("Wait for another process")
    first.kill()
    (tmp_path / "go").touch()
    assert "Read the checkpoints" in second.communicate()[0]
    assert second.returncode == 0
    assert len(built(cache)) == 1


def test_a_recipe_is_built_into_the_cache(checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "mine.toml", target=checkpoint)
    LLM(recipe, threads=1).close()
    assert [name.rsplit("-", 1)[0] for name in built(cache)] == [Recipe.load(recipe).name]
    with pytest.raises(BadRequest, match=r"max_model_len, draft: a recipe defines these"):
        LLM(recipe, max_model_len=64, draft="none")


def test_a_smaller_checkpoint_drafts(checkpoint: Path, tmp_path: Path) -> None:
    small = tiny_checkpoint(tmp_path / "small", layers=1)
    with LLM(checkpoint, dtype="float32", max_model_len=200, draft=str(small), threads=1) as llm:
        assert llm.bundle.draft.kind == "model"
        assert llm.generate("hello", PARAMS).speculation.num_spec_steps
    section = {"kind": "pard", "checkpoint": "ACME/Head"}
    choices = BuildOptions(draft="pard:ACME/Head", dtype="float32")
    assert recipe_of(checkpoint, Machine(CPU, GB), choices)["draft"] == section
    choices = BuildOptions(draft="pard:ACME/Head")
    assert recipe_of(checkpoint, Machine(CUDA, GB), choices)["draft"] == section
    assert recipe_of(checkpoint, Machine(CPU, GB), choices)["draft"] == {**section, "dtype": "int4"}
    with pytest.raises(BadRequest, match=r"draft: must be ngram, none, a checkpoint, or KIND:CHECKPOINT"):
        recipe_of(checkpoint, Machine(CPU, GB), BuildOptions(draft="tree:ACME/Head"))


def test_the_length_is_the_models_or_what_fits_into_memory(checkpoint: Path) -> None:
    token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head size, float32
    assert recipe_of(checkpoint, Machine(CPU, GB))["limits"] == {"batch": 4, "length": 3840}
    weights = 2 * 10**5  # at most
    small = recipe_of(checkpoint, Machine(CPU, 2 * (weights + 4 * 1024 * token)))["limits"]["length"]
    assert 768 <= small <= 1024
    with pytest.raises(BadRequest, match=f"must fit into memory with {LEAST_LENGTH} tokens for each of 4 requests"):
        recipe_of(checkpoint, Machine(CPU, 2 * 100 * token))
    assert recipe_of(checkpoint, Machine(CPU, GB), BuildOptions(max_model_len=77))["limits"]["length"] == 77


def test_an_unknown_dtype_is_rejected_before_a_recipe_is_written() -> None:
    with pytest.raises(BadRequest, match=r"dtype: must be one of float32, .* received 'int9'"):
        BuildOptions(dtype="int9")


@pytest.mark.parametrize("name", ["model.gguf", "."])
def test_a_gguf_file_gets_8_bits_whatever_the_types_of_its_weights(checkpoint: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.gguf"
    lengths = set()
    for kind, kinds in (("Q5_0", {}), ("Q5_0", {"model.layers.0.mlp.up_proj.weight": "Q8_0"}), ("Q4_0", {})):
        write_gguf(checkpoint, file, "qwen3", kind, kinds=kinds)
        source = CheckpointSource.find(str(tmp_path / name), BuildOptions(), SILENT)
        small = replace(source, machine=Machine(CPU, 10**7))
        recipe = Recipe.load(write_default_recipe(small, SILENT))
        assert recipe.target.dtype == "int8"
        lengths.add(recipe.limits.length)
    assert len(lengths) == 1, "weights that stay packed and weights that are rounded count alike"


def test_a_gpu_gets_the_checkpoints_dtype_and_a_paged_cache_within_its_memory(checkpoint: Path) -> None:
    recipe = recipe_of(checkpoint, Machine(CUDA, GB))
    assert recipe["target"]["dtype"] == "float32"
    assert recipe["backend"] == {"name": CUDA}
    assert recipe["limits"] == {"batch": 32, "length": 3840}, "all requests fit at full length"
    small = recipe_of(checkpoint, Machine(CUDA, 20 * 10**6))["limits"]
    assert small["length"] == 3840
    assert 3900 < small["cache_tokens"] < 32 * 3840
    assert small["cache_tokens"] % 64 == 0


def test_reasoning_is_taken_from_the_chat_template(checkpoint: Path, tmp_path: Path) -> None:
    assert "reasoning" not in recipe_of(checkpoint, Machine(CPU, GB))
    folder = tiny_checkpoint(tmp_path / "thinks")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<think>\n\n</think>{{ m.content }}{% endfor %}")
    section = recipe_of(folder, Machine(CPU, GB))["reasoning"]
    assert (section["think_start"], section["think_ends"], section["forced_end"]) == (
        "<think>",
        ["</think>"],
        "</think>",
    )


def test_other_folders_and_names_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        BadBundle, match=r"OWNER/NAME on the Hugging Face hub; got 'nowhere'\. Included recipes: demo, "
    ):
        LLM("nowhere")
    for missing in (tmp_path / "nowhere", "./nowhere", "nowhere.gguf", "nowhere.toml", "a/b/c"):
        with pytest.raises(BadBundle, match=r"nowhere.*' does not exist\. Correct the path|a/b/c' does not exist"):
            LLM(missing)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    with pytest.raises(BadBundle, match=r"a checkpoint's folder has config\.json; '.*empty' has neither"):
        LLM(tmp_path / "empty")
    (tmp_path / "damaged/tokenizer").mkdir(parents=True)
    (tmp_path / "damaged/verify.onnx").write_bytes(b"x")
    with pytest.raises(BadBundle, match=r"folder has bundle\.json, .* has neither"):
        LLM(tmp_path / "damaged")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(BadCheckpoint, match="weights as PyTorch pickles"):
        LLM(tmp_path / "pickled")


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [("Qwen/Qwen3-0.6B", "qwen3-0.6b"), ("A/B@refs/pr/7", "b"), ("/data/My Model/", "my-model"), ("..", "model")],
)
def test_a_bundle_is_named_after_its_checkpoint(checkpoint: str, name: str) -> None:
    assert recipe_name(checkpoint) == name


def test_chat_answers_one_chat_and_a_list_of_chats(tiny_bundle: Path) -> None:
    one, two = ([{"role": "user", "content": text}] for text in ("hello", "bye"))
    with LLM(tiny_bundle, threads=1) as llm:
        answers = llm.chat([one, two], PARAMS)
        assert [llm.chat(one, PARAMS).text, llm.chat(two, PARAMS).text] == [answer.text for answer in answers]
        assert llm.chat(one, PARAMS).prompt_token_ids == llm.generate(one, PARAMS).prompt_token_ids


def test_a_model_is_built_anew_for_other_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    place = sources._cache_place("model", "checkpoint")
    assert sources._cache_place("model", "checkpoint") == place
    older = replace(SCHEMAS["verify_draft"], inputs=SCHEMAS["verify_draft"].inputs[:-1])
    monkeypatch.setattr(sources, "SCHEMAS", SCHEMAS | {"verify_draft": older})
    assert sources._cache_place("model", "checkpoint") != place
