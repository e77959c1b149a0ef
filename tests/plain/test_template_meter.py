"""Templates that render in process, and templates that need a worker process."""

import time
from typing import Any

import pytest

from tandemrt.engines.text.chat_template import ChatTemplate

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a\nb"}]


DOUBLING = "{{% set ns = namespace(x='a') %}}{{% for i in range(60) %}}{}{{% endfor %}}"


def quickly(source: str, messages: Any = CHAT) -> str | None:
    template = ChatTemplate(source, {"eos_token": "</s>"})
    values = template.values(messages)
    text = template.render_quickly(values)
    assert text is None or text == template.render(values)
    return text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + eos_token ~ 5 ~ messages[1]['content'].split('\\n')[-1].lstrip() }}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index0 * 2 + 1 }}{{ loop.last }}{% else %}none{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% macro say(m) %}{{ m.content | trim | upper }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% macro w() %}<{{ caller() }}>{% endmacro %}{% call w() %}x{% endcall %}{% filter upper %}ab{% endfilter %}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'eq', 'user') | list }}",
        "{{ messages | tojson(indent=4) }}{{ messages[0] | tojson(separators=(',', ':')) }}{{ none_such }}{{ 7 % 3 }}",
        "{% if 'hel' in messages[0].content and messages[0].content not in ['x'] %}{{ messages|length }}{% endif %}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v.replace('l', 'L') }}{% endfor %}{{ '-'.join(['a', 'b']) }}",
        "{% block body %}{% set x %}{{ messages[0].content }}{% endset %}{{ x }}{% endblock %}{{ self.body() }}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{{ '<{}|{}>'.format(messages[0].role, 5) }}{{ '%s=%s' | format(none, [1.5]) }}{{ '{}'.format(x) }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% break %}{% endfor %}",
    ],
)
def test_usual_template_operations_run_in_process(source: str) -> None:
    assert quickly(source) is not None


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 5 }}",
        "{{ [0] * 5 }}",
        "{{ 2 ** 3 }}",
        "{{ 9223372036854775808 * 2 }}",
        "{{ '%5d' % 3 }}",
        "{{ 'a'.ljust(9) }}",
        "{{ 'a'['ljust'](9) }}",
        "{% set f = 'a'.zfill %}{{ f(9) }}",
        "{{ '{:9}'.format('a') }}",
        "{{ '{{}}'.format('a') }}",
        "{{ '{}'.format('a', 'b') }}",
        "{{ '%9s' | format('a') }}",
        "{{ messages[0].content.format('a') }}",
        "{{ 'a' | center(9) }}",
        "{{ ['a'] | map('center', 9) | list }}",
        "{{ 'a' | replace('a', messages[0].content) }}",
        "{{ 'aa'.replace('a', '" + "b" * 65 + "') }}",
        "{{ '" + "b" * 65 + "'.join(['a', 'b']) }}",
        "{{ 5.to_bytes(9) if false else (5).to_bytes(9) }}",
        "{{ 'x' | indent(9) }}",
    ],
)
def test_operations_with_unbounded_output_run_in_a_worker_process(source: str) -> None:
    template = ChatTemplate(source, {})
    assert template.render_quickly(template.values(CHAT)) is None


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endmacro %}"
        "{{ f() }}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        DOUBLING.format("{% set ns.x = ns.x + ns.x %}"),
        DOUBLING.format("{% set ns.x = ns.x ~ ns.x %}"),
        DOUBLING.format("{% set ns.x = ns.x|replace('a', 'aa') %}"),
        DOUBLING.replace("60", "24").format("{% set ns.x = ''.join([ns.x, ns.x]) %}"),
        DOUBLING.format("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        DOUBLING.format("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
        DOUBLING.format("{% set ns.x = [ns.x, ns.x] %}") + "{{ [ns.x] == [ns.x] }}",
        DOUBLING.format("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x | tojson }}",
        DOUBLING.format("{% set ns.x = ns.x|list + ns.x|list %}"),
        "{% set x = range(99999)|list %}{% for i in range(99999) %}{% set y = i in x %}{% endfor %}",
        "{% set x = range(99999)|list %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
        "{% for i in range(99999) %}{% continue %}" + "x" * 10_000 + "{% endfor %}",
    ],
)
def test_endless_loops_and_growing_values_are_stopped_early(source: str) -> None:
    template = ChatTemplate(source, {})
    values = template.values(CHAT)
    begun = time.thread_time()
    assert template.render_quickly(values) is None
    assert time.thread_time() - begun < 5.0  # takes milliseconds; without the budget, hours


@pytest.mark.parametrize("argument", ["{}", "d={}", "*[{}]", "**{{'d': {}}}"])
def test_every_kind_of_argument_of_a_filter_is_metered(argument: str) -> None:
    source = "{{ ['a', 'b', 'c'] | join(%s) }}"
    assert quickly(source % argument.format("messages[0].content")) is None
    if "*" not in argument:
        assert quickly(source % argument.format("', '")) == "a, b, c"


def test_a_long_chat_renders_in_process() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content | trim }}\n{% endfor %}"
    assert quickly(source, [{"role": "user", "content": "word " * 200}] * 300) is not None


def test_a_template_that_compiles_slowly_runs_in_a_worker_process() -> None:
    assert ChatTemplate("{{ 1 }}" * 20_000, {}).render_quickly({}) is None


HUGE = "('a' * 10**5) | center(3 * 10**8)"


@pytest.mark.parametrize(
    "source",
    [
        "{{% if false %}}{{{{ {huge} }}}}{{% endif %}}",
        "{{% if false %}}{{% set x = {huge} %}}{{% endif %}}",
        "{{% if false %}}{{% for x in {huge} %}}{{{{ x }}}}{{% endfor %}}{{% endif %}}",
        "{{% if false %}}{{% autoescape {huge} %}}a{{% endautoescape %}}{{% endif %}}",
        "{{% macro m(x={huge}) %}}{{% endmacro %}}",
        "{{% if false %}}{{{{ (({huge}) | length) ~ x }}}}{{% endif %}}",
    ],
)
def test_reading_a_template_computes_none_of_its_expressions(source: str) -> None:
    """A constant that is computed when the template compiles takes 300 MB here, and any amount elsewhere."""
    resource = pytest.importorskip("resource")
    template = ChatTemplate(source.format(huge=HUGE) + "{{ messages[0].content }}{{ mine }}", {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert template.variables >= {"messages", "mine"}
    assert template.render_quickly(template.values(CHAT)) in (None, "hello")
    assert template.render(template.values(CHAT)) == "hello"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
