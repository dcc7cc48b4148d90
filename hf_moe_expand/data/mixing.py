"""Computes how many documents of each language go into a mix."""

from collections.abc import Mapping, Sequence

from ..errors import InputError


def review_documents(
    available: Mapping[str, int],
    old: Sequence[str],
    new: Sequence[str],
    old_documents: int | None = None,
    new_per_old: float = 2.0,
) -> dict[str, int]:
    """Documents of each language for the review stage: `n` of each old one, `new_per_old * n` of each new one (1 : 2).

    Args:
        available: available documents of each language.
        old_documents: `n`; by default the largest number for which every language has enough documents.

    Raises:
        InputError: a language has fewer documents than `old_documents` needs.
    """
    most = min([available[code] for code in old] + [int(available[code] / new_per_old) for code in new])
    if old_documents is None:
        old_documents = max(most, 1)
    wanted = dict.fromkeys(old, old_documents) | {code: max(1, round(old_documents * new_per_old)) for code in new}
    for code, count in wanted.items():
        if available[code] < count:
            raise InputError(
                f"Language {code!r} has {available[code]} documents, but the mix asks for {count}: "
                f"give more text, or set old_documents to {most} or fewer."
            )
    return wanted
