"""Hugging Face folders (config.json and safetensors): read straight to devices, written tensor by tensor.

Everything but the numbers is checked when a folder is opened: the config, the table of every shard, each tensor's
presence, dtype and shape.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.checkpoints.folders import new_folder, read_object
from jaxrl_llm.checkpoints.hf_config import from_hf_config, is_nested, text_config
from jaxrl_llm.checkpoints.hf_tensors import EMBED, HEAD, OTHERS, TEXT, HfTensor, hf_tensors, is_derived
from jaxrl_llm.checkpoints.safetensors_file import FLOATS, StoredTensor, read_table, shards, write_file
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.global_arrays import place
from jaxrl_llm.types import Params, UserError

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""What travels beside the weights when a folder is written anew."""


@dataclass(frozen=True)
class HfFolder:
    """A checked folder: `raw` is its config.json, `model` what that says, `stored` the tensors by name, `layout` what
    tensors such a model has.

    Of a model that sees images too (Llama 4), these are the config and the tensors of its text part.
    """

    path: Path
    raw: Mapping[str, Any]
    model: ModelConfig
    stored: Mapping[str, StoredTensor]
    layout: Callable[[ModelConfig], Iterator[HfTensor]] = hf_tensors


def is_hf_folder(path: Path) -> bool:
    return path.is_dir() and (path / _CONFIG).is_file()


def read_hf_tables(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's shards by name, without a look at the config.

    Raises UserError naming the file or tensor that is missing, damaged, cut off, or there twice.
    """
    index_path = path / _INDEX
    if not index_path.is_file():
        if not (path / _SINGLE).is_file():
            raise UserError(f"{path} has neither {_SINGLE} nor {_INDEX}; only safetensors weights are read")
        return read_table(path / _SINGLE)
    places = read_object(index_path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) and Path(p).name == p for p in places.values()):
        raise UserError(f"{index_path}: weight_map is not an object of file names in this folder")
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        for name, tensor in read_table(path / file).items():
            if name in stored:
                raise UserError(f"{path}: tensor {name!r} is in {stored[name].path.name} and in {file}")
            stored[name] = tensor
    for name, file in places.items():
        if name not in stored or stored[name].path.name != file:
            raise UserError(f"{path}: tensor {name!r} is missing in {file}, where {_INDEX} places it")
    return stored


def open_hf(path: str | Path) -> HfFolder:
    """Checks a folder without reading weights.

    Raises UserError naming the field of config.json that is missing or unknown, or the tensor that is missing,
    unexpected, cut off, of another shape or of a dtype that is no float of 16 or 32 bits. A head that equals the tied
    embedding, and rotary frequencies, which follow from the config, may be there too.
    """
    path, raw = Path(path), read_hf_config(path)
    try:
        nested = is_nested(raw)
        raw = text_config(raw) if nested else raw
        model = from_hf_config(raw)
    except UserError as error:
        raise UserError(f"{path / _CONFIG}: {error}") from None
    stored = read_hf_tables(path)
    if nested:
        stored = {name.removeprefix(TEXT): tensor for name, tensor in stored.items() if not name.startswith(OTHERS)}
    expected = check_tensors(path, stored, hf_tensors(model))
    for name in sorted(stored.keys() - expected):
        if is_derived(name):
            continue
        if name != HEAD:
            raise UserError(f"{path}: tensor {name!r} is unexpected; the model of {_CONFIG} has no such weight")
        _check(path, stored, HEAD, (model.vocab_size, model.d_model))
        if stored[HEAD].kind != stored[EMBED].kind or stored[HEAD].sha256() != stored[EMBED].sha256():
            raise UserError(f"{path}: tensor {HEAD!r} differs from {EMBED!r}, but tie_word_embeddings is true")
    return HfFolder(path, raw, model, stored)


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """A folder's config.json. Raises UserError if there is none, or if it is no JSON object."""
    if not is_hf_folder(Path(path)):
        raise UserError(f"{path} is not a folder with a {_CONFIG}")
    return read_object(Path(path) / _CONFIG)


def check_tensors(path: Path, stored: Mapping[str, StoredTensor], wanted: Iterable[HfTensor]) -> set[str]:
    """The names of `wanted`. Raises UserError naming the first that is missing, of another shape or no float."""
    names = set()
    for tensor in wanted:
        _check(path, stored, tensor.name, tensor.shape)
        names.add(tensor.name)
    return names


def _check(path: Path, stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...]) -> None:
    if name not in stored:
        raise UserError(f"{path}: tensor {name!r} is missing")
    tensor = stored[name]
    if tensor.shape != shape:
        raise UserError(f"{path}: tensor {name!r} has shape {tensor.shape}, {_CONFIG} asks for {shape}")
    if tensor.kind not in FLOATS:
        raise UserError(f"{path}: tensor {name!r} has dtype {tensor.kind}; supported: {', '.join(FLOATS)}")


