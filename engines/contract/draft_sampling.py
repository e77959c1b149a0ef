"""How a draft model samples: the record that recipe, manifest and sampling parameters share, with its bounds."""

from typing import Annotated, Literal

from pydantic import Field

from tandemrt.engines.validation.records import Record

GreedyBelow = Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)]  # a temperature
TemperatureScale = Annotated[float, Field(ge=0.01, le=10.0, allow_inf_nan=False)]


class DraftSampling(Record):
    """How a draft model samples its tokens unless a request overrides it (SamplingParams.draft_*).

    Attributes:
        sampling: "greedy" takes the most likely token at any temperature; None follows the request's ``rule``.
        greedy_below: requests with a lower temperature take the most likely token.
        temperature_scale: factor on the request's temperature.
    """

    sampling: Literal["greedy"] | None = None
    greedy_below: GreedyBelow = 0.0
    temperature_scale: TemperatureScale = 1.0
