"""A model as one ONNX file of standard operators with its factored and coded tables; the file is checked by running it.

The file holds factors or codes, and the runtime computes the rows that it looks up.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.release import version
from kflats.evaluation.encoding import evaluating
from kflats.export.onnx_graphs import Graph, graph_of
from kflats.io.atomic_files import check_file, replaced_together
from kflats.io.atomic_folder import locked
from kflats.io.headers import VERSION_KEY
from kflats.io.write_errors import explain
from kflats.model.describe import compute_dtype
from kflats.model.weights import factored_layers
from kflats.report.analysis import stored_bytes

_LARGEST = 1_900_000_000  # bytes: a protobuf message holds 2 GiB
_OPSET = 18
_SMALL = 1024  # numbers in a constant that is folded


@dataclass(frozen=True)
class OnnxExport:
    """The result of ``export_onnx``, and its difference from PyTorch.

    Args:
        path: the file; a model beyond 1.9 GB has its numbers in ``<path>.data`` beside it.
        nbytes: bytes of the file and its data file.
        inputs, outputs: their names, in order.
        difference: largest absolute difference between onnxruntime and PyTorch over all shapes tried.
        notes: remarks on the file for its user.
    """

    path: Path
    nbytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    difference: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.nbytes:,} bytes, {', '.join(self.inputs)} -> {', '.join(self.outputs)}",
            f"onnxruntime differs from PyTorch by {self.difference:.1e} at most",
        ]
        return "\n".join([*lines, *self.notes])


def export_onnx(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    inputs: Mapping[str, Tensor] | None = None,
    pooled: bool = False,
    tolerance: float = 1e-4,
    force: bool = False,
) -> OnnxExport:
    """Write ``model`` as an ONNX file with dynamic batch and length, and run it before it gets its name.

    Factors and codes stay as stored: a low-rank table becomes two initializers, a coded table its bytes, which standard
    operators (opset 18) gather, shift and mask. The file is run by onnxruntime on several shapes,
    padded texts and single tokens among them, and refused unless

        max |onnxruntime - PyTorch| <= tolerance max(1, max |PyTorch|).

    A model in half precision is recorded in float32: few runtimes compute in less on a CPU.

    Args:
        model: a folder or hub name, a transformers model, a SentenceTransformer, or any torch module.
        path: the file to be, ``model.onnx`` by custom.
        inputs: an example of each input by name, for a module that does not read text. The module is called as
            ``model(**inputs)``. The first axis of each input is the batch; the second axis of an integer matrix is the
            length.
        pooled: one vector a text, named ``sentence_embedding``: by the folder's own sentence-transformers modules
            where it has some (pooling, dense layers, normalisation), else the masked mean of the last hidden states,
            of length 1, as ``kflats.fidelity`` compares it. Without it: ``logits`` of a model with a head, else
            ``last_hidden_state``. A SentenceTransformer is always pooled.
        tolerance: of the check.
        force: replace an existing ONNX file that kflats wrote.

    Raises:
        KflatsError: the extra "onnx" is not installed; ``path`` exists and is not to be replaced, or another run writes
            it; a tolerance that is not positive; a model that cannot be recorded; outputs that differ; a full disk. A
            refused file is removed.
    """
    _require("onnx", "onnxruntime", "onnxscript")
    goal = Path(path).expanduser().resolve()
    check_file(goal, force, _is_own_export)
    if not 0 < tolerance < math.inf:
        raise KflatsError(
            f"tolerance={tolerance!r} is not a positive number", hint="a small positive number such as 1e-4"
        )
    graph = graph_of(model, inputs, pooled)
    notes = []
    if (dtype := compute_dtype(graph.model)) != torch.float32:
        graph = graph.of(copy.deepcopy(graph.model).cpu().float())
        notes.append(f"recorded in float32: the model computes in {str(dtype).removeprefix('torch.')}")
    elif any(not tensor.is_cpu for tensor in graph.model.state_dict().values()):
        graph = graph.of(copy.deepcopy(graph.model).cpu())
    with evaluating(graph), torch.no_grad(), _written_aside(goal, force) as aside:
        _record(graph, aside, external=stored_bytes(graph.model) > _LARGEST)
        difference = _check(graph, aside, tolerance)
        size = sum(file.stat().st_size for file in aside.parent.iterdir())
    if more := _derived(graph.model):
        notes.append(
            f"flats and codes take {more:,} bytes in it beside those of their fixed-rate form: "
            "where each row and column lies"
        )
    return OnnxExport(goal, size, graph.names, graph.outputs, difference, tuple(notes))


def _derived(model: nn.Module) -> int:
    """Bytes of the buffers that matrices derive from their stored tensors; the graph needs them to look up rows."""
    found = 0
    for _, layer in factored_layers(model):
        if layer.owns_matrix:
            buffers = layer.matrix.named_buffers()
            hidden = layer.matrix._non_persistent_buffers_set
            found += sum(t.numel() * t.element_size() for name, t in buffers if name in hidden)
    return found


def _record(graph: Graph, path: Path, *, external: bool) -> None:
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass
    from onnxscript.optimizer import optimize

    example = graph.example
    shapes = tuple({axis: torch.export.Dim(name) for axis, name in axes.items()} for axes in graph.axes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch and onnxscript warn about their own code
            program = torch.onnx.export(
                graph,
                tuple(example),
                dynamo=True,
                opset_version=_OPSET,
                dynamic_shapes={"tensors": shapes},
                input_names=list(graph.names),
                output_names=list(graph.outputs),
                optimize=False,
                verbose=False,
            )
            assert program is not None
            # Only small constants are folded: codes must not be decoded into the file.
            optimize(program.model, input_size_limit=_SMALL, output_size_limit=_SMALL)
            ClearMetadataAndDocStringPass()(program.model)  # stack traces: paths of this machine, in every node
            program.model.metadata_props[VERSION_KEY] = version()
            program.save(str(path), external_data=external)
    except OSError as error:
        explain(error, path)
        raise
    except Exception as error:  # torch.export raises whatever the model's own code raised, in many classes
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise KflatsError(
            f"this {type(graph.model).__name__} cannot be recorded: {reason[:200]}",
            cause="its forward has steps that depend on data, or operators that ONNX lacks",
            hint="torch.onnx.export(model, ..., dynamo=True, report=True) on the original model shows the details",
            command="--dense, and another exporter on that checkpoint",
        ) from error


def _check(graph: Graph, path: Path, tolerance: float) -> float:
    """The largest difference between onnxruntime and PyTorch; more than ``tolerance`` is an error."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for given in graph.trials():
        wanted = graph(*given)
        feed = {name: tensor.numpy() for name, tensor in zip(graph.names, given, strict=True)}
        for name, here, there in zip(graph.outputs, _as_tuple(wanted), session.run(None, feed), strict=True):
            found = torch.from_numpy(there)
            shapes = [tuple(t.shape) for t in given]
            if found.shape != here.shape:
                raise KflatsError(
                    f"{name} of the recorded model is {tuple(found.shape)} for inputs of {shapes}, "
                    f"not {tuple(here.shape)}",
                    cause="the model's forward depends on the size of the recorded example",
                    hint="kflats export --dense, and another exporter on that checkpoint",
                )
            difference = float((found - here).abs().max()) if here.numel() else 0.0
            if not difference <= tolerance * max(1.0, float(here.abs().max())):
                raise KflatsError(
                    f"{name} of the recorded model differs by {difference:.2g} for inputs of {shapes}, "
                    f"more than {tolerance:g}",
                    cause="a step of the model's forward that depends on data, or a defect of the exporter",
                    hint="kflats export --dense, and another exporter on that checkpoint",
                )
            worst = max(worst, difference)
    return worst


