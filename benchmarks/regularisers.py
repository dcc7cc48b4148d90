"""The regularisers that the benchmarks compare: Elbayad et al.'s, at the rates that the paper found best."""

from hf_moe_expand import Masking

PLAIN, CURRICULUM = "plain", "curriculum"
MASKING = {
    PLAIN: Masking(),
    "EOM 0.1": Masking(expert_output=0.1),
    "FOM 0.3": Masking(final_output=0.3),
    "CMR 0.2": Masking(conditional_routing=0.2),
    "gating dropout 0.2": Masking(gating_dropout=0.2),
    CURRICULUM: Masking(),
}
