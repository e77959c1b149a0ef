"""The demo task: the same for the same seed, right in its arithmetic, valid, tokenized without loss, small."""

import itertools
import json
import re
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import jsonschema
import pytest
import torch
import xgrammar
from transformers import AutoTokenizer

from tools.demo import SCHEMAS, Example, examples, held_out
from tools.demo.batches import IGNORED, Batches, prompt_text
from tools.demo.decode import exact, greedy
from tools.demo.draw import is_reserved
from tools.demo.lexicon import FIRST_NAMES, LAST_NAMES
from tools.demo.models import CHECKPOINTS, DRAFT, TARGET, create_hybrid, load
from tools.demo.tokenizer import ADDED_TOKENS, END, PAD, START, THINK, THINK_END, prompt_ids
from tools.demo.train_hybrid import begin

SAMPLE = list(examples(11, 400))
FULL_NAMES = [f"{first} {last}" for first, last in itertools.product(FIRST_NAMES, LAST_NAMES)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET, local_files_only=True)


def test_the_same_seed_gives_the_same_examples_and_another_seed_gives_others():
    assert list(examples(11, 400)) == SAMPLE
    assert [e.sentence for e in examples(12, 400)] != [e.sentence for e in SAMPLE]
    assert held_out(50) == held_out(80)[:50]


def test_every_kind_occurs():
    assert {example.kind for example in SAMPLE} == set(SCHEMAS) == {"order", "appointment", "contact", "shipment"}


def test_held_out_sentences_name_only_people_that_training_never_names():
    reserved = {name for name in FULL_NAMES if is_reserved(*name.split())}
    assert 0.1 < len(reserved) / len(FULL_NAMES) < 0.15
    for example in held_out(200):
        names = {name for name in FULL_NAMES if name in example.sentence}
        assert names, example.sentence
        assert names <= reserved
    for example in SAMPLE:
        assert not [name for name in reserved if name in example.sentence]


def test_records_are_compact_json_valid_against_their_schema_in_its_order():
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for example in [*SAMPLE, *held_out(200)]:
        record = json.loads(example.record)
        jsonschema.Draft202012Validator(example.schema).validate(record)
        assert list(record) == list(example.schema["properties"]) == example.schema["required"]
        assert ": " not in example.record
        assert ", " not in example.record


def test_schemas_use_only_keywords_that_a_grammar_can_enforce():
    allowed = {"$schema", "type", "properties", "required", "additionalProperties", "items", "minItems"}
    allowed |= {"const", "enum", "pattern"}

    def keywords(schema: dict) -> set[str]:
        below = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
        return set(schema).union(*map(keywords, below))

    for schema in SCHEMAS.values():
        assert keywords(schema) <= allowed


def test_every_equation_in_the_working_holds():
    equation = re.compile(r"([\d.]+) ([×+]) ([\d.]+) = ([\d.]*\d)")
    equations = [match for example in SAMPLE for match in equation.findall(example.thinking)]
    assert len(equations) > len(SAMPLE)
    for left, sign, right, result in equations:
        a, b = Decimal(left), Decimal(right)
        assert (a * b if sign == "×" else a + b) == Decimal(result)


def test_totals_weights_dates_and_ends_follow_from_the_rest_of_the_record():
    for example in SAMPLE:
        record = json.loads(example.record, parse_float=Decimal)
        if example.kind == "order":
            assert record["total"] == sum(item["quantity"] * item["unit_price"] for item in record["items"])
            assert re.search(r'"total":\d+\.\d\d}$', example.record)
        elif example.kind == "appointment":
            start, end = (60 * int(clock[:2]) + int(clock[3:]) for clock in (record["start"], record["end"]))
            assert end - start == record["minutes"]
            days = re.findall(r"([A-Z][a-z]+day) (\d{4}-\d\d-\d\d)", example.thinking)
            dates = [date.fromisoformat(day) for _, day in days]
            assert [f"{day:%A}" for day in dates] == [name for name, _ in days]
            assert {later - earlier for earlier, later in itertools.pairwise(dates)} == {timedelta(days=1)}
            assert record["date"] == days[-1][1]
        elif example.kind == "contact":
            for card in record["cards"]:
                fields = [card[key] for key in ("department", "company", "phone", "email")]
                assert f"{card['name']}: {', '.join(fields)}" in example.thinking.splitlines()
                assert card["phone"] in example.sentence
                assert card["email"] in example.sentence
        else:
            products = re.findall(r": (\d+) × ([\d.]+)", example.thinking)
            assert record["parcels"] == sum(int(count) for count, _ in products)
            assert record["weight_kg"] == sum(int(count) * Decimal(unit) for count, unit in products)


