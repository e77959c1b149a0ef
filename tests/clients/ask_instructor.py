"""Ask a server for a pydantic model through instructor, in an environment of its own. Prints the answers as JSON."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

SENTENCE = "Please put 1 pine box at £26.55 on the account of Leo Conti."


class Order(BaseModel):
    kind: Literal["order"]
    customer: str
    currency: Literal["EUR", "USD", "GBP"]


def main(url: str, mode: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode[mode])
    asked = {"model": "demo", "messages": [{"role": "user", "content": SENTENCE}], "max_retries": 0, "temperature": 0}
    order = client.create(response_model=Order, **asked)
    *_, partial = client.create_partial(response_model=Order, **asked)
    print(json.dumps([order.model_dump(), partial.model_dump()]))


main(*sys.argv[1:])
