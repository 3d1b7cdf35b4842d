"""A model as one ONNX file of standard operators with its factored and coded tables; the file is checked by running it.

The file holds factors or codes, and the runtime computes the rows that it looks up. Linear layers multiply floats, or
integers (``kflats.export.integers``). A folder has the file where other programs look for it, with what they read
beside it.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import logging
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.dtypes import dtype_name
from kflats.common.errors import KflatsError, first_line
from kflats.common.paths import expanded
from kflats.common.release import needed, version
from kflats.evaluation.running import (
    collate,
    drawn_samples,
    evaluating,
    explained,
    is_encoder_decoder,
    last_hidden_state,
    mean_over_tokens,
    modalities_of,
    read_together,
    spoken_modalities,
    task_output,
)
from kflats.export.integers import in_integers_, translations
from kflats.io import load_model, resolve_model
from kflats.io.atomic import check_file, check_folder, locked, new_folder, replaced
from kflats.io.saving import STOP_KEY, VERSION_KEY
from kflats.io.sources import copy_companions, static_folder, trusts_remote_code, weights_folder
from kflats.io.static import StaticModel
from kflats.model.run_as import running_as
from kflats.model.weights import compute_dtype, is_sentence_transformer, pretrained_models
from kflats.report.model_card import CARD, onnx_card, rewrite_
from kflats.report.report import stored_bytes

_LARGEST = 1_900_000_000  # bytes: a protobuf message holds 2 GiB
_OPSET = 18
_DENSE = "kflats export --dense, and another exporter on that checkpoint"
_CHARACTERS = 128  # ids of a model that reads characters, without a vocabulary
_SMALL = 1024  # numbers in a constant that is folded
_REWRITTEN = 4000  # nodes: the time in which onnxscript matches patterns grows with their square
_TEXT_SHAPES = ((2, 7), (1, 1), (5, 1), (1, 12), (4, 23))
"""Batches and lengths of the check of a text model; the first is recorded."""
FILE, INTEGER_FILE = "onnx/model.onnx", "onnx/model_quantized.onnx"
"""Where sentence-transformers, text-embeddings-inference and fastembed look in a folder, and where transformers.js does
for its type q8."""
_TOLERANCE, _INTEGER_TOLERANCE = 1e-4, 0.15
_OPERATOR = re.compile(r"translating node .*target=([\w.]+)")
"""How torch names an operator that it cannot translate."""


@dataclass(frozen=True)
class OnnxExport:
    """The result of ``export_onnx``, and its difference from PyTorch.

    Args:
        path: the file, or the folder.
        nbytes: the file's bytes.
        inputs, outputs: their names, in order.
        difference: largest absolute difference between onnxruntime and PyTorch over all shapes tried.
        cosine: with integers: mean cosine of the outputs to those of the model in float, on drawn inputs.
        notes: remarks on the file for its user.
    """

    path: Path
    nbytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    difference: float
    cosine: float | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.nbytes:,} bytes, {', '.join(self.inputs)} -> {', '.join(self.outputs)}",
            f"onnxruntime differs from PyTorch by {self.difference:.1e} at most",
        ]
        if self.cosine is not None:
            lines.append(f"cosine to the model in float: {self.cosine:.4f}, mean over drawn inputs")
        return "\n".join([*lines, *self.notes])


def export_onnx(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    inputs: Mapping[str, Tensor] | None = None,
    pooled: bool = False,
    int8: bool = False,
    tolerance: float | None = None,
    force: bool = False,
) -> OnnxExport:
    """Write ``model`` as an ONNX file with dynamic batch and length, and run it before it gets its name.

    ``path`` ends in ".onnx": that file alone. Otherwise a folder for programs that run ONNX, with the file as
    ``onnx/model.onnx`` (with ``int8`` as ``onnx/model_quantized.onnx`` too), the tokenizer, the modules of
    sentence-transformers, and the config without its description of factors.

    Factors and codes stay as stored: a low-rank table becomes two initializers, a coded table its bytes, which standard
    operators (opset 18) gather, shift and mask. The file is run by onnxruntime on several shapes,
    padded texts and single tokens among them, and refused unless

        max |onnxruntime - PyTorch| <= tolerance max(1, max |PyTorch|),
        ||onnxruntime - PyTorch|| <= tolerance ||PyTorch||    with int8: a last bit may round to the next integer.

    A model in half precision is recorded in float32: few runtimes compute in less on a CPU.

    Args:
        model: a folder or hub name, a transformers model, a SentenceTransformer, or any torch module.
        path: the file to be, ``model.onnx`` by custom; or a folder, if ``model`` is a folder or a hub name.
        inputs: an example of each input by name, for a module that does not read text. The module is called as
            ``model(**inputs)``. The first axis of each input is the batch; the second axis of an integer matrix is the
            length.
        pooled: one vector a text, named ``sentence_embedding``: by the folder's own sentence-transformers modules
            where it has some (pooling, dense layers, normalisation), else the masked mean of the last hidden states,
            of length 1, as ``kflats.fidelity`` compares it. Without it: ``logits`` of a model with a head, else
            ``last_hidden_state``. A SentenceTransformer is always pooled.
        int8: linear layers and tied heads multiply integers of 8 bits, the inputs of each token rounded; dense tables
            have a byte a number. Choose it for speed on CPUs, where a cosine of about .998 to the same model in float
            is enough (all-MiniLM-L6-v2 in 8 MB: .998 for sentences and for paragraphs).
            It is right on every CPU; layers of more than 131,072 inputs are refused. Factored layers without codes stay
            as they are, and convolutions in float.
        tolerance: of the check; by default 1e-4, and .15 with ``int8``.
        force: replace an existing ONNX file, or folder, that kflats wrote.

    Raises:
        KflatsError: the extra "onnx" is not installed; ``path`` exists and is not to be replaced, or another run writes
            it; a folder of a model that is no folder, or with ``pooled`` or ``inputs``; a tolerance that is not
            positive; a model that cannot be recorded; weights that are not finite, with ``int8``; outputs that differ;
            a full disk. A refused file is removed.
    """
    for package in ("onnx", "onnxruntime", "onnxscript"):
        needed(package, "kflats[onnx]", "export to ONNX")
    goal = expanded(path).resolve()
    source = None if isinstance(model, nn.Module) else resolve_model(model)
    alone = goal.suffix == ".onnx"
    if alone:
        check_file(goal, force, _is_own_export)
    elif source is None or pooled or inputs is not None:
        raise KflatsError(
            f"a folder for ONNX cannot be written {'of a model object' if source is None else 'with pooling inside'}",
            cause="the tokenizer, the pooling and the config lie in files beside the model",
            hint="an output that ends in .onnx, or a model folder without pooled and inputs",
        )
    else:
        check_folder(goal, force, [source])
    limit = (_INTEGER_TOLERANCE if int8 else _TOLERANCE) if tolerance is None else tolerance
    if not 0 < limit < math.inf:
        raise KflatsError(
            f"tolerance={tolerance!r} is not a positive number", hint="a small positive number such as 1e-4"
        )
    graph = _graph_of(model if source is None else source, inputs, pooled)
    if stored_bytes(graph.model) > _LARGEST:
        raise KflatsError(
            f"this {type(graph.model).__name__} is too large for an ONNX file",
            cause=f"it stores {stored_bytes(graph.model):,} bytes, and one file holds at most 2 GiB",
            hint=_DENSE,
        )
    if (dtype := compute_dtype(graph.model)) != torch.float32:
        graph = graph.of(copy.deepcopy(graph.model).cpu().float())
    elif any(not tensor.is_cpu for tensor in graph.model.state_dict().values()):
        graph = graph.of(copy.deepcopy(graph.model).cpu())
    notes = [] if dtype == torch.float32 else [f"recorded in float32: the model computes in {dtype_name(dtype)}"]
    with evaluating(graph), running_as(graph.model, "dense"), torch.no_grad():
        wanted = [graph(*tensors) for tensors in graph.trials()] if int8 else []
        if int8:
            graph = graph.of(copy.deepcopy(graph.model))
            if floats := in_integers_(graph.model, lambda: graph(*graph.example)):
                shown = ", ".join(floats[:3]) + (", ..." if len(floats) > 3 else "")
                notes.append(f"layers that multiply floats: {len(floats)} ({shown})")
        if alone:
            with locked(goal), replaced(goal) as aside:
                difference, cosine = _written(graph, aside, limit, wanted)
                size = aside.stat().st_size
                check_file(goal, force, _is_own_export)
        else:
            assert source is not None
            inside = weights_folder(source).relative_to(source)
            with new_folder(goal, force, [source]) as aside:
                file = aside / inside / (INTEGER_FILE if int8 else FILE)
                file.parent.mkdir(parents=True)
                difference, cosine = _written(graph, file, limit, wanted)
                size = file.stat().st_size
                _complete(source, aside, aside / inside, file)
    return OnnxExport(goal, size, graph.names, graph.outputs, difference, cosine, tuple(notes))


def _written(graph: _Graph, path: Path, tolerance: float, wanted: list[Tensor]) -> tuple[float, float | None]:
    with _attention_by_products(graph.model):
        _record(graph, path)
        return _check(graph, path, tolerance, wanted)


def _complete(source: Path, folder: Path, inner: Path, file: Path) -> None:
    """What programs read beside the file, and the name under which most of them look for it."""
    if not (usual := inner / FILE).exists():
        try:
            os.link(file, usual)
        except OSError:  # a file system without such links
            shutil.copyfile(file, usual)
    config = json.loads((weights_folder(source) / "config.json").read_text(encoding="utf-8"))
    for key in ("quantization_config", STOP_KEY):
        config.pop(key, None)
    (inner / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    copy_companions(source, folder)
    if (folder / CARD).is_file():
        rewrite_(folder, onnx_card)


@contextmanager
def _silent() -> Iterator[None]:
    """No warnings of torch and onnxscript about their own code, none about other packages, and no print of a graph that
    could not be recorded to its end."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)


