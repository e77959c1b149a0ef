"""The packages and the layers of the runtime as a picture."""

from tools.pictures.svg import WIDTH, arrow, box, picture, text

_LAYERS = (
    ("servers, cli, check, trace", "clients of LLM"),
    ("llm", "opens a bundle, generates, streams"),
    ("engine_loop", "propose, score, fill, verify, commit"),
    ("drafters", "model, heads, blocks, n-grams"),
    ("requests", "admission, queue, slots, text"),
    ("constraints, grammars", "mask rows"),
    ("caches", "KV blocks, prefix caching"),
    ("device", "backends, buffers, CUDA graphs"),
)
_STAGES = (
    ("read", "checkpoint to ModelSpec"),
    ("model", "ModelSpec to graph"),
    ("passes", "fusions, cut"),
    ("compile", "engines, kernels"),
    ("bundle", "recipe to bundle.json"),
    ("triton", "model repository"),
)
_ROW = 46.0


def architecture() -> str:
    """Return the picture: export on the left, runtime on the right, plugins and engines below both."""
    split, top = 232.0, 62.0
    parts = [text(10, 24, "Packages and layers", "ink title"), text(10, 43, "imports go down only", "faint small")]
    bottom = top + 20 + len(_LAYERS) * _ROW
    parts += [text(10, top + 6, "export/", "ink"), text(split + 10, top + 6, "runtime/", "ink")]
    for number, (name, about) in enumerate(_LAYERS):
        y = top + 16 + number * _ROW
        parts += [box(split + 10, y, WIDTH - split - 20, _ROW - 5), text(split + 18, y + 17, name, "ink small")]
        parts.append(text(split + 18, y + 33, about, "faint small"))
    step = (bottom - top - 16) / len(_STAGES)
    for number, (name, about) in enumerate(_STAGES):
        y = top + 16 + number * step
        parts += [box(10, y, split - 20, step - 12), text(18, y + 20, name, "ink small")]
        parts.append(text(18, y + 37, about, "faint small"))
        if number:
            parts.append(arrow(split - 40, y - 12, split - 40, y - 1))
    for number, (name, about) in enumerate(
        (
            ("plugins/", "operators: numpy reference, ONNX function, CUDA kernel, plugin"),
            ("engines/", "contract, recipe, bundle, tokenizer, parameters, options"),
        )
    ):
        y = bottom + 4 + number * _ROW
        parts += [box(10, y, WIDTH - 20, _ROW - 5), text(18, y + 17, name, "ink")]
        parts.append(text(18, y + 34, about, "faint small"))
    return picture(bottom + 8 + 2 * _ROW, "Packages and layers: imports go down only", parts)
