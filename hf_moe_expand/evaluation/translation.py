"""Translates parallel text with a decoder, by prompts, or with an encoder-decoder, and scores it by chrF++."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from ..core.extra import import_extra
from ..core.jsonfile import write_json, write_text
from ..core.progress import Bar
from ..data.files import count_lines
from ..data.pairs import PairEncoder
from ..data.rows import Pair, translation_line, translation_start
from ..data.sources import LanguageText
from ..data.tokens import prompt_tokens
from ..inference.models import end_tokens, generated, longest_block
from .report import compared
from .scoring_settings import TranslationSettings


@dataclass(frozen=True)
class TranslationScore:
    """Scores of a model's translations from one language to another.

    Attributes:
        chrf: chrF++ of the corpus, 0 to 100.
        signature: sacrebleu's signature of the metric.
        cut: number of translations that reached the limit of new tokens before a newline or an end of text.
    """

    chrf: float
    signature: str
    sentences: int
    cut: int
    translations: list[str] = field(repr=False)


@dataclass
class TranslationScores:
    """The content of `translation.json`: settings, and `models[name][pair]`, with pairs such as `en-el`."""

    shots: int
    max_new_tokens: int
    beams: int = 1
    models: dict[str, dict[str, TranslationScore]] = field(default_factory=dict)

    def to_json(self, path: str | Path) -> None:
        """Writes the file."""
        write_json(path, {"metric": "chrF++", **asdict(self)})

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """A table: header, one row for each pair, their mean; the last model's change from the first in points."""
        names = list(self.models)
        pairs = list(self.models[names[0]])
        values = [(pair, [self.models[name][pair].chrf for name in names]) for pair in pairs]
        if len(pairs) > 1:
            values.append(("mean", [sum(column) / len(pairs) for column in zip(*(v for _, v in values), strict=True)]))
        rows = [[pair, *(f"{v:.2f}" for v in row), f"{row[-1] - row[0]:+.2f}"] for pair, row in values]
        return compared(["pair"], names, rows)


def chrf_plus_plus() -> Any:
    """sacrebleu's chrF++ (Popović, 2017): n-grams of up to six characters and two words."""
    return import_extra("sacrebleu.metrics").CHRF(word_order=2)


def load_parallel(sources: Mapping[str, LanguageText]) -> dict[str, list[str]]:
    """Parallel text: sentence `i` is the same in each language. White space in a sentence counts as one space."""
    texts = {code: [" ".join(text.split()) for text in source.load()["text"]] for code, source in sources.items()}
    first = next(iter(texts))
    for code, source in sources.items():
        if (lines := sum(map(count_lines, source.files()))) and lines != len(texts[code]):
            raise InputError(
                f"{source.source}: {len(texts[code])} texts in {code!r} on {lines} lines: parallel text has one "
                "sentence in each line, and no rows with `translation`, which make texts of both directions."
            )
        if len(texts[code]) != len(texts[first]):
            raise InputError(
                f"{sources[first].source} has {len(texts[first])} sentences, {source.source} has {len(texts[code])}: "
                "parallel text must have the same number in every language."
            )
    return texts


def parse_pairs(arguments: Sequence[str], languages: Sequence[str]) -> list[Pair]:
    """Parses pairs such as `en-el`; by default, the first language to and from each other language."""
    if len(languages) < 2:
        raise InputError("Translation needs text in at least two languages.")
    known = {pair_name((a, b)): (a, b) for a in languages for b in languages if a != b}
    if not arguments:
        return [pair for other in languages[1:] for pair in ((languages[0], other), (other, languages[0]))]
    for argument in arguments:
        if argument not in known or arguments.count(argument) > 1:
            wrong = "given twice" if argument in known else f"not a pair of the languages {', '.join(languages)}"
            raise InputError(f"{argument!r} is {wrong}.")
    return [known[argument] for argument in arguments]


