"""Variables of a chat that its template does not read: clients send some to every model, so they are left out.

The response names them in ``warnings``. Elsewhere such a variable is an error.
"""

from collections.abc import Mapping
from itertools import islice

from tandemrt.engines.text.tokenizer import Tokenizer
from tandemrt.engines.validation.records import MOST_LINES
from tandemrt.runtime.requests.prompt import Chat, Prompt
from tandemrt.runtime.servers.openai.field_names import renamed


def without_unread(prompt: Prompt, tokenizer: Tokenizer, names: Mapping[str, str]) -> tuple[Prompt, list[str]]:
    """Return the prompt without the variables that its template does not read, and a warning about each of the
    first MOST_LINES.

    ``names`` are the client's names of fields by those of the runtime.
    """
    if not isinstance(prompt, Chat):
        return prompt, []
    variables = prompt.chat_template_kwargs
    unread = set(tokenizer.unread_variables(variables, prompt.tools))
    if not unread:
        return prompt, []
    kept = {name: value for name, value in variables.items() if name not in unread}
    problems = (tokenizer.unread_problem(name, prompt.tools) for name in variables if name in unread)
    warnings = [renamed(f"{problem}; it was ignored", names) for problem in islice(problems, MOST_LINES)]
    return prompt.model_copy(update={"chat_template_kwargs": kept}), warnings
