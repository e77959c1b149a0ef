"""The check of a finished text that ``validate_output`` requests.

A pattern of the request may take unbounded time on a text, so the check runs in a worker process
(runtime/workers/sandbox). The imports stay small for that process.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.validation.errors import clipped


@dataclass(frozen=True)
class OutputCheck:
    """Validate a finished text against ``schema``, JSON in ``dialect``. Returns the error as text, or None."""

    schema: str
    dialect: str

    def __call__(self, text: str) -> str | None:
        import jsonschema
        import referencing.exceptions

        from tandemrt.runtime.grammars.schema.validators import format_checker, read_exactly, validator_of

        # The empty registry keeps references to other documents from being fetched.
        validator = validator_of(self.dialect)(
            _with_python_names(json.loads(self.schema)),
            registry=referencing.Registry(),
            format_checker=format_checker(self.dialect),
        )
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(read_exactly(text)))
        except ValueError as failure:
            return f"the text is not JSON: {clipped(failure)}"
        except (referencing.exceptions.Unresolvable, RecursionError, OverflowError, re.error) as failure:
            return f"the text cannot be checked: {clipped(failure)}"
        return None if error is None else f"{clipped(error.json_path)}: {clipped(error.message)}"


def _with_python_names(schema: Any) -> Any:
    """Return a schema with the patterns of names in Python's form, because several keywords search for them."""
    from tandemrt.runtime.grammars.regex.python_form import python_form
    from tandemrt.runtime.grammars.schema.document import subschemas

    pending = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += [child for _, child in subschemas(one)]
            patterns = one.get("patternProperties", {})
            if isinstance(patterns, dict):
                renamed = {python_form(pattern): child for pattern, child in patterns.items()}
                patterns.clear()
                patterns |= renamed
    return schema