def pair_name(pair: Pair) -> str:
    """`en-el`."""
    return "-".join(pair)


def translation_prompt(pair: Pair, sentence: str, examples: Sequence[Pair] = ()) -> str:
    """One line for each example, `English: ... → Greek: ...`, then the sentence in this form without a translation."""
    lines = [translation_line(pair, source, target) for source, target in examples]
    return "\n".join([*lines, translation_start(pair, sentence)])


def translate(
    model: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int = 8, max_new_tokens: int = 256
) -> tuple[list[str], int]:
    """Greedy continuations of prompts up to a newline or an end of text, and how many `max_new_tokens` cut off. Of the
    checkpoint's own generation settings, only its end tokens count."""
    encoded = _prompts(model.config, tokenizer, prompts, max_new_tokens)
    return _written(model, tokenizer, encoded, batch_size, max_new_tokens=max_new_tokens, stop_strings=["\n"])


def translate_pairs(
    model: Any, tokenizer: Any, sentences: Sequence[str], direction: Pair, batch_size: int = 8,
    max_new_tokens: int = 256, beams: int = 1,
) -> tuple[list[str], int]:  # fmt: skip
    """An encoder-decoder's translations, and the number of those cut off at `max_new_tokens`. The first token names the
    target's language, where the tokenizer has codes. Of the checkpoint's own settings, only its special tokens count.
    """
    encoded, own = _sources(model.config, tokenizer, sentences, direction, max_new_tokens), model.generation_config
    start = own.decoder_start_token_id
    special = {
        "bad_words_ids": own.bad_words_ids,
        "decoder_start_token_id": getattr(model.config, "decoder_start_token_id", None) if start is None else start,
        **PairEncoder(tokenizer).start(direction),
    }
    return _written(model, tokenizer, encoded, batch_size, max_new_tokens=max_new_tokens, num_beams=beams, **special)


def _prompts(config: Any, tokenizer: Any, prompts: Sequence[str], new_tokens: int) -> list[list[int]]:
    """The tokens of prompts, which must leave room for new ones."""
    encoded = [prompt_tokens(prompt, tokenizer) for prompt in prompts]
    longest = max(map(len, encoded), default=0)
    _check_fits(config, longest, new_tokens, longest + new_tokens)
    return encoded


def _sources(
    config: Any, tokenizer: Any, sentences: Sequence[str], direction: Pair, new_tokens: int
) -> list[list[int]]:
    """The tokens of sentences in a direction of the model, which must fit its positions, as their translations must."""
    encoder = PairEncoder(tokenizer)
    encoder.check([direction])
    encoded = encoder.sources(list(sentences), direction) if sentences else []
    longest = max(map(len, encoded), default=0)
    _check_fits(config, longest, new_tokens, max(longest, new_tokens + 2))
    return encoded


def _check_fits(config: Any, longest: int, new_tokens: int, needed: int) -> None:
    positions = longest_block(config)
    if positions is not None and longest and needed > positions:
        raise InputError(
            f"{longest} tokens and {new_tokens} new ones do not fit the model's {positions} positions: give shorter "
            "text, fewer examples or fewer new tokens."
        )


def _written(
    model: Any, tokenizer: Any, encoded: Sequence[list[int]], batch_size: int, **options: Any
) -> tuple[list[str], int]:
    """What the model writes after each input: a decoder's first line, an encoder-decoder's sentence; and how many lack
    their end."""
    ends, texts, cut = end_tokens(model, tokenizer), [""] * len(encoded), 0
    # Batches of similar length need little padding; the longest come first, since they need the most memory.
    order = sorted(range(len(encoded)), key=lambda place: -len(encoded[place]))
    model.eval()
    with Bar(total=len(order), desc="translate", unit="sentence") as bar:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            rows = generated(model, tokenizer, [encoded[place] for place in batch], do_sample=False, **options)
            for place, row in zip(batch, rows, strict=True):
                end = next((at for at, token in enumerate(row) if token in ends), None)
                text = tokenizer.decode(row[:end], skip_special_tokens=True)
                text, newline = (" ".join(text.split()), "") if "num_beams" in options else text.partition("\n")[:2]
                texts[place] = text.strip()
                cut += end is None and not newline
            bar.update(len(batch))
    return texts, cut


