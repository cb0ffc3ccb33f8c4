"""Runs of the command on numeric series: they answer here as there, and what is learned here is read there."""

import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
from agreement import learned
from longspan.torch.runs import Scaling, SeriesModel, SeriesRun, load_run, load_weights, save_weights
from test_runs import run_command as command, settings_of

GATED, FORM = "gated_attention=true", ["norm_kind=rms", "activation=silu", "gated=true"]
#: Target, channels, whether values are missing, and settings.
RUNS = {
    "fourier": ("label", 2, True, ["dropout=0.1"]),
    "causal": ("label", 1, False, ["causal=true", "pooling=last", GATED, *FORM]),
    "attention pooling": ("label", 3, True, ["pooling=attention", "norm=post"]),
    "number": ("number", 2, True, ["causal=true", "pooling=attention", GATED]),
    "number at the end": ("number", 1, False, ["pooling=last", "attention_options={normalizer = 'unrotated', rotary = true}"]),
    "mixed": ("label", 2, False, ["attention=fourier,softmax-window", "attention_options={softmax-window = {window = 4}}"]),
    "sines": ("label", 1, True, ["attention=kernelized", GATED]),
    "shaw": ("label", 2, False, ["attention=shaw", "causal=true"]),
    "clock": ("label", 2, True, ["clock=true"]),
    "by position": ("number", 1, False, ["attention=aft-full", "max_tokens=40"]),
}


def series(count, channels, missing, target, start=1e6):
    """Series of 3 to 30 points at random times after a start, the label of which is how fast they turn."""
    draw = random.Random(7)
    for place in range(count):
        speed = draw.uniform(0.3, 3)
        times = sorted(draw.uniform(0, 20) + start for _ in range(draw.randint(3, 30)))
        values = [
            [None if missing and draw.random() < 0.2 else 5 * channel + math.sin(speed * time) for channel in range(channels)]
            for time in times
        ]
        # A point without any value counts as one that is missing.
        values[0] = values[0] if missing else [draw.random()] * channels
        label = str(speed) if target == "number" else ("slow", "middle", "fast")[place % 3]
        yield {"times": times, "values": values, "label": label}


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    target, channels, missing, settings = RUNS[request.param]
    place = tmp_path_factory.mktemp("run")
    data = list(series(60, channels, missing, target, 0 if request.param == "clock" else 1e6))
    even = request.param == "shaw"
    for start, one in enumerate(data if even else []):
        one["times"] = [50 * start + n for n in range(len(one["times"]))]
    (place / "series.jsonl").write_text("".join(json.dumps(one) + "\n" for one in data))
    settings = ["d_model=16", "heads=2", "d_ff=32", "layers=2", "warmup_steps=5", "learning_rate=0.01", "base=false", *settings]
    command("train", "--series", place / "series.jsonl", "--steps", "40", "--out", place / "run",
            *settings_of(settings))  # fmt: skip
    told = json.loads((place / "run" / "series.json").read_text())
    assert (("clock" in told), told.get("grid", False)) == (request.param == "clock", even)
    return place / "run", data


def assert_same(answers, folder, data):
    """The command's answers for the file are these, to the rounding of float32."""
    lines = command("predict", folder, data, "--json").splitlines()
    assert len(answers) == len(lines)
    for answer, line in zip(answers, map(json.loads, lines)):
        if isinstance(answer, float):
            assert answer == pytest.approx(float(line["target"]), rel=1e-5, abs=1e-5)
            continue
        assert next(iter(answer)) == line["target"]
        assert list(answer.values()) == sorted(answer.values(), reverse=True)
        wanted = {one["target"]: one["log_probability"] for one in line["answers"]}
        assert {label: math.log(chance) for label, chance in answer.items()} == pytest.approx(wanted, abs=1e-5)


def test_a_run_answers_as_the_command(run):
    folder, data = run
    loaded = load_run(folder)
    assert type(loaded) is SeriesRun and loaded.model.input.in_features == loaded.scaling.inputs
    answers = loaded.predict(data)
    assert_same(answers, folder, folder.parent / "series.jsonl")
    # Answers differ, so that equal ones say something.
    assert len({str(answer) for answer in answers}) > 20
    # One by one, as arrays and as tensors, in any order of their points.
    for one, answer in list(zip(data, answers))[:5]:
        order = np.random.default_rng(0).permutation(len(one["times"]))
        values = np.array(one["values"], float)[order]
        values = values[:, 0] if values.shape[1] == 1 else values
        (again,) = loaded.predict([{"times": np.array(one["times"])[order], "values": torch.from_numpy(values)}])
        assert again == pytest.approx(answer, rel=1e-4)


