"""Write a shared object for x86-64 Linux without a compiler: its name, its dependencies, and one-instruction functions.

A function either returns a constant or jumps to a function of a library that the object needs. Layout and constants
are those of the System V ABI (gABI chapters 4 and 5, psABI x86-64): one read-and-execute segment with headers, symbols
and code, one writable segment with the dynamic table and the slots that the loader fills.
"""

import struct
from dataclasses import dataclass, field
from pathlib import Path

_PAGE = 0x1000
_SYMBOL, _DYNAMIC, _RELA, _PROGRAM_HEADER, _ELF_HEADER = 24, 16, 24, 56, 64
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_DT_NULL, _DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ = 0, 1, 4, 5, 6, 7, 8
_DT_RELAENT, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 9, 10, 11, 14
_GLOBAL_FUNCTION, _R_X86_64_GLOB_DAT = 0x12, 6


@dataclass(frozen=True)
class SharedObject:
    """``returns`` maps a function to the int it returns, ``forwards`` to the function of ``needed`` it jumps to."""

    name: str
    returns: dict[str, int] = field(default_factory=dict)
    forwards: dict[str, str] = field(default_factory=dict)
    needed: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        """Write ``folder / name`` and return its path."""
        path = folder / self.name
        path.write_bytes(_image(self))
        return path


def _image(shared_object: SharedObject) -> bytes:
    targets = list(dict.fromkeys(shared_object.forwards.values()))
    defined = [*shared_object.returns, *shared_object.forwards]
    names = _Strings()
    symbols = len(targets) + len(defined) + 1

    read_only = _Segment(_ELF_HEADER + 4 * _PROGRAM_HEADER)
    symbol_table = read_only.reserve(symbols * _SYMBOL)
    hashes = read_only.reserve(4 * (3 + symbols))
    relocations = read_only.reserve(len(targets) * _RELA)
    code = {name: read_only.reserve(8) for name in defined}
    soname, needed = names.add(shared_object.name), [names.add(each) for each in shared_object.needed]
    name_offsets = [names.add(name) for name in (*targets, *defined)]
    strings = read_only.reserve(len(names.data))

    entries = 10 + len(needed)
    dynamic = -(-read_only.end // _PAGE) * _PAGE
    slots = {target: dynamic + entries * _DYNAMIC + 8 * i for i, target in enumerate(targets)}
    size = dynamic + entries * _DYNAMIC + 8 * len(targets)

    image = bytearray(size)
    image[strings : strings + len(names.data)] = names.data
    for i, (name, offset) in enumerate(zip((*targets, *defined), name_offsets, strict=True), start=1):
        section, address = (0, 0) if i <= len(targets) else (1, code[name])
        struct.pack_into(
            "<IBBHQQ", image, symbol_table + i * _SYMBOL, offset, _GLOBAL_FUNCTION, 0, section, address, 8 * section
        )
    # One hash bucket: the chain visits every symbol.
    chain = [i + 1 for i in range(1, symbols - 1)] + [0]
    struct.pack_into(f"<{3 + symbols}I", image, hashes, 1, symbols, 1, 0, *chain)
    for i, target in enumerate(targets, start=1):
        info = i << 32 | _R_X86_64_GLOB_DAT
        struct.pack_into("<QQq", image, relocations + (i - 1) * _RELA, slots[target], info, 0)
    for name, value in shared_object.returns.items():
        struct.pack_into("<Bi B", image, code[name], 0xB8, value, 0xC3)  # mov eax, value; ret
    for name, target in shared_object.forwards.items():
        struct.pack_into("<2Bi", image, code[name], 0xFF, 0x25, slots[target] - (code[name] + 6))  # jmp *[rip + n]
    table = [
        *((_DT_NEEDED, offset) for offset in needed),
        (_DT_SONAME, soname),
        (_DT_HASH, hashes),
        (_DT_STRTAB, strings),
        (_DT_SYMTAB, symbol_table),
        (_DT_STRSZ, len(names.data)),
        (_DT_SYMENT, _SYMBOL),
        (_DT_RELA, relocations),
        (_DT_RELASZ, len(targets) * _RELA),
        (_DT_RELAENT, _RELA),
        (_DT_NULL, 0),
    ]
    for i, entry in enumerate(table):
        struct.pack_into("<QQ", image, dynamic + i * _DYNAMIC, *entry)

    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)  # 64 bits, little endian, ELF version 1
    header = (3, 62, 1, 0, _ELF_HEADER, 0, 0, _ELF_HEADER, _PROGRAM_HEADER, 4, 0, 0, 0)  # a shared object for x86-64
    struct.pack_into("<16sHHIQQQIHHHHHH", image, 0, ident, *header)
    readable, writable, executable = 4, 2, 1
    segments = [
        (_PT_LOAD, readable | executable, 0, read_only.end),
        (_PT_LOAD, readable | writable, dynamic, size - dynamic),
        (_PT_DYNAMIC, readable | writable, dynamic, entries * _DYNAMIC),
        (_PT_GNU_STACK, readable | writable, 0, 0),  # without it the loader would ask for an executable stack
    ]
    for i, (kind, flags, start, length) in enumerate(segments):
        place = _ELF_HEADER + i * _PROGRAM_HEADER
        struct.pack_into("<IIQQQQQQ", image, place, kind, flags, start, start, start, length, length, _PAGE)
    return bytes(image)


class _Strings:
    """The string table; offset 0 is the empty name."""

    def __init__(self) -> None:
        self.data = b"\0"

    def add(self, text: str) -> int:
        offset = len(self.data)
        self.data += text.encode() + b"\0"
        return offset


class _Segment:
    """Parts one after the other, each aligned to 8 bytes."""

    def __init__(self, start: int) -> None:
        self.end = start

    def reserve(self, size: int) -> int:
        place = -(-self.end // 8) * 8
        self.end = place + size
        return place
