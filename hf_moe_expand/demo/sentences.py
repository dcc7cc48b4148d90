"""The demo's text: our own sentences, written from templates in six languages.

Every template exists in every language. A document is a few sentences about one day of one person. The fillers vary,
which gives enough text to train a tiny model, and held-out documents use combinations that training never saw.
"""

import random
from importlib.resources import files

from ..yamlfile import parse_yaml

OLD = ("en", "es", "de")
NEW = ("el", "hu", "tr")

# By kind of word or sentence, then by language.
_WORDS = parse_yaml((files(__package__) / "sentences.yaml").read_text(encoding="utf-8"), "sentences.yaml")


def documents(language: str, count: int, seed: int) -> list[str]:
    """`count` documents of six sentences, drawn with `seed`."""
    draw = random.Random(f"{language}-{seed}")
    texts = []
    for _ in range(count):
        sentences = [draw.choice(_WORDS["weather"][language])]
        name, name2 = draw.sample(_WORDS["names"][language], 2)
        for template in draw.sample(_WORDS["sentences"][language], 5):
            good, good2 = draw.sample(_WORDS["goods"][language], 2)
            time = draw.choice(_WORDS["times"][language])
            words = {"time_cap": time[0].upper() + time[1:], "place": draw.choice(_WORDS["places"][language])}
            sentences.append(template.format(name=name, name2=name2, good=good, good2=good2, time=time, **words))
        texts.append(" ".join(sentences))
    return texts
