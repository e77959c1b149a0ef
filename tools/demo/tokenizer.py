"""The demo tokenizer: byte-level BPE, every digit a token, single-token delimiters, a ChatML template."""

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo.corpus import Example, examples

VOCABULARY = 2000
"""Tokens of the tokenizer. The models pad their vocabulary to a multiple of 64, so a few ids have no token."""

PAD, START, END, THINK, THINK_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"

# As Qwen3 does: turn delimiters are special (left out when special tokens are skipped), reasoning delimiters are not.
ADDED_TOKENS = [
    *(AddedToken(text, special=True, normalized=False) for text in (PAD, START, END)),
    *(AddedToken(text, special=False, normalized=False) for text in (THINK, THINK_END)),
]

# Words with the character before them, single digits, runs of punctuation, line ends, spaces.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>' }}
    {%- endif %}
{%- endif %}"""


def train_tokenizer(seed: int, count: int = 20_000) -> PreTrainedTokenizerFast:
    """Learn the merges from ``count`` training examples. Raises RuntimeError if they do not fill the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, count), trainer)
    tokenizer.add_tokens(ADDED_TOKENS)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"{count} examples give {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}: use more")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def prompt_ids(tokenizer: Any, example: Example, *, thinking: bool = True) -> list[int]:
    """Return the token ids of the generation prompt; without ``thinking`` it holds an empty, closed block."""
    text = tokenizer.apply_chat_template(
        example.prompt_messages(), tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    return list(tokenizer(text)["input_ids"])


def _texts(seed: int, count: int) -> Iterator[str]:
    for example in examples(seed, count):
        yield example.sentence
        yield example.completion().replace(THINK_END, "\n")