def check_translation(
    config: Any, tokenizer: Any, texts: Mapping[str, Sequence[str]], pairs: Sequence[Pair],
    settings: TranslationSettings,
) -> None:  # fmt: skip
    """Refuses what `evaluate_translation` cannot translate with a model of this configuration."""
    sentences, shots, beams = len(next(iter(texts.values()))), settings.shots, settings.beams
    if config.is_encoder_decoder and shots:
        raise InputError(f"shots is {shots}, but an encoder-decoder translates without examples: leave it at 0.")
    if not config.is_encoder_decoder and beams > 1:
        raise InputError(f"beams is {beams}, but a decoder's continuations of prompts are greedy: leave it at 1.")
    if shots >= sentences:
        raise InputError(f"{shots} of {sentences} sentences are examples, so that none is left to score: lower shots.")
    for pair in pairs:
        if config.is_encoder_decoder:
            _sources(config, tokenizer, _scored(texts[pair[0]], settings), pair, settings.max_new_tokens)
        else:
            _prompts(config, tokenizer, _prompts_of(pair, texts, settings), settings.max_new_tokens)


def _scored(texts: Sequence[str], settings: TranslationSettings) -> list[str]:
    """The sentences behind those that are examples."""
    return list(texts[settings.shots : None if settings.limit is None else settings.shots + settings.limit])


def _prompts_of(pair: Pair, texts: Mapping[str, Sequence[str]], settings: TranslationSettings) -> list[str]:
    examples = list(zip(*(texts[code][: settings.shots] for code in pair), strict=True))
    return [translation_prompt(pair, sentence, examples) for sentence in _scored(texts[pair[0]], settings)]


def evaluate_translation(
    model: Any, tokenizer: Any, texts: Mapping[str, Sequence[str]], pairs: Sequence[Pair], settings: TranslationSettings
) -> dict[str, TranslationScore]:
    """chrF++ of each pair of languages, of a decoder's continuations of prompts or an encoder-decoder's translations;
    `texts` has parallel sentences."""
    sizes = (settings.batch_size, settings.max_new_tokens)
    check_translation(model.config, tokenizer, texts, pairs, settings)  # before the first direction is translated
    metric = chrf_plus_plus()
    scores = {}
    for pair in pairs:
        if model.config.is_encoder_decoder:
            given = _scored(texts[pair[0]], settings)
            translations, cut = translate_pairs(model, tokenizer, given, pair, *sizes, settings.beams)
        else:
            translations, cut = translate(model, tokenizer, _prompts_of(pair, texts, settings), *sizes)
        chrf = metric.corpus_score(translations, [_scored(texts[pair[1]], settings)]).score
        scores[pair_name(pair)] = TranslationScore(
            chrf, str(metric.get_signature()), len(translations), cut, translations
        )
    return scores


def write_texts(
    folder: Path, scores: TranslationScores, texts: Mapping[str, Sequence[str]], pairs: Sequence[Pair]
) -> None:
    """Writes sources, references and each model's translations, a line each, as COMET and other metrics read them."""
    for pair in pairs:
        name = pair_name(pair)
        number = next(iter(scores.models.values()))[name].sentences
        source, reference = (texts[code][scores.shots : scores.shots + number] for code in pair)
        files = {f"{name}.source": source, f"{name}.reference": reference}
        files |= {f"{model}/{name}": of[name].translations for model, of in scores.models.items()}
        for file, lines in files.items():
            write_text(folder / f"{file}.txt", "".join(f"{line}\n" for line in lines))
