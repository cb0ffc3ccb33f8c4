//! Forecasts: learning to tell the next values of series, their scores, and what cannot be learned from or told.

mod support;

use std::fmt::Write as _;

use serde_json::Value;
use support::{Place, able, random, text};

/// A wave of a period of 9 with noise, at irregular times: times and values.
fn wave(points: usize, seed: u64) -> (Vec<f64>, Vec<f64>) {
    let mut random = random(seed);
    let (level, height, phase) = (100.0 * random(), 2.0 + 8.0 * random(), 9.0 * random());
    let mut time = 0.0;
    let mut times = Vec::new();
    let values = (0..points).map(|_| {
        time += 0.4 + 1.2 * random();
        times.push(time);
        let noise = random() + random() + random() - 1.5;
        level + height * ((std::f64::consts::TAU * (time + phase) / 9.0).sin() + 0.2 * noise)
    });
    let values = values.collect();
    (times, values)
}

/// Many of them, as JSON lines.
fn waves(count: u64) -> String {
    let line = |seed| {
        let (times, values) = wave(60, seed + 1);
        format!("{{\"times\": {times:?}, \"values\": {values:?}}}\n")
    };
    (0..count).map(line).collect()
}

/// One as CSV, without an id, then lines whose value is to be told at some times.
fn table(points: usize, ahead: &[f64]) -> String {
    let (times, values) = wave(points, 7);
    let mut all = String::from("time,height\n");
    times.iter().zip(values).for_each(|(time, value)| writeln!(all, "{time},{value}").unwrap());
    ahead.iter().for_each(|time| writeln!(all, "{time},").unwrap());
    all
}

/// Arguments of a tiny training run on a file, then `more`.
fn train<'a>(file: &'a str, out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let source = ["--series", file, "--forecast", "6", "--set", "context=16"];
    support::train(&source, out, steps, more)
}

/// As a model that can learn: wider, in larger batches.
const WIDER: [&str; 5] = ["d_model=32", "heads=4", "d_ff=64", "layers=2", "batch_size=24"];

fn number(value: &Value, key: &str) -> f64 {
    value[key]["rate"].as_f64().unwrap_or_else(|| panic!("{key}: {value}"))
}

/// Scores of a model that has learned: half the error of the last value, and an interval that holds about as often as it says.
fn good(scores: &Value) {
    assert!(number(scores, "error_over_last") < 0.5 && number(scores, "error_over_mean") < 0.6, "{scores}");
    assert!((0.6..0.95).contains(&number(scores, "coverage")), "{scores}");
    assert!(number(scores, "pinball_loss") < number(scores, "mean_absolute_error"), "{scores}");
}

