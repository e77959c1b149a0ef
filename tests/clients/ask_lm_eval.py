"""Ask a server for loglikelihoods as lm-eval does, with its own model class. Prints logprob and greediness as JSON.

lm-eval is installed without its other packages: its model class needs none of the datasets.
"""

import json
import sys

from lm_eval.models.openai_completions import LocalCompletionsAPI


def main(url: str, pairs: str) -> None:
    model = LocalCompletionsAPI(
        base_url=f"{url}/completions",
        model="demo",
        tokenizer_backend=None,
        batch_size=2,
        max_length=511,
    )
    model.tokenizer, model.tokenized_requests = "none", True  # token ids need no tokenizer
    requests = [(("", ""), context, continuation) for context, continuation in json.loads(pairs)]
    print(json.dumps(model._loglikelihood_tokens(requests)))


main(*sys.argv[1:])
