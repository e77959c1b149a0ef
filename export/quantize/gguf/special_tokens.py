"""The special tokens of a GGUF file: the tokens that end a text, by their keys and by their names.

Source: llama.cpp's src/llama-vocab.cpp, which ends a text at each of them.
"""

from typing import Any

_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_NAMES = (
    "</s>",
    "<eos>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|fim_pad|>",  # of Qwen: padding, and the beginning of another file
    "<|repo_name|>",
    "<|file_sep|>",
)


def special_tokens(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json about special tokens, with every token that ends a text.

    Files of instruct models often name the end of a document in ``eos_token_id``, and the end of an answer elsewhere.
    """

    def named(key: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}_token_id")

    ids = {token: index for index, token in enumerate(metadata.get("tokenizer.ggml.tokens") or ())}
    ends = [*map(named, _END_KEYS), *map(ids.get, _END_NAMES)]
    fields = {
        "bos_token_id": named("bos"),
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)) or None,
        "pad_token_id": named("padding"),
    }
    return {name: value for name, value in fields.items() if value is not None}
