"""Vocabularies inside GGUF files, against transformers' reader of them, tokenizer.json and tiktoken.model."""

import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from transformers.integrations.gguf import gguf_tokenizer_mapping as oracle

from proa.chat.gguf_vocabulary import PRETOKENIZERS
from proa.chat.templates import read_template_source
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer
from proa.chat.tokenizer import Tokenizer
from proa.chat.tokenizer_files import TokenizerFiles
from proa.core.errors import CheckpointError, UnsupportedError
from proa.gguf.model import GgufModel

TEXTS = [
    "Hello, world! It's 12345 o'clock; we'LL see 3.14159",
    "don't DON'T iPhone HTMLParser getHTTPResponse snake_case kebab-case a/b//c\n/path",
    "def f(x):\n    return x  +  1\r\n\r\n\t# done   \n\n\n",
    "中文字符和 English 混排，日本語カタカナ ひらがな, العربية हिन्दी ไทย ñandú naïve Ünïcödé",
    "e\u0301 combining \u0928\u093f Ⅻ ½ ² \u00a0nbsp\u3000wide 🙂👩‍👩‍👧 $100 #tag @me [x] {y} ~!%^&*()_+",
    "   leading and trailing   ",
    "<|end|> is <think> text",
]
TRAINING = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 3, "return self.value if value is not None else 0"]
CONTROL, USER_DEFINED = 3, 4


@pytest.fixture(scope="module")
def trained():
    """(tokens, merges) of a small byte-level BPE, trained by the tokenizers package."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        TRAINING, tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    definition = json.loads(model.to_str())["model"]
    tokens = sorted(definition["vocab"], key=definition["vocab"].get)
    return tokens, [" ".join(merge) for merge in definition["merges"]]


def write_file(path: Path, tokens, merges, *, pre="qwen2", model="gpt2", types=None, **extra) -> Path:
    """A GGUF file without tensors. `extra`: further keys below tokenizer.ggml, ids and booleans."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens) if types is None else types)
    writer.add_token_merges(merges)
    writer.add_chat_template("{{ messages }}")
    for name, value in extra.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def with_control(trained):
    tokens, merges = trained
    tokens = [*tokens, "<|end|>", "<think>", "<|start|>"]
    return tokens, merges, [1] * (len(tokens) - 3) + [CONTROL, USER_DEFINED, CONTROL]


@pytest.mark.parametrize("pre", sorted(PRETOKENIZERS.keys() & oracle.GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_cuts_texts_as_transformers_does(trained, tmp_path, pre):
    tokens, merges, types = with_control(trained)
    path = write_file(tmp_path / "model.gguf", tokens, merges, pre=pre, types=types, eos_token_id=len(tokens) - 3)
    architecture, fields, _ = oracle.get_gguf_tokenizer(str(path))
    theirs, _ = oracle.convert_gguf_tokenizer(architecture, fields)
    theirs.normalizer = tokenizers.normalizers.NFC() if PRETOKENIZERS[pre].normal_form else None
    ours = TokenizerFiles(tmp_path).tokenizer()
    rng = random.Random(pre)
    alphabet = "aZé中カ 1\n\r\t.,'_/-{²\u0301🙂"
    texts = TEXTS[:-1] + ["".join(rng.choices(alphabet, k=rng.randint(1, 30))) for _ in range(300)]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text).ids, text
        normal = theirs.normalizer.normalize_str(text) if theirs.normalizer else text
        assert ours.decode(ours.encode(text)) == normal


def test_pieces_of_deepseek_v3_and_smollm(trained, tmp_path):
    def cut(pre, text):
        tokens, merges = trained
        write_file(tmp_path / "model.gguf", tokens, merges, pre=pre)
        vocabulary = TokenizerFiles(tmp_path)._vocabulary
        backend = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.definition()))
        return [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]

    assert cut("deepseek-v3", "x12345中文_name(a) b.c") == ["x", "123", "45", "中文", "_name", "(a", ")", " b", ".c"]
    assert cut("deepseek-v3", "a  b\n\n c!?\n") == ["a", " ", " b", "\n\n", " c", "!?\n"]
    assert cut("smollm", "abc 123") == ["abc", " ", "1", "2", "3"]
    assert cut("glm4", "abc 12345") == ["abc", " ", "123", "45"]


def test_control_tokens_are_never_text(trained, tmp_path):
    tokens, merges, types = with_control(trained)
    end = len(tokens) - 3
    write_file(tmp_path / "m.gguf", tokens, merges, types=types, eos_token_id=end, bos_token_id=end + 2)
    files = TokenizerFiles(tmp_path)
    assert files.special_tokens() == {"eos_token": "<|end|>", "bos_token": "<|start|>"}
    assert files.template_source() == "{{ messages }}"
    tokenizer = files.tokenizer("… <think> …")
    assert tokenizer.special_ids == {end, end + 2}
    assert tokenizer.encode("a<|end|>")[-1] == end
    assert end not in tokenizer.encode_rendered(tokenizer.control.mark("a<|end|><think>"))
    assert tokenizer.encode_rendered("<think>") == [end + 1]
    assert tokenizer.token_bytes(end) == b"<|end|>"