def read_hf_params(folder: HfFolder, dtype: Any = "float32", shardings: Params | None = None) -> Params:
    """The folder's weights in `dtype`: the tree of models/transformer.py, layers stacked.

    With `shardings` (NamedShardings in that tree's form, layers whole) they are jax arrays, and the host holds no more
    than the shards of one tensor at a time: each device's part is read from the file by itself and sent there, layers
    are written into their stack in place. Without, they are numpy arrays.
    Raises UserError naming a tensor that ends early or holds a number that is not finite.
    """
    dtype = jnp.dtype(dtype)
    params: dict[str, Any] = {}
    for tensor in folder.layout(folder.model):
        for leaf, path in enumerate(tensor.leaves):
            _read_leaf(folder, tensor, leaf, path, params, dtype, shardings)
    return jax.tree.map(lambda x: x.whole() if isinstance(x, _Stack) else x, params)


def _read_leaf(
    folder: HfFolder, tensor: HfTensor, leaf: int, path: tuple[str, ...], params: Params, dtype: Any, shardings: Params
) -> None:
    """Puts what one tensor says about one of its leaves into `params`, where what is stacked is a `_Stack` if it is on
    devices."""
    stored, node, sharding = folder.stored[tensor.name], params, shardings
    for part in path[:-1]:
        node = node.setdefault(part, {})
    stacks = (folder.model.layers, folder.model.experts or 0)[: len(tensor.index)]
    shape, name = (*stacks, *tensor.ours), path[-1]
    if shardings is None:
        array = node.setdefault(name, np.empty(shape, dtype)) if name not in node else node[name]
        _fill(stored, tensor, leaf, array[tensor.index], _everything(tensor))
        return
    for part in path:
        sharding = sharding[part]
    if not tensor.index:
        node[name] = _to_devices(stored, tensor, leaf, dtype, sharding)
        return
    if name not in node:
        node[name] = _Stack(shape, dtype, sharding)
    node[name].put(tensor.index, len(stacks), partial(_to_devices, stored, tensor, leaf, dtype))