def test_delimiters_are_single_tokens_and_digits_stand_alone(tokenizer):
    for text in (PAD, START, END, THINK, THINK_END):
        assert len(tokenizer(text)["input_ids"]) == 1
    assert [tokenizer.decode([token]) for token in tokenizer("2026")["input_ids"]] == ["2", "0", "2", "6"]
    assert 1024 <= len(tokenizer) <= 4096
    assert {token.content for token in tokenizer.added_tokens_decoder.values()} == {
        token.content for token in ADDED_TOKENS
    }


def test_the_tokenizer_returns_every_text_unchanged(tokenizer):
    for text in ["", " a  b\n\n\tc ", "naïve Łódź 東京 🙂", *(e.sentence + e.completion() for e in SAMPLE)]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_ends_where_the_training_text_goes_on(tokenizer):
    for example in SAMPLE[:20]:
        ids = prompt_ids(tokenizer, example)
        expected = f"{START}user\n{example.sentence}{END}\n{START}assistant\n{THINK}\n"
        assert tokenizer.decode(ids) == expected == prompt_text(example)
        assert prompt_ids(tokenizer, example, thinking=False) == tokenizer(f"{expected}\n{THINK_END}")["input_ids"]
        whole = tokenizer(expected + example.completion() + END)["input_ids"]
        assert whole == ids + tokenizer(example.completion() + END)["input_ids"]
        assert len(whole) <= 400


def test_the_grammar_of_each_schema_accepts_its_records_token_by_token(tokenizer):
    texts = [""] * len(tokenizer)
    for text, token in tokenizer.get_vocab().items():
        texts[token] = "" if token in tokenizer.added_tokens_decoder else text
    info = xgrammar.TokenizerInfo(
        texts, xgrammar.VocabType.BYTE_LEVEL, vocab_size=2048, stop_token_ids=[tokenizer.eos_token_id]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    grammars = {
        kind: compiler.compile_json_schema(json.dumps(schema), any_whitespace=True) for kind, schema in SCHEMAS.items()
    }
    for example in [*SAMPLE, *held_out(100)]:
        matcher = xgrammar.GrammarMatcher(grammars[example.kind])
        for token in tokenizer(example.record + END)["input_ids"]:
            assert matcher.accept_token(token), (example.record, tokenizer.decode([token]))
        assert matcher.is_terminated()


def test_batches_count_the_answer_and_nothing_else(tokenizer):
    data = Batches(tokenizer, seed=5, batch=8, steps=32)
    batches = data[1]
    assert all(
        torch.equal(a, b) for one, two in zip(batches, data[1], strict=True) for a, b in zip(one, two, strict=True)
    )
    think_end, end = tokenizer.convert_tokens_to_ids([THINK_END, END])
    for ids, targets in batches:
        counted = targets != IGNORED
        assert torch.equal(targets[:, :-1][counted[:, :-1]], ids[:, 1:][counted[:, :-1]])
        for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
            first = next(at for at, token in enumerate(target) if token != IGNORED)
            assert tokenizer.decode(row[: first + 1]).endswith((f"{THINK}\n", THINK_END))
            assert target[max(at for at, token in enumerate(target) if token != IGNORED)] == end
            assert row.count(think_end) == 1


def test_the_committed_checkpoints_are_small_and_share_their_vocabulary():
    files = [path for path in CHECKPOINTS.rglob("*") if path.is_file()]
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) < 16 * 2**20
    assert (TARGET / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()


def test_transformers_loads_both_and_the_target_answers_a_held_out_sentence():
    torch.set_num_threads(1)
    target, tokenizer = load(TARGET)
    draft, _ = load(DRAFT)
    assert type(target).__name__ == type(draft).__name__ == "Qwen3ForCausalLM"
    assert target.config.vocab_size == draft.config.vocab_size >= len(tokenizer)
    assert draft.num_parameters() < target.num_parameters() / 6
    asked: list[Example] = held_out(8)
    answers = greedy(target, tokenizer, asked)
    assert sum(exact(tokenizer, example, answer) for example, answer in zip(asked, answers, strict=True)) >= 6


def test_the_hybrid_begins_as_the_draft_without_its_first_attention():
    torch.set_num_threads(1)
    draft, tokenizer = load(DRAFT)
    hybrid = begin(create_hybrid(tokenizer, seed=0), draft)
    draft.model.layers[0].self_attn.o_proj.weight.data.zero_()
    ids = torch.tensor([prompt_ids(tokenizer, held_out(1)[0])])
    with torch.no_grad():
        torch.testing.assert_close(hybrid(ids).logits, draft(ids).logits, atol=1e-4, rtol=0)


def test_no_file_of_the_checkpoints_names_a_place_on_a_disk():
    for path in Path(CHECKPOINTS).rglob("*.json"):
        if path.name != "tokenizer.json":
            assert not re.search(r"\"[^\"]*/(tmp|home|work|root)/", path.read_text()), path
