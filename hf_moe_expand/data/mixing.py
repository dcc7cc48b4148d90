"""Computes how much text of each language goes into a mix: tokens, or documents."""

from collections.abc import Mapping, Sequence

from ..errors import InputError

NEW_PER_OLD = 2.0  # MoE-LPR: 50,000 documents of each old language, 100,000 of each new one


def balanced_tokens(available: Mapping[str, int], sides: Sequence[Sequence[str]]) -> dict[str, int]:
    """Tokens of each language for a mix whose sides have equally many, shared equally by the languages of a side.

    Args:
        available: tokens of each language; the language with the least text for its share limits the mix.
        sides: the languages of each side, such as old and new ones.
    """
    of_side = min(available[code] * len(side) for side in sides for code in side)
    return {code: of_side // len(side) for side in sides for code in side}


def small_shares(tokens: Mapping[str, int]) -> dict[str, float]:
    """The share of each language that has less than a tenth of the tokens, and less than half of an equal share."""
    whole, least = sum(tokens.values()), min(0.1, 0.5 / len(tokens))
    return {code: count / whole for code, count in tokens.items() if count < least * whole}


def review_documents(
    available: Mapping[str, int],
    old: Sequence[str],
    new: Sequence[str],
    old_documents: int | None = None,
    new_per_old: float = NEW_PER_OLD,
    fewer_documents: bool = False,
) -> dict[str, int]:
    """Documents of each language for the review stage: `n` of each old one, `new_per_old * n` of each new one (1 : 2).

    Args:
        available: available documents of each language.
        old_documents: `n`; by default the largest number for which every language has enough documents.
        fewer_documents: take this largest number, too, where a language has too few documents for `old_documents`.

    Raises:
        InputError: a language has fewer documents than `old_documents` needs, or than one old document needs.
    """
    most = min([available[code] for code in old] + [int(available[code] / new_per_old) for code in new])
    taken = max(most, 1) if old_documents is None else old_documents
    if fewer_documents:
        taken = max(min(taken, most), 1)
    wanted = dict.fromkeys(old, taken) | {code: max(1, round(taken * new_per_old)) for code in new}
    for code, count in wanted.items():
        if available[code] < count:
            if most:
                advice = f"give more text, set `fewer_documents: true` to take {most} of each old language, or set "
                advice += f"old_documents to {most}" + (" or fewer" if most > 1 else "")
            else:
                advice = "give more text" if code in old else "give more text, or lower new_per_old"
            raise InputError(
                f"Language {code!r} has {available[code]} documents, but the mix asks for {count}: {advice}."
            )
    return wanted
