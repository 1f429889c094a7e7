"""Models for the command line: of a function in a user's file, or of transformers."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._check import near
from .._extras import MissingPackageError
from .._types import PyTree
from .._user_file import InputError, describe_error
from ..auditing import load_function, user_errors
from ..auditing._file import as_arguments, made_by
from ._torch import Module, torch

HF = "hf:"
LENGTH, BATCH, SOUND = 16, 2, 4000  # of generated inputs: tokens, examples, samples of sound


class Loaded(NamedTuple):
    model: Module
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]
    module: Any = None


def load(target: str, args: str | None = None, seed: int = 0, labels: bool = False) -> Loaded:
    """Returns the model of ``path/to/file.py:function``, or of ``hf:`` and a config of transformers
    (random weights) or a folder with a config and weights in safetensors."""
    with _seeded(seed):
        if target.startswith(HF):
            if args is not None:
                raise InputError(f"--args names a function of a file, which {target} is not")
            model = _of_transformers(Path(target.removeprefix(HF)))
            return Loaded(model, (), inputs_of(model, labels))
        return _of_file(target, args)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _of_file(target: str, args: str | None) -> Loaded:
    function, module = load_function(target)
    name = target.rpartition(":")[2]
    with user_errors(module):
        try:
            made = function()
        except TypeError as error:
            raise InputError(f"{name}() failed: {describe_error(error)}") from error
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not is_model(model):
        raise InputError(
            f"{name}() returned a {type(made).__name__}; expected a torch.nn.Module, or a pair of "
            "it and its inputs (a tuple or a dict)"
        )
    if args is not None:
        given = made_by(module, args)
    if given is None:
        raise InputError(
            f"{name}() returned a model without inputs: return a pair (model, inputs), or name a "
            "function that returns the inputs with --args"
        )
    return Loaded(model, *as_arguments(given), module)


def is_model(made: Any) -> bool:
    model = made[0] if isinstance(made, tuple) and made else made
    return isinstance(model, torch.nn.Module)


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingPackageError("hf: needs transformers: pip install transformers") from None
    return transformers


def _of_transformers(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"no file at {str(file)!r}: expected a config of transformers (.json)")
    transformers = _transformers()
    try:
        values = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no config of transformers: it is no JSON: {error}") from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise InputError(f"{file} is no config of transformers: it has no model_type")
    if quantized := values.get("quantization_config"):
        how = quantized.get("quant_method") if isinstance(quantized, dict) else "some method"
        raise InputError(
            f"{file} has a quantization_config ({how}), whose weights can't be read: remove it "
            "from the config, for an audit of the model before quantization"
        )
    if kind not in transformers.CONFIG_MAPPING:
        version = transformers.__version__
        hint = near(kind, transformers.CONFIG_MAPPING)
        raise InputError(
            f"{file}: transformers {version} has no model_type {kind!r}; {hint}".rstrip("; ")
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(values)
        config.use_cache = False
        return _model(transformers, config, values, path).float().eval()
    except InputError:
        raise
    except Exception as error:  # configs are checked where models are built
        raise InputError(f"{file}: the model can't be built: {describe_error(error)}") from error


def _model(transformers: Any, config: Any, values: Mapping[str, Any], path: Path) -> Any:
    names = values.get("architectures") or []
    if not isinstance(names, list):
        raise InputError(f"architectures is {names!r}; expected a list of names")
    kind: Any = getattr(transformers, str(names[0]), None) if names else transformers.AutoModel
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if names and not known:  # the config may be a stranger's
        version = transformers.__version__
        raise InputError(f"transformers {version} has no class of models {names[0]!r}")
    if not path.is_dir():
        return kind(config) if names else kind.from_config(config)
    if not list(path.glob("*.safetensors")):
        raise InputError(
            f"{path} has no weights (.safetensors); for random ones, name its config.json"
        )
    return kind.from_pretrained(
        path, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )


def inputs_of(model: Module, labels: bool = False) -> dict[str, Any]:
    config, accepted = model.config, inspect.signature(model.forward).parameters
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or LENGTH
    shape = BATCH, min(LENGTH, positions)
    ids = torch.randint(1, max(getattr(text, "vocab_size", 2), 2), shape)
    main = model.main_input_name
    vision = getattr(config, "vision_config", config)
    if main == "input_ids":
        found = {"input_ids": ids}
        if "pixel_values" in accepted and vision is not config:
            found["pixel_values"] = _image(vision)
    elif main == "pixel_values":
        found = {"pixel_values": _image(vision)}
    elif main == "input_values":
        found = {"input_values": torch.randn(BATCH, SOUND)}
    elif main == "input_features":
        length = 2 * config.max_source_positions
        found = {"input_features": torch.randn(BATCH, config.num_mel_bins, length)}
    else:
        raise InputError(
            f"{type(model).__name__} takes {main}, for which no inputs can be made: write a file "
            "with a function that returns the model and its inputs"
        )
    if labels and "labels" in accepted:
        found["labels"] = ids
    elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        found["decoder_input_ids"] = ids
    return found


def _image(config: Any) -> Any:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(BATCH, getattr(config, "num_channels", 3), height, width)
