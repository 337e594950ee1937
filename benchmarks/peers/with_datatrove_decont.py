"""datatrove's NGramsDecontFilter over JSON lines, with an index of 13-grams of an evaluation."""

import json
import sys
from pathlib import Path

import numpy as np
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.decont import n_grams
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.text import ngrams, simplify_text


class Spaces:
    """Split words at white space, which is our rule. datatrove's default is spaCy, which is slower."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        return text.split()


def main(documents: str, evals: str, output: str) -> None:
    """Write the removed documents to ``output``/removed."""
    index = Path(output) / "index"
    index.mkdir(parents=True)
    config = NGramsDecontConfig(n_grams=13)
    removed = JsonlWriter(f"{output}/removed", compression=None)
    n_grams.load_word_tokenizer = lambda _: Spaces()
    step = NGramsDecontFilter(str(index), config, exclusion_writer=removed)
    # As in NGramsDecontIndexer, which needs lighteval and a separate task.
    hashes = set()
    for line in Path(evals).read_text(encoding="utf-8").splitlines():
        tokens = step.tokenizer.word_tokenize(simplify_text(json.loads(line)["text"], config.norm_config))
        hashes.update(map(step.hash_func, map(" ".join, ngrams(tokens, config.n_grams))))
    np.array(list(hashes), config.hash_config.np_descr).tofile(index / "evals.index.hashes")
    reader = JsonlReader(documents, glob_pattern="*.jsonl")
    LocalPipelineExecutor(pipeline=[reader, step], logging_dir=f"{output}/logs", tasks=1).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