@contextmanager
def _attention_by_products(model: nn.Module) -> Iterator[None]:
    """Attention by two products and a softmax, in place of torch's operator: that is recorded with a test of every
    score for NaN and a selection by it: two more passes over the scores of all heads."""
    # ``set_attn_implementation`` sets those of other parts, too, which may have attention of their own.
    configs = [config for _, part in pretrained_models(model) for config in _with_parts(part.config)]
    ours = [config for config in configs if config._attn_implementation_internal == "sdpa"]
    try:
        for config in ours:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config in ours:
            config._attn_implementation_internal = "sdpa"


def _with_parts(config: Any) -> Iterator[Any]:
    """A config of transformers, and those in it."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _with_parts(part)


def _record(graph: _Graph, path: Path) -> None:
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass
    from onnxscript.optimizer import fold_constants, optimize, remove_unused_nodes

    example = graph.example
    shapes = tuple({axis: torch.export.Dim(name) for axis, name in axes.items()} for axes in graph.axes)
    try:
        with _silent():
            program = torch.onnx.export(
                graph,
                tuple(example),
                dynamo=True,
                opset_version=_OPSET,
                dynamic_shapes={"tensors": shapes},
                input_names=list(graph.names),
                output_names=list(graph.outputs),
                custom_translation_table=translations(),
                optimize=False,
                verbose=False,
            )
            assert program is not None
            # Only small constants are folded: codes must not be decoded into the file.
            if len(program.model.graph) <= _REWRITTEN:
                optimize(program.model, input_size_limit=_SMALL, output_size_limit=_SMALL)
            else:
                fold_constants(program.model, input_size_limit=_SMALL, output_size_limit=_SMALL)
                remove_unused_nodes(program.model)
            _sum_unfused_(program.model.graph)
            _scale_in_products_(program.model.graph)
            ClearMetadataAndDocStringPass()(program.model)  # stack traces: paths of this machine, in every node
            program.model.metadata_props[VERSION_KEY] = version()
            program.save(str(path))
    except OSError:
        raise
    except Exception as error:  # torch.export raises whatever the model's own code raised, in many classes
        said = first_line(error.__cause__ or error)[:200]
        if operator := _OPERATOR.search(said):
            said = f"ONNX has no form of the operator {operator[1]}"
        raise KflatsError(
            f"this {type(graph.model).__name__} cannot be recorded: {said}",
            cause="its forward has steps that depend on data, or operators that ONNX lacks",
            hint=_DENSE,
        ) from error


def _sum_unfused_(graph: Any) -> None:
    """Let ``Sum`` add what a layer normalisation or an exact GELU reads. It computes what ``Add`` does, but onnxruntime
    does not fuse it with what follows: its fused kernels (SkipLayerNormalization and BiasGelu, on CPUs) take longer
    than the two alone."""
    for node in graph:
        if node.op_type == "LayerNormalization":
            read = node.inputs[0]
        elif node.op_type == "Erf" and (divided := node.inputs[0].producer()) is not None and divided.op_type == "Div":
            read = divided.inputs[0]
        else:
            continue
        added = read.producer()
        # Sum takes no integers.
        if added is not None and added.op_type == "Add" and read.dtype is not None and read.dtype.is_floating_point():
            added.op_type = "Sum"


def _scale_in_products_(graph: Any) -> None:
    """Multiply the steps of outputs by a one that is known only when the graph runs.

    onnxruntime multiplies sums of integers by two scales in the pass that writes them (MatMulIntegerToFloat) where it
    finds a product of two scales. It computes a product of constants beforehand, and then finds one scale. The one is
    Size(x) == Size(x) of an input x, as a float.
    """
    from onnx_ir import DataType, node

    scaled = [(mul, place) for mul in graph if mul.op_type == "Mul" and (place := _cast_sums(mul)) is not None]
    if scaled:
        size = node("Size", [graph.inputs[0]])
        equal = node("Equal", [size.outputs[0], size.outputs[0]])
        one = node("Cast", equal.outputs, {"to": DataType.FLOAT})
        graph.insert_before(graph[0], [size, equal, one])
    for mul, place in scaled:
        steps = node("Mul", [one.outputs[0], mul.inputs[1 - place]])
        graph.insert_before(mul, steps)
        mul.replace_input_with(1 - place, steps.outputs[0])


def _cast_sums(node: Any) -> int | None:
    """The input of ``node`` that is sums of integers, as floats."""
    for place, read in enumerate(node.inputs):
        cast = read.producer()
        if cast is not None and cast.op_type == "Cast":
            sums = cast.inputs[0].producer()
            if sums is not None and sums.op_type == "MatMulInteger":
                return place
    return None


def _check(graph: _Graph, path: Path, tolerance: float, wanted: list[Tensor]) -> tuple[float, float | None]:
    """The largest difference between onnxruntime and PyTorch, and with integers the mean cosine to ``wanted``, the
    outputs in float; differences of more than ``tolerance`` are an error."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    worst, cosines = 0.0, list[Tensor]()
    for trial, tensors in enumerate(graph.trials()):
        name, feed = graph.outputs[0], dict(zip(graph.names, (tensor.numpy() for tensor in tensors), strict=True))
        try:
            here, recorded = graph(*tensors), torch.from_numpy(session.run(None, feed)[0])
        except (KflatsError, MemoryError):
            raise
        except Exception as error:  # of the model's own code, or of onnxruntime, in many classes
            raise KflatsError(
                f"this {type(graph.model).__name__} cannot be run on inputs of {[tuple(t.shape) for t in tensors]}: "
                f"{first_line(error)[:200]}",
                cause="its forward depends on sizes of the batch or of the texts",
                hint=_DENSE,
            ) from error
        if recorded.shape != here.shape:
            problem = f"is {tuple(recorded.shape)}, not {tuple(here.shape)}"
        else:
            apart = recorded - here
            difference = float(apart.abs().max()) if here.numel() else 0.0
            if wanted:
                close = float(apart.norm()) <= tolerance * float(here.norm()) or difference < _TOLERANCE
                cosines.append(F.cosine_similarity(recorded, wanted[trial], dim=-1).flatten())
            else:
                close = difference <= tolerance * max(1.0, float(here.abs().max()) if here.numel() else 0.0)
            problem = "" if close else f"differs by {difference:.2g} at most, beyond the tolerance {tolerance:g}"
        if problem:
            raise KflatsError(
                f"{name} of the recorded model {problem} for inputs of {[tuple(t.shape) for t in tensors]}",
                cause="the model's forward depends on data or on sizes, or a defect of the exporter",
                hint=_DENSE,
            )
        worst = max(worst, difference)
    return worst, float(torch.cat(cosines).mean()) if cosines else None


