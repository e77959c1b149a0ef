"""``sampling.cuh``: the table of sampling parameters in CUDA C++, for the kernels that include it.

It declares the struct ``Sampling`` of vectors with an element per request, and three macros:

* ``SAMPLING_PARAMETERS``: the vectors as parameters of a kernel, in the order of the operators' inputs;
* ``SAMPLING``: the struct of these parameters;
* ``FOR_FILTERS(DO)``: ``DO(type, name)`` for each filter.
"""

from tandemrt.engines.contract.sampling_parameters import FILTERS, SAMPLING_PARAMETERS

FILE_NAME = "sampling.cuh"
_TYPES = {"float32": "float", "int64": "i64"}  # in CUDA C++


def sampling_header() -> bytes:
    """Return the file's content."""
    vectors = [f"const {_TYPES[parameter.dtype]}* {name}" for name, parameter in SAMPLING_PARAMETERS.items()]
    filters = [f"DO({_TYPES[parameter.dtype]}, {name})" for name, parameter in FILTERS.items()]
    lines = (
        "#pragma once",
        f"struct Sampling {{ {' '.join(f'{vector};' for vector in vectors)} }};",
        f"#define SAMPLING_PARAMETERS {', '.join(vectors)}",
        f"#define SAMPLING Sampling{{{', '.join(SAMPLING_PARAMETERS)}}}",
        f"#define FOR_FILTERS(DO) {' '.join(filters)}",
    )
    return "\n".join((*lines, "")).encode()
