"""Runs of the command: they load here with equal outputs, and what is written here loads there."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from agreement import learned
from longspan.torch import models
from longspan.torch.runs import END, START, Run, Seq2Seq, Tokenizer, load_run, load_weights, save_weights
from safetensors.torch import load_file, save_file

REPOSITORY = Path(__file__).parents[2]
COMMAND = os.environ.get("LONGSPAN_COMMAND", str(REPOSITORY / "target/release/longspan"))
WORDS = ["ab", "abc", "ca", "bca", "bb", "acc", "ba", "cab"]


def run_command(*arguments, text=None):
    """What the command says; a test that needs it is skipped where it is not built."""
    if not Path(COMMAND).exists():
        pytest.skip(f"the command is not built: no {COMMAND}")
    done = subprocess.run([COMMAND, *map(str, arguments)], input=text, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def settings_of(settings):
    return [part for setting in settings for part in ("--set", setting)]


#: Every mechanism of the command, and options of which the names in the file depend.
RUNS = [
    ("shaw", None), ("shaw", "relative = {shared = true}"),
    ("kernelized", "kernel = {feature_map = 'softplus'}"), ("fourier", None),
    ("fourier", "normalizer = 'dominant'"), ("fourier", "normalizer = 'unrotated', rotary = true"), ("toeplitz", None),
    ("toeplitz", "bias = {kind = 'table', reach = 40}"), ("toeplitz", "bias = {kind = 'grid', height = 5, width = 6}"),
    ("toeplitz", "bias = {kind = 'buckets', buckets = 8, max_distance = 20, bidirectional = true}"), ("aft-full", None),
    ("aft-full", "length = 40, rank = 3"), ("aft-local", "window = 3"), ("aft-simple", None), ("aft-conv", None),
    ("aft-conv", "taps = 4, normalized = false"), ("short-convolution", "width = 3"),
    ("gated", "gate = 'channel'"), ("gated", "convolution = 3"), ("delta", "beta_max = 2.0"),
    ("gated-delta", None), ("gated-delta", "gate = 'channel', convolution = 4"), ("softmax", None), ("softmax-window", "window = 4"),
]  # fmt: skip


#: And whether the attention is gated.
FORMS = [(*run, False) for run in RUNS] + [(name, None, True) for name in ("shaw", "kernelized", "aft-conv")]


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: f"{form[0]}, {form[1]}{', gated' if form[2] else ''}")
def run(request, tmp_path_factory):
    attention, options, gated = request.param
    place = tmp_path_factory.mktemp("run")
    (place / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in WORDS))
    settings = ["d_model=16", "heads=2", "d_ff=32", "encoder_layers=1", "decoder_layers=2", "max_tokens=30"]
    settings += ["radius=3"] if attention == "shaw" else []
    # None that is a default.
    settings += ["feature_map=softplus"] if attention in ("kernelized", "shaw", "fourier", "toeplitz") else []
    settings += [] if options is None else [f"attention_options={{{options}}}"]
    settings += ["gated_attention=true", "dropout=0"] if gated else ["dropout=0"]
    run_command("train", "--pairs", place / "pairs.tsv", "--steps", "30", "--out", place / "run", "--attention", attention,
                *settings_of(settings))  # fmt: skip
    return place / "run"


def test_no_mechanism_of_the_command_is_missing():
    if not Path(COMMAND).exists():
        pytest.skip(f"the command is not built: no {COMMAND}")
    done = subprocess.run([COMMAND, "train", "--attention", "?"], timeout=60, capture_output=True, text=True)
    known = done.stderr.strip().splitlines()[0].split("known are ")[1].split(", ")
    assert {name for name, _ in RUNS} == set(known)


def predictions(folder):
    """What the command answers: target and log-probability of each word."""
    asked = "".join(f"{word}\n" for word in WORDS)
    return [json.loads(line)["answers"][0] for line in run_command("predict", folder, "--json", text=asked).splitlines()]


def test_a_run_loads_with_equal_outputs(run):
    loaded = load_run(run)
    for word, answer in zip(WORDS, predictions(run)):
        assert loaded.predict(word) == answer["target"]
        source = torch.tensor([[*loaded.source.encode(word), END]])
        target = [START, *loaded.target.encode(answer["target"]), *([END] if answer["finished"] else [])]
        with torch.no_grad():
            # Padded by two tokens, which must not matter.
            padded = torch.nn.functional.pad(source, (0, 2))
            logits = loaded.model(padded, torch.tensor([source.shape[1]]), torch.tensor([target[:-1]]))
        chosen = logits.log_softmax(-1)[0].gather(-1, torch.tensor(target[1:])[:, None])
        assert chosen.sum().item() == pytest.approx(answer["log_probability"], abs=1e-4)


def test_what_is_trained_here_is_read_there(run, tmp_path):
    loaded = load_run(run)
    loaded.model.train()
    word = "abc"
    source = torch.tensor([[*loaded.source.encode(word), END]])
    target = torch.tensor([[START, *loaded.target.encode("ccc"), END]])

    def loss():
        logits = loaded.model(source, torch.tensor([source.shape[1]]), target[:, :-1])
        return torch.nn.functional.cross_entropy(logits[0], target[0, 1:])

    learned(loaded.model.parameters(), loss, 60)
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    save_weights(loaded.model, folder / "model.safetensors")
    answers = predictions(folder)
    assert answers[WORDS.index(word)]["target"] == "ccc"
    again = load_run(folder)
    assert [again.predict(w) for w in WORDS] == [answer["target"] for answer in answers]


def test_a_model_that_corrects_a_simple_method_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"series": "a.csv", "base": True}))
    with pytest.raises(ValueError, match="expected a whole model, got one that corrects a simple method .* --set base=false"):
        load_run(tmp_path)


@pytest.mark.parametrize("setting", [{"norm_kind": "l2"}, {"activation": "tanh"}])
def test_blocks_of_unknown_forms_are_named(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"config.json: {name}: expected one of .*, got '{setting[name]}'"):
        Seq2Seq({**CONFIG, **setting}, 7, 9)


@pytest.mark.parametrize("task, value", [("text", ["a.txt"]), ("labelled", "a.tsv"), ("synthetic", "mqar"), ("forecast", 3)])
def test_settings_name_the_task(task, value, tmp_path):
    """Its own and no others, of which the command writes all."""
    tmp_path = tmp_path / "my run"
    tmp_path.mkdir()
    others = {"pairs": None, "text": [], "labelled": None}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **others, task: value}))
    with pytest.raises(ValueError, match=f"expected a run of pairs or series, got one of .* `longspan [a-z]+ '{tmp_path}'`$"):
        load_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **others}))
    with pytest.raises(FileNotFoundError, match="source_tokenizer.json"):
        load_run(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json: expected the settings of a run, got list"):
        load_run(tmp_path)


CONFIG = {"attention": "shaw", "d_model": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "d_ff": 8, "radius": 2}


def test_weights_come_back(tmp_path):
    other_form = {"norm_kind": "rms", "activation": "silu", "gated": True, "gated_attention": True}
    for config in (CONFIG, {**CONFIG, "attention_options": {"relative": {"shared": True, "raw": True}}, "norm": "post"},
                   {**CONFIG, **other_form}):  # fmt: skip
        one, other = Seq2Seq(config, 7, 9), Seq2Seq(config, 7, 9)
        save_weights(one, tmp_path / "model.safetensors")
        load_weights(other, tmp_path / "model.safetensors")
        for a, b in zip(one.parameters(), other.parameters()):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["kernelized", "shaw", "fourier"])
def test_gates_of_texts_have_the_names_of_the_command(name, tmp_path):
    settings = {"attention": name, "attention_options": {"kernel": {"gates": True}}, "d_model": 16, "heads": 2, "d_ff": 8, "text": ["a"]}
    one, other = models.LanguageModel(settings, 9), models.LanguageModel(settings, 9)
    save_weights(one, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    for last, shape in (("rate", (2,)), ("bias", (2, 1))):
        assert found[f"blocks.0.attention.attention.{last}"].shape == shape
    load_weights(other, tmp_path / "model.safetensors")
    ids = torch.arange(6)[None]
    assert torch.equal(one.eval()(ids), other.eval()(ids))


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64", "int32"])
def test_weights_of_other_types(kind, tmp_path):
    path, one, other = tmp_path / "model.safetensors", Seq2Seq(CONFIG, 7, 9), Seq2Seq(CONFIG, 7, 9)
    save_weights(one, path)
    save_file({name: tensor.to(getattr(torch, kind)) for name, tensor in load_file(path).items()}, path)
    if kind == "int32":
        with pytest.raises(ValueError, match="expected a floating-point type, got torch.int32"):
            load_weights(other, path)
        return
    load_weights(other, path)
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.equal(a.to(getattr(torch, kind)).float(), b)


UNKNOWN_IS_2 = ({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"}},)


@pytest.mark.parametrize("kind, vocabulary", [("characters", ("a", "b")), ("words", ("a", "b")), ("json", UNKNOWN_IS_2)])
def test_what_is_not_known_is_no_answer(kind, vocabulary):
    """Nor are padding and the start, however likely."""
    tokenizer = Tokenizer(kind, tuple(json.dumps(part) for part in vocabulary) if kind == "json" else vocabulary)
    model = Seq2Seq(CONFIG, len(tokenizer), len(tokenizer))
    with torch.no_grad():
        model.output.bias[:] = torch.tensor([9.0, 9.0, 0.0, 9.0, 8.0, 0.0, 9.0])[: len(tokenizer)] * 10
    answer = Run(model, {**CONFIG, "max_tokens": 3}, tokenizer, tokenizer).predict("a")
    assert answer.replace(" ", "") == "aaa"
    transformers = pytest.importorskip("longspan.transformers")
    stored = {"kind": kind, "tokenizer": json.loads(tokenizer.vocabulary[0])} if kind == "json" else {"kind": kind, "vocabulary": vocabulary}
    sides = dict.fromkeys(("text", "source", "target"), stored)
    for build in (transformers.LongspanForSeq2SeqLM, transformers.LongspanForCausalLM):
        suppressed = build(transformers.LongspanConfig(sides, **CONFIG)).generation_config.suppress_tokens
        assert suppressed == [0, 1, 3, *([6] if kind == "json" else [])]


def test_letters_with_marks_are_read_composed_or_decomposed():
    """As the command reads them: whichever the run learned."""
    composed, decomposed = "na\u00efve", "nai\u0308ve"
    for kind, pieces in (("characters", tuple(composed)), ("words", (composed,))):
        tokenizer = Tokenizer(kind, pieces)
        assert tokenizer.encode(decomposed) == tokenizer.encode(composed) == list(range(4, 4 + len(pieces)))
    assert Tokenizer("characters", tuple(decomposed)).encode(composed) == [4, 5, 6, 7, 8, 9]
    # A text of which no form is known better stays as it stands. What Python alone takes for white space is none.
    assert Tokenizer("characters", ("a",)).encode("\u00ef") == [3]
    assert Tokenizer("words", ("red\x1fapple", "7")).encode("red\x1fapple\u3000 7\n") == [4, 5]


def test_ids_beyond_a_vocabulary_are_no_text():
    gaps = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 7}, "unk_token": "a"}}
    assert len(Tokenizer("json", (json.dumps(gaps),))) == 12
    assert Tokenizer("characters", ("a",)).decode([4, 5]) == Tokenizer("bytes", ()).decode([4 + ord("a"), 260]) == "a"


@pytest.mark.parametrize("kind", ["characters", "words", "bytes", "json"])
def test_a_list_is_no_text(kind):
    with pytest.raises(TypeError, match="Tokenizer.encode: text: expected str, got list"):
        Tokenizer(kind, ()).encode(["a"])


def test_a_text_without_tokens_has_an_empty_answer():
    words = Tokenizer("words", ("a", "b"))
    run = Run(Seq2Seq(CONFIG, 6, 6), {**CONFIG, "max_tokens": 3}, words, words)
    with torch.no_grad():
        run.model.output.bias[4] = 90.0
    assert [run.predict(text) for text in ("", " \t", "a")] == ["", "", "a a a"]


def test_widths_that_heads_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="d_model: expected a multiple of heads = 4, got 30"):
        Seq2Seq({**CONFIG, "d_model": 30, "heads": 4}, 7, 9)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    model = Seq2Seq(CONFIG, 7, 9)
    save_weights(model, path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:7], whole[:100], whole[:-1], b"\xff" * 100, whole[:8] + b"[" + whole[9:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            load_weights(model, path)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="expected shape"):
        load_weights(Seq2Seq({**CONFIG, "radius": 3}, 7, 9), path)
    with pytest.raises(ValueError, match="expected the parameters of this model"):
        load_weights(Seq2Seq({**CONFIG, "norm": "post"}, 7, 9), path)
    with pytest.raises(FileNotFoundError):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="attention: expected one of"):
        Seq2Seq({**CONFIG, "attention": "magic"}, 7, 9)
