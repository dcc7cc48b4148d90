"""Whether held-out text is training text too."""

import filecmp
from collections.abc import Iterator, Mapping
from itertools import product

from ..core.errors import InputError
from ..core.progress import Bar
from .rows import counted
from .sources import LanguageText

# The share of a text's bytes from which a score on it says nothing of held-out text.
MOST_SHARED = 0.01
# The bytes of each training text that are compared.
MOST_READ = 1 << 28


def check_held_out(
    tests: Mapping[str, LanguageText], training: Mapping[str, LanguageText], as_pairs: bool = False
) -> list[str]:
    """Refuses held-out text that is training text too, by the documents' words; returns a line where some documents
    are, or where not all of the training text was compared.

    Args:
        tests, training: texts by their keys in the recipe. Of text on the hub the names alone are compared.

    Raises:
        InputError: more than `MOST_SHARED` of a held-out text's bytes are training text too.
    """
    for (key, test), (other, source) in product(tests.items(), training.items()):
        is_copy = any(filecmp.cmp(*files, shallow=False) for files in product(test.files(), source.files()))
        if is_copy or (not test.files() and test.source.partition("[")[0] == source.source.partition("[")[0]):
            raise InputError(f"{key}: {test.source}: is training text, too ({other}: {source.source}): {_ADVICE}")
    documents = {key: dict(_contents(test, as_pairs)) for key, test in tests.items()}
    wanted = set().union(*documents.values())
    lines: list[str] = []
    for other, source in training.items() if wanted else ():
        seen, read = set[int](), 0
        for content, size in Bar(_contents(source, as_pairs), desc=f"compare {other} with held-out text", leave=False):
            if content in wanted:
                seen.add(content)
            read += size
            if read >= MOST_READ:
                lines.append(f"{other}: its first {read >> 20:,} MB were compared with the held-out text")
                break
        for key, of_test in documents.items():
            if shared := seen & of_test.keys():
                words = (
                    f"{key}: {tests[key].source}: {len(shared):,} of its {counted(len(of_test), 'document')} are "
                    f"training text, too ({other}: {source.source})"
                )
                if sum(of_test[content] for content in shared) > MOST_SHARED * sum(of_test.values()):
                    raise InputError(f"{words}: {_ADVICE}")
                lines.append(f"warning: {words}")
    return lines


_ADVICE = (
    "scores would be of text that the model has seen: hold some text out (of a folder all files are read, a test file "
    "too)."
)


def _contents(text: LanguageText, as_pairs: bool) -> Iterator[tuple[int, int]]:
    """Of each local document or pair a hash of its words, whatever the white space between them, and its bytes."""
    rows = (f"{pair['source']}\n{pair['target']}" for pair in text.pairs()) if as_pairs else text.documents()
    for row in rows:
        yield hash(tuple(row.split())), len(row.encode())
