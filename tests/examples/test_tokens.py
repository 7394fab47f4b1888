"""Tokenizers of checkpoints: what text each token stands for."""

import pytest
import tokenizers

from examples.finetune.tokens import (
    END_OF_TEXT,
    byte_tokenizer,
    read_sentencepiece,
    read_tokenizer,
)
from examples.gpt2 import data
from examples.gpt2.command import InputError

TEXT = 'Él café “naïve” 東京 <b>\t x  y\n 👍🏽 it \'s "quoted"'


@pytest.fixture(scope="module")
def trained():
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT] * 3, 300, special_tokens=[END_OF_TEXT])
    return tokenizer


@pytest.fixture(params=["tokenizer.json", "vocab.json", "tokenizer.model", "bytes"])
def tokenizer(request, trained, tmp_path):
    if request.param == "bytes":
        return byte_tokenizer()
    if request.param == "tokenizer.json":
        trained.save(str(tmp_path / "tokenizer.json"))
    elif request.param == "vocab.json":
        trained.save_model(str(tmp_path))
    else:
        model = data.train_sentencepiece([("a", TEXT * 3)], 320)
        (tmp_path / "tokenizer.model").write_bytes(model)
        return read_sentencepiece(tmp_path / "tokenizer.model")
    return read_tokenizer(tmp_path)


def test_tokens_come_back_as_text_and_know_their_characters(tokenizer):
    [(tokens, spans), nothing] = tokenizer.encode_all([TEXT, ""])
    assert nothing == ([], [])
    assert len(tokens) == len(spans)
    assert 0 <= tokenizer.end < tokenizer.size
    assert max(tokens) < tokenizer.size
    assert tokenizer.end not in tokens
    covered = {i for begin, end in spans for i in range(begin, end)}
    assert covered == set(range(len(TEXT)))
    assert [begin for begin, _ in spans] == sorted(begin for begin, _ in spans)


def test_a_file_that_asks_for_cuts_and_padding_is_not_heeded(trained, tmp_path):
    asking = tokenizers.Tokenizer.from_str(trained.to_str())
    asking.enable_truncation(8)
    asking.enable_padding(length=500)
    asking.save(str(tmp_path / "tokenizer.json"))
    tokens = read_tokenizer(tmp_path).encode_all([TEXT])[0].tokens
    assert tokens == trained.encode(TEXT).ids
    assert len(tokens) > 8


def test_bad_folders(trained, tmp_path):
    with pytest.raises(InputError, match=r"has no tokenizer; allowed: tokenizer\.json, or vocab"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"tokenizer\.model: not a SentencePiece model"):
        read_sentencepiece(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"not a tokenizer: Model missing"):
        read_tokenizer(tmp_path)
    other = tokenizers.ByteLevelBPETokenizer()
    other.train_from_iterator([TEXT], 300)
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"has no <\|endoftext\|>, which ends a text"):
        read_tokenizer(tmp_path)