#[test]
fn waves_at_irregular_times_are_told_with_their_intervals() {
    let place = Place::new();
    place.write("waves.jsonl", waves(150).as_bytes());
    let (stdout, stderr) = place.said(&train("waves.jsonl", "run", "400", &able(&WIDER)));
    for part in ["the next 6 points from up to 16 before them", "1 channel to learn from", "other series are held out"]
    {
        assert!(stderr.contains(part), "{part:?}: {stderr}");
    }
    for part in ["over that of the last value", "80 % interval holds", "(expected ", "predict run"] {
        assert!(stdout.contains(part), "{part:?}: {stdout}");
    }
    let info = place.info("run");
    good(&info["held_out"]);
    place.finds_its_scores_again("run");
    let words = place.ok(&["info", "run"]);
    for part in ["1 channel → 6 next points", "held out    error over that of the last value 0.", "80 % interval holds"]
    {
        assert!(words.contains(part), "{part:?}: {words}");
    }

    // Others are scored, and told at any times, in any order of the times.
    let new: String = (900..940)
        .map(|seed| {
            let (times, values) = wave(40, seed);
            format!("{{\"times\": {times:?}, \"values\": {values:?}}}\n")
        })
        .collect();
    place.write("new.jsonl", new.as_bytes());
    good(&place.json(&["eval", "run", "new.jsonl", "--json"]));
    assert_eq!(place.ok(&["predict", "run", "new.jsonl"]).lines().count(), 1 + 6 * 40);
    let (times, values) = wave(40, 900);
    let last = times[30];
    let mut ahead = times[31..36].to_vec();
    ahead.reverse();
    let one = format!(
        "{{\"id\": \"b\", \"times\": {:?}, \"values\": {:?}, \"forecast\": {ahead:?}}}\n",
        &times[..31],
        &values[..31]
    );
    place.write("one.jsonl", one.as_bytes());
    let lines = place.ok(&["predict", "run", "one.jsonl"]);
    assert_eq!(lines.lines().next(), Some("id\ttime\t0.1\t0.25\t0.5\t0.75\t0.9"));
    for (line, (time, value)) in lines.lines().skip(1).zip(times[31..].iter().zip(&values[31..])) {
        let cells: Vec<&str> = line.split('\t').collect();
        assert_eq!((cells[0], cells[1], cells.len()), ("b", time.to_string().as_str(), 7), "{line}");
        let told: Vec<f64> = cells[2..].iter().map(|cell| cell.parse().unwrap()).collect();
        assert!(told.is_sorted() && (told[2] - value).abs() < 10.0, "{line}: {value}");
    }
    let object = place.json(&["predict", "run", "one.jsonl", "--json"]);
    assert_eq!(object["quantiles"], serde_json::json!([0.1, 0.25, 0.5, 0.75, 0.9]));
    assert_eq!((object["id"].as_str(), object["values"].as_array().unwrap().len()), (Some("b"), 5));
    assert_eq!(object["values"][0][0][2].to_string(), lines.lines().nth(1).unwrap().split('\t').nth(4).unwrap());

    for (ahead, part) in [
        (format!("[{last}]"), "is not after"),
        ("[1e999]".into(), "no JSON"),
        ("[\"soon\"]".into(), "a time is no number and no date"),
        ("9".into(), "`forecast` has no list of times"),
    ] {
        let (before, _) = one.split_once("\"forecast\": ").unwrap();
        place.write("bad.jsonl", format!("{before}\"forecast\": {ahead}}}\n").as_bytes());
        place.fails(&["predict", "run", "bad.jsonl"], &["bad.jsonl, line 1", part]);
    }
    place.write("short.jsonl", b"{\"values\": [1, 2]}\n");
    place.fails(&["eval", "run", "short.jsonl"], &["short.jsonl: no series has more than 4 points"]);
    assert_eq!(place.ok(&["predict", "run", "short.jsonl"]).lines().count(), 7, "little is known, and still told from");
    let notes = place.said(&["predict", "run", "one.jsonl"]).1;
    assert!(!notes.contains("further ahead"), "{notes}");
    place.write("far.jsonl", b"{\"values\": [1, 2, 1, 2], \"forecast\": [100]}\n");
    let notes = place.said(&["predict", "run", "far.jsonl"]).1;
    assert!(notes.contains("fewer than 4 points, or times further ahead than 6 points, in 1 series"), "{notes}");
}

#[test]
fn one_long_series_is_learned_from_and_its_next_values_are_told() {
    let place = Place::new();
    place.write("long.csv", table(800, &[]).as_bytes());
    let (stdout, stderr) = place.said(&train("long.csv", "run", "400", &able(&WIDER)));
    assert!(stderr.contains("the last points of series are held out, 14 windows"), "{stderr}");
    assert!(stdout.contains("1 series, 14 windows, 80 values"), "{stdout}");
    good(&place.info("run")["held_out"]);
    assert_eq!(place.ok(&["predict", "run", "long.csv"]).lines().count(), 7);

    let last = wave(800, 7).0[799];
    let ahead = [last + 1.0, last + 2.5];
    place.write("more.csv", table(800, &ahead).as_bytes());
    let lines = place.ok(&["predict", "run", "more.csv"]);
    let times: Vec<&str> = lines.lines().skip(1).map(|line| line.split('\t').nth(1).unwrap()).collect();
    assert_eq!(times, ahead.map(|time| time.to_string()), "{lines}");
    place.write("date.csv", b"time,height\n2024-01-31,5\n");
    place.fails(
        &["predict", "run", "date.csv"],
        &["date.csv", "\"2024-01-31\" are dates, and this run learned from numbers"],
    );
}

