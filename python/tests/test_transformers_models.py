"""Models of the command in transformers: the same answers, folders that both read, and what generate and training do with them."""

import json
import math
from copy import deepcopy
from functools import partial

import pytest
import torch
import transformers
from agreement import learned
from longspan.torch.runs import END, START, Tokenizer, load_run
from longspan.transformers import (
    LongspanConfig,
    LongspanForCausalLM,
    LongspanForSeq2SeqLM,
    LongspanForSequenceClassification,
    StateCache,
)
from longspan.transformers._config import SETTINGS
from longspan.transformers._models import _CACHE as CACHE
from safetensors.torch import load_file, save_file
from test_runs import WORDS, run_command as run, settings_of

SIZES = {"d_model": 16, "heads": 2, "d_ff": 32, "layers": 2, "encoder_layers": 1, "decoder_layers": 2, "radius": 3}
MODELS = [LongspanForCausalLM, LongspanForSequenceClassification, LongspanForSeq2SeqLM]
STREAMED = ["kernelized", "shaw", "fourier", "toeplitz", "aft-full", "aft-local", "aft-simple", "aft-conv", "softmax",
            "short-convolution", "gated-delta"]  # fmt: skip
TEXT = "".join(f"It was the {name} of the {thing}.\n" for name in ("best", "worst", "age") for thing in ("sea", "sun", "hill"))


def train(place, flag, contents, *settings):
    data, folder = place / "data.tsv", place / "run"
    data.write_text(contents)
    # The command refuses settings that a kind of run does not use.
    unused = ("encoder_layers", "decoder_layers") if flag != "--pairs" else ("layers",)
    mechanisms = next((setting for setting in settings if setting.startswith("attention=")), "" if flag == "--text" else "shaw")
    unused += () if "shaw" in mechanisms else ("radius",)
    most = [] if flag == "--text" else ["max_tokens=40"]
    most += ["base=false"] if flag == "--labelled" else []
    settings = [*(f"{name}={size}" for name, size in SIZES.items() if name not in unused), *most, *settings]
    run("train", flag, data, "--steps", "20", "--out", folder, *settings_of(settings))
    return folder


def tokens(folder, side, text):
    return Tokenizer.load(folder / f"{side}_tokenizer.json").encode(text)


