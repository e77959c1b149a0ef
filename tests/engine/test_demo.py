"""The demo end to end: trained models, reasoning, JSON, budgets; transformers and jsonschema as oracles."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandemrt import LLM, RequestOutput, SamplingParams, StructuredOutputs
from tandemrt.engines.recipe.models import HeadDraft
from tandemrt.engines.recipe.recipe import Recipe, locate
from tandemrt.export.bundle.build import build
from tests.engine.test_trace import read
from tests.makers import tiny_checkpoint, write_recipe
from tools.demo import held_out, train_draft
from tools.demo.models import CHECKPOINTS
from tools.drafts.kinds import Kind

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
EXAMPLES = held_out(24)


@pytest.fixture(scope="module")
def llm(demo_bundle: Path) -> Iterator[LLM]:
    with LLM(demo_bundle, threads=1) as opened:
        yield opened


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_greedy_tokens_are_those_of_transformers(llm: LLM) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "target", dtype=torch.float32)
    outputs = llm.generate([e.prompt_messages() for e in EXAMPLES[:6]], SamplingParams(temperature=0.0))
    for output in outputs:  # one forward pass: if every token is the best one after those before it, the text is greedy
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids + output.token_ids])).logits[0]
        first = len(output.prompt_token_ids) - 1
        assert output.token_ids == logits[first:-1].argmax(dim=-1).tolist()
    assert max(output.speculation.mean_acceptance_length for output in outputs) > 3


def test_answers_are_right_and_valid_and_the_same_without_speculation(llm: LLM) -> None:
    prompts = [e.prompt_messages() for e in EXAMPLES]
    params = [SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(json=e.schema)) for e in EXAMPLES]
    outputs = llm.generate(prompts, params)
    autoregressive = llm.generate(prompts, [p.model_copy(update={"num_draft_tokens": 0}) for p in params])
    for output, example in zip(outputs, EXAMPLES, strict=True):
        jsonschema.validate(json.loads(output.text), example.schema)
        assert output.finish_reason == "stop"
    assert [o.token_ids for o in outputs] == [o.token_ids for o in autoregressive]
    right = sum(o.text == e.record for o, e in zip(outputs, EXAMPLES, strict=True))
    assert right >= 0.9 * len(EXAMPLES)
    assert llm.metrics.reasoning_ends_mid_round > 0, "reasoning never ended in the middle of a window"


@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_a_thinking_budget_is_exact_and_the_answer_is_still_valid(llm: LLM, budget: int) -> None:
    end = llm.tokenizer.token_to_id("</think>")
    params = [
        SamplingParams(
            temperature=0.8, seed=i, thinking_token_budget=budget, structured_outputs=StructuredOutputs(json=e.schema)
        )
        for i, e in enumerate(EXAMPLES[:8])
    ]
    outputs = llm.generate([e.prompt_messages() for e in EXAMPLES[:8]], params)
    for output, example in zip(outputs, EXAMPLES, strict=False):
        # The prompt ends with the start delimiter and a line break, which counts as reasoning.
        inside = len(output.prompt_token_ids) - 1 - output.prompt_token_ids.index(llm.tokenizer.token_to_id("<think>"))
        spent = inside + output.token_ids.index(end)
        assert spent == max(budget, inside)
        assert output.forced_ends == 1
        jsonschema.validate(json.loads(output.text), example.schema)


def test_a_stop_string_that_straddles_tokens_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate(EXAMPLES[0].prompt_messages(), SamplingParams(temperature=0.0))
    stop = whole.text[9:15]
    cut = llm.generate(EXAMPLES[0].prompt_messages(), SamplingParams(temperature=0.0, stop=stop))
    assert whole.text.index(stop) <= 9
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_text_that_fails_its_requested_check_is_kept_with_the_reason(llm: LLM) -> None:
    def answer(never: str) -> RequestOutput:
        wanted = StructuredOutputs(json={"enum": ["x" * 20], "not": {"pattern": never}}, validate_output=True)
        return llm.generate("Hello", SamplingParams(temperature=0, thinking_token_budget=3, structured_outputs=wanted))

    good, bad = answer("y"), answer("x")
    assert good.text.strip() == bad.text.strip() == f'"{"x" * 20}"'
    assert (good.finish_reason, good.error) == ("stop", None)
    assert bad.finish_reason == "constraint"
    assert "the finished text is not valid" in str(bad.error)


def test_the_trace_of_a_comparison_begins_with_the_answer(demo_bundle: Path, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    options = ("--max-tokens", "40", "--compare", "--trace", str(page), "--threads", "1")
    run(str(BIN / "tandemrt"), "run", str(demo_bundle), EXAMPLES[0].sentence, *options)
    lengths = [len(request["tokens"]) for request in read(page)]
    assert lengths == [40, 40], "the answer and its comparison, without the run of one token before them"


def test_run_compares_and_prints_json(demo_bundle: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(EXAMPLES[0].schema))
    options = ("--schema", str(schema), "--seed", "3", "--temperature", "0.7", "--budget", "20", "--compare")
    command = (str(BIN / "tandemrt"), "run", str(demo_bundle), EXAMPLES[0].sentence, "--threads", "1", *options)
    assert "without speculation: the same text" in run(*command)
    printed = json.loads(run(*command, "--json"))
    assert printed["same_as_autoregressive"]
    assert printed["seed"] == 3
    jsonschema.validate(json.loads(printed["text"]), EXAMPLES[0].schema)


def test_run_does_not_compare_what_need_not_be_equal(demo_bundle: Path) -> None:
    command = (str(BIN / "tandemrt"), "run", str(demo_bundle), "hello", "--compare", "--rule", "rejection")
    refused = subprocess.run([*command, "--temperature", "1"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--compare: the rejection rule keeps the distribution" in refused.stderr


def test_bench_measures_both_ways(demo_bundle: Path, tmp_path: Path) -> None:
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    prompts.write_text(run(sys.executable, "-m", "tools.demo.prompts", "4"))
    options = ("--prompts", str(prompts), "--repeats", "1", "--json", str(figures), "--threads", "1")
    printed = run(str(BIN / "tandemrt"), "bench", str(demo_bundle), *options)
    assert "same text: 4 of 4" in printed
    printed = json.loads(figures.read_text())
    assert printed["speculative"]["acceptance_length"] > 2.5
    assert printed["speculative"]["rounds"] < printed["autoregressive"]["rounds"]
    phases = {"propose", "target", "wait", "commit", "deliver", "fill", "verify", "draft_prompts"}
    assert set(printed["autoregressive"]["ms_per_round"]) == phases


@pytest.mark.parametrize(("recipe", "floor"), [("demo-eagle3", 3.9), ("demo-pard", 5.4), ("demo-dflash", 4.9)])
def test_the_demos_trained_drafts_draft_and_change_no_text(tmp_path: Path, llm: LLM, recipe: str, floor: float) -> None:
    folder = build(Recipe.load(locate(recipe)), tmp_path / recipe).folder
    prompts = [example.prompt_messages() for example in EXAMPLES[:8]]
    params = SamplingParams(temperature=0.0, max_tokens=80)
    with LLM(folder, threads=1) as drafted:
        outputs = drafted.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in llm.generate(prompts, params)]
    steps = sum(output.speculation.num_spec_steps for output in outputs)
    accepted = sum(output.speculation.num_accepted_draft_tokens for output in outputs)
    assert 1 + accepted / steps > floor, "docs/drafts.md says more"


def test_the_demos_hybrid_writes_the_same_texts_without_speculation(tmp_path: Path) -> None:
    folder = build(Recipe.load(locate("demo-hybrid")), tmp_path / "bundle").folder
    prompts, schemas = [e.prompt_messages() for e in EXAMPLES[:4]], [e.schema for e in EXAMPLES[2:4]]
    params = [SamplingParams(temperature=at, seed=at, max_tokens=40) for at in range(2)]
    params += [
        SamplingParams(
            temperature=at, seed=at, thinking_token_budget=8, structured_outputs=StructuredOutputs(json=schema)
        )
        for at, schema in enumerate(schemas)
    ]
    with LLM(folder, threads=1) as llm:
        outputs = llm.generate(prompts, params)
        autoregressive = llm.generate(prompts, [p.model_copy(update={"num_draft_tokens": 0}) for p in params])
    assert [output.token_ids for output in outputs] == [output.token_ids for output in autoregressive]
    for output, schema in zip(outputs[2:], schemas, strict=True):
        jsonschema.validate(json.loads(output.text), schema)
    assert max(output.speculation.mean_acceptance_length for output in outputs) > 3


@pytest.mark.parametrize("kind", [Kind.MTP, Kind.PEAGLE])
def test_a_draft_of_the_training_command_drafts_by_its_recipe_and_changes_no_text(
    tmp_path: Path, llm: LLM, kind: Kind
) -> None:
    few: dict[str, Any] = {"texts": 1, "longest": 4, "together": 1, "steps": 1, "batch": 1}
    train_draft.main(kind, device="cpu", out=tmp_path / "draft", **few)
    recipe = Recipe.load(ROOT / f"tools/demo/{kind}.toml")
    assert isinstance(recipe.draft, HeadDraft)
    drafting = recipe.draft.model_copy(update={"checkpoint": tmp_path / "draft"})
    folder = build(recipe.model_copy(update={"draft": drafting}), tmp_path / "bundle").folder
    prompts = [example.prompt_messages() for example in EXAMPLES[:3]]
    params = [SamplingParams(temperature=seed / 2, seed=seed, max_tokens=12) for seed in range(3)]
    with LLM(folder, threads=1) as drafted:
        outputs = drafted.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in llm.generate(prompts, params)]
    assert sum(output.speculation.num_draft_tokens for output in outputs) > 0


def test_a_bundle_for_rtx_is_refused_at_opening_with_what_to_do(tmp_path: Path) -> None:
    backend = 'name = "tensorrt-rtx"\ncompute_capabilities = ["8.9"]'
    target = tiny_checkpoint(tmp_path / "target", layers=1)
    build(
        Recipe.load(write_recipe(tmp_path / "r.toml", target=target, dtype="float16", backend=backend)),
        tmp_path / "rtx",
    )
    command = (str(BIN / "tandemrt"), "run", str(tmp_path / "rtx"), "hello")
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "BackendUnavailable: device: torch" in refused.stderr
    assert "engines built for tensorrt-rtx (sm_89)" in refused.stderr
    assert "Traceback" not in refused.stderr
