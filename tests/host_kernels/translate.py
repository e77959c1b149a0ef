"""Translate a CUDA source of the project to C++ for a CPU: its headers in one text, calls in place of assembly."""

import re
from collections.abc import Iterator
from pathlib import Path

HOST = Path(__file__).parent / "host.h"
_HERE = ("cluster.cuh",)  # host.h has it
_TYPES = re.compile(r"(?m)^(?:typedef .*|using [ui]\d+ = .*|#define INFINITE .*|#pragma .*)$")


def translated(file: Path) -> str:
    """Return ``file`` (NAME.cu) as C++ that includes host.h."""
    text = _TYPES.sub("", "\n".join(_lines(file, set())))
    text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];", _SHARED, text)
    code, end = "", 0
    for assembly in re.finditer(r"\basm(?: volatile)?\s*\(", text):
        code += text[end : assembly.start()]
        end = _closing(text, assembly.end() - 1)
        code += _call(text[assembly.end() : end - 1])
    return f'#include "{HOST}"\n#define INFINITE __int_as_float(0x7f800000)\n{code}{text[end:]}'


_SHARED = r"\1* \2 = reinterpret_cast<\1*>(shared_begin(current->block));"


def _lines(file: Path, seen: set[str]) -> Iterator[str]:
    for line in file.read_text().splitlines():
        included = re.match(r'#include "(.+)"', line)
        if included is None:
            yield line
        elif included[1] not in seen:
            seen.add(included[1])
            if included[1] not in _HERE:
                yield from _lines(file.with_name(included[1]), seen)


def _call(assembly: str) -> str:
    """Return a call of ptx_INSTRUCTION in host.h with the outputs and inputs of an asm statement."""
    template = re.match(r'\s*((?:"[^"]*"\s*)+)', assembly)
    assert template is not None
    instruction = re.sub(r'"\s*"', "", template[1]).strip().strip('"').split()[0].strip(";")
    if instruction.startswith("mma."):
        instruction = "mma_bf16" if "bf16" in instruction else "mma_f16"
    elif instruction.startswith("ld.global."):
        instruction = "ld_global"
    name = f"ptx_{re.sub(r'[.:]', '_', instruction)}"
    if f"{name}(" not in _INSTRUCTIONS and f"{name} " not in _INSTRUCTIONS:
        return f'fail("{re.escape(instruction)}")'.replace("\\", "")
    operands, at = [], template.end()
    while operand := re.compile(r'"[=+]*\w"\s*\(').search(assembly, at):
        at = _closing(assembly, operand.end() - 1)
        operands.append(assembly[operand.end() : at - 1])
    return f"{name}({', '.join(operands)})"


_INSTRUCTIONS = HOST.read_text()


def _closing(text: str, opening: int) -> int:
    """Return the place after the parenthesis that closes the one at ``opening``."""
    depth = quoted = 0
    for at in range(opening, len(text)):
        if text[at] == '"':
            quoted ^= 1
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            if depth == 0:
                return at + 1
    raise ValueError(f"the parenthesis at {opening} is not closed")