#[test]
fn several_channels_with_holes_and_every_mechanism_trains() {
    let place = Place::new();
    let mut all = String::new();
    for seed in 0..60 {
        let (times, values) = wave(50, seed);
        let hole = |n: usize, value: f64| if n % 4 == 1 { "null".into() } else { value.to_string() };
        // The second channel is alike everywhere, the third has no value in half of the series.
        let third = |value: f64| if seed % 2 == 0 { "null".into() } else { (-value).to_string() };
        let points: Vec<String> =
            values.iter().enumerate().map(|(n, y)| format!("[{},7,{}]", hole(n, *y), third(*y))).collect();
        writeln!(all, "{{\"times\": {times:?}, \"values\": [{}]}}", points.join(", ")).unwrap();
    }
    place.write("holes.jsonl", all.as_bytes());
    for (n, name) in place.mechanisms().iter().enumerate() {
        let causal = if n % 2 == 0 { "causal=true" } else { "causal=false" };
        let more = ["--attention", name, "--set", causal, "--set", "max_tokens=64"];
        let stdout = place.ok(&train("holes.jsonl", name, "4", &more));
        assert!(stdout.contains("in deviations of the channels"), "{name}: {stdout}");
        place.ok(&["train", "--resume", name, "--steps", "6"]);
        assert_eq!(place.losses(name).len(), 6, "{name}");
        let lines = place.ok(&["predict", name, "holes.jsonl"]);
        assert_eq!(lines.lines().count(), 1 + 60 * 6, "{name}");
        assert!(lines.lines().all(|line| line.split('\t').count() == 2 + 3 * 5), "{name}: {lines}");
    }
    place.fails(
        &train("holes.jsonl", "refused", "4", &["--set", "missing=refuse"]),
        &["holes.jsonl, line 1: the series that begins here has no value at the time"],
    );
    let gap: String =
        (1..40).map(|day| if day == 23 { "23,\n".into() } else { format!("{day},{}\n", day % 7) }).collect();
    place.write("gap.csv", format!("day,x\n{gap}").as_bytes());
    place.fails(
        &train("gap.csv", "refused", "4", &["--set", "missing=refuse"]),
        &["gap.csv, line 2: the series that begins here has no value of `x` at the time 23"],
    );
    place.write("one.jsonl", b"{\"values\": [1, 2, 3, 4, 5]}\n");
    for verb in ["predict", "eval"] {
        let parts = ["one.jsonl, line 1: 1 channel, and this run was trained on 3"];
        place.fails(&[verb, "fourier", "one.jsonl"], &parts);
    }
}

#[test]
fn days_without_weekends_go_on_so() {
    let place = Place::new();
    // From Monday, the 1st of January 2024, to Friday, the 29th of March.
    let date = |day: usize| match day {
        0..31 => format!("2024-01-{:02}", day + 1),
        31..60 => format!("2024-02-{:02}", day - 30),
        _ => format!("2024-03-{:02}", day - 59),
    };
    let rows: String = (0..89).filter(|day| day % 7 < 5).map(|day| format!("{},{}\n", date(day), day % 7)).collect();
    place.write("days.csv", format!("date,x\n{rows}").as_bytes());
    place.ok(&train("days.csv", "run", "3", &[]));
    let (table, notes) = place.said(&["predict", "run", "days.csv", "--csv"]);
    // Only that nothing was ever unlike what was predicted: the next 6 points are as far as in training, though they take 8 days.
    assert!(notes.contains("note: intervals of 1 series have no width, ") && notes.lines().count() == 1, "{notes}");
    let dates: Vec<&str> = table.lines().skip(1).filter_map(|line| line.split(',').nth(1)).collect();
    assert_eq!(dates, ["2024-04-01", "2024-04-02", "2024-04-03", "2024-04-04", "2024-04-05", "2024-04-08"]);
    // The same days as milliseconds, of which JSON has numbers; weeks from Sunday to Thursday; in New York, whose clocks change in March.
    let predicted = |rows: String| -> Vec<Value> {
        place.write("other.csv", format!("date,x\n{rows}").as_bytes());
        place.ok(&train("other.csv", "other", "3", &[]));
        let told = place.json(&["predict", "other", "other.csv", "--json"]);
        std::fs::remove_dir_all(place.path("other")).unwrap();
        told["times"].as_array().unwrap().clone()
    };
    let count = |day: usize| 1_704_067_200_000 + 86_400_000 * day as i64;
    let rows = (0..89).filter(|day| day % 7 < 5).map(|day| format!("{},{}\n", count(day), day % 7)).collect();
    assert_eq!(predicted(rows), [91, 92, 93, 94, 95, 98].map(count));
    let rows = (0..89).filter(|day| ![4, 5].contains(&(day % 7))).map(|day| format!("{},{}\n", date(day), day % 7));
    assert_eq!(predicted(rows.collect())[3..], ["2024-04-03", "2024-04-04", "2024-04-07"]);
    let local = |day: usize| format!("{} 00:00:00-0{}:00", date(day), if day < 70 { 5 } else { 4 });
    let rows = (0..89).filter(|day| day % 7 < 5).map(|day| format!("{},{}\n", local(day), day % 7)).collect();
    assert_eq!(predicted(rows)[4..], ["2024-04-05 00:00:00-04:00", "2024-04-08 00:00:00-04:00"]);
}

