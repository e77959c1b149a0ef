"""The output that each planned request gets alone."""

from collections.abc import Sequence

from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import RequestOutput
from tools.quality.soak.plans import Plan


class Reference:
    """Runs each plan alone, once: without drafts under the coupled rule, with its own drafts under rejection.

    ``coupled`` is the reference for plans under the coupled rule, if another bundle has the same target.
    """

    def __init__(self, llm: LLM, plans: Sequence[Plan], coupled: "Reference | None" = None) -> None:
        self._llm, self._plans, self._coupled = llm, plans, coupled
        self._outputs: dict[int, RequestOutput] = {}

    def run(self, plans: set[int]) -> None:
        """Run the plans that have no output yet, one after another."""
        if self._coupled is not None:
            self._coupled.run({index for index in plans if self._plans[index].params.rule == "coupled"})
        for index in plans - self._outputs.keys():
            plan = self._plans[index]
            if plan.params.rule == "rejection":
                self._outputs[index] = self._llm.generate(plan.prompt, plan.params)
            elif self._coupled is not None:
                self._outputs[index] = self._coupled.output(index)
            else:
                self._outputs[index] = self._llm.generate(
                    plan.prompt, plan.params.model_copy(update={"num_draft_tokens": 0})
                )

    def output(self, plan: int) -> RequestOutput:
        """Return the output of a plan that ``run`` has run."""
        return self._outputs[plan]