def test_what_is_learned_here_is_read_there(run, tmp_path):
    folder, data = run
    loaded = load_run(folder)
    before = loaded.predict(data)
    shutil.copytree(folder, tmp_path / "run")
    save_weights(loaded.model, tmp_path / "run" / "model.safetensors")
    assert_same(before, tmp_path / "run", folder.parent / "series.jsonl")
    goals = torch.tensor([float(one["label"]) if not loaded.labels else loaded.labels.index(one["label"]) for one in data[:12]])

    def loss():
        out = loaded.model(*loaded.batch(data[:12]))
        if loaded.labels:
            return torch.nn.functional.cross_entropy(out, goals)
        return (out[:, 0] - (goals - loaded.mean) / loaded.deviation).square().mean()

    loaded.model.train()
    # Many more steps, and a loss of 0, and the weights make 2e-5 of float32's rounding here and there.
    losses = learned(loaded.model.parameters(), loss, 20)
    assert losses[-1] < losses[0] / 2
    assert all(parameter.grad is not None for parameter in loaded.model.parameters())
    save_weights(loaded.model, tmp_path / "run" / "model.safetensors")
    after = loaded.predict(data)
    assert str(after) != str(before)
    assert_same(after, tmp_path / "run", folder.parent / "series.jsonl")
    assert load_run(tmp_path / "run").predict(data) == after


def test_points_are_counted_without_times():
    run = made()
    values = [1.0, None, 2.5, 4.0]
    counted = {"times": [0, 1, 2, 3], "values": [[1.0], [None], [2.5], [4.0]]}
    assert run.predict([values]) == run.predict([counted]) == run.predict([[*values, None, None]])
    assert run.predict(np.array([values, values], float)) == run.predict([values] * 2)
    assert run.predict([]) == []
    # Only differences of times count, measured in steps.
    later = {"times": [1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3], "values": values}
    assert run.predict([later]) == run.predict([counted]) != run.predict([{**counted, "times": [0, 1, 2, 4]}])
    # Far from one another, points near one another keep their distances.
    far = [run.predict([{"times": [0, 1, 1e12, 1e12 + gap], "values": values}]) for gap in (1, 2)]
    assert far[0] != far[1]


def test_answers_do_not_depend_on_what_is_answered_together(monkeypatch):
    run, asked = made(), [[float(n)] * (n % 7 + 1) for n in range(20)]
    together = run.predict(asked)
    for points in (1, 20):
        monkeypatch.setattr("longspan.torch.runs._TOGETHER", points)
        assert [answer["a"] for answer in run.predict(asked)] == pytest.approx([answer["a"] for answer in together], rel=1e-5)


CONFIG = {"attention": "fourier", "d_model": 8, "heads": 2, "layers": 1, "d_ff": 8}


def made(channels=1, **settings):
    torch.manual_seed(0)
    scaling = Scaling([], [3.0] * channels, [2.0] * channels, 0.5, masked=False)
    config = {**CONFIG, **settings}
    return SeriesRun(SeriesModel(config, scaling.inputs, 2), config, scaling, ("a", "b"))