def copy(model, folder):
    """What the model becomes when it is written and read again."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


FORMS, GATED = ["norm_kind=rms", "activation=silu", "gated=true"], "gated_attention=true"


@pytest.mark.parametrize(
    "settings",
    [["attention=shaw"], ["attention=softmax"], ["attention=shaw,softmax", *FORMS, GATED], ["attention=fourier"], ["attention=aft-conv"], ["attention=toeplitz"],
     ["attention=gated-delta", "attention_options={convolution=4}", GATED], ["attention=delta,softmax", "attention_options={delta={convolution=2}}"],
     ["attention=kernelized", "norm=post", "activation=gelu"], ["tokens=bpe", "vocabulary=300"]],
    ids=lambda settings: settings[0],
)  # fmt: skip
@torch.no_grad()
def test_a_run_of_texts(settings, tmp_path):
    folder = train(tmp_path, "--text", TEXT * 3, *settings)
    model = LongspanForCausalLM.from_pretrained(folder)
    auto = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="got one of texts, a language model; read it with `longspan generate"):
        load_run(folder)
    prompt = "It was the "
    ids = torch.tensor([[START, *tokens(folder, "text", prompt)]])
    torch.testing.assert_close(auto(ids).logits, model(ids).logits)
    again = copy(model, tmp_path / "copy")
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    got = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
    written = Tokenizer.load(folder / "text_tokenizer.json").decode(got)
    passage = tmp_path / "passage.txt"
    passage.write_text(TEXT[:150])
    whole = torch.tensor([[START, *tokens(folder, "text", TEXT[:150])]])
    bits = model(whole, labels=whole).loss.item() / math.log(2) * (whole.shape[1] - 1) / 150
    for place in (folder, tmp_path / "copy"):
        options = ("--prompt", prompt, "--temperature", "0", "--tokens", "40", "--json")
        assert json.loads(run("generate", place, *options))["text"] == written
        scores = json.loads(run("eval", place, passage, "--json"))
        assert scores["bits_per_byte"]["rate"] == pytest.approx(bits, abs=1e-4)
    assert "no checkpoint" in run("info", tmp_path / "copy")
    assert json.loads(run("info", tmp_path / "copy", "--json"))["step"] is None


LABELLED = {
    "label": "".join(f"{word} good\tyes\n{word} bad\tno\n{word}\tmaybe\n" for word in ("a", "the", "any", "this", "one", "what")),
    "number": "".join(f"{'ab' * n}\t{3 * n + 5.5}\n" for n in range(1, 31)),
}


@pytest.mark.parametrize("pooling", ["mean", "last", "attention"])
@pytest.mark.parametrize("target", LABELLED)
@torch.no_grad()
def test_a_run_of_labelled_texts(target, pooling, tmp_path):
    form = {"mean": ["attention=kernelized"], "last": ["causal=true", *FORMS, GATED], "attention": ["attention=aft-local"]}[pooling]
    folder = train(tmp_path, "--labelled", LABELLED[target], f"pooling={pooling}", *form)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model) is LongspanForSequenceClassification
    with pytest.raises(ValueError, match="got one of labelled texts, a classifier; read it with `longspan predict"):
        load_run(folder)
    asked = [line.split("\t")[0] for line in LABELLED[target].splitlines()[:6]]
    rows = [[*tokens(folder, "text", text), END] for text in asked]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    logits = model(ids, attention_mask=ids != 0).logits
    torch.testing.assert_close(copy(model, tmp_path / "copy")(ids, attention_mask=ids != 0).logits, logits, rtol=0, atol=0)
    for place in (folder, tmp_path / "copy"):
        lines = run("predict", place, "--json", text="".join(f"{text}\n" for text in asked)).splitlines()
        for row, line in zip(logits, map(json.loads, lines)):
            if target == "number":
                assert row.item() == pytest.approx(float(line["answers"][0]["target"]), rel=1e-4)
                continue
            for answer in line["answers"]:
                place_of = model.config.label2id[answer["target"]]
                assert row.log_softmax(-1)[place_of].item() == pytest.approx(answer["log_probability"], abs=1e-4)
        run("eval", place, tmp_path / "data.tsv")
    run("info", tmp_path / "copy")


@pytest.mark.parametrize("settings", [["attention=shaw", GATED], ["attention=kernelized", *FORMS], ["attention=aft-full"]],
                         ids=lambda settings: settings[0])  # fmt: skip
@torch.no_grad()
def test_a_run_of_pairs(settings, tmp_path):
    folder = train(tmp_path, "--pairs", "".join(f"{word}\t{word[::-1]}\n" for word in WORDS), *settings)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model) is LongspanForSeq2SeqLM
    # Every setting of the command is one here, so that none is lost when the folder is written.
    assert list(json.loads((folder / "config.json").read_text())) == ["model_type", "architectures", *SETTINGS]
    again = copy(model, tmp_path / "copy")
    target = Tokenizer.load(folder / "target_tokenizer.json")
    for place, one in ((folder, model), (tmp_path / "copy", again)):
        lines = run("predict", place, "--json", text="".join(f"{word}\n" for word in WORDS)).splitlines()
        for word, line in zip(WORDS, map(json.loads, lines)):
            answer = line["answers"][0]
            source = torch.tensor([[*tokens(folder, "source", word), END]])
            got = one.generate(source, do_sample=False)[0].tolist()
            assert target.decode(got) == answer["target"]
            labels = torch.tensor([[*target.encode(answer["target"]), *([END] if answer["finished"] else [])]])
            loss = one(source, labels=labels).loss.item() * labels.shape[1]
            assert -loss == pytest.approx(answer["log_probability"], abs=1e-4)
    run("info", tmp_path / "copy")


@torch.no_grad()
def test_a_model_made_here_is_read_there(tmp_path):
    LongspanForCausalLM(LongspanConfig(**SIZES, gated_attention=True)).save_pretrained(tmp_path / "lm")
    run("generate", tmp_path / "lm", "--prompt", "abc", "--tokens", "5")
    assert "standard input" in run("info", tmp_path / "lm")
    # Labels in an order of their own, which the command must not take for one of its own.
    names = {place: name for place, name in enumerate(["c", "a", "b"])}
    classifier = LongspanForSequenceClassification(LongspanConfig(**SIZES, id2label=names)).eval()
    classifier.save_pretrained(tmp_path / "labels")
    (answers,) = map(json.loads, run("predict", tmp_path / "labels", "--json", text="hello\n").splitlines())
    logits = classifier(torch.tensor([[*(4 + byte for byte in b"hello"), END]])).logits[0].log_softmax(-1)
    for answer in answers["answers"]:
        label = next(place for place, name in names.items() if name == answer["target"])
        assert logits[label].item() == pytest.approx(answer["log_probability"], abs=1e-4)
    (tmp_path / "data.tsv").write_text("".join(f"hello\t{name}\n" for name in "abc"))
    assert "accuracy" in run("eval", tmp_path / "labels", tmp_path / "data.tsv")
    LongspanForSeq2SeqLM(LongspanConfig(**SIZES)).save_pretrained(tmp_path / "pairs")
    run("predict", tmp_path / "pairs", text="hello\n")


def causal(**settings):
    return LongspanForCausalLM(LongspanConfig(**{**SIZES, **settings}, vocab_size=30)).eval()


@pytest.mark.parametrize("attention", STREAMED)
@torch.no_grad()
def test_generate_is_the_full_forward(attention):
    model = causal(attention=attention)
    ids = torch.randint(4, 30, (2, 7))
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    done = model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    whole = model(done.sequences[:, :-1])
    torch.testing.assert_close(torch.stack(done.logits, 1), whole.logits[:, 6:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(done.sequences[:, :-1], use_cache=True).logits, whole.logits, rtol=1e-4, atol=1e-4)
    for beam in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        assert torch.equal(model.generate(ids, **options, **beam), model.generate(ids, use_cache=False, **options, **beam))


@torch.no_grad()
def test_memory_is_constant():
    model, sizes = causal(), []
    for count in (3, 60):
        cache = StateCache()
        model.generate(torch.randint(4, 30, (1, 5)), max_new_tokens=count, min_new_tokens=count, **{CACHE: cache})
        assert cache.get_seq_length() == 5 + count - 1
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1] > 0


@torch.no_grad()
def test_softmax_has_a_capacity(tmp_path):
    model, ids = causal(attention="shaw,softmax", capacity=6), torch.randint(4, 30, (1, 7))
    with pytest.raises(ValueError, match="at most 6 tokens"):
        model(ids, use_cache=True)
    model.save_pretrained(tmp_path)
    roomy = LongspanForCausalLM.from_pretrained(tmp_path, capacity=7)
    torch.testing.assert_close(roomy(ids, use_cache=True).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["kernelized", "shaw", "fourier", "toeplitz", "aft-conv", "shaw,softmax"])
@torch.no_grad()
def test_padding_on_the_left(attention):
    model = causal(attention=attention)
    ids = torch.randint(4, 30, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    options = {**options, "return_dict_in_generate": True, "output_logits": True}
    together, first, second = (
        torch.stack(model.generate(some, attention_mask=which, **options).logits, 1)
        for some, which in ((ids, mask), (ids[:1, 4:], None), (ids[1:], None))
    )
    torch.testing.assert_close(together, torch.cat([first, second]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_exported_model_takes_any_mask():
    model = causal(attention="shaw")
    ids = torch.randint(4, 30, (2, 9))
    mask = torch.ones_like(ids)
    exported = torch.export.export(model, (ids, mask)).module()
    mask = mask.clone()
    mask[0, :4] = 0
    got, expected = (way(ids, mask).logits[mask.bool()] for way in (exported, model))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_padding_behind_a_cache():
    """Tokens that come with ignored ones stand after those of the cache, where a model counts positions."""
    model, ids, mask = causal(attention="softmax"), torch.randint(4, 30, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 7:] = 0
    pair = LongspanForSeq2SeqLM(LongspanConfig(**{**SIZES, "attention": "kernelized"}, vocab_size=30, target_vocab_size=30)).eval()
    for run, name in ((model, ""), (partial(pair, ids), "decoder_")):
        def rows(part, **more):
            return run(**{f"{name}input_ids": ids[:, part], f"{name}attention_mask": mask[:, : part.stop]}, **more).logits

        cache = StateCache()
        pieces = torch.cat([rows(part, **{CACHE: cache}) for part in (slice(0, 4), slice(4, 9))], 1)
        torch.testing.assert_close(pieces[mask.bool()], rows(slice(0, 9))[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", STREAMED)
@torch.no_grad()
def test_a_decoder_keeps_what_the_encoder_gave(attention):
    model = LongspanForSeq2SeqLM(LongspanConfig(**{**SIZES, "attention": attention}, vocab_size=30, target_vocab_size=20)).eval()
    source, mask = torch.randint(4, 30, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    done = model.generate(source, **options, return_dict_in_generate=True, output_logits=True)
    whole = model(source, attention_mask=mask, decoder_input_ids=done.sequences[:, :-1])
    torch.testing.assert_close(torch.stack(done.logits, 1), whole.logits, rtol=1e-4, atol=1e-4)
    for beam in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        got = model.generate(source, **options, **beam)
        assert torch.equal(got, model.generate(source, use_cache=False, **options, **beam))
    alone = model.generate(source[1:, :4], **{**options, "attention_mask": mask[1:, :4]})
    assert torch.equal(alone, model.generate(source, **options)[1:])


@pytest.mark.parametrize("kind", MODELS)
def test_they_learn_and_come_back(kind, tmp_path):
    model = kind(LongspanConfig(**SIZES, vocab_size=30, target_vocab_size=20, num_labels=3))
    ids = torch.randint(4, 30, (4, 10))
    labels = {LongspanForCausalLM: ids, LongspanForSequenceClassification: torch.tensor([0, 1, 2, 1]),
              LongspanForSeq2SeqLM: torch.randint(4, 20, (4, 6))}[kind]  # fmt: skip
    losses = learned(model.parameters(), lambda: model(ids, labels=labels).loss, 40)
    assert losses[-1] < losses[0] / 4
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    with torch.no_grad():
        again = copy(model, tmp_path)
        assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is LongspanConfig
        assert again.config.vocab_size == 30
        torch.testing.assert_close(again(ids, labels=labels).logits, model(ids, labels=labels).logits, rtol=0, atol=0)
        model.save_pretrained(tmp_path, state_dict={name: 2 * value for name, value in model.state_dict().items()})
        doubled = kind.from_pretrained(tmp_path, dtype="float64")
        for one, other in zip(model.parameters(), doubled.parameters()):
            torch.testing.assert_close(2 * one.double(), other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_checkpoints_of_activations_change_no_gradient(kind):
    config = partial(LongspanConfig, **SIZES, dropout=0.2, vocab_size=30, target_vocab_size=20, num_labels=3)
    model = kind(config()).train()
    assert kind(config(recompute=True)).is_gradient_checkpointing and not model.is_gradient_checkpointing
    ids = torch.randint(4, 30, (2, 10))
    labels = torch.tensor([0, 2]) if kind is LongspanForSequenceClassification else torch.randint(4, 20, (2, 10))
    kept = []

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(kept.pop() + x.numel()), x)[1], lambda x: x):
            loss = model(ids, labels=labels).loss
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.testing.assert_close(gradients(), expected)
        assert kept[-1] < kept[0]
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(gradients(), expected)
    assert kept[-1] == kept[0]


class Adapted(torch.nn.Module):
    """A projection with a change, as adapters of peft are: what is wrapped still shows its weights."""

    def __init__(self, base, change):
        super().__init__()
        self.base, self.change, self.weight, self.bias = base, change, base.weight, base.bias

    def forward(self, x):
        return self.base(x) + x @ self.change.T


AROUND = {
    "module": lambda attention, change: setattr(attention, "query_key_value", Adapted(attention.query_key_value, change)),
    "hook": lambda attention, change: attention.query_key_value.register_forward_hook(lambda _, x, out: out + x[0] @ change.T),
    "forward": lambda attention, change: setattr(
        attention.query_key_value, "forward", Adapted(deepcopy(attention.query_key_value), change).forward
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", AROUND)
@torch.no_grad()
def test_what_is_put_around_a_projection_counts(way):
    model = LongspanForSeq2SeqLM(LongspanConfig(**SIZES, vocab_size=30, target_vocab_size=20)).eval()
    merged, ids, target = deepcopy(model), torch.randint(4, 30, (2, 7)), torch.randint(4, 20, (2, 5))
    for block, other in zip(model.model.decoder, merged.model.decoder):
        change = torch.randn(48, 16)
        AROUND[way](block.cross_attention, change)
        other.cross_attention.query_key_value.weight += change
    got, expected = (one(ids, decoder_input_ids=target).logits for one in (model, merged))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_losses_are_those_of_the_labels():
    model, ids = causal(), torch.randint(4, 30, (2, 9))
    labels = ids.clone()
    labels[0, :5] = -100
    logits = model(ids).logits[:, :-1]
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([3, 5])).logits, logits[:, [3, 5]])
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=labels).loss, wanted)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=100).loss, wanted * 12 / 100)
    config = LongspanConfig(**SIZES, num_labels=1, problem_type="regression", target_mean=5.0, target_deviation=2.0)
    classifier = LongspanForSequenceClassification(config).eval()
    out = classifier(ids, labels=torch.tensor([4.0, 7.0]))
    torch.testing.assert_close(out.loss, ((out.logits[:, 0] - torch.tensor([4.0, 7.0])) / 2).square().mean())


def test_what_is_refused(tmp_path):
    model = causal(attention="aft-local")
    ids, mask = torch.randint(4, 30, (1, 6)), torch.tensor([[0, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="LongspanForCausalLM: attention_mask: expected ignored tokens at the end alone"):
        model(ids, attention_mask=mask)
    for shape in ((1, 1, 6, 6), (1, 8)):
        with pytest.raises(ValueError, match=r"LongspanForCausalLM: attention_mask: expected shape \(1, 6\)"):
            model(ids, attention_mask=torch.ones(shape))
    with pytest.raises(TypeError, match="LongspanForCausalLM: position_ids: expected None"):
        model(ids, position_ids=torch.arange(6)[None])
    with pytest.raises(TypeError, match="LongspanForCausalLM: cache: expected a StateCache, got DynamicCache"):
        model(ids, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="LongspanForSeq2SeqLM: decoder_input_ids: expected ids or labels, got None"):
        LongspanForSeq2SeqLM(LongspanConfig(**SIZES))(ids)
    with pytest.raises(ValueError, match="config.json: attention: expected one of kernelized, .* got 'magic'"):
        causal(attention="magic")
    with pytest.raises(ValueError, match="config.json: expected a file of a folder that `longspan train` or save_pretrained wrote"):
        LongspanForCausalLM.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a folder of a LongspanForSeq2SeqLM, got one of a LongspanForCausalLM"):
        LongspanForSeq2SeqLM.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="from_pretrained: expected settings of LongspanConfig, got depth"):
        LongspanForCausalLM.from_pretrained(tmp_path, depth=3)
    for place in ("meta", {"": "meta"}):
        placed = LongspanForCausalLM.from_pretrained(tmp_path, device_map=place, low_cpu_mem_usage=True)
        assert {(weight.device.type, weight.dtype) for weight in placed.parameters()} == {("meta", torch.float32)}
    placed = LongspanForCausalLM.from_pretrained(tmp_path, device_map="cpu", dtype="bfloat16")
    assert {(weight.device.type, weight.dtype) for weight in placed.parameters()} == {("cpu", torch.bfloat16)}
    with pytest.raises(ValueError, match="device_map: expected one device for all of the model, got {'model.embedding': 0, 'model.blocks': 1}"):
        LongspanForCausalLM.from_pretrained(tmp_path, device_map={"model.embedding": 0, "model.blocks": 1})
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:50])
    with pytest.raises(ValueError, match="model.safetensors: damaged"):
        LongspanForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="save_directory: expected a folder without a training run, got .* which has a checkpoint"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="series: expected a run of texts, .* read it with `longspan.torch.runs.load_run`"):
        (tmp_path / "config.json").write_text(json.dumps({"series": "a.csv"}))
        LongspanConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="synthetic: expected a task of a language model, got compression"):
        (tmp_path / "config.json").write_text(json.dumps({"synthetic": "compression:length=32,vocabulary=16"}))
        LongspanConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("settings, message", [
    ({"norm": "Pre"}, "config.json: norm: expected one of pre, post, got 'Pre'"),
    ({"attention": "kernelized", "attention_options": {"decay": 0.9}}, "config.json: attention_options: expected kernel, got 'decay'"),
    ({"attention_options": {"relative": {"radios": 3}}}, "attention_options: relative: expected radius, content, shared, raw, got 'radios'"),
    ({"attention": "shaw,softmax", "attention_options": {"relative": {}}}, "attention_options: expected shaw, softmax, got 'relative'"),
    ({"attention_options": [1]}, "config.json: attention_options: expected relative, kernel, got"),
    ({"attention": ["shaw"]}, "config.json: attention: expected str, got list"),
    *(({size: wrong}, f"config.json: {size}: expected an integer from 1 to 16777215, got") for size, wrong in (
        ("heads", 0), ("layers", 0), ("d_ff", -1), ("d_model", 16.0), ("encoder_layers", 0))),
    ({"vocab_size": 0}, "LongspanConfig: vocab_size: expected an integer from 1"),
    ({"tokenizers": {"txt": {"kind": "bytes"}}}, "LongspanConfig: tokenizers: expected text, or source and target, got 'txt'"),
    ({"tokenizers": {"text": {"kind": "json"}}}, "tokenizer: expected the contents of a tokenizer.json, got none"),
    ({"tokenizers": {"text": []}}, r"kind: expected characters, words, bytes or json, the tokenizer of a run, got \[\]"),
    ({"num_labels": 1}, "problem_type: expected regression with num_labels=1, .* got None with num_labels=1"),
    ({"num_labels": 3, "problem_type": "regression"}, "got 'regression' with num_labels=3"),
    ({"problem_type": "multi_label_classification"}, "got 'multi_label_classification' with num_labels=2"),
    ({"id2label": {1: "a", 2: "b"}}, r"id2label: expected labels of the ids from 0 to 1, got ids \[1, 2\]"),
], ids=str)  # fmt: skip
def test_settings_of_no_model_are_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LongspanForSequenceClassification(LongspanConfig(**{**SIZES, **settings}))


def test_another_vocabulary_is_refused_and_other_types_of_weights_are_read(tmp_path):
    model = LongspanForCausalLM(LongspanConfig(**{**SIZES, "radius": 3}))
    with pytest.raises(NotImplementedError, match="resize_token_embeddings: expected the vocabulary of the run's tokenizers"):
        model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    again = LongspanForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a.bfloat16().float(), b) for a, b in zip(model.parameters(), again.parameters()))
