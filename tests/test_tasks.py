"""Tasks: what is read from a folder or the hub, what is refused, how labels become numbers, and how they are scored."""

from __future__ import annotations

import copy
import gzip
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kflats.common.errors import KflatsError
from kflats.tasks.batches import IGNORED, Feature, collate_features, features, load_examples, task_batches, uncollate
from kflats.tasks.scoring import entity_f1, f1, matthews, measure, pearson, pearson_spearman, perplexity, spearman
from kflats.tasks.task import TASKS, Task, check_head, find_task, head_of

HEADER = "sentence1\tsentence2\tlabel\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write one file of a task's folder; the folder is returned."""

    def put(name: str, text: str, folder: str = "") -> Path:
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        raw = text.encode()
        (where / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return tmp_path

    return put


def head(kind: str, labels: int, names: tuple[str, ...] = ()) -> Any:
    """A tiny BERT with a head."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=labels,
    )
    if names:
        config.id2label = dict(enumerate(names))
    return getattr(transformers, f"BertFor{kind}")(config).eval()


@pytest.mark.parametrize("name", ["dev.tsv", "dev.tsv.gz"])
@pytest.mark.parametrize("folder", ["", "mrpc"])
def test_a_folder_is_read(write: Any, name: str, folder: str) -> None:
    data = write(name, HEADER + 'the "a"\tof b\t1\nc\td\t0\n', folder)
    found = load_examples("mrpc", "dev", data)
    assert found.inputs == (('the "a"', "of b"), ("c", "d"))  # quotes are characters
    assert found.labels == (1, 0)
    assert found.source.endswith(name)


def test_one_sentence_needs_no_second_column(write: Any) -> None:
    assert load_examples("cola", "train", write("train.tsv", "sentence1\tlabel\na b\t1\n")).inputs == (("a b",),)
    assert load_examples("cola", "dev", write("dev.tsv", HEADER + "a b\t\t1\r\n\n")).labels == (1,)


def test_odd_characters_do_not_end_a_line(write: Any) -> None:
    """As str.splitlines would: some rows of real files hold them."""
    data = write("dev.tsv", "sentence1\tlabel\na\x85b\x0bc\u2028d\t1\n")
    assert load_examples("cola", "dev", data).inputs == (("a\x85b\x0bc\u2028d",),)


def test_words_and_tags_are_read(write: Any) -> None:
    text = "token\tpos\tner\na\tX\tB-ORG\nb\tX\tO\n\n\nc\tX\tI-PER\n"
    found = load_examples("conll2003", "dev", write("dev.tsv", text))
    assert found.inputs == (("a", "b"), ("c",))
    names = find_task("conll2003").labels
    assert [[names[i] for i in row] for row in found.labels] == [["B-ORG", "O"], ["I-PER"]]


def test_paragraphs_are_read_and_dev_has_other_names(write: Any) -> None:
    found = load_examples("wikitext2", "dev", write("valid.txt.gz", " the a \n\n of b\n"))
    assert found.inputs == ((" the a ",), (" of b",))


@pytest.mark.parametrize(
    ("text", "task", "message"),
    [
        ("a b\t\t1\nc\t\t0\n", "cola", "no column 'sentence1'.*first line with"),
        ("sentence1\tlabel\na\t1\n", "mrpc", "no column 'sentence2'"),
        ("sentence1\tsentence2\na\tb\n", "mrpc", "no column 'label'"),
        ("", "cola", "is empty"),
        ("\n \n", "cola", "is empty"),
        (HEADER, "cola", "no examples"),
        (HEADER + "a\t\t2\n", "cola", "label 2, out of 0 to 1"),
        (HEADER + "a\t\t-1\n", "cola", "label -1, out of 0 to 1"),
        (HEADER + "a\t\tgood\n", "cola", "line 2 .* label 'good'.*unacceptable, acceptable"),
        (HEADER + "a\tb\t5.5\n", "stsb", "label 5.5, out of 0 to 5"),
        (HEADER + "a\tb\tnan\n", "stsb", "label nan"),
        (HEADER + "a\tb\t\n", "stsb", "label ''"),
        (HEADER + "a\t1\n", "cola", "line 2 .* has 2 columns, its header 3"),
        ("token\tner\na\tB-DOG\n", "conll2003", "label 'B-DOG'"),
        ("token\tpos\na\tX\n", "conll2003", "no column 'ner'"),
    ],
)
def test_bad_files_are_refused(write: Any, text: str, task: str, message: str) -> None:
    data = write("dev.tsv", text)
    with pytest.raises(KflatsError, match=message):
        load_examples(task, "dev", data)


def test_files_that_cannot_be_read_are_refused(write: Any, tmp_path: Path) -> None:
    (write("dev.tsv", HEADER) / "dev.tsv").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(KflatsError, match="not UTF-8"):
        load_examples("cola", "dev", tmp_path)
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(HEADER.encode() * 50)[:30])
    with pytest.raises(KflatsError, match=r"cannot be read.*damaged"):
        load_examples("cola", "train", tmp_path)


def test_a_missing_split_names_those_that_are_there(write: Any, tmp_path: Path) -> None:
    data = write("train_sample.tsv", HEADER + "a\tb\t0\n", "mnli")
    with pytest.raises(KflatsError, match=r"no split 'train'.*train_sample"):
        load_examples("mnli", "train", data)
    with pytest.raises(KflatsError, match="no data folder"):
        load_examples("mnli", "train", tmp_path / "nowhere")
    for split in ("", "../mnli/train_sample"):
        with pytest.raises(KflatsError, match="not the name of a split"):
            load_examples("mnli", split, data)


def test_an_unknown_task_names_near_ones() -> None:
    with pytest.raises(KflatsError, match=r"no task 'mrcp'.*mrpc"):
        find_task("mrcp")
    assert find_task("SST-2").name == "sst2"
    own = Task("own", "classification", ("accuracy",), ("no", "yes"))
    assert find_task(own) is own
    with pytest.raises(KflatsError, match=r"kind='clasification' .* classification, regression"):
        Task("own", "clasification", ("accuracy",))
    with pytest.raises(KflatsError, match=r"metrics=\(\) is not supported"):
        Task("own", "regression", ())


class Hub:
    """The part of ``datasets`` that is used."""

    def __init__(self, rows: dict[str, list[Any]]) -> None:
        self.rows, self.asked = rows, ()

    def load_dataset(self, *names: Any, split: str, revision: str | None) -> Any:
        self.asked = (*names, split, revision)
        if split == "nowhere":
            raise ValueError('Unknown split "nowhere"')
        return self.rows


def test_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub({"question1": ["a"], "question2": ["b"], "label": [1], "idx": [0]})
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=hub.load_dataset))
    found = load_examples("qqp", "dev")
    assert (found.inputs, found.labels) == ((("a", "b"),), (1,))
    assert hub.asked == ("nyu-mll/glue", "qqp", "validation", None)
    with pytest.raises(KflatsError, match="no split 'nowhere'"):
        load_examples("qqp", "nowhere")
    hub.rows["label"] = [-1]
    with pytest.raises(KflatsError, match=r"label -1.*hidden labels"):
        load_examples("qqp", "test")
    hub.rows = {"tokens": [["a", "b"]], "ner_tags": [[3, 0]]}
    assert load_examples("conll2003", "train").labels == ((3, 0),)
    assert hub.asked == ("eriktks/conll2003", None, "train", "refs/convert/parquet")
    hub.rows = {"premise": ["a"], "hypothesis": ["b"], "label": [2]}
    assert load_examples("mnli", "dev").split == "validation_matched"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(KflatsError, match=r"kflats\[tasks\]"):
        load_examples("qqp", "dev")


def test_batches_have_labels_and_similar_lengths(write: Any, tiny_tokenizer: Any) -> None:
    rows = "".join(f"{'a ' * (i + 1)}\t{'b ' * i}\t{i % 2}\n" for i in range(10))
    data = write("train.tsv", HEADER + rows)
    batches = task_batches("mrpc", tiny_tokenizer, "train", 4, task_data=data)
    assert [len(b["labels"]) for b in batches] == [4, 4, 2]
    lengths = [length for b in batches for length in b["attention_mask"].sum(1).tolist()]
    assert lengths == sorted(lengths, reverse=True)
    assert [label for b in batches for label in b["labels"].tolist()] == [i % 2 for i in reversed(range(10))]


def test_batches_of_nothing_are_refused(write: Any, tiny_tokenizer: Any) -> None:
    data = write("dev.tsv", HEADER + "a\t\t1\n")
    with pytest.raises(KflatsError, match="a batch size of 0"):
        task_batches("sst2", tiny_tokenizer, "dev", batch=0, task_data=data)


def test_pairs_have_token_types_where_the_tokenizer_makes_them(write: Any, tiny_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    (batch,) = task_batches("mrpc", tokenizer, task_data=write("train.tsv", HEADER + "a b\tc d e\t1\nf\tg\t0\n"))
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]


def test_a_sample_is_drawn_by_its_seed(write: Any, tiny_tokenizer: Any) -> None:
    data = write("train.tsv", HEADER + "".join(f"word{i}\t\t{i % 2}\n" for i in range(100)))
    drawn = [
        [
            row.inputs["input_ids"]
            for row in features(load_examples("cola", "train", data), tiny_tokenizer, limit=7, seed=s)
        ]
        for s in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 7


def test_regression_labels_are_floats(write: Any, tiny_tokenizer: Any) -> None:
    (batch,) = task_batches("stsb", tiny_tokenizer, task_data=write("train.tsv", HEADER + "a\tb\t2.5\n"))
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [2.5]


def test_a_word_is_labelled_at_its_first_token(write: Any, tiny_tokenizer: Any) -> None:
    """The tokenizer splits "a-b" into three; "[CLS]" and "[SEP]" carry no label."""
    data = write("dev.tsv", "token\tner\na-b\tB-PER\nc\tO\nd\tB-LOC\n")
    (row,) = features(load_examples("conll2003", "dev", data), tiny_tokenizer)
    assert row.labels == [IGNORED, 1, IGNORED, IGNORED, 0, 5, IGNORED]
    assert row.words == (0, 1, 2)
    (row,) = features(load_examples("conll2003", "dev", data), tiny_tokenizer, max_length=6)
    assert row.words == (0, 1)  # the last word was cut off


def test_labels_follow_the_models_own_order(write: Any, tiny_tokenizer: Any) -> None:
    model = head("SequenceClassification", 3, ("CONTRADICTION", "Entailment", "neutral"))
    assert check_head(model, TASKS["mnli"]) == (1, 2, 0)
    data = write("train.tsv", HEADER + "a\tb\t0\na\tb\t2\n")
    (batch,) = task_batches("mnli", tiny_tokenizer, task_data=data, model=model)
    assert batch["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("kind", "labels", "names", "task", "message"),
    [
        ("SequenceClassification", 3, (), "cola", "has 2 labels, the head .* has 3"),
        ("SequenceClassification", 2, (), "stsb", "has 1 labels, the head .* has 2"),
        ("SequenceClassification", 9, (), "conll2003", "does not fit BertForSequenceClassification.*ForTokenClass"),
        ("TokenClassification", 2, (), "cola", "does not fit BertForTokenClassification"),
        ("MaskedLM", 2, (), "cola", "does not fit BertForMaskedLM"),
        ("SequenceClassification", 2, (), "wikitext2", "does not fit"),
        ("SequenceClassification", 2, ("bad", "good"), "cola", r"\['bad', 'good'\], are not those.*id2label"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    kind: str, labels: int, names: tuple[str, ...], task: str, message: str
) -> None:
    with pytest.raises(KflatsError, match=message):
        check_head(head(kind, labels, names), TASKS[task])


def test_a_base_model_has_no_head(tiny_model: Any) -> None:
    assert head_of(tiny_model("bert")) == ""
    assert head_of(tiny_model("gpt2")) == "causal"
    assert check_head(tiny_model("bert"), TASKS["sts"]) == ()
    with pytest.raises(KflatsError, match="no task head"):
        check_head(tiny_model("bert"), TASKS["cola"])


def test_a_decoder_needs_to_know_its_padding(write: Any, tiny_tokenizer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=3)
    model = transformers.GPT2ForSequenceClassification(config)
    data = write("train.tsv", HEADER + "a b\t\t1\nc\t\t0\n")
    with pytest.raises(KflatsError, match="pad_token_id"):
        task_batches("cola", tiny_tokenizer, task_data=data, model=model)
    model.config.pad_token_id = 4
    (batch,) = task_batches("cola", tiny_tokenizer, task_data=data, model=model)
    assert batch["input_ids"][1, -1] == 4


def test_a_tokenizer_of_another_model_is_refused(write: Any, tiny_tokenizer: Any) -> None:
    model = head("SequenceClassification", 2)
    model.config.vocab_size = 20
    with pytest.raises(KflatsError, match=r"tokenizer gives id 2.*own folder"):
        task_batches("cola", tiny_tokenizer, task_data=write("train.tsv", HEADER + "word200\t\t1\n"), model=model)
    with pytest.raises(KflatsError, match="tokenizer is needed"):
        task_batches("cola", None, task_data=write("train.tsv", HEADER + "word200\t\t1\n"))
    with pytest.raises(KflatsError, match="limit of 1 or more"):
        task_batches("cola", tiny_tokenizer, task_data=write("train.tsv", HEADER + "word200\t\t1\n"), limit=0)


def test_language_is_cut_into_blocks(write: Any, tiny_tokenizer: Any) -> None:
    data = write("train.txt", "a b c d\ne f g\n")
    rows = features(load_examples("wikitext2", "train", data), tiny_tokenizer, 3)
    ids = tiny_tokenizer.convert_tokens_to_ids(list("abcdefg"))
    assert [row.inputs["input_ids"] for row in rows] == [ids[:3], ids[3:6]]  # one token alone predicts nothing
    assert [row.labels for row in rows] == [ids[:3], ids[3:6]]


def test_collating_is_undone() -> None:
    rows = [Feature({"input_ids": [5, 6, 7]}, [1, 0, 1]), Feature({"input_ids": [8]}, [2])]
    assert uncollate([collate_features(rows, 9)]) == rows
    rows = [
        Feature({"input_ids": [5, 6], "token_type_ids": [0, 1]}, 1),
        Feature({"input_ids": [8], "token_type_ids": [0]}, 0),
    ]
    assert uncollate([collate_features(rows)]) == rows
    for nothing in ([], [torch.ones(2)], [{"pixel_values": torch.ones(2, 3)}]):
        with pytest.raises(KflatsError, match="batch"):
            uncollate(nothing)


def test_metrics_by_hand() -> None:
    pytest.importorskip("sklearn")
    predicted, true = [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1]
    assert f1(predicted, true) == pytest.approx(2 / 3)  # precision and recall 2/3
    assert matthews(predicted, true) == pytest.approx((2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3))
    assert measure(["f1", "accuracy"], predicted, true) == {"f1": f1(predicted, true), "accuracy": 4 / 6}
    a, b = [0.0, 1.0, 2.0, 9.0], [1.0, 2.0, 4.0, 5.0]
    assert spearman(a, b) == pytest.approx(1.0)
    covariance = sum((x - 3) * (y - 3) for x, y in zip(a, b, strict=True))
    assert pearson(a, b) == pytest.approx(covariance / math.sqrt(50 * 10))
    assert pearson_spearman(a, b) == pytest.approx((1 + pearson(a, b)) / 2)
    assert perplexity(3 * math.log(7.0), 3) == pytest.approx(7.0)
    assert perplexity(1e6, 3) == math.inf


def test_a_model_that_says_one_thing_scores_nothing() -> None:
    pytest.importorskip("sklearn")
    assert matthews([1, 1, 1], [0, 1, 1]) == 0
    assert f1([0, 0], [1, 0]) == 0
    assert pearson([2.0, 2.0], [1.0, 3.0]) == spearman([2.0, 2.0 + 1e-12], [1.0, 3.0]) == 0


def test_entities_count_whole() -> None:
    pytest.importorskip("seqeval")
    true = [["B-PER", "I-PER", "O", "B-LOC"]]
    assert entity_f1(true, true) == 1
    assert entity_f1([["B-PER", "O", "O", "B-LOC"]], true) == 0.5  # half a name is no name
    assert entity_f1([["O", "O", "O", "O"]], true) == 0


def test_scores_of_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for predicted, true in (([], []), ([1], [1, 0])):
        with pytest.raises(KflatsError, match="cannot be scored"):
            measure(["accuracy"], predicted, true)
    with pytest.raises(KflatsError, match="not finite"):
        measure(["pearson"], [math.nan, 1.0], [1.0, 2.0])
    with pytest.raises(KflatsError, match="no metric 'bleu'"):
        measure(["bleu"], [1], [1])
    with pytest.raises(KflatsError, match="no token to predict"):
        perplexity(0.0, 0)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(KflatsError, match=r"needs sklearn.*kflats\[tasks\]"):
        matthews([1], [1])


@pytest.mark.parametrize(
    ("task", "split", "count"),
    [
        ("cola", "dev", 1043),
        ("mrpc", "dev", 408),
        ("sts", "dev", 1500),
        ("rte", "dev", 277),
        ("conll2003", "dev", 3250),
    ],
)
def test_real_files(data_folder: Path, task: str, split: str, count: int) -> None:
    assert len(load_examples(task, split, data_folder)) == count


def test_a_setting_in_a_batch_is_no_row_of_tokens() -> None:
    ids = torch.tensor([[2, 7, 3], [2, 9, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([0, 1]), "use_cache": False}
    first, second = uncollate([batch])
    assert (first.inputs, first.labels) == ({"input_ids": [2, 7, 3]}, 0)
    assert (second.inputs, second.labels) == ({"input_ids": [2, 9]}, 1)