@pytest.mark.parametrize("pooling", ["mean", "last", "attention"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_padded_does_not_count(pooling, causal):
    run = made(pooling=pooling, causal=causal)
    torch.nn.init.normal_(run.model.pooling_query) if pooling == "attention" else None
    short, long = [5.0, 1.0], [2.0, 7.0, 3.0, 4.0]
    together = run.model(*run.batch([short, long]))
    values, times, lengths = run.batch([short, long])
    values[0, 2:], times[0, 2:] = 9.0, 7.0
    torch.testing.assert_close(run.model(values, times, lengths), together)
    for row, one in zip(together, (short, long)):
        torch.testing.assert_close(run.model(*run.batch([one])[:2])[0], row)


def test_a_model_of_other_numbers_answers_alike():
    run = made()
    (single,) = run.predict([[1.0, 2.0]])
    run.model.double()
    assert run.predict([[1.0, 2.0]])[0] == pytest.approx(single, rel=1e-5)
    # Half precision keeps the times of training: these would all be 1,000.
    near = {"times": [0, 500, 500.5, 501], "values": [1.0, 2.0, 3.0, 4.0]}
    assert torch.equal(run.batch([near])[1], torch.tensor([[0.0, 1000.0, 1001.0, 1002.0]]).double())
    for kind in (torch.float16, torch.bfloat16):
        for pooling in ("mean", "last", "attention"):
            run = made(pooling=pooling)
            expected = run.predict([near, [5.0]])
            run.model.to(kind)
            assert torch.equal(run.batch([near])[1], torch.tensor([[0.0, 1000.0, 1001.0, 1002.0]]))
            assert [answer["a"] for answer in run.predict([near, [5.0]])] == pytest.approx([answer["a"] for answer in expected], abs=0.01)


@pytest.mark.parametrize(
    "channels, one, kind, message",
    [
        (2, [[1.0]], ValueError, r"series\[1\]: values: expected shape \(points, 2\), the channels .*, got \(1, 1\); give as many"),
        (2, [1.0, 2.0], ValueError, r"values: expected shape \(points, 2\), .* got \(2,\)"),
        (1, 1.0, ValueError, r"values: expected shape \(points, 1\), .* got \(\)"),
        (1, [], ValueError, "values: expected at least one, got 0 and all of them missing; leave the series out"),
        (1, [None, np.nan], ValueError, "values: expected at least one, got 2 and all of them missing"),
        (1, {"times": [0, np.nan], "values": [1, 2]}, ValueError, "times: expected finite numbers, got another at point 1; give one"),
        (1, [1.0, math.inf], ValueError, "values: expected finite numbers, got another at point 1"),
        (1, {"times": [0], "values": [1, 2]}, ValueError, r"times: expected shape \(2,\), got \(1,\); give a time to each point"),
        (1, {"values": [1, 2]}, ValueError, "expected the keys times and values, got values; give the values alone"),
        (1, [1e300], ValueError, "expected values and times as large as those of training"),
        (1, ["high"], ValueError, "values: expected an array of numbers"),
        (1, [{}], TypeError, "values: expected an array of numbers"),
    ],
)
@pytest.mark.parametrize("method", ["predict", "batch"])
def test_series_that_are_refused(method, channels, one, kind, message):
    run = made(channels)
    with pytest.raises(kind, match=f"^SeriesRun: {message if message.startswith('series') else rf'series.1.: {message}'}"):
        getattr(run, method)([[[1.0] * channels], one])


def test_what_is_no_list_of_series_is_refused():
    with pytest.raises(TypeError, match="SeriesRun: series: expected a list of series, got one dict; put it into a list"):
        made().predict({"times": [0], "values": [1]})
    with pytest.raises(ValueError, match="SeriesRun: series: expected at least one, got none"):
        made().batch([])


def test_tensors_of_other_shapes_are_refused():
    model = made(2).model
    values, times = torch.zeros(3, 4, 2), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"SeriesModel: values: expected shape \(batch, points, 2\), got \(3, 4, 1\)"):
        model(values[..., :1], times)
    with pytest.raises(ValueError, match=r"SeriesModel: times: expected shape \(3, 4\), as values have, got \(3, 4, 1\)"):
        model(values, times[..., None])
    with pytest.raises(ValueError, match=r"SeriesModel: lengths: expected shape \(3,\), as values have, got \(2,\)"):
        model(values, times, torch.tensor([4, 4]))
    with pytest.raises(ValueError, match="config.json: pooling: expected one of mean, last, attention, got 'max'"):
        made(pooling="max")


WHOLE = {"names": [], "means": [3.0], "deviations": [2], "step": 0.5, "masked": False}


def stored(folder, scaling=WHOLE, labels=("a", "b")):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "series": "a.csv"}))
    (folder / "series.json").write_text(json.dumps(scaling))
    (folder / "labels.json").write_text(json.dumps(labels))
    return folder


@pytest.mark.parametrize(
    "change",
    [{"means": []}, {"means": [1.0, 2.0]}, {"means": ["x"]}, {"deviations": [0.0]}, {"step": math.nan}, {"masked": 1}, {"more": 1},
     {"means": 3.0, "deviations": 2.0}, {"clock": [0.0, 1.0]}, {"clock": {"begin": 0.0, "span": 0.0}}],
)  # fmt: skip
def test_a_damaged_scaling_is_refused(change, tmp_path):
    with pytest.raises(ValueError, match="series.json: expected names, means and .* the file is damaged: restore it or train again"):
        load_run(stored(tmp_path, {**WHOLE, **change}))


def test_damaged_folders_are_refused(tmp_path):
    run = made()
    save_weights(run.model, stored(tmp_path) / "model.safetensors")
    loaded = load_run(tmp_path)
    assert loaded.predict([[1.0, 2.0]]) == run.predict([[1.0, 2.0]])
    for labels in ([], [1], {"mean": 1.0}, {"mean": 1.0, "deviation": math.inf}, "a"):
        with pytest.raises(ValueError, match="labels.json: expected a list of labels, or a mean and a deviation, got something else"):
            load_run(stored(tmp_path, labels=labels))
    with pytest.raises(ValueError, match="model.safetensors: input.weight: expected shape"):
        load_run(stored(tmp_path, {**WHOLE, "masked": True}))
    with pytest.raises(ValueError, match="model.safetensors: output.weight: expected shape"):
        load_run(stored(tmp_path, labels={"mean": 1, "deviation": 2.0}))
    (stored(tmp_path) / "series.json").write_text("[1, ")
    with pytest.raises(ValueError, match="series.json: damaged"):
        load_run(tmp_path)
    (tmp_path / "series.json").write_text("[]")
    with pytest.raises(ValueError, match="series.json: expected names"):
        load_run(tmp_path)
    (tmp_path / "series.json").unlink()
    with pytest.raises(FileNotFoundError, match="series.json"):
        load_run(tmp_path)


def test_weights_come_back(tmp_path):
    for settings in ({"pooling": "attention"}, {"norm": "post", "attention": "shaw"}, {"gated_attention": True}):
        one, other = made(**settings).model, made(2).model
        save_weights(one, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="expected"):
            load_weights(other, tmp_path / "model.safetensors")
        other = SeriesModel({**CONFIG, **settings}, 1, 2)
        load_weights(other, tmp_path / "model.safetensors")
        assert one.state_dict().keys() == other.state_dict().keys()
        for a, b in zip(one.parameters(), other.parameters()):
            assert torch.equal(a, b)
