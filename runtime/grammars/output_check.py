"""The check of a finished text that ``validate_output`` requests.

A pattern of the request may take unbounded time on a text, so the check runs in a worker process
(runtime/workers/sandbox). The imports stay small for that process.
"""

import json
import re
from dataclasses import dataclass

from tandemrt.engines.validation.errors import clipped


@dataclass(frozen=True)
class OutputCheck:
    """Validate a finished text against ``schema``, JSON in ``dialect``. Returns the error as text, or None."""

    schema: str
    dialect: str

    def __call__(self, text: str) -> str | None:
        import jsonschema
        import referencing.exceptions

        from tandemrt.runtime.grammars.schema.dialect import validator_of

        # The empty registry keeps references to other documents from being fetched.
        validator = validator_of(self.dialect)(
            json.loads(self.schema), registry=referencing.Registry(), format_checker=jsonschema.FormatChecker()
        )
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(json.loads(text)))
        except ValueError as failure:
            return f"the text is not JSON: {clipped(failure)}"
        except (referencing.exceptions.Unresolvable, RecursionError, OverflowError, re.error) as failure:
            return f"the text cannot be checked: {clipped(failure)}"
        return None if error is None else f"{clipped(error.json_path)}: {clipped(error.message)}"