/// Sales of two shops by months, a third more in holidays, which come every fifth month.
fn sales(months: usize, ahead: usize) -> String {
    let mut all = String::from("Month;shop;holiday;sales;note\n");
    for month in 0..months + ahead {
        for (shop, level) in [("a", 20.0), ("b b", 50.0)] {
            let (holiday, date) = (month % 5 == 0, format!("{}-{:02}", 1990 + month / 12, month % 12 + 1));
            let sold = level * if holiday { 1.5 } else { 1.0 } + 0.01 * (month % 3) as f64;
            let sold = if month < months { format!("{sold:.2}").replace('.', ",") } else { String::new() };
            writeln!(all, "{date};{shop};{};{sold};x", u8::from(holiday)).unwrap();
        }
    }
    all
}

#[test]
fn a_table_of_months_is_read_by_its_names_and_what_is_known_ahead_is_seen() {
    let place = Place::new();
    place.write("sales.csv", sales(90, 0).as_bytes());
    let source = ["--series", "sales.csv", "--forecast", "4", "--set", "context=16"];
    place.fails(
        &support::train(&source, "run", "3", &[]),
        &["sales.csv, line 2: \"x\" in the column `note` is no number", "--channels 'holiday,sales'"],
    );
    let more = [&able(&WIDER)[..], &["--channels", "holiday,sales", "--known", "holiday"]].concat();
    let (stdout, stderr) = place.said(&support::train(&source, "run", "300", &more));
    for part in [
        "times `Month` (dates of the form %Y-%m, in months), ids `shop`, channels `holiday`, `sales`",
        "the usual distance of times is 1 month",
    ] {
        assert!(stderr.contains(part), "{part:?}: {stderr}");
    }
    assert!(stdout.contains("run/forecast.svg"), "{stdout}");
    assert!(text(&place.read("run/forecast.svg")).contains("held out"));

    place.write("next.csv", sales(90, 3).as_bytes());
    let table = place.ok(&["predict", "run", "next.csv", "--csv", "--picture", "next.svg"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split(',').collect()).collect();
    // So does the simple method that a run begins with.
    let (_, stderr) =
        place.said(&support::train(&source, "begun", "3", &["--channels", "holiday,sales", "--known", "holiday"]));
    assert!(stderr.contains("with the effect of what is known ahead"), "{stderr}");
    // Of one channel that is predicted the error is one of its values.
    let errors = &place.info("begun")["held_out"];
    assert!(number(errors, "mean_absolute_error") < 0.3, "{errors}");
    let begun = place.ok(&["predict", "begun", "next.csv", "--csv"]);
    for (at, expected) in [(1, 30.0), (2, 20.0), (4, 75.0), (5, 50.0)] {
        let median: f64 = begun.lines().nth(at).unwrap().split(',').nth(4).unwrap().parse().unwrap();
        assert!((median / expected - 1.0).abs() < 0.05, "{expected}: {begun}");
    }
    assert_eq!(rows[0], ["shop", "Month", "0.1", "0.25", "0.5", "0.75", "0.9"]);
    let keys: Vec<[&str; 2]> = rows[1..].iter().map(|row| [row[0], row[1]]).collect();
    let months = ["1997-07", "1997-08", "1997-09"];
    assert_eq!(keys, [months.map(|month| ["a", month]), months.map(|month| ["b b", month])].concat());
    // The first of them is a holiday.
    let median = |row: usize| rows[row][4].parse::<f64>().unwrap();
    for (first, level) in [(1, 20.0), (4, 50.0)] {
        assert!((median(first) / level - 1.5).abs() < 0.2 && (median(first + 1) / level - 1.0).abs() < 0.2, "{table}");
    }
    let picture = text(&place.read("next.svg"));
    assert!(picture.contains("a: sales") && picture.contains("b b: sales") && !picture.contains("holiday"));
    let object = place.ok(&["predict", "run", "next.csv", "--json"]);
    let object: Value = serde_json::from_str(object.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&object["id"], &object["times"][2], &object["channels"]),
        (&"a".into(), &"1997-09".into(), &serde_json::json!(["sales"]))
    );
    place.fails(
        &["predict", "run", "sales.csv"],
        &["no row after the last known one has what is known ahead (`holiday`)"],
    );
    place.fails(
        &support::train(&["--series", "sales.csv"], "no", "3", &["--known", "holiday"]),
        &["--known is not used by --series; labels are predicted from all that a series has"],
    );

    // How the file would be read.
    let words = place.ok(&["info", "next.csv", "--channels", "sales"]);
    for part in [
        "186 rows, 5 columns",
        "numbers from 20 to 75.02, 6 missing",
        "dates of the form %Y-%m: 1990-01 … 1997-09",
        "--series    2 series of 90 points and 1 channel",
    ] {
        assert!(words.contains(part), "{part:?}: {words}");
    }
    let found = place.json(&["info", "next.csv", "--json"]);
    assert!(found["tasks"]["series"].as_str().unwrap().starts_with("no: line 2: \"x\""), "{found}");
}

