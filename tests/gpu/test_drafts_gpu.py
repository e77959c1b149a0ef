"""Heads, parallel drafts and block drafts on a CUDA device: every subgraph is a graph, and drafts change no text."""

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandemrt import LLM
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.publish import publish
from tests.eagle3 import LATENT as SMALL
from tests.engine.decoding import make_checkpoint
from tests.engine.draft_kinds import EAGLE3, KINDS, SIZES, Kind, Target
from tests.engine.test_assistant import save_assistant
from tests.gpu.here import needs_float8
from tests.gpu.rounds import MIXED, SCHEMA, drive, output_of, paged, where_texts_part
from tests.gpu.test_deployed_models_gpu import config_of
from tests.makers import VOCAB, tiny_checkpoint, tiny_tokenizer, write_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FLOAT8, LATENT = "eagle3 in float8", "eagle3 with latent attention"
IN_ONE_GROUP = range(64, 68)


def save_assistant_of_gemma4(folder: Path, target: Target) -> None:
    """Write an assistant that seldom drafts other tokens than these, and in place of ``target`` one of Gemma 4.

    Heads have the sizes of published ones.
    """
    vocab = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB)
    gemma4 = make_checkpoint(config_of("gemma4", **vocab, eos_token_id=5), tiny_tokenizer(target.folder))
    assistant = save_assistant(folder, gemma4, use_ordered_embeddings=True, num_centroids=20)
    with torch.no_grad():
        assistant.model.embed_tokens.weight[IN_ONE_GROUP] *= 30
        assistant.masked_embedding.token_ordering.copy_(torch.arange(VOCAB).roll(-IN_ONE_GROUP[0]))
        assistant.masked_embedding.centroids.weight.zero_()  # the first groups are scored
    assistant.save_pretrained(folder)


DRAFTS = KINDS | {"assistant": Kind(save_assistant_of_gemma4, window=4, known=lambda _folder: IN_ONE_GROUP)}


@pytest.fixture(scope="module", params=[*DRAFTS, LATENT, pytest.param(FLOAT8, marks=needs_float8)])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A bundle in bfloat16, and parameters under which many drafts are accepted."""
    name = "eagle3" if request.param in (FLOAT8, LATENT) else request.param
    kind, folder = DRAFTS[name], tmp_path_factory.mktemp(name)
    target = tiny_checkpoint(folder / "target", **SIZES)
    if request.param == LATENT:
        widths = {**SMALL, "kv_lora_rank": 512, "qk_rope_head_dim": 64}  # the kernel's
        replace(EAGLE3, latent=widths, fc_norm=True, norm_output=True).save(folder / "draft")
        known = list(kind.known(folder / "draft"))
    elif request.param == FLOAT8:  # its matmuls have 16 outputs, or a multiple of it
        whole = replace(EAGLE3, draft_vocab=16).save(folder / "whole")
        publish(whole, folder / "draft", "fp8")
        ids = load_file(whole / "model.safetensors")["d2t"] + torch.arange(16)
        known = [token for token in ids.tolist() if token < 256]
    else:
        kind.save(folder / "draft", Target(target))
        known = list(kind.known(folder / "draft"))
    drafting = f'kind = "{name}"\ncheckpoint = "{folder / "draft"}"\nnum_draft_tokens = {kind.window}'
    recipe = write_recipe(
        folder / "tiny.toml",
        target=folder / "draft" if kind.with_target else target,
        drafting=drafting,
        backend=paged(),
        dtype="bfloat16",
        length=256,
        prefill_chunk=64,
    )
    return build(Recipe.load(recipe), folder / "bundle").folder, (
        {"logit_bias": dict.fromkeys(known, 30.0), "ignore_eos": True} if known else {}
    )


def test_drafts_are_graphs_and_change_no_text(built: tuple[Path, dict[str, Any]]) -> None:
    bundle, among = built
    requests = [*MIXED, *(("among " * (7 * i + 1), {"seed": i, "max_tokens": 40, **among}) for i in range(4))]
    fixed = {"adaptive_draft_tokens": False}  # a draft that is rarely right must be tried, too
    with ExitStack() as stack:
        plain, graphs, eager = (
            stack.enter_context(LLM(bundle, **options))
            for options in ({"num_draft_tokens": 0}, fixed, fixed | {"cuda_graphs": False})
        )
        expected, outputs = drive(plain, requests), drive(graphs, requests)
        again, eagerly = drive(graphs, requests), drive(eager, requests)
        metrics = graphs.metrics
        print(f"captured {metrics.graphs_captured}, eager {metrics.eager_runs}, accepted {metrics.accepted}")
        parted = where_texts_part(outputs, expected)
        assert set(metrics.eager_runs) == {"prompts"}
        assert sum(metrics.accepted) > 10
        assert output_of(again) == output_of(outputs)
        assert output_of(eagerly) == output_of(outputs)
        assert sum(at is None for at in parted) >= len(requests) // 2


def test_graphs_keep_the_probabilities_that_the_rejection_rule_reads(built: tuple[Path, dict[str, Any]]) -> None:
    bundle, among = built
    asked = {"temperature": 1.0, "rule": "rejection", "max_tokens": 40, **among}
    requests = [("among " * (7 * i + 1), {"seed": i, **asked}) for i in range(4)]
    # A cached prompt is processed in other calls, which round differently: probabilities are compared bit for bit.
    with ExitStack() as stack:
        graphs, eager = (
            stack.enter_context(LLM(bundle, prefix_caching=False, **options))
            for options in ({}, {"cuda_graphs": False})
        )
        outputs = drive(graphs, requests)
        print(f"accepted {graphs.metrics.accepted}, eager {graphs.metrics.eager_runs}")
        assert set(graphs.metrics.eager_runs) <= {"prompts"}
        assert sum(graphs.metrics.accepted) > 0
        assert output_of(drive(eager, requests)) == output_of(outputs) == output_of(drive(graphs, requests))


def test_masked_drafts_change_no_text(built: tuple[Path, dict[str, Any]]) -> None:
    """The host waits for each draft, so drafting runs eagerly; the rest of the round is graphs.

    A grammar of the tokens that a head drafts most lets it guess right; it has few tokens of a JSON text.
    """
    bundle, among = built
    fixed = {"fast_forward_drafts": False, "adaptive_draft_tokens": False}
    with ExitStack() as stack:
        plain, masked = (
            stack.enter_context(LLM(bundle, **options, **fixed))
            for options in ({"num_draft_tokens": 0}, {"draft_masks": True})
        )
        known = [plain.tokenizer.backend.decode([token]) for token in among.get("logit_bias", ())]
        letters = re.escape("".join(text for text in known if text.isascii() and text.isprintable()))
        grammars = [{"json": SCHEMA}, {"regex": f"[{letters}]{{30}}"} if letters else {"json": SCHEMA}]
        requests = [
            (
                "json " * (i + 1),
                {"seed": i, "temperature": 1.0, "max_tokens": 40, "structured_outputs": grammars[i % 2]},
            )
            for i in range(6)
        ]
        expected, outputs = drive(plain, requests), drive(masked, requests)
        metrics = masked.metrics
        print(f"eager {metrics.eager_runs}, accepted {metrics.accepted}, cut {metrics.constraint_rejected_drafts}")
        parted = where_texts_part(outputs, expected)
        assert metrics.eager_runs["masks"] > 0
        assert sum(metrics.accepted) > 0
        assert metrics.constraint_rejected_drafts < metrics.drafted / 10
        assert output_of(drive(masked, requests)) == output_of(outputs)
        assert sum(at is None for at in parted) >= len(requests) // 2
