"""transformers in eager mode."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.bench.cpu.protocol import Unable, serve


class Transformers:
    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def generate(self, prompts: list[list[int]], tokens: int, *, schema: str, speculate: bool) -> list[list[int]]:
        if schema:
            raise Unable("transformers has no grammars")
        ids = torch.tensor(prompts)
        how = {"prompt_lookup_num_tokens": 5} if speculate else {}
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
                **how,
            )
        texts: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return texts


if __name__ == "__main__":
    serve(Transformers)