#[test]
fn variation_that_is_small_beside_its_level_is_predicted() {
    let place = Place::new();
    let line = |level: usize| {
        let values: Vec<f64> =
            (0..80).map(|t| 101_325.0 + 50.0 * level as f64 + 0.05 * (t as f64 / 3.0).sin()).collect();
        format!("{{\"values\": {values:?}}}\n")
    };
    place.write("high.jsonl", (0..60).map(line).collect::<String>().as_bytes());
    place.ok(&train("high.jsonl", "run", "200", &able(&WIDER)));
    let scores = &place.info("run")["held_out"];
    assert!(number(scores, "error_over_last") < 0.5, "{scores}");
}

#[test]
fn a_run_goes_on_with_its_own_points_alone() {
    let place = Place::new();
    place.write("long.csv", table(300, &[]).as_bytes());
    place.ok(&train("long.csv", "run", "9", &[]));
    place.write("long.csv", table(301, &[]).as_bytes());
    place.fails(&["train", "--resume", "run", "--steps", "12"], &["is not what this run began with", "--series"]);
    place.fails(&["train", "--resume", "run", "--forecast", "7"], &["`forecast` is fixed by the run"]);
    // A file of its own is named, not the first.
    place.write("own.csv", table(200, &[]).as_bytes());
    place.ok(&train("long.csv", "own", "3", &["--held-out", "own.csv"]));
    place.write("own.csv", table(201, &[]).as_bytes());
    place.fails(&["eval", "own"], &["own.csv is not what this run learned from"]);
}

