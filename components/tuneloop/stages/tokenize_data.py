"""Token ids of demonstrations and pairs, made once for all stages that train on them.

It is optional: without it each stage that trains tokenizes all rows when it starts.
"""

from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.formats.token_files import Corpus, write_corpus
from tuneloop.training.corpora import SIDES, digest_tokenizer, tokenize_split


@component("tokens", image="trainer", results={"documents": int})
def tokenize_data(stage: Stage, policy: Input, prompts: Input) -> Results:
    """Tokenize demonstrations and pairs as `policy` does, for stages that take the result in place
    of `prompts`.

    A stage that trains on fixed rows maps these into memory; given rows, each of its processes
    tokenizes all of them, at every start. The files are a function of the rows and the tokenizer
    with its chat template (``facts.tokenizer``).

    Raises:
        UserError: nothing to tokenize, a row or a tokenizer that does not fit.
        Interrupted: on SIGTERM. Nothing is kept: a retry begins anew.
    """
    corpora: dict[str, Corpus] = {}
    splits = [split for split in SIDES if f"{split}.parquet" in prompts.manifest.files]
    with stage.timed("tokenize"):
        for split in splits:
            file = str(stage.out / f"{split}.arrow")
            documents = tokenize_split(prompts, policy, split, stage.check_stop)
            write_corpus(file, documents)
            # Mapped into memory: only its counts are read here.
            corpora[split] = Corpus(file)
    count = sum(len(corpus) for corpus in corpora.values())
    if not count:
        remedy = "holds no rows to tokenize; set data_prep's sft or preference"
        raise UserError("--prompts", prompts.url, remedy)
    tokens = {split: corpus.tokens for split, corpus in corpora.items()}
    # A stage refuses these tokens for a policy whose tokenizer has another digest.
    stage.facts.update(tokens=tokens, tokenizer=digest_tokenizer(policy))
    # How rows are treated is a setting of the data, which stages read from either artifact: these
    # are the settings among the fields of `formats/facts.py: PromptFacts`. One that is missing here
    # has its default for who trains on tokens.
    for name in ("history", "reasoning", "too_long", "drop_at_most"):
        if name in prompts.manifest.facts:
            stage.facts[name] = prompts.manifest.facts[name]
    stage.log(f"tokens: {tokens}")
    return {"documents": count}


if __name__ == "__main__":
    tokenize_data.main()
