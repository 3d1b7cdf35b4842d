"""The life of one model type: built, inspected, compressed in four ways, loaded, trained, saved again; then compared,
exported, trimmed and recovered.

Four processes live it: the one that compresses, one that loads what the first wrote, one that loads what the second
wrote, and one that runs the other commands. None of them has a model of the one before.
"""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import transformers
from safetensors import safe_open
from tiny_configs import SCHEMES, VOCABULARY, WORDS, tiny_config
from tiny_inputs import outputs, runnable
from torch import nn
from transformers.models.auto import modeling_auto

from kflats.cli.app import app
from kflats.common.errors import KflatsError
from kflats.common.machine import is_out_of_memory
from kflats.compress import pipeline
from kflats.evaluation.proof import compare
from kflats.importance import KroneckerFisher
from kflats.io.saving import load_model
from kflats.matrices.layers import FactoredConv2d, FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.methods import SVD
from kflats.model.weights import factored_layers, find_weights, spellings, submodule
from kflats.recipe.recipe import Recipe

Outcome: TypeAlias = Literal["held", "none", "refused", "failed", "unbuildable"]
"""none: there is nothing to do, such as no embedding to compress."""
Say: TypeAlias = Callable[[str, Outcome, str, float], None]

COMPRESSIONS = ("tables", "linear", "size", "data")
"""Choosing among all methods for each weight, ``size`` takes half of the time of a life."""
COMMANDS = ("compare", "dense", "onnx", "trim", "recover", "smallest")
"""What a model may be refused, and still hold: not every model reads texts, or has a form in ONNX."""
WAYS = (*COMPRESSIONS, *COMMANDS)
LARGEST = 16_000_000
"""Parameters of a model that still counts as tiny."""
_SEARCHED = 16_000_000
"""Bytes of a model for which several sizes are tried in the time of a life."""
_OF_TEXTS = {"input_ids", "attention_mask", "decoder_input_ids"}
_TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
_HEADS = [
    *("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM"),
    *("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM", "CTC"),
]
_TASKS = [
    *("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
    *("TOKEN_CLASSIFICATION", "QUESTION_ANSWERING"),
]
_TEXTS = [f"w{i % 97} w{(3 * i) % 89} the w{(7 * i) % 61} of w{i % 13} w{(5 * i) % 101} ." for i in range(64)]


class Nothing(Exception):
    """A stage that has nothing to do for this model type, with the reason."""


class Unbuildable(Exception):
    """A model type of which no tiny model can be made, with the reason."""


@dataclass(frozen=True)
class Built:
    """A tiny model, and what it is known to run on; None where no inputs are known."""

    model: Any
    batch: dict[str, Any] | None
    scheme: str


def names_of(head: str) -> Mapping[str, Any]:
    """The class names of one Auto model, by model type."""
    return getattr(modeling_auto, "MODEL_MAPPING_NAMES" if head == "" else f"MODEL_FOR_{head}_MAPPING_NAMES")  # type: ignore[no-any-return]


def model_types() -> list[str]:
    """Every model type whose config has an Auto model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    mapped = {t for name, names in vars(modeling_auto).items() if _is_mapping(name) for t in names}
    return sorted(mapped & set(CONFIG_MAPPING_NAMES))


def _is_mapping(name: str) -> bool:
    return name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")


def class_name(model_type: str) -> str:
    """The class that is compressed: with a language head where there is one, else the base model, else any."""
    others = [names for name, names in vars(modeling_auto).items() if _is_mapping(name)]
    for names in [*(names_of(head) for head in _HEADS), names_of(""), *others]:
        if found := names.get(model_type):
            return found if isinstance(found, str) else found[0]
    raise KeyError(model_type)


def build(model_type: str) -> Built:
    """The tiny model of the first scheme that runs, else of the first that can be built.

    Raises:
        Unbuildable: with the reason of the first scheme.
    """
    reasons, built = [], None
    for scheme in SCHEMES:
        try:
            kind = getattr(transformers, class_name(model_type))
            with torch.device("meta"):
                size = sum(p.numel() for p in kind._from_config(tiny_config(model_type, scheme)).parameters())
            if size > LARGEST:
                reasons.append(f"{size:,} parameters")
                continue
            for seed in range(4):  # where a last ReLU leaves zeros alone, another draw
                torch.manual_seed(seed)
                model = kind._from_config(tiny_config(model_type, scheme), dtype=torch.float32).eval()
                stir_(model)
                batch = runnable(model)
                if batch is None or any(bool(value.any()) for value in outputs(model, batch).values()):
                    break
            if batch is not None:
                return Built(model, batch, scheme)
            built = built or Built(model, None, scheme)
        except Exception as error:  # configs that do not fit together make models raise anything
            reasons.append(_brief(error))
    if built is None:
        raise Unbuildable(reasons[0])
    return built


def stir_(model: nn.Module) -> None:
    """Biases start at zero and scales at one, where a lost one would not be missed."""
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn_like(parameter))


def make_tokenizer() -> Any:
    """A word-level tokenizer whose ids are below every special id of the config."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "the", "of", *(f"w{i}" for i in range(WORDS - 8))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", **names)


