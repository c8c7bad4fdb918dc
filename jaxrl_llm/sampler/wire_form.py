"""The form in which weights travel from a trainer to samplers in other processes, and back into a tree."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.sampler.loading import WeightLoader
from jaxrl_llm.types import Params
from jaxrl_llm.weights.snapshot import leaf_name, named

LeafShape = tuple[tuple[int, ...], str]
"""(shape, name of the dtype)"""


class WireForm:
    """Layers stacked, in `dtype` (a router in float32), with `int8` the layers' matrices quantised.

    Quantising before the way or after it gives the same numbers; before it, fewer bytes.
    """

    def __init__(self, model: ModelConfig, mesh: Mesh, *, dtype: str, int8: bool):
        self._loader = WeightLoader(model, mesh, dtype=dtype, int8=int8, unstack=False)
        self._abstract = self._loader.abstract()
        self._dtype, self._int8 = dtype, int8

    @property
    def words(self) -> str:
        """What both ends must have in common."""
        return f"{self._dtype}, layers' matrices in int8" if self._int8 else self._dtype

    @property
    def shapes(self) -> dict[str, LeafShape]:
        """Of every leaf, by name."""
        leaves = jax.tree_util.tree_leaves_with_path(self._abstract)
        return {leaf_name(path): (tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves}

    def make(self, params: Params) -> Params:
        """A copy of a policy's weights in this form, on the mesh; it is dispatched, not waited for."""
        return self._loader.load(params)

    def rebuild(self, leaves: Mapping[str, Any]) -> Params:
        """The tree whose leaves are `leaves` by name; KeyError if one is missing."""
        return jax.tree_util.tree_map_with_path(lambda path, _: leaves[leaf_name(path)], self._abstract)

    def read_back(self, loaded: Params) -> Iterator[tuple[str, np.ndarray]]:
        """The named leaves of this form out of an engine's own copy, which may have its layers cut up, and a wider
        dtype than they came in: casting back loses nothing."""
        stacked = loaded
        if isinstance(layers := loaded["layers"], tuple):
            stacked = {**loaded, "layers": jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *layers)}
        dtypes = {name: dtype for name, (_, dtype) in self.shapes.items()}
        for name, array in named(stacked):
            yield name, array.astype(np.dtype(dtypes[name]), copy=False)