#[test]
fn mistakes_are_named_and_no_run_is_made() {
    let place = Place::new();
    place.write("long.csv", table(300, &[]).as_bytes());
    place.write("short.jsonl", b"{\"values\": [1, 2, 3]}\n{\"values\": [1, 2]}\n");
    place.write("empty.csv", b"");
    place.write("huge.jsonl", format!("{{\"values\": {:?}}}\n", vec![1e300; 40]).as_bytes());
    let series = ["--series", "long.csv"];
    for (data, forecast, more, parts) in [
        (&series[..], "0", &[][..], &["forecast = 0: expected at least 1"][..]),
        (&series, "400", &[], &["long.csv: the longest series has 300 points, and 401 are needed", "lower --forecast"]),
        (&series, "9000", &[], &["forecast = 9000 and max_tokens = 8192", "raise --set max_tokens"]),
        (&series, "6", &["--set", "context=8190"], &["context = 8190 and forecast = 6 are more than max_tokens"]),
        (&series, "6", &["--set", "context=0"], &["context = 0: expected at least 1"]),
        (
            &series,
            "6",
            &["--set", "target=number"],
            &["`target` is not used by --series with --forecast", "--labelled, --series"],
        ),
        (&["--series", "short.jsonl"], "6", &[], &["short.jsonl: the longest series has 3 points"]),
        (&["--series", "empty.csv"], "6", &[], &["empty.csv: no series in it"]),
        (&["--series", "huge.jsonl"], "6", &[], &["huge.jsonl, line 1: a value or a time is too large"]),
        (&["--series", "nowhere.csv"], "6", &[], &["cannot read nowhere.csv"]),
        (&[], "6", &[], &["forecast is given without series", "--series"]),
        (&["--pairs", "pairs.tsv"], "6", &[], &["forecast is given without series"]),
    ] {
        let arguments = [&["train", "--out", "run", "--forecast", forecast][..], data, more].concat();
        place.fails(&arguments, parts);
        assert!(!place.path("run").exists(), "{arguments:?}: a run folder was made");
    }
    place.fails(
        &["train", "--series", "long.csv", "--set", "context=9"],
        &["`context` is not used by --series; it belongs to --series with --forecast"],
    );
    place.ok(&train("long.csv", "run", "3", &[]));
    place.fails(&["generate", "run"], &["predicts for lines", "predict run"]);
    let labelled: String =
        (0..60).map(|n| format!("{{\"values\": [{n}, {}], \"label\": \"{}\"}}\n", n % 7, n % 2)).collect();
    place.write("labelled.jsonl", labelled.as_bytes());
    place.ok(&support::train(&["--series", "labelled.jsonl"], "labels", "2", &[]));
    place.write("ahead.jsonl", b"{\"values\": [1, 2], \"forecast\": [3]}\n");
    place.fails(
        &["predict", "labels", "ahead.jsonl"],
        &["ahead.jsonl, line 1: it has times to forecast, and this run predicts labels", "--forecast"],
    );
}

#[test]
fn points_in_lines_of_json_are_predicted_as_those_of_a_table() {
    let place = Place::new();
    let point = |day: u32| (format!("2024-{:02}-{:02}", 1 + day / 28, 1 + day % 28), day % 7);
    let points: Vec<_> = (0..80).map(point).collect();
    let lines: String = points.iter().map(|(date, x)| format!("{{\"date\": \"{date}\", \"x\": {x}}}\n")).collect();
    let rows: String = points.iter().map(|(date, x)| format!("{date},{x}\n")).collect();
    place.write("points.jsonl", lines.as_bytes());
    place.write("points.csv", format!("date,x\n{rows}").as_bytes());
    place.ok(&train("points.jsonl", "run", "3", &[]));
    let told = place.ok(&["predict", "run", "points.jsonl"]);
    assert_eq!(told, place.ok(&["predict", "run", "points.csv"]).replace("2\t2024", "1\t2024"));
    assert!(told.contains("\t2024-03-25\t"), "{told}");
}

#[test]
fn what_is_unlike_training_or_cannot_be_is_said() {
    let place = Place::new();
    let rows = |minutes: u32| -> String {
        let row = |n: u32| {
            let (day, rest) = (n * minutes / 1440, n * minutes % 1440);
            let date = format!("2024-{:02}-{:02} {:02}:{:02}", 1 + day / 28, 1 + day % 28, rest / 60, rest % 60);
            format!("{date},{}\n", 101 - n)
        };
        format!("date,left\n{}", (0..100).map(row).collect::<String>())
    };
    place.write("days.csv", rows(1440).as_bytes());
    place.write("hours.csv", rows(60).as_bytes());
    // From 2 on the line goes below 0, which a person may know better.
    place.ok(&train("days.csv", "run", "3", &[]));
    let (table, notes) = place.said(&["predict", "run", "days.csv"]);
    assert!(table.lines().last().unwrap().contains("\t-"), "{table}");
    assert_eq!(
        notes,
        "note: predictions below 0 for 1 series that never were; where values cannot be, read them as 0\n"
    );
    let below = rows(1440).replace(",101\n", ",-1\n");
    place.write("below.csv", below.as_bytes());
    assert_eq!(place.said(&["predict", "run", "below.csv"]).1, "");
    // What was 0 before, and never less, goes no lower; a series that did goes on so.
    let level = |n: u32, low: i64| (i64::from(n) - 50).abs().min(60 - i64::from(n)).max(low);
    let shop = |low: i64| {
        let dates = (0..70).map(|n| format!("2024-{:02}-{:02},{}\n", 1 + n / 28, 1 + n % 28, level(n, low)));
        format!("date,sold\n{}", dates.collect::<String>())
    };
    place.write("sold.csv", shop(0).as_bytes());
    place.write("returned.csv", shop(-20).as_bytes());
    place.ok(&train("sold.csv", "shop", "3", &[]));
    let lowest = |file: &str| -> f64 {
        let table = place.ok(&["predict", "shop", file]);
        let numbers = table.lines().skip(1).map(|line| line.split('\t').nth(2).unwrap().parse().unwrap());
        numbers.fold(f64::INFINITY, f64::min)
    };
    assert!(lowest("sold.csv") == 0.0 && lowest("returned.csv") < -1.0);
    for verb in ["predict", "eval"] {
        let notes = place.said(&[verb, "run", "hours.csv"]).1;
        let part = "hours.csv: the usual distance of times is 3600 seconds, and 86400 seconds in training";
        assert!(notes.contains(part), "{verb}: {notes}");
    }
}