def test_a_first_token_where_the_file_says_so(trained, tmp_path):
    tokens, merges, types = with_control(trained)
    first = len(tokens) - 1
    write_file(tmp_path / "m.gguf", tokens, merges, types=types, bos_token_id=first, add_bos_token=True)
    tokenizer = TokenizerFiles(tmp_path).tokenizer()
    assert tokenizer.encode("hello")[0] == first
    assert first not in tokenizer.encode("hello", add_special_tokens=False)


def test_kimi_is_its_tiktoken_model(kimi_tokenizer, shared, tmp_path):
    """All 163 840 tokens, from a GGUF file: golden texts, control tokens, reserved ones."""
    byte_text = gguf_alphabet()
    count = min(kimi_tokenizer.special_ids)
    tokens = ["".join(byte_text[b] for b in kimi_tokenizer.token_bytes(i)) for i in range(count)]
    tokens += [kimi_tokenizer.token_bytes(i).decode() for i in range(count, kimi_tokenizer.vocab_size)]
    special = kimi_tokenizer.control.aliases.keys()
    types = [1] * count + [CONTROL if name in special else USER_DEFINED for name in tokens[count:]]
    write_file(tmp_path / "kimi.gguf", tokens, ["Ġ t"] if "Ġt" in tokens else [], pre="kimi-k2", types=types)
    tokenizer = TokenizerFiles(Path(tmp_path / "no tokenizer here"), tmp_path / "kimi.gguf").tokenizer()
    assert isinstance(tokenizer, TiktokenTokenizer)
    assert tokenizer.special_ids == kimi_tokenizer.special_ids and tokenizer.vocab_size == kimi_tokenizer.vocab_size
    lines = (shared / "data/kimi-tokenizer/golden.jsonl").read_text().splitlines()
    for text in [*TEXTS, *(json.loads(line).get("text", "") for line in lines)]:
        assert tokenizer.encode(text) == kimi_tokenizer.encode(text)
        assert tokenizer.encode(text, with_control=False) == kimi_tokenizer.encode(text, with_control=False)


def gguf_alphabet() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def test_files_of_the_directory_come_first(trained, tmp_path):
    tokens, merges = trained
    write_file(tmp_path / "m.gguf", tokens, merges)
    definition = TokenizerFiles(tmp_path)._vocabulary.definition()
    definition["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "chat_template.jinja").write_text("mine")
    files = TokenizerFiles(tmp_path, tmp_path / "m.gguf")
    assert isinstance(files.tokenizer(), Tokenizer) and files.template_source() == "mine"
    assert files.special_tokens() == {} and read_template_source(tmp_path) == "mine"


def test_a_file_without_vocabulary_is_no_tokenizer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_tensor("t", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert not any(key.startswith("tokenizer") for key in GgufModel.open(tmp_path / "m.gguf").metadata)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TokenizerFiles(tmp_path).tokenizer()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama"}, r"ggml\.model.*byte-level BPE.*'llama'"),
        ({"pre": "klingon"}, r"ggml\.pre.*deepseek-v3.*kimi-k2.*'klingon'"),
        ({"tokens": ["a", "b"]}, r"ggml\.tokens.*256"),
        ({"tokens": ["a"] * 300}, r"1 of them distinct"),
        ({"types": [1] * 3}, r"token_type.*numbers from 1 to 6.*3 values"),
        ({"types": "seven"}, r"token_type.*got 7"),
        ({"merges": ["ab"]}, r"merges.*two tokens"),
        ({"merges": ["a b c"]}, r"merges.*two tokens"),
        ({"merges": ["nothere nor"]}, r"merges.*two tokens"),
        ({"eos_token_id": 10**6}, r"eos_token_id.*id below"),
        ({"bos_token_id": True}, r"bos_token_id.*id below"),
        ({"add_bos_token": True}, r"add_bos_token.*bos_token_id"),
        ({"pre": "kimi-k2", "types": "late"}, r"token_type.*behind all others"),
    ],
)
def test_vocabularies_that_lie(trained, tmp_path, change, message):
    tokens, merges = trained
    change = {"tokens": tokens, "merges": merges, **change}
    types = {"seven": [7] + [1] * (len(tokens) - 1), "late": [CONTROL] + [1] * (len(tokens) - 1)}
    if isinstance(change.get("types"), str):
        change["types"] = types[change["types"]]
    write_file(tmp_path / "m.gguf", change.pop("tokens"), change.pop("merges"), **change)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        TokenizerFiles(tmp_path).tokenizer()
