"""The transformers plug-in: ``AutoModel.from_pretrained`` of a kflats folder, once ``import kflats`` has run.

transformers calls any weight format a "quantizer". This one swaps layers while the model is still on the meta device,
lets transformers load the factors like other tensors, and checks that none is missing. Then it removes the "quantized"
marks: a factored model is an ordinary float model for ``.half()``, the Trainer, PEFT and ``save_pretrained``.

This module imports transformers; ``kflats.io.register_plugin`` imports this module once transformers is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kflats.codecs.streamed import StreamedMatrix
from kflats.common.dtypes import dtype_of
from kflats.common.errors import KflatsError
from kflats.common.machine import return_memory_now
from kflats.io.saving import STOP_KEY, Described, check_files, guard_saving_
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.layers import FactoredEmbedding
from kflats.model.description import Description, Module, describe, match, read_description, swap_described_
from kflats.model.parameters import decode_, end_loading_, shown_dense
from kflats.model.swap import Swaps, untie_
from kflats.model.weights import (
    QUANT_METHOD,
    FactoredLayer,
    factored_layers,
    is_parameter,
    pretrained_models,
    spellings,
    stored_name,
)


class KflatsConfig(QuantizationConfigMixin):
    """``quantization_config`` of a kflats folder, in the form that transformers needs while it loads."""

    def __init__(self, **data: Any) -> None:
        self.quant_method = cast(Any, QUANT_METHOD)  # transformers lists its own methods in an enum
        self.data = {"quant_method": QUANT_METHOD, **data}
        self.description: Description = read_description(self.data)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """From the ``quantization_config`` of a folder's config.json."""
        config = cls(**config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """The description as config.json holds it."""
        return Described(self.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> KflatsConfig:
        return self  # nothing changes it, and transformers copies configs in each forward of an encoder and a decoder


class KflatsQuantizer(HfQuantizer):
    """Swaps layers before the weights are loaded, checks them after, and then removes itself from the model."""

    quantization_config: KflatsConfig
    is_trainable = is_qat_trainable = is_compileable = True

    def __init__(self, quantization_config: KflatsConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise KflatsError(
                "a kflats description is not supported for a model that has no factors in its folder",
                hint="load the model, then compress it",
            )

    def update_attn_implementation(self, config: Any) -> Any:
        # The name of a weight file which stops transformers without this plug-in: files are looked for after this hook.
        config.__dict__.pop(STOP_KEY, None)
        # save_pretrained writes the type of the first parameter as the type of the model. If that parameter is a factor
        # with a type of its own, dtype="auto" would cast the whole model to it. So this hook writes the right type into
        # the config before transformers reads it; which of the two hooks is called depends on the version of
        # transformers. A type that the caller names is not changed.
        description = self.quantization_config.description
        if any(module.dtype != description.dtype for module in description.modules.values()):
            config.dtype = dtype_of(description.dtype)
        return config

    update_tp_plan = update_attn_implementation

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        description = self.quantization_config.description
        same_class = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
        dtype = kwargs.get("dtype")
        untie_(
            model, {s for module in description.modules.values() for n in module.untied for s in spellings(model, n)}
        )
        files = kwargs.get("checkpoint_files") or ()
        check_files(files)
        _check_shapes(files, description.modules.values())
        self._modules: list[tuple[str, Module]] = []
        with Swaps(model, just_found=True) as swaps:
            for weight, module in match(model, description, strict=same_class):
                target = description.stored_dtype(
                    module, dtype if isinstance(dtype, torch.dtype) else dtype_of(weight.dtype)
                )
                swap_described_(swaps, weight, module, module.new(target))
                self._modules.append((weight.name, module))
        model.__dict__["initialize_weights"] = partial(_initialize_rest, model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._own_names = _has_own_names(model, files, self._shapes)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        # transformers gives the model from 5.18 or so on.
        # These rules rename what transformers or others saved under older names. Some of them, made for whole names of
        # one class, take own names apart: those of a base model that are read from the folder of a task model.
        return [] if self._own_names else weight_conversions

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model.__dict__.pop("initialize_weights", None)
        for name, layer in factored_layers(model):
            if layer.owns_matrix:
                for key, tensor in _stored(layer).items():
                    # transformers only warns of a missing tensor, and fills it with random numbers.
                    if tensor.is_meta and "disk" in getattr(model, "hf_device_map", {}).values():
                        raise KflatsError(
                            f"{name} holds factors or codes, and a device_map that keeps them on disk is not supported",
                            cause="they are read whole in every call",
                            hint="a device_map that has them on a device or on the CPU",
                        )
                    if tensor.is_meta or not _is_loaded(tensor):
                        raise KflatsError(
                            f"the checkpoint has no {name}.{key} of shape {tuple(tensor.shape)}",
                            cause="a damaged folder: config.json and model.safetensors do not belong together",
                            hint="restore the folder, or compress again",
                        )
            if not isinstance(layer, FactoredEmbedding) and layer.bias is not None and not _is_loaded(layer.bias):
                # transformers reports the bias as missing, and initializes only biases of torch's own layers.
                nn.init.zeros_(layer.bias)
        # The first versions of transformers 5 check no shapes with a quantizer; later ones refuse before this point.
        for name, tensor in model.state_dict().items():
            there, here = tuple(tensor.shape), self._shapes.get(name)
            if here is not None and there != here:
                raise _wrong_size(name, there, here)
        several = bool(set(getattr(model, "hf_device_map", {}).values()) - {"cpu"})  # hooks move buffers in each call
        for name, module in self._modules:
            raw = is_parameter(module.places[0].role)
            matrix = end_loading_(model, name) if raw else cast(FactoredLayer, model.get_submodule(name)).matrix
            if isinstance(matrix, StreamedMatrix):
                # It keeps its stream, and transformers' tensor a map of the whole file.
                matrix.hold_(matrix.get_buffer("codes").clone())
            module.finish_(matrix)
            if several:
                matrix.complete_()
            if raw:
                decode_(model, name)
        if self._own_names:
            # transformers notes that it renamed nothing, and would write own names into an ordinary checkpoint, too.
            model.__dict__.pop("_weight_conversions", None)
        _let_go_of_files(model, [module for _, module in self._modules])
        model.config.quantization_config = self.quantization_config.to_dict()
        _take_marks_off(model)
        return_memory_now()
        return model

    def is_serializable(self, **_: Any) -> bool:
        """True: factors and codes are ordinary tensors."""
        return True


def _check_shapes(paths: Sequence[str | os.PathLike[str]], modules: Iterable[Module]) -> None:
    """Refuse safetensors files whose coded matrices have tensors of other shapes than their description says.

    Raises:
        KflatsError: files of another description.
    """
    expected = {
        stored_name(module.name, key, module.places[0].role): tuple(tensor.shape)
        for module in modules
        if isinstance(module.empty, CodedMatrix)
        for key, tensor in module.empty.tensors().items()
    }
    for path in paths if expected else ():
        with safe_open(path, framework="pt") as file:
            for name in expected.keys() & set(file.keys()):
                if (shape := tuple(file.get_slice(name).get_shape())) != expected[name]:
                    raise _wrong_size(name, shape, expected[name])


def _has_own_names(model: Any, paths: Sequence[str | os.PathLike[str]], names: Iterable[str]) -> bool:
    """Whether safetensors files name their tensors as ``model`` does, as files of kflats do: the files lack none of its
    ``names`` that is not tied, or have no others."""
    there: set[str] = set()
    for path in (path for path in paths if str(path).endswith(".safetensors")):
        with safe_open(path, framework="pt") as file:
            there.update(file.keys())
    own = {name: set(spellings(model, name)) & there for name in names}
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    lacks_none = all(found or name in tied for name, found in own.items())
    return lacks_none or (bool(there) and there == set().union(*own.values()))


def _wrong_size(name: str, there: tuple[int, ...], here: tuple[int, ...]) -> KflatsError:
    return KflatsError(
        f"size mismatch: {name} is {there} in the checkpoint, {here} in the model",
        cause="config.json was edited, or belongs to other weights",
    )


def _initialize_rest(model: Any) -> None:
    """transformers' ``initialize_weights``. Some modules fill tables of layers inside them, by their dense shapes."""
    with ExitStack() as stack:
        for _, layer in factored_layers(model):
            stack.enter_context(layer.shown_dense())
        stack.enter_context(shown_dense(model))
        type(model).initialize_weights(model)


def _stored(layer: FactoredLayer) -> dict[str, Tensor]:
    """The tensors of an owning layer that the checkpoint must have and the dense layer does not have."""
    tensors = layer.matrix.tensors()
    if layer.gained_bias and (bias := layer._parameters["bias"]) is not None:
        tensors["bias"] = bias
    return tensors


def _is_loaded(tensor: Tensor) -> bool:
    return bool(tensor.__dict__.get("_is_hf_initialized"))


def _let_go_of_files(model: nn.Module, modules: Iterable[Module]) -> None:
    """Copy parameters where they are less than the streams beside them.

    transformers maps files into memory, and a map stays for its last parameter, with all streams that were read.
    """
    streams = sum(module.stream.bytes for module in modules if module.stream is not None)
    if sum(parameter.nbytes for parameter in model.parameters()) < streams:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def _take_marks_off(model: Any) -> None:
    model.is_quantized = False
    for name in ("hf_quantizer", "quantization_method"):
        model.__dict__.pop(name, None)
    for _, part in pretrained_models(model):
        part.config.__dict__.pop("_is_quantized", None)
    # The description is written anew for this class: a base model has no head, and no prefix in its names.
    if (description := describe(model)) is None:
        del model.config.quantization_config
    else:
        model.config.quantization_config = Described(description)
    guard_saving_(model)


def register() -> None:
    """Enter both classes in transformers' tables. A second call does nothing."""
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(KflatsConfig)
    if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(QUANT_METHOD)(KflatsQuantizer)


register()
