"""Write weights as the graphs of a bundle read them: dequantized, per channel, in few bits or in tiles."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from tandemrt.engines.contract.dtypes import BITS
from tandemrt.engines.options.build_listener import Progress
from tandemrt.export.bundle.models import Model
from tandemrt.export.quantize.checkpoint import write_quantized
from tandemrt.export.quantize.dequantized_checkpoint import write_dequantized
from tandemrt.export.quantize.float_tiles import write_tiles
from tandemrt.export.quantize.groups import GROUP_SIZE
from tandemrt.export.quantize.per_channel import write_per_channel
from tandemrt.export.quantize.stored_weights import is_rounded_again, packed_format
from tandemrt.export.read.quantization.scheme import Quantization

_NO_COMPILER = (
    "no C compiler works here, so matmuls use onnxruntime's kernels (install gcc or clang, or name a compiler in CC, "
    "and build again)"
)


@dataclass(frozen=True)
class WeightsWriter:
    """Writes the weights of models into ``folder``.

    ``step`` measures and shows a step of the build. ``notes`` collects a line for each change that users should know.
    """

    folder: Path
    step: Callable[[str], AbstractContextManager[None]]
    progress: Progress
    notes: list[str]

    def write(self, model: Model) -> Model:
        """Return ``model`` with the checkpoint that its graph reads: the one it has, or one that is written here."""
        quantization = model.quantization
        if quantization is not None and model.dtype not in BITS and not model.blocks_become_channels:
            self.notes.extend(f"{model.role}: {note}" for note in quantization.notes())
        if not model.packed:
            return self._in_tiles(model)
        if model.dequantize and (stored := model.stored_quantization) is not None:
            return self._in_tiles(self._dequantized(model, stored))
        if quantization is not None and model.rewrites_float8:
            return self._per_channel(model, quantization)
        return self._in_few_bits(model)

    def _in_tiles(self, model: Model) -> Model:
        if model.on_cpu and model.compute == "float32" and not model.tiled:
            self.notes.append(f"{model.role}: {_NO_COMPILER}; the bundle will need longer to open")
        if not model.tiled:
            return model
        with self.step(f"Write the weights of {model.role} in tiles"):
            written = write_tiles(model.checkpoint, model.spec, self.folder / model.role, self.progress)
        return replace(model, checkpoint=written)

    def _dequantized(self, model: Model, stored: Quantization) -> Model:
        with self.step(f"Dequantize the weights of {model.role} to {model.compute}"):
            folder = self.folder / model.role
            plain = write_dequantized(model.source, model.spec, stored, folder, model.compute, self.progress)
        self.notes.append(
            f"{model.role}: {plain.weights} quantized weights ({stored.method}) became {model.compute}: "
            f"{plain.after / 1e9:.2f} GB instead of {plain.before / 1e9:.2f}"
        )
        return replace(model, checkpoint=plain.checkpoint)

    def _per_channel(self, model: Model, quantization: Quantization) -> Model:
        with self.step(f"Write the {model.role}'s float8 weights for a GPU"):
            folder = self.folder / model.role
            written = write_per_channel(model.source, model.spec, quantization, folder, self.progress)
        if model.blocks_become_channels:
            self.notes.append(
                f"{model.role}: scales of blocks became one per output, which changed the weights by "
                f"{written.error:.2%} (root mean square), and inputs get one per token"
            )
        if written.experts:
            kept = f"{written.experts} weights of experts keep their values"
            self.notes.append(f"{model.role}: {kept}, and their inputs stay unquantized")
        return replace(model, checkpoint=written.checkpoint)

    def _in_few_bits(self, model: Model) -> Model:
        """Quantize the weights to the recipe's dtype, or repack those that come quantized."""
        quantization, rounded = model.quantization, model.dtype in BITS
        bits = BITS.get(model.dtype)
        schemes = [] if quantization is None else [scheme for _, scheme in quantization.rules if scheme.packed]
        keeps = any(  # most values; the bits of a format are the same for any number of inputs
            not (model.rounds_again and is_rounded_again(packed_format(scheme, GROUP_SIZE, on_gpu=False), bits))
            for scheme in schemes
        )
        title = f"Quantize the weights of {model.role} to {model.dtype}"
        with self.step(title if rounded and not keeps else f"Pack the {model.role}'s weights"):
            written = write_quantized(
                model.source,
                model.spec,
                self.folder / model.role,
                bits,
                self.progress,
                tiles=model.tiles,
                interleaved=model.interleaved,
                rounds_again=model.rounds_again,
            )
        in_bits = {name.rpartition(".")[0].rpartition(".")[2] for name in written.checkpoint.tensors}
        if model.on_cpu_in_float32 and not model.interleaved and in_bits & {"int4", "int8"}:
            self.notes.append(f"{model.role}: {_NO_COMPILER}; matmuls in 4 and 8 bits will take about twice as long")
        if quantization is not None and written.kept:
            how = f"{written.kept} quantized weights ({quantization.method}) were repacked"
            changed = f"their scales changed by {written.scales_error:.2%} ({model.compute}; root mean square)"
            self.notes.append(
                f"{model.role}: {how}, {changed if written.scales_error else 'their values are the same'}"
            )
        if rounded and written.error:
            change = f"changed the weights by {written.error:.2%} (root mean square)"
            self.notes.append(f"{model.role}: {model.dtype} {change}")
        return replace(model, checkpoint=written.checkpoint)
