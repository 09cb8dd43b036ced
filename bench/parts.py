"""The parts of a round: what bytes each must move, and which operations of a profile are its own.

The floor of a part is its bytes over the bandwidth at which a long kernel reads; every weight is
read once, whatever the number of rows.
"""

import dataclasses
import re

import jax.numpy as jnp

from qwen4jax.config import Config
from qwen4jax.params import declare, tensors

# at which an H200 reads the 1.27 GB of lm_head (4.34 TB/s in `kernels.jsonl`), rounded down
READ_BANDWIDTH = 4.3e12


@dataclasses.dataclass(frozen=True)
class Part:
    """One line of the roofline table.

    Attributes:
        name: of the part.
        nbytes: least bytes moved per round.
        phase: `verify`, `commit` or `draft`.
    """

    name: str
    nbytes: float
    phase: str

    @property
    def floor_ms(self) -> float:
        """Least time, milliseconds."""
        return self.nbytes / READ_BANDWIDTH * 1e3


def expected_distinct(choices: int, experts: int) -> float:
    """Distinct experts among `choices` uniform draws."""
    return experts * (1 - (1 - 1 / experts) ** choices)


def floor_parts(
    config: Config,
    *,
    batch: int,
    context: int,
    drafts: int,
    kv_bytes: int = 2,
    distinct: float | None = None,
) -> list[Part]:
    """The parts of one round and their byte floors.

    Args:
        config: of the model.
        batch: requests.
        context: tokens of each.
        drafts: draft tokens per round.
        kv_bytes: of one key or value channel.
        distinct: distinct experts that a layer reads in verification; by default expected.
    """
    c = config
    d = declare(c)
    linear = [x for x in d.layers if x.linear_attn is not None]
    sparse = [x for x in d.layers if x.self_attn is not None]
    rows = batch * (drafts + 1)
    if distinct is None:
        distinct = expected_distinct(rows * c.num_experts_per_tok, c.num_experts)
    head = _nbytes(d.embed_tokens if d.lm_head is None else d.lm_head)
    chosen = c.num_experts_per_tok * batch
    draft_distinct = expected_distinct(chosen, c.num_experts)
    blocks = context // c.indexer_compress_ratio
    tokens = min(c.selected_tokens, context)
    per_row_kv = 2 * tokens * c.num_key_value_heads * c.head_dim * kv_bytes
    index = blocks * c.indexer_head_dim * jnp.dtype(c.dtype).itemsize
    state_bytes = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * 4
    residual = [x.attn_hyper_connection for x in d.layers] + [
        x.mlp_hyper_connection for x in d.layers
    ]
    parts = [
        Part("GDN projections", _nbytes([_gdn_weights(x) for x in linear]), "verify"),
        Part("QSA projections", _nbytes([_qsa_weights(x) for x in sparse]), "verify"),
        Part("gated residual", _nbytes([residual, d.hyper_connection_mixer]), "verify"),
        Part("router", _nbytes([_router(x) for x in d.layers]), "verify"),
        Part(
            "experts",
            len(d.layers) * distinct * _expert_bytes(d.layers[0])
            + _nbytes([x.mlp.shared_expert for x in d.layers]),
            "verify",
        ),
        Part("lm_head", head, "verify"),
        Part("GDN state", batch * len(linear) * state_bytes, "verify"),
        Part("index scoring", batch * len(sparse) * index, "verify"),
        Part("index top-k", rows * len(sparse) * blocks * 4, "verify"),
        Part("sparse attention", rows * len(sparse) * per_row_kv, "verify"),
        Part("n-gram embedding", _nbytes([_ple_weights(x) for x in d.layers]), "verify"),
        Part("commit", 2 * batch * len(linear) * state_bytes, "commit"),
    ]
    if drafts and d.mtp is not None:
        layer = d.mtp.layers[0]
        per_step = _expert_bytes(layer) * draft_distinct
        extend = _expert_bytes(layer) * distinct
        copy = _nbytes(d.mtp.lm_head)
        dense = _nbytes(d.mtp) - _nbytes(layer.mlp.experts) - copy
        parts += [
            Part("draft experts", extend + (drafts - 1) * per_step, "draft"),
            Part("draft dense", drafts * dense, "draft"),
            Part("draft lm_head", drafts * (copy or head), "draft"),
            Part(
                "draft attention",
                (rows + (drafts - 1) * batch) * per_row_kv + batch * index,
                "draft",
            ),
        ]
    return parts


_VERIFY = (
    ("GDN projections", r"delta_projections"),
    ("GDN state", r"delta_rule"),
    ("QSA projections", r"attention_projections"),
    ("index scoring", r"index_score"),
    ("index top-k", r"index_topk"),
    ("sparse attention", r"/sparse_attention"),
    ("compress and store", r"compress_and_store"),
    ("gated residual", r"gated_residual"),
    ("router", r"/router"),
    ("experts", r"/experts"),
    ("n-gram embedding", r"/ple"),
    ("lm_head", r"lm_head"),
)
_DRAFT = (
    ("draft lm_head", r"lm_head"),
    ("draft experts", r"/experts"),
    ("draft attention", r"index_score|index_topk|/sparse_attention|compress_and_store"),
)


def part_of(op_name: str) -> tuple[str, str]:
    """(part, phase) of an operation by the scopes in its name."""
    if re.search(r"draft_(extend|\d)", op_name):
        for name, pattern in _DRAFT:
            if re.search(pattern, op_name):
                return name, "draft"
        return "draft dense", "draft"
    if "/commit" in op_name:
        return "commit", "commit"
    for name, pattern in _VERIFY:
        if re.search(pattern, op_name):
            return name, "verify"
    if "/accept" in op_name:
        return "accept", "verify"
    return "other", "verify"


def _nbytes(declared: object) -> int:
    return sum(t.nbytes for t in tensors(declared))


def _expert_bytes(layer) -> float:
    """Stored bytes of one expert of a layer (scales included)."""
    experts = layer.mlp.experts
    return _nbytes(experts) / experts.down_proj.shape[0]


def _router(layer) -> list:
    return [layer.mlp.gate, layer.mlp.shared_expert_gate]


def _gdn_weights(layer) -> list:
    p = layer.linear_attn
    return [p.in_proj_qkv, p.in_proj_z, p.in_proj_a, p.in_proj_b, p.out_proj]


def _qsa_weights(layer) -> list:
    p = layer.self_attn
    return [p.q_proj, p.k_proj, p.v_proj, p.o_proj, p.indexer.index_qk_proj]


def _ple_weights(layer) -> list:
    return [] if layer.ple is None else [layer.ple.key_proj, layer.ple.value_proj]