class _Stack:
    """A leaf that is written layer by layer, or expert by expert: one array for all devices that hold the same experts,
    so that an expert is sent to no other device and rewrites nothing but its own place."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding):
        self._shape, self._dtype, self._sharding = shape, dtype, sharding
        self._mesh = cast(Mesh, sharding.mesh)  # never an abstract one: arrays live there
        self._parts: dict[int, jax.Array] = {}

    def put(self, index: tuple[int, ...], stacks: int, read: Callable[[NamedSharding], jax.Array]) -> None:
        """Writes what `read` gives at `index` of the first `stacks` axes; nothing is read where no device wants it."""
        spec, shape = self._sharding.spec, list(self._shape)
        group, mesh = 0, self._mesh
        if stacks == 2 and (split := spec[1]) is not None:
            shape[1] //= mesh.shape[split]
            group, mesh = index[1] // shape[1], _slice_of(mesh, split, index[1] // shape[1])
            index = (index[0], index[1] % shape[1])
        whole, one = NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec(*spec[stacks:]))
        if not whole.addressable_devices:
            return
        if group not in self._parts:
            zeros = jax.jit(partial(jnp.zeros, shape, self._dtype), out_shardings=whole)
            self._parts[group] = jax.block_until_ready(zeros())
        # A transfer before the next layer is read: JAX lets go of host memory it was lent only when it is called again.
        at = place(np.array(index, np.int32), NamedSharding(mesh, PartitionSpec()))
        layer = jax.block_until_ready(read(one))
        # Waited for, or the layers read ahead would pile up on the host.
        self._parts[group] = jax.block_until_ready(_put_layer(self._parts[group], layer, at))

    def whole(self) -> jax.Array:
        """The leaf, without a copy."""
        shards = [shard.data for part in self._parts.values() for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards)


def _slice_of(mesh: Mesh, axis: str, at: int) -> Mesh:
    """The devices at one place of a mesh axis, which keeps its name."""
    devices = np.take(mesh.devices, [at], axis=mesh.axis_names.index(axis))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


@partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    layer = layer.reshape((1,) * len(index) + layer.shape)
    return lax.dynamic_update_slice(stack, layer, (*index, *[0] * (stack.ndim - len(index))))


def _everything(tensor: HfTensor) -> tuple[slice, ...]:
    return (slice(None),) * len(tensor.ours)


def _fill(stored: StoredTensor, tensor: HfTensor, leaf: int, out: np.ndarray, part: tuple[slice, ...]) -> None:
    """Writes a part (slices of our axes) of one tensor's leaf into `out`."""
    out, part = tensor.place(leaf, out, part)
    stored.read_into(out, tensor.view, part)


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An empty array that begins at a multiple of 64 bytes: the CPU backend takes such memory over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _to_devices(stored: StoredTensor, tensor: HfTensor, leaf: int, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """One tensor's leaf in our layout; each distinct part is read once, however many devices hold it."""
    parts: dict[Any, np.ndarray] = {}

    def read(part: tuple[slice, ...] | None) -> np.ndarray:
        part = _everything(tensor) if part is None else part
        key = tuple(s.indices(n) for s, n in zip(part, tensor.ours, strict=True))
        if key not in parts:
            parts[key] = _aligned([len(range(*bounds)) for bounds in key], dtype)
            _fill(stored, tensor, leaf, parts[key], part)
        return parts[key]

    return jax.make_array_from_callback(tensor.ours, sharding, read)


def write_hf(
    path: str | Path,
    model: ModelConfig,
    params: Params,
    config: Mapping[str, Any],
    *,
    dtype: Any = None,
    beside: Iterable[Path] = (),
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes weights as a Hugging Face folder that must not exist yet; one tensor is on the host at a time.

    `config` becomes config.json (from `to_hf_config`, or a folder's own that says the same); its dtype is set.
    `params` is the tree of models/transformer.py, of numpy or jax arrays; `dtype` (theirs by default) is the file's.
    Files `beside`, such as a tokenizer's, are copied. The folder appears complete or not at all.
    Raises UserError if it exists or cannot be written.
    """
    path = Path(path)
    tensors = list(hf_tensors(model))
    dtypes = [np.dtype(_leaf(params, t.leaves[0]).dtype if dtype is None else jnp.dtype(dtype)) for t in tensors]
    sizes = [int(np.prod(t.shape)) * kind.itemsize for t, kind in zip(tensors, dtypes, strict=True)]
    with new_folder(path) as unfinished:
        groups, places = list(shards(sizes, shard_bytes)), {}
        for number, group in enumerate(groups, 1):
            file = _SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            rows = [(tensors[i].name, dtypes[i], tensors[i].shape) for i in group]
            write_file(unfinished / file, rows, (_on_host(params, tensors[i], dtypes[i]) for i in group))
            places |= {tensors[i].name: file for i in group}
        if len(groups) > 1:
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
            (unfinished / _INDEX).write_text(json.dumps(index, indent=2))
        told = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")} | {"torch_dtype": str(dtypes[0])}
        (unfinished / _CONFIG).write_text(json.dumps(told, indent=2, allow_nan=False))
        for source in beside:
            shutil.copy(source, unfinished / source.name)


def _leaf(params: Params, path: tuple[str, ...]) -> Any:
    for part in path:
        params = params[part]
    return params


def _on_host(params: Params, tensor: HfTensor, dtype: np.dtype) -> np.ndarray:
    return tensor.to_hf([np.asarray(_leaf(params, path)[tensor.index]).astype(dtype) for path in tensor.leaves])