#[test]
fn a_constant_stretch_has_the_usual_intervals_and_training_without_errors_none() {
    let place = Place::new();
    let mut random = random(5);
    let mut rows = |level: f64, height: f64| -> String {
        let rows: String = (0..80).map(|n| format!("{},{}\n", 1900 + n, level + height * random())).collect();
        format!("year,x\n{rows}")
    };
    place.write("noise.csv", rows(0.0, 10.0).as_bytes());
    place.write("constant.csv", rows(5.0, 0.0).as_bytes());
    place.ok(&train("noise.csv", "noise", "3", &[]));
    assert_eq!(place.said(&["predict", "noise", "noise.csv"]).1, "");
    let (table, notes) = place.said(&["predict", "noise", "constant.csv", "--csv"]);
    let row: Vec<f64> = table.lines().nth(1).unwrap().split(',').skip(2).map(|cell| cell.parse().unwrap()).collect();
    assert!(notes.is_empty() && row[4] - row[0] > 1.0, "{table}{notes}");
    place.ok(&train("constant.csv", "constant", "3", &[]));
    let notes = place.said(&["predict", "constant", "constant.csv"]).1;
    assert!(notes.contains("intervals of 1 series have no width"), "{notes}");
}

#[test]
fn parts_of_a_year_or_a_day_in_columns_are_one_series() {
    let place = Place::new();
    let table = |first: &str, titles: &[String], name: &dyn Fn(usize) -> String, rows: usize| -> String {
        let row = |n: usize| -> String {
            let cells = (0..titles.len()).map(|m| format!(",{}", 100 + n * titles.len() + 7 * m % 5));
            format!("{},a{},0\n", name(n), cells.collect::<String>())
        };
        format!("{first},station,{},mean\n{}", titles.join(","), (0..rows).map(row).collect::<String>())
    };
    let months: Vec<String> = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(' ').map(String::from).collect();
    let numbers: Vec<String> = (1..=12).map(|month| month.to_string()).collect();
    let quarters: Vec<String> = (1..=4).map(|quarter| format!("Q{quarter}")).collect();
    let hours: Vec<String> = (0..24).map(|hour| format!("{hour:02}:00")).collect();
    let year = |n: usize| (1990 + n).to_string();
    let day = |n: usize| format!("2024-01-{:02}", n + 1);
    for (text, last, next) in [
        (table("Year", &months, &year, 20), "a row for each month, from the columns `Jan` … `Dec`", "a\t2010-01\t"),
        (table("year", &numbers, &year, 20), "a row for each month, from the columns `1` … `12`", "a\t2010-01\t"),
        (table("YEAR", &quarters, &year, 20), "a row for each quarter, from the columns `Q1` … `Q4`", "a\t2010 Q1\t"),
        (table("date", &hours, &day, 9), "a row for each time of the day", "a\t2024-01-10 00:00\t"),
    ] {
        place.write("wide.csv", text.as_bytes());
        let said = place.said(&train("wide.csv", "run", "2", &[])).1;
        assert!(said.contains(last) && said.contains("1 series of 1 channel to learn from"), "{said}");
        assert!(place.ok(&["predict", "run", "wide.csv"]).contains(next), "{next}");
        let output = place.run(&["predict", "run", "wide.csv", "--picture", "x.pdf"]);
        support::failed(&output, &["--picture x.pdf: expected a name that ends in .svg or .png"]);
        assert!(output.stdout.is_empty(), "refused before any answer");
        std::fs::remove_dir_all(place.path("run")).unwrap();
    }
    // A person may say otherwise, and a run that did reads other files so.
    place.write("wide.csv", table("Year", &months, &year, 20).replace(",0\n", "\n").replace(",mean", "").as_bytes());
    let said = place.said(&train("wide.csv", "apart", "2", &["--time", "Year", "--id", "station"])).1;
    assert!(said.contains("1 series of 12 channels"), "{said}");
    assert!(place.ok(&["predict", "apart", "wide.csv"]).contains("a\t2010\t"));
}

