"""Gemma 4 assistants: every round drafts what transformers drafts, over the same target, and no text changes."""

import json
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, PreTrainedModel

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.read.assistant import AssistantSpec, token_groups
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tandemrt.runtime.requests.round import Round
from tests.engine.decoding import make_checkpoint, randomize
from tests.engine.preempted import preempting
from tests.engine.test_paged_rounds import PAGED
from tests.makers import VOCAB, tiny_tokenizer, write_recipe

SIZES = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "eos_token_id": 5, "max_position_embeddings": 512}
SIZES["head_dim"] = 64  # of sliding layers; full ones have 32
WINDOW = 4
FORMS = {"all tokens": {}, "groups": {"use_ordered_embeddings": True, "num_centroids": 20}}
CACHES = {"all tokens": 'name = "onnxruntime-cpu"', "groups": PAGED}


def save_assistant(folder: Path, target: PreTrainedModel, **config: Any) -> Gemma4AssistantForCausalLM:
    """Write an assistant of two layers, which read the target's last sliding and its last full layer with a cache."""
    of_target = target.config.get_text_config().to_dict()
    full, *_ = of_target["per_layer_config"].values()
    own = {"hidden_size": 32, "num_hidden_layers": 2, "num_kv_shared_layers": 2, "intermediate_size": 48}
    own |= {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": full["head_dim"]}
    own |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False}
    layers = Gemma4TextConfig(**{name: value for name, value in of_target.items() if name != "per_layer_config"} | own)
    width = {"backbone_hidden_size": of_target["hidden_size"], "centroid_intermediate_top_k": 3}
    # transformers 5.23 rejects layers that all read caches of another model, although an assistant has only these.
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", ["reuse"] * 2):
        model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=layers, **width, **config)).eval()
    randomize(model)
    if model.masked_embedding is not None:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
        model.masked_embedding.token_ordering.copy_(order)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def drafts_of(assistant: Any, target: Any, text: Sequence[int], window: int) -> list[int]:
    """Return the greedy drafts after ``text``; the keys and values of its newest token are not there yet.

    A sliding layer sees as many of them as those of the target do. transformers' mask would let it see one more.
    """
    outputs = target(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    seen = {"sliding_attention": target.config.get_text_config().sliding_window, "full_attention": len(text)}
    shared = {kind: [each[:, :, -seen[kind] :] for each in pair] for kind, pair in outputs.shared_kv_states.items()}
    token, state = torch.tensor([text[-1:]]), outputs.hidden_states[-1][:, -1:]
    drafted: list[int] = []
    for _ in range(window):
        step = assistant(
            inputs_embeds=torch.cat([target.get_input_embeddings()(token), state], -1),
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=shared,
        )
        token, state = step.logits.argmax(-1), step.last_hidden_state
        drafted.append(int(token))
    return drafted


class Built:
    """A target and an assistant by transformers, and the bundle of both."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder = folder
        self.target = make_checkpoint("gemma4", tiny_tokenizer(folder / "target"), sizes=SIZES)
        self.assistant = save_assistant(folder / "draft", self.target, **FORMS[form])
        self.recipe = {"target": folder / "target", "drafting": recipe_of(folder / "draft"), "length": 256}
        recipe = Recipe.load(write_recipe(folder / "r.toml", **self.recipe, backend=CACHES[form]))
        self.bundle = build(recipe, folder / "bundle").folder


def recipe_of(draft: Path) -> str:
    return f'kind = "assistant"\ncheckpoint = "{draft}"\nnum_draft_tokens = {WINDOW}'


@pytest.fixture(scope="module", params=FORMS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("assistant"), request.param)


@pytest.fixture(scope="module")
def llm(built: Built) -> Iterator[LLM]:
    with LLM(built.bundle, device="cpu", threads=1, lookup=False, adaptive_draft_tokens=False) as opened:
        yield opened


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **more})


def prompt_of(length: int) -> list[int]:
    return [(11 * i * i + length) % 199 for i in range(length)]


def test_every_round_drafts_the_tokens_of_transformers(built: Built, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """After prompts within and beyond the sliding window, whatever the last round accepted."""
    rounds: list[tuple[list[int], int]] = []
    verified, late = llm.loop.drafter.after_verify, llm.loop.drafter.reads_prompts_late

    def watch(round_: Round) -> None:
        buffers = llm.loop.target.buffers
        drafts = buffers.draft_tokens.view(round_.batch, round_.window)[0].tolist()
        rounds.append((drafts, buffers.count.view(round_.batch)[0].item()))
        verified(round_)

    monkeypatch.setattr(llm.loop.drafter, "after_verify", watch)
    for length in (2, 65):
        rounds.clear()
        prompt = prompt_of(length)
        text, known = prompt + llm.generate(prompt, params()).token_ids, length
        for at, (drafts, count) in enumerate(rounds[:6]):
            if at or not late:
                assert drafts == drafts_of(built.assistant, built.target, text[:known], len(drafts)), known
            known += count


def test_drafts_and_neighbours_change_no_text(llm: LLM) -> None:
    """Also of prompts of one token, whose drafts have no keys to read, and with rounds that draft nothing between."""
    prompts = [prompt_of(length) for length in (1, 2, 40, 65)]

    def texts(windows: Sequence[int]) -> list[list[int]]:
        asked = [params(temperature=0.4 * at, seed=at, num_draft_tokens=window) for at, window in enumerate(windows)]
        return [output.token_ids for output in llm.generate(prompts, asked)]

    plain, before = texts([0] * 4), llm.metrics.copy()
    assert texts([WINDOW] * 4) == plain == texts([1, 3, 0, 4])
    assert sum(llm.metrics.since(before).accepted) > 0


def test_a_text_under_the_rejection_rule_depends_on_its_seed_alone(llm: LLM) -> None:
    """Not on what its slot or a cached prefix held: after a prompt of whole blocks the state of its end is missing."""
    asked = params(temperature=1.0, seed=5, rule="rejection")
    for length in (1, 65):
        first = llm.generate(prompt_of(length), asked)
        llm.generate([prompt_of(at) for at in (3, 50, 70, 90)], params())
        again = llm.generate(prompt_of(length), asked)
        assert again.token_ids == first.token_ids


def test_a_preemption_changes_no_text_or_draft_under_the_rejection_rule(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it drops a round with drafts: the repeated round drafts from the state of the text's end, read again."""
    if not llm.loop.drafter.reads_prompts_late:
        return  # a linear cache has memory for every text
    text = preempting(llm, monkeypatch, prompt_of(24), params(temperature=1.0, seed=1, rule="rejection"))
    alone, before = text(0), llm.metrics.preemptions
    assert [text(at) for at in range(2, 6)] == [alone] * 4
    assert llm.metrics.preemptions == before + 4
    assert sum(map(len, alone[1].values())) > 0


REJECTED = {
    "architectures should be one of Gemma4AssistantForCausalLM": {"architectures": ["LlamaForCausalLM"]},
    "target_hidden_size should be the target's hidden_size, 48": {"backbone_hidden_size": 64},
    "some_field": {"some_field": 1},
    "num_centroids should divide vocab_size, 320": {"use_ordered_embeddings": True, "num_centroids": 7},
    "num_kv_shared_layers should be num_hidden_layers, 2": {"text_config": {"num_kv_shared_layers": 1}},
    "layer 0 should have the KV heads": {"text_config": {"num_key_value_heads": 1}},
    "text_config should describe layers of gemma4_text": {"text_config": {"model_type": "gemma3_text"}},
    "layers of gemma4_text, for a target of this family": {"text_config": {"model_type": ["gemma4_text"]}},
}


def test_an_assistant_of_another_target_is_rejected_by_name(built: Built) -> None:
    target, config = (json.loads((built.folder / each / "config.json").read_text()) for each in ("target", "draft"))
    spec = ModelSpec.from_hf(target)
    AssistantSpec.from_hf(config, spec)
    for message, changes in REJECTED.items():
        layers = {**config["text_config"], **changes.get("text_config", {})}
        with pytest.raises(BadCheckpoint, match=re.escape(message)):
            AssistantSpec.from_hf({**config, **changes, "text_config": layers}, spec)


def test_a_target_with_a_cache_in_float8_is_rejected(built: Built, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.toml", **built.recipe, backend=PAGED)
    with pytest.raises(BadRecipe, match="must be in its compute dtype"):
        open_models(Recipe.load(recipe, kv_dtype="float8_e4m3"))


def test_unknown_fields_of_both_parts_can_be_ignored(built: Built) -> None:
    target, config = (json.loads((built.folder / each / "config.json").read_text()) for each in ("target", "draft"))
    spec, layers = ModelSpec.from_hf(target), config["text_config"]
    unknown = {**config, "some_field": 1, "text_config": {**layers, "other_field": 2}}
    read = AssistantSpec.from_hf(unknown, spec, ignored=["some_field", "other_field"])
    assert read == AssistantSpec.from_hf(config, spec)
    with pytest.raises(BadCheckpoint, match="other_field"):
        AssistantSpec.from_hf(unknown, spec, ignored=["some_field"])


def test_a_token_in_two_groups_is_rejected(built: Built, tmp_path: Path) -> None:
    if built.assistant.masked_embedding is None:
        return
    target, draft = (Checkpoint.open(built.folder / each) for each in ("target", "draft"))
    spec = AssistantSpec.from_hf(draft.config, ModelSpec.from_hf(target.config))
    assert sorted(token_groups(draft, spec).ravel()) == list(range(VOCAB))
    changed = deepcopy(built.assistant)  # other tests draft with this one
    changed.masked_embedding.token_ordering[:2] = 7
    changed.save_pretrained(tmp_path)
    with pytest.raises(BadCheckpoint, match="should have each token id below 320 once"):
        token_groups(Checkpoint.open(tmp_path), spec)
