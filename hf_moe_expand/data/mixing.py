"""Computes how many documents of each language go into a mix."""

from collections.abc import Mapping, Sequence

from ..errors import InputError


def review_documents(
    available: Mapping[str, int],
    old: Sequence[str],
    new: Sequence[str],
    old_documents: int | None = None,
    new_per_old: float = 2.0,
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