#[test]
fn a_run_of_wide_tables_reads_no_others() {
    let place = Place::new();
    let (years, names) = (1970..2010, ["a", "b", "c"]);
    let titles: String = years.clone().map(|year| format!(",{year}")).collect();
    let row = |name: &&str| -> String {
        format!("{name}{}\n", years.clone().map(|year| format!(",{}", year % 7 + 5)).collect::<String>())
    };
    place.write("wide.csv", format!("land{titles}\n{}", names.iter().map(row).collect::<String>()).as_bytes());
    place.ok(&train("wide.csv", "run", "3", &["--wide"]));
    assert!(place.ok(&["predict", "run", "wide.csv"]).contains("c\t2010\t"));
    // A point a row: each would be read as a series of one value.
    let rows: String = years.map(|year| format!("a,{year},5\n")).collect();
    place.write("long.csv", format!("land,year,value\n{rows}").as_bytes());
    place.fails(
        &["predict", "run", "long.csv"],
        &["long.csv, line 1: no columns of times, as in training, among `land`, `year`, `value`"],
    );
    place.write("own.csv", place.read("wide.csv").as_slice());
    let said = place.said(&train("wide.csv", "other", "3", &["--wide", "--held-out", "own.csv"])).1;
    assert!(said.contains("own.csv is held out, "), "{said}");
}

#[test]
fn quarters_of_an_hour_repeat_after_a_day() {
    let place = Place::new();
    for (minutes, season) in [(15, 96), (30, 48), (60, 24)] {
        let mut random = random(3);
        // Shifts in noise, which the changes from point to point do not show.
        let row = |n: usize| {
            let (day, minute) = (n / season, n % season * minutes);
            let value = if n % season < season / 3 { 14.0 } else { 10.0 } + 3.0 * random();
            format!("2024-01-{:02} {:02}:{:02},{value}\n", day + 1, minute / 60, minute % 60)
        };
        place.write("day.csv", format!("time,load\n{}", (0..8 * season).map(row).collect::<String>()).as_bytes());
        let day = season.to_string();
        let source = ["--series", "day.csv", "--forecast", &day, "--set", "context=16"];
        let said = place.said(&support::train(&source, &format!("run{minutes}"), "1", &[])).1;
        assert!(said.contains(&format!("a season of {season} points")), "{minutes}: {said}");
    }
}

#[test]
fn a_week_of_working_days_has_five() {
    let place = Place::new();
    let mut random = random(3);
    // Mondays that the noise hides from changes.
    let monday = jiff::civil::date(2021, 1, 4);
    let row = |n: i64| {
        let day = monday.saturating_add(jiff::Span::new().days(n / 5 * 7 + n % 5));
        format!("{day},{}\n", if n % 5 == 0 { 10.8 } else { 10.0 } + 3.0 * random())
    };
    place.write("days.csv", format!("date,x\n{}", (0..700).map(row).collect::<String>()).as_bytes());
    let said = place.said(&train("days.csv", "run", "1", &[])).1;
    assert!(said.contains("with a season of 5 points"), "{said}");
}

#[test]
fn intervals_of_a_simple_method_follow_what_became_wilder() {
    let place = Place::new();
    let mut random = random(5);
    // Noise that is four times as wide from the end of the points to learn from on.
    let row = |n: usize| format!("{}\n", if n < 640 { 1.0 } else { 4.0 } * (0..4).map(|_| random() - 0.5).sum::<f64>());
    place.write("noise.csv", format!("x\n{}", (0..800).map(row).collect::<String>()).as_bytes());
    let said = place.said(&train("noise.csv", "run", "1", &["--time", "row"])).1;
    assert!(said.contains("so that method answers alone"), "{said}");
    let scores = &place.info("run")["held_out"];
    // Without the development points it would hold three of five.
    assert!((0.7..0.95).contains(&number(scores, "coverage")), "{scores}");
}
