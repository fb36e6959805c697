"""The ops: one NAME.py each, with the formula, the tensors and the reference. docs/ops.md defines the dims."""

from .all_sum import AllSum
from .expert_down import ExpertDown
from .gdn_gated_norm import GDNGatedNorm
from .gdn_in_proj import GDNInProj
from .gdn_in_proj_merged import GDNInProjMerged
from .gdn_qk_norm import GDNQKNorm
from .gdn_step import GDNStep
from .gqa_in_proj import GQAInProj
from .kv_update import KVUpdate
from .linear import Linear
from .moe_combine import MOECombine
from .moe_sum import MOESum
from .norm_router import NormRouter
from .o_proj_router import OProjRouter
from .qk_norm_rope import QKNormRope
from .residual import Residual
from .rms_norm import RMSNorm
from .route_swiglu import RouteSwiglu
from .router import Router
from .sdpa_combine_gate import SDPACombineGate
from .sdpa_partial import SDPAPartial
from .swiglu import Swiglu

__all__ = [
    "AllSum",
    "ExpertDown",
    "GDNGatedNorm",
    "GDNInProj",
    "GDNInProjMerged",
    "GDNQKNorm",
    "GDNStep",
    "GQAInProj",
    "KVUpdate",
    "Linear",
    "MOECombine",
    "MOESum",
    "NormRouter",
    "OProjRouter",
    "QKNormRope",
    "RMSNorm",
    "Residual",
    "RouteSwiglu",
    "Router",
    "SDPACombineGate",
    "SDPAPartial",
    "Swiglu",
]