def _is_own_export(path: Path) -> bool:
    """Whether ``export_onnx`` wrote the file."""
    import onnx

    try:
        entries = onnx.load(path, load_external_data=False).metadata_props
    except Exception:  # protobuf raises several classes for a file of another kind
        return False
    return any(entry.key == VERSION_KEY for entry in entries)


class _Graph(nn.Module):
    """A model as a function of tensors with one output tensor, with the inputs to record and to check it.

    Args:
        model: the model.
        kind: "pooled" (masked mean, length 1), "sentence" (a SentenceTransformer), "text" (logits or last hidden
            states) or "any".
        names: the names of the inputs.
        example: one tensor for each input.
        axes: for each input, the names of the axes that vary.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        names: tuple[str, ...],
        example: tuple[Tensor, ...],
        axes: tuple[dict[int, str], ...],
        outputs: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.model, self.kind = model, kind
        self.names, self.example, self.axes, self.outputs = names, example, axes, outputs

    def forward(self, *tensors: Tensor) -> Tensor:
        inputs = dict(zip(self.names, tensors, strict=True))
        if self.kind == "sentence":
            sentences: Tensor = self.model(inputs)["sentence_embedding"]
            return sentences
        if self.kind == "pooled":
            hidden = last_hidden_state(self.model, inputs)
            return F.normalize(mean_over_tokens(hidden, inputs["attention_mask"]), dim=1)
        return _output(self.model(**inputs, **_quiet(self.model)), self.outputs[0])

    def of(self, model: nn.Module) -> _Graph:
        """The graph of ``model``, which is a copy in float32 on the CPU."""
        example = tuple(t.cpu().float() if t.is_floating_point() else t.cpu() for t in self.example)
        return _Graph(model, self.kind, self.names, example, self.axes, self.outputs)

    def trials(self) -> Iterator[tuple[Tensor, ...]]:
        """Inputs of several batches and lengths, the same in every run."""
        if self.kind != "any":
            for batch, length in _TEXT_SHAPES:
                yield _texts(self.model, self.names, batch, length)
            return
        yield self.example
        yield tuple(t[:1] for t in self.example)
        yield tuple(torch.cat([t, t.flip(0), t]) for t in self.example)
        if any("length" in axes.values() for axes in self.axes):
            pairs = list(zip(self.example, self.axes, strict=True))
            yield tuple(t[:, : -(-t.shape[1] // 2)] if "length" in axes.values() else t for t, axes in pairs)


def _graph_of(model: nn.Module | str | os.PathLike[str], inputs: Mapping[str, Tensor] | None, pooled: bool) -> _Graph:
    """The graph to record of a model or of a model folder.

    Raises:
        KflatsError: a module that does not say what it reads, without ``inputs``; a model that generates with a decoder
            of its own, or that reads several things in one call.
    """
    folder = None if isinstance(model, nn.Module) else resolve_model(model)
    static = isinstance(model, StaticModel) if folder is None else static_folder(folder) is not None
    if isinstance(model, nn.Module) and is_sentence_transformer(model):
        static = not any(True for _ in pretrained_models(model))
    if static:
        raise KflatsError(
            "ONNX is not supported with a static model", hint="kflats export --dense, which both libraries load"
        )
    if not isinstance(model, nn.Module):
        assert folder is not None
        model = _loaded(folder, pooled)
    sentences = is_sentence_transformer(model)
    forward = inspect.signature(model.forward).parameters
    if inputs is not None:
        if pooled:
            raise KflatsError("pooled is not supported with inputs", hint="leave one of them out")
        return _any_graph(model, inputs)
    known = any(part is model for _, part in pretrained_models(model))
    reads_text = known and "input_ids" in forward
    if known and is_encoder_decoder(model) and not (pooled and reads_text):
        encoder = "pooled=True for its encoder, or " if reads_text else ""
        raise KflatsError(
            f"{type(model).__name__} cannot be recorded as one graph",
            cause="its decoder runs once for each token, with a state",
            hint=f"{encoder}an exporter of generation (optimum) on the dense checkpoint",
        )
    if known and pooled and not reads_text:
        raise KflatsError(
            f"pooled is not supported with {type(model).__name__}, which reads {spoken_modalities(model)}",
            hint="leave pooled out: the outputs are then its last hidden states, or its logits",
        )
    if known and not pooled and modalities_of(model):
        if len(modalities := read_together(model)) > 1:
            raise KflatsError(
                f"{type(model).__name__} cannot be recorded as one graph with one output",
                cause=f"one call of it reads {spoken_modalities(model)}",
                hint=_DENSE,
            )
        if modalities != ("input_ids",):
            return _any_graph(model, collate(drawn_samples(model, 2), 0))
    if not sentences and not reads_text:
        raise KflatsError(
            f"a {type(model).__name__} cannot be recorded without examples of its inputs",
            hint=f"an example of each of its inputs, or {_DENSE}",
        )
    if sentences or pooled:
        kind = "sentence" if sentences else "pooled"
        return _text_graph(model, kind, ("input_ids", "attention_mask"), "sentence_embedding")
    names = ["input_ids", "attention_mask"]
    # Pairs of texts need token types; a table of one type has no information.
    if "token_type_ids" in forward and getattr(model.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    return _text_graph(model, "text", tuple(names), "")


def _loaded(folder: Path, pooled: bool) -> nn.Module:
    if not pooled or not (folder / "modules.json").is_file():
        model: nn.Module = load_model(folder)
        return model
    library = needed("sentence_transformers", "kflats[st]", "pooling by the modules of that folder")
    # Other arguments keep their defaults; code of the folder is run only where it is trusted.
    sentences: nn.Module = library.SentenceTransformer(
        str(folder), device="cpu", trust_remote_code=trusts_remote_code(), local_files_only=True
    )
    return sentences


def _text_graph(model: nn.Module, kind: str, names: tuple[str, ...], output: str) -> _Graph:
    example = _texts(model, names, *_TEXT_SHAPES[0])
    if not output:
        device = next(model.parameters()).device
        with explained(model, _DENSE), torch.no_grad():
            result = model(**{n: t.to(device) for n, t in zip(names, example, strict=True)}, **_quiet(model))
        output = "logits" if task_output(result) is not None else "last_hidden_state"
    axes = tuple({0: "batch", 1: "length"} for _ in names)
    return _Graph(model, kind, names, example, axes, (output,))


def _any_graph(model: nn.Module, inputs: Mapping[str, Tensor]) -> _Graph:
    named = isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs)
    if not named or not inputs or not all(isinstance(t, Tensor) and t.ndim and len(t) > 1 for t in inputs.values()):
        raise KflatsError(
            "inputs must be tensors of two or more examples, by name", hint="a tensor of two examples for each input"
        )
    axes = tuple(
        {0: "batch", 1: "length"} if t.ndim == 2 and not t.is_floating_point() else {0: "batch"}
        for t in inputs.values()
    )
    return _Graph(model, "any", tuple(inputs), tuple(inputs.values()), axes, ("output",))


def _texts(model: nn.Module, names: tuple[str, ...], batch: int, length: int) -> tuple[Tensor, ...]:
    """Random ids of the model's table, with padding at the right of every text but the first."""
    gen = torch.Generator().manual_seed(batch * 1000 + length)
    configs = [part.config for _, part in pretrained_models(model)]
    config = configs[0].get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 0
    length = min(length, positions) if positions > 0 else length  # XLNet's is -1: it has no table of positions
    keep = torch.randint(1, length + 1, (batch, 1), generator=gen)
    keep[0] = length
    mask = (torch.arange(length) < keep).to(torch.int64)
    inputs = {
        "input_ids": torch.randint(0, getattr(config, "vocab_size", _CHARACTERS), (batch, length), generator=gen),
        "attention_mask": mask,
        "token_type_ids": (torch.arange(length) >= keep // 2).to(torch.int64) * mask,
    }
    return tuple(inputs[name] for name in names)


def _quiet(model: nn.Module) -> dict[str, Any]:
    """Arguments that turn off the cache, which would be a second output."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _output(result: Any, name: str) -> Tensor:
    if isinstance(result, Tensor):
        return result
    value = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    if value is None and name == "output":
        value = task_output(result)
        value = getattr(result, "last_hidden_state", None) if value is None else value
    if not isinstance(value, Tensor):
        raise KflatsError(f"the model's output has no {name}", hint="a module around the model that returns one tensor")
    return value
