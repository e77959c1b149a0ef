"""Texts of single tokens, and the blank between an echoed prompt and its completion."""

from pathlib import Path

import pytest
from tokenizers import decoders

from tandemrt import SamplingParams
from tandemrt.engines.text.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.runtime.servers.openai.formatters import CompletionFormatter
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.openai.token_texts import token_text
from tests.makers import VOCAB, tiny_tokenizer
from tests.plain.test_openai_choices import delta_of, output_of
from tests.plain.test_tokenizer_parity import llama_like


@pytest.fixture
def llama(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(llama_like(tmp_path))


def test_bytes_of_tokens_join_to_the_text(llama: Tokenizer) -> None:
    text = "the é😀 the"
    tokens = llama.encode(text, add_special_tokens=False)
    texts = [token_text(llama, token, first=at == 0) for at, token in enumerate(tokens)]
    assert b"".join(each.utf8 for each in texts) == text.encode()
    assert sum(each.characters for each in texts) == len(text)
    assert "bytes:\\xf0" in [each.text for each in texts]


def test_a_control_token_has_a_name_and_no_bytes(llama: Tokenizer) -> None:
    token = llama.token_to_id("</s>")
    assert token is not None
    assert token_text(llama, token) == ("</s>", b"")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_and_its_completion_are_decoded_together(llama: Tokenizer, streamed: bool, as_ids: bool) -> None:
    prompt, token = llama.encode("the", add_special_tokens=False), llama.token_to_id("▁the")
    assert token is not None
    assert llama.decode([token]) == "the"
    output = output_of("the", token_ids=[token])
    request = CompletionRequest(
        prompt=prompt if as_ids else "the", params=SamplingParams(), stream=streamed, model=None, echo=True
    )
    formatter = CompletionFormatter(request, "model", llama)
    if streamed:
        chunks = [*formatter.chunks([delta_of("the", tokens=[token])], 1), *formatter.chunks([delta_of("", output)], 1)]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        text = formatter.complete([output])["choices"][0]["text"]
    assert text == llama.decode([*prompt, token]) == "the the"


def test_byte_level_tokens_with_another_decoder_are_rejected(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path)
    backend = open_tokenizer(folder, VOCAB)[0].backend
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(BadBundle, match=r"tokens are byte-level, so its decoder must be ByteLevel, got .*'aĠb'"):
        open_tokenizer(folder, VOCAB)
