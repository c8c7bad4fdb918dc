"""Attention of packed rows over their own keys: XLA's products, cuDNN's kernel on GPU or Splash's on TPU.

What a token may look at is a `Sight`: documents, causality, and perhaps a window. A model has as many sights as kinds
of layers; each layer names its own by an index, which may be traced (layers are scanned) although a kernel's mask may
not.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.attention import attend, document_mask, in_chunk, in_window, same_document
from jaxrl_llm.models.near_attention import attend_near, block_mask, families, pays
from jaxrl_llm.models.shared_splash import attend_twice
from jaxrl_llm.sharding import RULES, parts, spec
from jaxrl_llm.types import Reach, UserError

Implementation = Literal["xla", "cudnn", "splash"]

# Splash works on blocks of whole vector registers (128 lanes); larger blocks are faster until they outgrow VMEM.
_SPLASH_BLOCKS = (512, 256, 128)
_CUDNN_LENGTH = 2  # cuDNN's backward pass with a mask wants even lengths


@dataclass(frozen=True)
class RowAttention:
    """Which implementation runs, and the mesh whose shards it runs on (None: one device); `reason` says who chose.

    `reach` is a promise about the rows: XLA's products then leave out what no document of theirs can see. `interpret`
    runs Splash without a TPU, for tests.
    """

    implementation: Implementation = "xla"
    mesh: Mesh | None = None
    reason: str = ""
    interpret: bool = False
    reach: Reach | None = None


XLA = RowAttention()


class Sight(NamedTuple):
    """A token looks at the earlier tokens of its segment (itself included), at most `window` - 1 positions back, and
    with `chunk` only at those of its own chunk: positions of one document count in chunks from 0.

    Segment 0 is padding: nobody looks at it. With `prefix_ids` a token also sees that segment, unless it is 0: a prompt
    that several documents of its row share. Documents lie in one piece, so that positions and places in the row differ
    by a constant inside each; Splash counts places.
    """

    segment_ids_BT: Int[Array, "B T"]
    positions_BT: Int[Array, "B T"]
    window: int | None = None
    chunk: int | None = None
    prefix_ids_BT: Int[Array, "B T"] | None = None


Attend = Callable[[Array, Array, Array, Any], Array]
"""(queries [B T H C], keys [B T K C], values [B T K C], index of the layer's sight) -> [B T H C]

On a mesh that splits tokens over `context`, all four hold pieces of rows, [P t ...] as `sharding.pieces` makes them."""


def choose_attention(
    model: ModelConfig, mesh: Mesh, *, share_prompts: bool = False, reach: Reach | None = None
) -> RowAttention:
    """What `model.attention` means on the devices of `mesh`; auto takes their platform's kernel where that can run.

    `share_prompts` says that rows may come with `prefix_ids`, `reach` how far their documents reach at most.

    Raises UserError, before anything is compiled, if the implementation asked for cannot work there.
    """
    device = mesh.devices.flat[0]
    if model.attention != "auto":
        if cannot := _refusal(model.attention, model, device, share_prompts):
            raise UserError(f"model.attention = {model.attention}: {cannot}; or set model.attention=auto")
        return RowAttention(model.attention, mesh, "model.attention names it", reach=reach)
    kernels: dict[str, Implementation] = {"tpu": "splash", "gpu": "cudnn"}
    kernel = kernels.get(device.platform)
    if kernel is None:
        return RowAttention("xla", mesh, f"auto on {device.platform}", reach=reach)
    if cannot := _refusal(kernel, model, device, share_prompts):
        reason = f"auto on {device.platform}, where {kernel} cannot run: {cannot}"
        return RowAttention("xla", mesh, reason, reach=reach)
    return RowAttention(kernel, mesh, f"auto on {device.platform}")


def _refusal(implementation: Implementation, model: ModelConfig, device: Any, share_prompts: bool) -> str | None:
    """Why `implementation` cannot run this model on this device, and the way out; None if it can."""
    wanted = {"splash": "tpu", "cudnn": "gpu", "xla": device.platform}[implementation]
    if device.platform != wanted:
        return f"it is a kernel for {wanted.upper()}, the trainer's devices are {device.platform}"
    if implementation == "splash" and share_prompts and model.window is not None:
        return "its windows count places in a row, which a shared prompt is not next to; set train.share_prompts=false"
    return _cudnn_refusal(model, device) if implementation == "cudnn" else None


def _cudnn_refusal(model: ModelConfig, device: Any) -> str | None:
    capability = str(device.compute_capability)  # "9.0" of an H100; another vendor's is no number
    generation = float(capability) if capability.replace(".", "", 1).isdigit() else 0.0
    widest = 256 if generation >= 9 else 128
    if generation < 8:
        return f"it needs an NVIDIA GPU of compute capability 8.0 or later, this is {device.device_kind}"
    if model.compute_dtype != "bfloat16":
        return f"it computes in bfloat16, not {model.compute_dtype}; set model.compute_dtype=bfloat16"
    if model.attention_softcap is not None:
        return f"it has no soft cap (model.attention_softcap = {model.attention_softcap})"
    if model.head_dim > widest or model.head_dim % 8:
        return f"on this device it takes a head_dim up to {widest} that is a multiple of 8, not {model.head_dim}"
    return None


def row_attention(how: RowAttention, sights: Sequence[Sight], *, scale: float, softcap: float | None) -> Attend:
    """Attention over rows by `how`, for layers that see by `sights`.

    The results agree wherever a token stands (segment > 0); what padding gets is finite and nobody's. Splash and cuDNN
    run shard by shard, rows over the batch axes, heads over tensor; rows are padded to the lengths that they take.

    Where the mesh splits tokens over `context`, all run shard by shard: each device gathers its rows' keys and values
    and attends with its own queries, so that a result is the same sum over the same keys as on one device.

    Raises UserError where Splash is to split rows that are no whole blocks.
    """
    if how.implementation == "xla":
        if parts(how.mesh, "time") == 1 and pays(how.reach, sights[0].segment_ids_BT.shape[1]):
            return _near(how, sights, scale, softcap)
        masks = [_mask(sight) for sight in sights]
        run = functools.partial(attend, scale=scale, softcap=softcap)
        if how.mesh is not None and parts(how.mesh, "time") > 1:
            by_query = NamedSharding(how.mesh, spec(("batch", "time", None)))
            masks = lax.with_sharding_constraint(masks, by_query)
            run = _on_shards(how.mesh, run, (by_query.spec,))
        return lambda q, k, v, which: run(q, k, v, _select(which, masks))
    branches = [_kernel(how, sight, scale, softcap) for sight in sights]

    def attend_by_kernel(q, k, v, which):
        if len(branches) > 1 and isinstance(which, jax.Array):
            return lax.switch(which.astype(jnp.int32), branches, q, k, v)
        return branches[int(which) if len(branches) > 1 else 0](q, k, v)

    return attend_by_kernel


def _mask(sight: Sight) -> Bool[Array, "B T T"]:
    positions = sight.positions_BT
    return document_mask(sight.segment_ids_BT, sight.prefix_ids_BT) & _narrower(sight, positions, positions)


def _narrower(sight: Sight, query_positions: Array, key_positions: Array) -> Bool[Array, "*b t u"] | bool:
    """What the sight's window and chunk allow."""
    mask = True
    if sight.window is not None:
        mask &= in_window(query_positions, key_positions, sight.window)
    if sight.chunk is not None:
        mask &= in_chunk(query_positions, key_positions, sight.chunk)
    return mask


def _near(how: RowAttention, sights: Sequence[Sight], scale: float, softcap: float | None) -> Attend:
    """XLA's products over the keys that `how.reach` leaves; shard by shard, so that no block looks for another's."""
    reach = how.reach
    assert reach is not None
    families_BT = families(sights[0].segment_ids_BT, sights[0].prefix_ids_BT)

    def mask_of(sight: Sight) -> Array:
        def allowed(queries: Sequence[Array], keys: Sequence[Array]) -> Array:
            seen = same_document(queries[0], keys[0], *queries[2:])
            return seen & _narrower(sight, queries[1], keys[1])

        fields = sight.segment_ids_BT, sight.positions_BT
        fields += (sight.prefix_ids_BT,) if sight.prefix_ids_BT is not None else ()
        return block_mask(allowed, fields, families_BT, reach)

    masks = [mask_of(sight) for sight in sights]
    run = functools.partial(attend_near, reach=reach, scale=scale, softcap=softcap)
    run = _on_shards(how.mesh, run, (spec(("batch", None)), spec(("batch", None, None, None))))
    return lambda q, k, v, which: run(q, k, v, families_BT, _select(which, masks))


def _select(which: Any, masks: list[Array]) -> Array:
    if len(masks) > 1 and isinstance(which, jax.Array):
        return lax.select_n(which, *masks)
    return masks[int(which) if len(masks) > 1 else 0]


def _kernel(how: RowAttention, sight: Sight, scale: float, softcap: float | None) -> Callable[..., Array]:
    """(queries, keys, values) -> attended, by the kernel that `how` names."""
    rows, own = spec(("batch", None)), spec(("batch", "time"))
    if how.implementation == "splash":
        assert sight.prefix_ids_BT is None or sight.window is None  # choose_attention has refused both
        # Made here, once for all layers that see so: the blocks of a long row's mask take seconds to work out.
        kernel = _splash_kernel(sight, softcap, parts(how.mesh, "time"), how.interpret)
        by_block = PartitionSpec()
        if how.mesh is not None:
            by_block = kernel.manual_sharding_spec(NamedSharding(how.mesh, spec((None, "time"))))
        run = _on_shards(how.mesh, functools.partial(_splash, scale=scale), (own, rows, own, by_block))
        documents_BT, prompts_BT = _documents(sight, sight.segment_ids_BT), None
        if sight.prefix_ids_BT is not None:
            prompts_BT = jnp.where(sight.prefix_ids_BT > 0, _documents(sight, sight.prefix_ids_BT), 0)
        return lambda q, k, v: run(q, k, v, documents_BT, documents_BT, prompts_BT, kernel)
    assert softcap is None  # choose_attention has refused it
    run = functools.partial(_cudnn, scale=scale, window=sight.window, chunk=sight.chunk)
    run = _on_shards(how.mesh, run, (rows,) * 3)
    return lambda q, k, v: run(q, k, v, sight.segment_ids_BT, sight.positions_BT, sight.prefix_ids_BT)


def _on_shards(mesh: Mesh | None, run: Callable[..., Array], places: tuple[Any, ...]) -> Callable[..., Array]:
    """`run(queries, keys, values, *others)` on every shard by itself; `others` lie where `places` says.

    Along `context` a shard has the queries of its own tokens, and the keys and values of whole rows.
    """
    if mesh is None:
        return run

    def local(q, k, v, *others):
        if parts(mesh, "time") > 1:
            k, v = (lax.all_gather(x, RULES["time"], axis=1, tiled=True) for x in (k, v))
        return run(q, k, v, *others)

    queries, keys = (spec(("pieces", None, heads, None)) for heads in ("heads", "kv_heads"))
    return jax.shard_map(local, mesh=mesh, in_specs=(queries, keys, keys, *places), out_specs=queries, check_vma=False)


def _padded(multiple: int, *arrays: Array) -> list[Array]:
    """Arrays [B T ...] with zeros behind, T a multiple of `multiple`; a segment id of 0 is padding."""
    behind = -arrays[0].shape[1] % multiple
    return [jnp.pad(x, [(0, 0), (0, behind)] + [(0, 0)] * (x.ndim - 2)) for x in arrays]


def _cudnn(
    q_BTHC: Float[Array, "B T H C"],
    k_BUKC: Float[Array, "B U K C"],
    v_BUKC: Float[Array, "B U K C"],
    segment_ids_BU: Int[Array, "B U"],
    positions_BU: Int[Array, "B U"],
    prefix_ids_BU: Int[Array, "B U"] | None,
    *,
    window: int | None,
    chunk: int | None,
    scale: float,
) -> Float[Array, "B T H C"]:
    """U is T, or T times the devices that split rows: then the queries are this device's part of the U tokens."""
    T, U = q_BTHC.shape[1], k_BUKC.shape[1]
    k, v, segments, positions = _padded(_CUDNN_LENGTH, k_BUKC, v_BUKC, segment_ids_BU, positions_BU)
    (q,) = _padded(_CUDNN_LENGTH, q_BTHC)
    # Padding looks at padding here: a query that sees nothing at all is NaN in some versions of cuDNN.
    prefixes = None
    if prefix_ids_BU is not None:
        (prefixes,) = _padded(_CUDNN_LENGTH, prefix_ids_BU)
        prefixes += prefixes > 0
    mask = _mask(Sight(segments + 1, positions, window, chunk, prefixes))
    if T < U:
        mask = lax.dynamic_slice_in_dim(mask, lax.axis_index(RULES["time"]) * T, T, axis=1)
        mask = jnp.pad(mask, [(0, 0), (0, q.shape[1] - T), (0, 0)], constant_values=True)
    # Causality is said twice: known to the kernel, which counts queries and keys from one place, it skips the blocks
    # above the diagonal.
    attended = jax.nn.dot_product_attention(
        q, k, v, mask=mask[:, None], is_causal=T == U, scale=scale, implementation="cudnn"
    )
    return attended[:, :T]


def _documents(sight: Sight, segment_ids_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Segment ids in which every chunk of a document is one of its own; 0 stays padding."""
    if sight.chunk is None:
        return segment_ids_BT
    chunks = segment_ids_BT.shape[1] // sight.chunk + 1  # no document has more
    return segment_ids_BT * chunks + sight.positions_BT // sight.chunk


def _splash_kernel(sight: Sight, softcap: float | None, pieces: int, interpret: bool) -> Any:
    """A splash kernel for rows of this length, forward and backward; any number of heads share its one mask.

    With `pieces` of a row on as many devices, its mask is to be split into theirs (`manual_sharding_spec`).
    """
    (padded,) = _padded(_SPLASH_BLOCKS[-1], sight.segment_ids_BT)
    length, smallest = padded.shape[1], _SPLASH_BLOCKS[-1]
    if pieces > 1 and sight.segment_ids_BT.shape[1] % (smallest * pieces):
        # Padding would stand between the pieces, where windows count places.
        raise UserError(
            f"rows of {sight.segment_ids_BT.shape[1]} tokens are no whole blocks of {smallest} on each of {pieces} "
            f"devices along context, as splash attention wants; use a train.row_length that is a multiple of "
            f"{smallest * pieces}, or model.attention=xla"
        )
    block = next(size for size in _SPLASH_BLOCKS if length // pieces % size == 0)
    sizes = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: Any = {f"block_{name}": block for name in sizes}
    square, window = (length, length), sight.window
    mask = (
        splash_mask.CausalMask(square) if window is None else splash_mask.LocalMask(square, (window - 1, 0), offset=0)
    )
    return splash.make_splash_mha(
        splash_mask.MultiHeadMask([mask]),
        block_sizes=splash.BlockSizes(**blocks),
        head_shards=1,
        q_seq_shards=pieces,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )


def _splash(
    q_BTHC: Float[Array, "B T H C"],
    k_BUKC: Float[Array, "B U K C"],
    v_BUKC: Float[Array, "B U K C"],
    segment_ids_BT: Int[Array, "B T"],
    segment_ids_BU: Int[Array, "B U"],
    prompt_ids_BT: Int[Array, "B T"] | None,
    kernel: Any,
    *,
    scale: float,
) -> Float[Array, "B T H C"]:
    T = q_BTHC.shape[1]
    q_BTHC = (q_BTHC.astype(jnp.float32) * scale).astype(q_BTHC.dtype)  # the kernel has no scale
    q, segments_BT = _padded(_SPLASH_BLOCKS[-1], q_BTHC, segment_ids_BT)
    k, v, segments_BU = _padded(_SPLASH_BLOCKS[-1], k_BUKC, v_BUKC, segment_ids_BU)

    def one_row(q_HTC, k_KUC, v_KUC, segments_T, segments_U, prompts_T):
        if prompts_T is None:
            return kernel(q_HTC, k_KUC, v_KUC, segment_ids=splash.SegmentIds(segments_T, segments_U))
        return attend_twice(kernel, q_HTC, k_KUC, v_KUC, segments_T, prompts_T, segments_U)

    prompts_BT = None
    if prompt_ids_BT is not None:
        (prompts_BT,) = _padded(_SPLASH_BLOCKS[-1], prompt_ids_BT)
        prompts_BT = jnp.where(prompts_BT > 0, prompts_BT, -1)  # padding is no prompt
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.vmap(one_row)(q, k, v, segments_BT, segments_BU, prompts_BT).swapaxes(1, 2)[:, :T]