def compressing(model_type: str, folder: Path, say: Say, ways: Sequence[str] = WAYS) -> None:
    """Build, inspect, compress in four ways; what each compressed model gave lies beside its folder."""
    built: list[Built] = []

    def start() -> str:
        made = build(model_type)
        built.append(made)
        try:
            made.model.save_pretrained(folder / "dense")
        except Exception as error:
            raise Unbuildable(f"transformers cannot save its own model: {_brief(error)}") from error
        if reads_text(made.model):
            make_tokenizer().save_pretrained(folder / "dense")
        torch.save(made.batch, folder / "batch.pt")
        try:
            again = type(made.model).from_pretrained(folder / "dense").eval()
        except Exception as error:
            raise Unbuildable(f"transformers cannot load its own folder: {_brief(error)}") from error
        if (fault := _difference(_given(made.model, made.batch), _given(again, made.batch))) is not None:
            raise Unbuildable(f"transformers' own folder comes back otherwise: {fault}")
        inputs = "inputs unknown: tensors are compared" if made.batch is None else ", ".join(made.batch)
        numbers = sum(p.numel() for p in made.model.parameters())
        named = sum(torch.Size(weight.shape).numel() for weight in find_weights(made.model)) / max(1, numbers)
        return f"{type(made.model).__name__}, {numbers:,} parameters, {named:.0%} named, {made.scheme}, {inputs}"

    if not _stage("build", start, say):
        return
    model, batch = built[0].model, built[0].batch
    # Half of a smaller table holds nothing.
    large = [weight for weight in find_weights(model) if min(weight.shape) >= 8 and max(weight.shape) >= 32]
    roles = {weight.places[0].role for weight in large}
    dense, base = str(folder / "dense"), ["--no-proof", "--quiet"]

    def written(name: str, *options: str) -> str:
        return _commanded(["compress", dense, "--out", str(folder / name), *base, *options])

    def chosen(name: str, role: str, method: str) -> str:
        if role not in roles:
            raise Nothing(f"no {role} that is compressed, or small ones")
        words = {"embedding": "embeddings", "linear": "linear"}
        how = f"--weights {words[role]} --keep 50% {method} --importance uniform"
        return written(name, *how.split())

    def with_data() -> str:
        if batch is None:
            raise Nothing("inputs unknown")
        data: dict[str, Any] = {"calibration": [batch]}
        if reads_text(model) and batch.keys() <= _OF_TEXTS:
            data = {"texts": _TEXTS, "samples": 8}
        # Texts do not reach the images' part of a model.
        recipe = Recipe(SVD(), KroneckerFisher(unreached="uniform"))
        pipeline.compress_folder(dense, folder / "data", size=size, method=recipe, weights=("all",), quiet=True, **data)
        return ""

    named = sum(weight.nbytes for weight in find_weights(model))
    files = sum(path.stat().st_size for path in (folder / "dense").glob("*.safetensors"))
    size = f"{files - named // 2}B"  # half of what can be compressed: biases and norms weigh much in tiny models
    stages: dict[str, Callable[[], str]] = {
        "inspect": lambda: _commanded(["inspect", dense]),
        "tables": lambda: chosen("tables", "embedding", "--method flats --flats 2"),
        "linear": lambda: chosen("linear", "linear", "--method svd"),
        "size": lambda: written("size", "--size", size, "--samples", "8"),
        "data": with_data,
    }
    with _outputs_kept(folder, batch):
        for name, work in stages.items():
            if name in COMPRESSIONS and name not in ways:
                continue
            if _stage(name, work, say) and (folder / name).exists():
                (folder / "before.pt").replace(folder / f"{name}.pt")
            else:
                shutil.rmtree(folder / name, ignore_errors=True)


