"""Checks with a language identifier that every line of the package's anchors is in the language of its file.

    pip install py3langid==0.4.0
    python benchmarks/check_anchors.py

The table has a row for each language: how many of its lines the identifier confirms, and what it takes the others for.
The exit status is 1 where it takes a line for a language that is not one of the named neighbours (`NEIGHBOURS`).
"""

import argparse
from collections import Counter

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from hf_moe_expand.data.anchors import shipped_anchors

# Languages whose short sentences are often right in both.
NEIGHBOURS = ({"da", "nn", "no"}, {"id", "ms"}, {"bs", "hr", "sr"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    known = set(identifier.labels)
    wrong, unknown = [], []
    print("| language | lines | confirmed | taken for |\n| --- | ---: | ---: | --- |")
    for code, lines in shipped_anchors().items():
        if code not in known:
            unknown.append(code)
            print(f"| {code} | {len(lines)} | - | (not known to the identifier) |")
            continue
        near = set().union({code}, *(group for group in NEIGHBOURS if code in group))
        called = {line: identifier.classify(line)[0] for line in lines}
        counts = Counter(called.values())
        others = ", ".join(f"{other} ({count})" for other, count in counts.most_common() if other != code)
        print(f"| {code} | {len(lines)} | {counts[code]} | {others} |")
        wrong += [f"{code}: taken for {other}: {line}" for line, other in called.items() if other not in near]
    print(f"\nNot known to the identifier: {', '.join(unknown) or 'none'}.")
    print("\n".join(wrong) or "Every line of a known language is in it, or taken for a neighbour.")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