def _as_tuple(value: Any) -> Sequence[Tensor]:
    return value if isinstance(value, tuple) else (value,)


@contextmanager
def _written_aside(goal: Path, force: bool) -> Iterator[Path]:
    """A path in a temporary folder; at the end all files there move beside ``goal``, or none of them."""
    try:
        with locked(goal), replaced_together(goal.parent, f".{goal.name}") as aside:
            yield aside / goal.name
            check_file(goal, force, _is_own_export)
            for file in aside.iterdir() if not goal.exists() else ():
                check_file(goal.parent / file.name)  # the data file of another graph
    except OSError as error:
        explain(error, goal)
        raise


def _is_own_export(path: Path) -> bool:
    """Whether ``export_onnx`` wrote the file."""
    import onnx

    try:
        entries = onnx.load(path, load_external_data=False).metadata_props
    except Exception:  # protobuf raises several classes for a file of another kind
        return False
    return any(entry.key == VERSION_KEY for entry in entries)


def _require(*packages: str) -> None:
    from importlib.util import find_spec

    if missing := [name for name in packages if find_spec(name) is None]:
        raise KflatsError(
            f"export to ONNX needs {', '.join(missing)}",
            cause="the extra 'onnx' is not installed",
            hint="pip install 'kflats[onnx]'",
        )