def reads_text(model: nn.Module) -> bool:
    """Whether a tokenizer belongs into its folder."""
    from inspect import signature

    sizes = getattr(model.config.get_text_config(), "vocab_size", None)
    return "input_ids" in signature(model.forward).parameters and isinstance(sizes, int) and sizes == VOCABULARY


class _outputs_kept:
    """Inside, what a compressed model gives just before it is saved is kept beside its folder."""

    def __init__(self, folder: Path, batch: dict[str, Any] | None) -> None:
        self._folder, self._batch, self._save = folder, batch, pipeline.save_model

    def __enter__(self) -> None:
        def save(model: Any, aside: Any, **settings: Any) -> None:
            given = _given(model.eval(), self._batch)
            self._save(model, aside, **settings)
            torch.save(given, self._folder / "before.pt")

        pipeline.save_model = save

    def __exit__(self, *_: object) -> None:
        pipeline.save_model = self._save


def _given(model: nn.Module, batch: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """What the model gives for the batch; its parameters where no inputs are known."""
    if batch is not None:
        return outputs(model, batch)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.is_floating_point()}


def loading(model_type: str, folder: Path, say: Say, ways: Sequence[str] = WAYS) -> None:
    """Load each folder: the same outputs, the same ties; then one step of training, heads taken off and put on."""
    if not _compressed(folder):
        return
    batch = torch.load(folder / "batch.pt", weights_only=False)
    dense = load_model(folder / "dense").eval()
    for small in _compressed(folder):
        _stage(f"load {small.name}", lambda: _loaded_as_before(dense, small, batch), say)  # noqa: B023
    last = _compressed(folder)[-1]
    _stage("heads", lambda: _heads(model_type, folder, last), say)
    _stage("train", lambda: _trained(last, batch, folder / "trained"), say)


def again(model_type: str, folder: Path, say: Say, ways: Sequence[str] = WAYS) -> None:
    """Load what the trained model saved."""
    if (folder / "trained" / "config.json").is_file():
        batch = torch.load(folder / "batch.pt", weights_only=False)
        _stage("saved again", lambda: _equal(load_model(folder / "trained").eval(), folder / "trained.pt", batch), say)


def commanding(model_type: str, folder: Path, say: Say, ways: Sequence[str] = WAYS) -> None:
    """Run the commands that use a compressed model. Each ends well, or says what it does not support and why."""
    if not _compressed(folder):
        return
    small, batch = _compressed(folder)[-1], torch.load(folder / "batch.pt", weights_only=False)
    texts = folder / "texts.txt"
    texts.write_text("\n".join(_TEXTS), encoding="utf-8")
    dense, has_tokenizer = str(folder / "dense"), (folder / "dense" / "tokenizer.json").is_file()

    def exported() -> str:
        command = ["export", str(small), "--dense", "--out", str(folder / "exported"), "--quiet"]
        try:
            note, whole = _commanded(command), True
        except KflatsError as error:
            if "--drop-biases" not in error.on_command_line():
                raise
            note, whole = _commanded([*command, "--drop-biases"]), False
        plain, own = load_model(folder / "exported").eval(), load_model(small).eval()
        if any(True for _ in factored_layers(plain)):
            raise AssertionError("the export has factored layers")
        if whole and batch is not None and (fault := _difference(_given(own, batch), _given(plain, batch))) is not None:
            raise AssertionError(f"the export gives other outputs: {fault}")
        if other := _stored_names(folder / "exported") ^ _stored_names(folder / "dense"):
            raise AssertionError(f"the export has other names than the original's files: {sorted(other)[:4]}")
        return note if whole else "without biases that compression added"

    def compared() -> str:
        """Less the fresh processes, in which the command measures memory: starting them takes ten seconds."""
        try:
            return str(compare(dense, small, turns=2, fresh=False))[:0]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise KflatsError("the memory does not suffice", hint="a machine with more memory") from error

    def of_text(*arguments: str) -> str:
        return _commanded([*arguments, *(["--texts", str(texts)] if has_tokenizer else []), "--quiet"])

    def smallest() -> str:
        """The command without a size, on fewer samples; the search over sizes judges by outputs."""
        out = folder / "smallest"
        if sum(path.stat().st_size for path in (folder / "dense").glob("*.safetensors")) > _SEARCHED:
            raise Nothing("too large for several sizes in two minutes")
        note = _commanded(["compress", dense, "--out", str(out), "--samples", "16", "--no-proof", "--quiet"])
        if batch is not None and (
            bad := [n for n, t in _given(load_model(out).eval(), batch).items() if t.isnan().any()]
        ):
            raise AssertionError(f"outputs of NaN: {bad[:3]}")
        return note

    stages: dict[str, Callable[[], str]] = {
        "smallest": smallest,
        "compare": compared,
        "dense": exported,
        "onnx": lambda: _commanded(["export", str(small), "--onnx", "--out", str(folder / "onnx"), "--quiet"]),
        "trim": lambda: of_text("trim", dense, "--keep", "200", "--out", str(folder / "trimmed")),
        "recover": lambda: of_text(
            *("recover", str(small), "--teacher", dense, "--epochs", "1", "--out", str(folder / "recovered"))
        ),
    }
    for name, work in stages.items():
        if name in ways:
            _stage(name, work, say)


