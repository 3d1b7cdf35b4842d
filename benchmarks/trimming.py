"""Claim: for one language trimming is a poor bargain. Counted on WikiText-2 and judged on STS-B, the mean cosine to the
original's sentence vectors is below .95 with 60 % of the rows and below .87 with 40 %, and rare words, which trimming
spells with pieces, below .5. ``benchmarks/fidelity.py`` has other methods at these sizes.

    python benchmarks/trimming.py --write benchmarks/results/trimming.md
"""

from __future__ import annotations

from _common import arguments, markdown, publish
from _sentences import HEAD, Evaluator, cells, sentences

from kflats import trim
from kflats.common.formatting import share
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.io import load_model


def main() -> None:
    options = arguments(__doc__, keep=".60,.40,.26,.135", sentences="1000", counted="24000")
    counted, all_judged = sentences("wikitext2")[: int(options.counted)], sentences("stsb")
    judged = all_judged[:: max(1, len(all_judged) // int(options.sentences))]
    source = packaged_model()
    original, tokenizer = load_model(source), load_tokenizer(source)
    evaluator = Evaluator(original, tokenizer, judged, counted[:2000])
    lines = []
    for part in map(float, options.keep.split(",")):
        made = trim(original, tokenizer, keep=round(part * len(tokenizer)), texts=counted, eval_texts=judged)
        found, told = evaluator(made.model, made.tokenizer).fidelity, made.report.segmentation
        assert told is not None
        anew = share(told.tokens_changed, told.tokens_before), share(told.tokens_after, told.tokens_before)
        nbytes = made.report.table_bytes[1]
        lines.append([f"{part:.1%}", f"{len(made.kept):,}", f"{nbytes / 1e6:.2f} MB"])
        lines[-1] += [*cells(found), *anew]
        print(lines[-1], flush=True)
    head = ["kept", "entries", "table", *HEAD]
    head += ["tokens segmented anew", "length of texts"]
    publish(
        "Trimmed vocabularies of all-MiniLM-L6-v2, judged on STS-B",
        f"{len(counted):,} lines of WikiText-2 counted, {len(judged):,} sentences and "
        f"{evaluator.original.fidelity.rare_words} rare words judged; "
        "the original's table has 46.88 MB.\n\n" + markdown(head, lines),
        options,
    )


if __name__ == "__main__":
    main()
