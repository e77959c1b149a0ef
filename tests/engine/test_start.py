"""What a bundle on a CPU needs to give its first token: none of the packages that take seconds to import."""

import subprocess
import sys
from pathlib import Path

SLOW = (
    *("torch", "transformers", "xgrammar", "jsonschema", "rich", "asyncio", "ml_dtypes"),
    "tandemrt.engines.recipe.models",
    "tandemrt.plugins.reference",
    "tandemrt.runtime.engine_loop.capture",
    "tandemrt.runtime.grammars.library",
    "tandemrt.runtime.llm.neural_drafts",
    "tandemrt.runtime.trace.recorder",
    "tandemrt.runtime.workers.sandbox.process",
)


def test_a_bundle_on_a_cpu_gives_text_without_the_packages_that_are_slow_to_import(ngram_bundle: Path) -> None:
    code = f"""
import sys
from tandemrt import LLM, SamplingParams
with LLM({str(ngram_bundle)!r}, threads=1) as llm:
    assert llm.generate("the text", SamplingParams(max_tokens=8)).token_ids
print(sorted({set(SLOW)!r} & set(sys.modules)))
"""
    assert _printed(code) == "[]"


def test_a_grammar_needs_neither_torch_nor_transformers_and_leaves_xgrammar_to_import_as_ever() -> None:
    code = """
import sys
from tandemrt.runtime.grammars import xgrammar_library
compiled = xgrammar_library.NativeCompiler([b"a", b"b", b""], [2], max_threads=1).compile_grammar('root ::= "a" "b"')
matcher = xgrammar_library.NativeMatcher.of(compiled, [2])
assert matcher.accept_token(0) and not matcher.accept_token(0)
print(sorted({"torch", "transformers", "xgrammar"} & set(sys.modules)))
import xgrammar
assert xgrammar.GrammarCompiler and "torch" in sys.modules
"""
    assert _printed(code) == "[]"


def _printed(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