def _stored_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder's weight files."""
    names = set[str]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def _compressed(folder: Path) -> list[Path]:
    """The folders of compressed models that were written."""
    return [folder / name for name in COMPRESSIONS if (folder / name / "config.json").is_file()]


def _loaded_as_before(dense: nn.Module, folder: Path, batch: dict[str, Any] | None) -> str:
    kind = type(dense)
    loaded = kind.from_pretrained(folder).eval()
    _equal(loaded, folder.with_suffix(".pt"), batch)
    if (fault := _lost_tie(dense, loaded)) is not None:
        raise AssertionError(f"no longer tied: {fault}")
    if not any(True for _ in factored_layers(loaded)):
        raise Nothing("every weight is kept as it is")
    return f"{sum(1 for _ in factored_layers(loaded))} layers"


def _equal(loaded: nn.Module, before: Path, batch: dict[str, Any] | None) -> str:
    fault = _difference(torch.load(before, weights_only=False), _given(loaded, batch))
    if fault is not None:
        raise AssertionError(f"other outputs than before: {fault}")
    return ""


def _difference(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> str | None:
    """The first tensor that differs, or None."""
    if first.keys() != second.keys():
        return f"{sorted(first.keys() ^ second.keys())[:3]} are in one of both alone"
    for name, one in first.items():
        try:
            torch.testing.assert_close(second[name], one, equal_nan=True, **_TOLERANCE)
        except AssertionError as error:
            return f"{name}: {_brief(error)}"
    return None


def _lost_tie(dense: nn.Module, loaded: nn.Module) -> str | None:
    """Two parameters that were one and are none any more."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in dense.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    for names in by_parameter.values():
        held = {_holds(loaded, name) for name in names} if len(names) > 1 else set()
        if len(held) > 1:
            return " = ".join(names[:3])
    return None


def _holds(model: nn.Module, name: str) -> int | None:
    """What the module of this parameter holds in its place: the parameter, or the matrix in its factors."""
    path, _, key = name.rpartition(".")
    module = submodule(model, path)
    if isinstance(module, FactoredEmbedding | FactoredHead | FactoredLinear | FactoredConv2d) and key == "weight":
        return id(module.matrix)
    return None if module is None else id(module._parameters.get(key))


def _trained(folder: Path, batch: dict[str, Any] | None, out: Path) -> str:
    """One step of SGD towards outputs of zero, then saved, with what it gives."""
    model = load_model(folder)
    if batch is None:
        model.save_pretrained(out)
        torch.save(_given(model, batch), out.with_suffix(".pt"))
        raise Nothing("inputs unknown; saved again")
    model.eval()  # dropout and normalisation of two samples would hide the step
    torch.manual_seed(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        has_gradient = _backward(model, batch)
    except AssertionError:  # Reformer refuses gradients in eval mode
        has_gradient = _backward(model.train(), batch)
        model.eval()
    if not has_gradient:
        model.save_pretrained(out)
        torch.save(_given(model, batch), out.with_suffix(".pt"))
        raise Nothing("no output has a gradient; saved again")
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    finite = all(bool(torch.isfinite(g).all()) for g in gradients)
    norm = torch.stack([g.float().norm() for g in gradients]).norm()  # squares overflow float16
    if finite:
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 / norm.clamp_min(1e-6) * p.grad
    moved = [name for name, p in model.named_parameters() if not torch.equal(p.detach(), before[name])]
    if not finite or not moved or not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise AssertionError(f"the step is not finite, or moved nothing ({len(moved)} parameters)")
    model.save_pretrained(out)
    torch.save(_given(model, batch), out.with_suffix(".pt"))
    return f"{len(moved)} parameters moved"


def _backward(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Take the gradients of the mean squares of all outputs; False where no output has one."""
    found = [t for t in _differentiable(model(**batch)) if t.requires_grad]
    if found:
        torch.stack([t.float().square().mean() for t in found]).sum().backward()
    return bool(found)


def _differentiable(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _differentiable(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _differentiable(one)


def _heads(model_type: str, folder: Path, small: Path) -> str:
    """Out of the head into the base model and back; or, of a base model, into a task's head and out again."""
    own, base = class_name(model_type), names_of("").get(model_type)
    base = base if isinstance(base, str) or base is None else base[0]
    task = next((names_of(head)[model_type] for head in _TASKS if model_type in names_of(head)), None)
    route = [base, own] if base not in (None, own) else [task, own] if task is not None else []
    if not route or any(not isinstance(name, str) for name in route):
        raise Nothing("no other head")
    lost = _lost(route, small, folder / "route")
    own_losses = _lost(route, folder / "dense", folder / "dense-route") if lost else []
    if worse := [name for name in lost if name not in own_losses]:
        raise AssertionError(f"{' and '.join(route)}: {worse[0]} and {len(worse) - 1} more are lost on the way")
    return " and ".join(route)


def _lost(route: list[str], start: Path, out: Path) -> list[str]:
    """Load as one class, save, load as the next: the layers that are others at the end. transformers itself loses those
    that the class in between does not have."""
    first, path, last = load_model(start), start, None
    for place, name in enumerate(route):
        last = getattr(transformers, name).from_pretrained(path)
        path = out.with_name(f"{out.name}{place}")
        last.save_pretrained(path)
    assert last is not None
    return [name for name, module in first.named_modules() if _has_matrix(module) and not _same(module, last, name)]


def _has_matrix(module: nn.Module) -> bool:
    return isinstance(
        module, nn.Linear | nn.Embedding | nn.Conv2d | FactoredLinear | FactoredEmbedding | FactoredConv2d
    )


def _same(mine: Any, last: nn.Module, name: str) -> bool:
    there: Any = next((m for one in spellings(last, name) if (m := submodule(last, one)) is not None), None)
    if type(mine) is not type(there):
        return False
    one, other = (
        m.weight if isinstance(m, nn.Linear | nn.Embedding | nn.Conv2d) else m.matrix.dense() for m in (mine, there)
    )
    return one.shape == other.shape and torch.equal(one, other)


def _commanded(arguments: list[str]) -> str:
    """Run one command; what it complains of becomes a KflatsError.

    Raises:
        KflatsError: exit code 2. Any other exception is a traceback that the user would see.
    """
    said, shown = io.StringIO(), io.StringIO()
    with redirect_stderr(said), redirect_stdout(shown):
        code = app(arguments, standalone_mode=False)
    if code:
        raise KflatsError(" ".join(said.getvalue().split()).removeprefix("kflats: ").rstrip("."))
    return " ".join(said.getvalue().split())[:300]


def _stage(name: str, work: Callable[[], str], say: Say) -> bool:
    """Do the work and say what came of it; whether a folder is there afterwards."""
    begin = time.monotonic()
    outcome: Outcome = "held"
    try:
        note = work()
    except Nothing as reason:
        outcome, note = "none", str(reason)
    except Unbuildable as reason:
        outcome, note = "unbuildable", str(reason)
    except KflatsError as error:
        outcome, note = "refused", error.on_command_line()
    except Exception as error:  # what a user would see as a traceback
        outcome, note = "failed", _brief(error, where=True)
    say(name, outcome, note, time.monotonic() - begin)
    return outcome == "held"


def _brief(error: BaseException, *, where: bool = False) -> str:
    """One line of an error; ``where``: the innermost line of kflats too."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    places, frame = [], error.__traceback__
    while frame is not None:
        places.append((frame.tb_frame.f_code.co_filename, frame.tb_lineno))
        frame = frame.tb_next
    inside = [f"{Path(path).name}:{line}" for path, line in places if "/kflats/" in path]
    last = f"{Path(places[-1][0]).name}:{places[-1][1]}" if places else ""
    return f"{text} @ {inside[-1] if inside else '-'}, {last}" if where else text
