"""Language packs that a model joins. `config.parts["joined"]` is the number of expansions of each; the model's first
expansions are those of the packs, in order."""

from typing import Any, ClassVar

from .part import BasePart

_HOME = (
    "Nobody tells the language of a text, and no gate judges it: it is the base's. Tell it (`languages=`, "
    "`use_languages`), or fit a gate (`hf-moe-expand gates`)."
)


class Part(BasePart):
    name = "joined"
    flat: ClassVar = {"packs": None, "updates_of_packs": "updates"}

    @property
    def stays_home(self) -> str | None:
        """No pack is newer than another."""
        return _HOME if joins_packs(self.config) else None

    def check(self) -> None:
        packs, expansions = self.settings, len(self.config.counts_of_expansions)
        is_list = isinstance(packs, list) and all(isinstance(size, int) and size >= 1 for size in packs)
        if not is_list or sum(packs) > expansions:
            raise ValueError(
                f"packs is {packs}: must be the number of expansions of each pack, of {expansions} in all."
            )
        if not self.config.exclusive_experts:
            raise ValueError(
                "packs: the checkpoint joins packs whose routers choose among all experts, of an earlier version: "
                "expand the base with exclusive experts for each language, and join those packs."
            )


def joins_packs(config: Any) -> bool:
    """Whether a model joins language packs and was not expanded further since."""
    packs = (getattr(config, "parts", None) or {}).get("joined")
    return packs is not None and sum(packs) == len(config.counts_of_expansions)
