"""The verb that fits gates."""

from typing import Annotated

import typer

from ..disk import DEFAULT_SHARD_SIZE
from .apps import app
from .common import check_checkpoints, texts_of
from .options import Data, Model, OutFolder, Overwrite, Seed, ShardSize

Anchors = Annotated[
    list[str] | None,
    typer.Option(
        "--anchors", help="LANGUAGE=FILE of a language that is not new; repeat. By default the package's own sentences."
    ),
]
UnseenShare = Annotated[
    float, typer.Option(help="Most tokens of a language that the gates have not seen that may go to new experts.")
]


@app.command()
def gates(
    model: Model,
    out: OutFolder,
    data: Data,
    anchors: Anchors = None,
    unseen_share: UnseenShare = 0.01,
    tokens: Annotated[int, typer.Option(help="Tokens of each of the model's languages to fit on.")] = 1600,
    anchor_tokens: Annotated[int, typer.Option(help="Tokens of each anchor language to fit on.")] = 400,
    state_free: Annotated[
        bool, typer.Option("--state-free", help="Judge each token by itself, as vLLM needs it; sees less of a text.")
    ] = False,
    seed: Seed = 0,
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE,
    overwrite: Overwrite = False,
) -> None:
    """Fit gates that send home every text whose language they do not recognise as new. Nothing is trained.

    Give text of every new language, and of the base's own as far as you have some. What is not new the gates learn from
    anchors, some twenty sentences in each of many languages, which come with the package. A language that nobody named
    keeps the base's own output.

    Example: hf-moe-expand gates qwen-el-1 qwen-el-2 --data en=en.jsonl --data el=el.jsonl
    """
    check_checkpoints(model, expanded=True)
    from ..analysis.gating import fit_gates
    from ..schema import read
    from ..settings import GateSettings

    settings = read(
        GateSettings,
        {"unseen_share": unseen_share, "tokens": tokens, "anchor_tokens": anchor_tokens, "state_free": state_free},
        "gates",
    )
    known = None if anchors is None else texts_of(anchors)
    report = fit_gates(
        model, out, texts_of(data), known, settings, seed=seed, max_shard_size=max_shard_size, overwrite=overwrite
    )
    print("\n".join(report.lines()))
