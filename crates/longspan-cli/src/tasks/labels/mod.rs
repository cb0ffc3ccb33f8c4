//! What is learned about a text or a series: which of some labels it has, or a number.

mod confusion;
mod numbers;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::{self, Display};

use anyhow::{Result, bail};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokenizers::NormalizedString;

use super::batches::{micro_batches, values};
use super::scores::{decimals, likeliest};
use super::series::unusual::far_ends;
use super::simple::Simple;
use super::split::Split;
use super::table::{is_missing, value};
use super::task::{self, Answer, Answering, Loss, Titles, Vocabulary};
use crate::run::columns::Columns;
use crate::run::config::LabelKind;
use crate::run::folder::RunFolder;
use crate::terminal::notes::note;
use crate::terminal::plot::Matrix;
use crate::terminal::samples::{counted, listed};
use confusion::Confusion;
use numbers::Errors;

const FILE: &str = "labels.json";

const BATCH: usize = 64;

/// So many different numbers are labels still, if nobody says what they are.
const MOST_NUMBERED: usize = 20;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Target {
    /// One of these labels, in the order of their ids.
    Labels(Vec<String>),
    /// A number. The model gives it less the mean and by the standard deviation of those it learned from.
    Number { mean: f64, deviation: f64 },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    Label(u32),
    Number(f32),
}

/// What the model gets of a text or a series, what is right of it, and what a simple method that has not learned from it gives: the model
/// learns what is left over. Empty where there is no such method.
#[derive(Debug, Clone)]
pub struct Example<I> {
    pub input: I,
    pub goal: Goal,
    pub base: Vec<f32>,
}

impl Goal {
    /// Takes note of it in the fingerprint of all examples.
    pub fn hash(self, hash: &mut Sha256) {
        match self {
            Self::Label(label) => hash.update(label.to_le_bytes()),
            Self::Number(number) => hash.update(number.to_bits().to_le_bytes()),
        }
    }
}

pub fn number(text: &str) -> Option<f64> {
    value(text).filter(|number| !number.is_nan())
}

/// Whether a number is a name: with zeros before it, as codes have, or with more digits than a double keeps.
fn is_name(label: &str) -> bool {
    let digits = label.trim().trim_start_matches(['-', '+']);
    let is_code = digits.len() > 1 && digits.starts_with('0') && digits.as_bytes()[1].is_ascii_digit();
    is_code || digits.len() > 15 && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether labels are one number in two spellings, such as `1` and `1.0`.
fn is_same_number(a: &str, b: &str) -> bool {
    !is_name(a) && !is_name(b) && number(a).is_some_and(|a| number(b) == Some(a))
}

/// Those of some labels whose parts, with a mark between them, stand in others too: `a;b` beside `a` and `b;c`, or `["a", "b"]`.
fn several<'a>(labels: impl Iterator<Item = &'a str> + Clone) -> Vec<&'a str> {
    let quotes = |c: char| c.is_whitespace() || "[]{}()'\"".contains(c);
    let of_mark = |mark: char| {
        let parts = move |label: &'a str| label.split(mark).map(move |part| part.trim_matches(quotes));
        let mut counts: HashMap<&str, usize> = HashMap::new();
        labels.clone().flat_map(parts).for_each(|part| *counts.entry(part).or_default() += 1);
        labels.clone().filter(move |label| label.contains(mark) && parts(label).all(|part| counts[part] > 1))
    };
    [';', '|', ',']
        .into_iter()
        .map(|mark| of_mark(mark).collect::<Vec<_>>())
        .find(|found| !found.is_empty())
        .unwrap_or_default()
}

/// What texts that look alike have in common: without what is not seen, and whatever the case, the width, the blanks and the quotes.
pub fn alike(text: &str) -> String {
    let seen = |c: &char| !matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2060}' | '\u{feff}');
    let plain = |c: char| match c {
        '\u{2018}' | '\u{2019}' | '`' | '\u{b4}' => '\'',
        '\u{201c}' | '\u{201d}' => '"',
        '\u{2010}'..='\u{2015}' => '-',
        other => other,
    };
    let plain: String = text.chars().filter(seen).map(plain).collect();
    let words = NormalizedString::from(plain).nfkc().get().to_uppercase();
    words.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl Target {
    /// What the labels of the examples to learn from are, which `kind` may say; else numbers where all are, not all of them whole, and
    /// more than [`MOST_NUMBERED`] differ. `examples` is what a person calls them.
    pub fn of<'a>(
        labels: impl Iterator<Item = &'a str>,
        kind: &mut Option<LabelKind>,
        name: &str,
        examples: &str,
    ) -> Result<Self> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        labels.for_each(|label| *counts.entry(label).or_default() += 1);
        let total: usize = counts.values().sum();
        let strange = counts.keys().find(|label| number(label).is_none());
        let numbers = match kind {
            None if strange.is_some() => false,
            None => {
                let whole = counts.keys().all(|label| number(label).is_some_and(|number| number.fract() == 0.0));
                let named = counts.keys().any(|label| is_name(label));
                let numbers = !whole && !named && counts.len() > MOST_NUMBERED;
                let sort = if whole { "whole numbers" } else { "numbers" };
                let (taken, other) =
                    if numbers { ("to be predicted as numbers", "label") } else { ("names of classes", "number") };
                note(format_args!(
                    "{name}: the labels are {} different {sort}, taken as {taken}; --set target={other} decides otherwise",
                    counts.len()
                ));
                numbers
            }
            Some(LabelKind::Label) => false,
            Some(LabelKind::Number) => match strange {
                Some(label) => {
                    bail!("{name}: target = number, and the label {label:?} is none; take it out, or leave target out")
                }
                None => true,
            },
        };
        if let [(only, _)] = counts.iter().collect::<Vec<_>>()[..] {
            bail!("{name}: all {examples} to train on have the label {only:?}; give {examples} of at least two labels");
        }
        *kind = Some(if numbers { LabelKind::Number } else { LabelKind::Label });
        if numbers {
            let all: Vec<f64> =
                counts.iter().flat_map(|(label, &count)| std::iter::repeat_n(number(label), count)).flatten().collect();
            let (mean, deviation) = moments(&all);
            for (count, code, [low, high]) in far_ends(all) {
                note(format_args!(
                    "{name}: {code} is the label of {}, and others go from {low} to {high}; if it says that none is known, take them out",
                    counted(count, examples)
                ));
            }
            return Ok(Self::Number { mean, deviation });
        }
        if let Some((label, count)) = counts.iter().find(|(label, _)| is_missing(label)) {
            note(format_args!(
                "{name}: {count} {examples} have the label {label:?}, which is a class; if it says that none is known, take them out"
            ));
        }
        let several = several(counts.keys().copied());
        if let Some(first) = several.first() {
            note(format_args!(
                "{name}: {} of {} labels, such as {first:?}, seem to be several others together, and are a class each; give {examples} one \
                 label, or a line for each",
                several.len(),
                counts.len()
            ));
        }
        if total >= 8 && counts.len() * 2 > total {
            bail!(
                "{name}: {total} {examples} have {} labels; a label should come often: to answer with texts, train with --pairs, to \
                 predict numbers, with --set target=number",
                counts.len()
            );
        }
        let mut labels: Vec<String> = Vec::new();
        let mut known: HashMap<u64, &str> = HashMap::new();
        for label in counts.into_keys() {
            let number = number(label).filter(|_| !is_name(label));
            match number.and_then(|number| known.insert(number.to_bits(), label)) {
                Some(other) => {
                    note(format_args!("{name}: the labels {other} and {label} are one number, and so one class"))
                }
                None => labels.push(label.into()),
            }
        }
        let mut known: HashMap<String, &str> = HashMap::new();
        for label in &labels {
            if let Some(other) = known.insert(alike(label), label) {
                note(format_args!("{name}: the labels {other:?} and {label:?} look alike, and are two classes"));
            }
        }
        Ok(Self::Labels(labels))
    }

    /// Says which labels of examples that are not learned from are none of those that are, so that they are never predicted.
    pub fn say_unlearned<'a, E>(&self, split: &'a Split<E>, names: [String; 2], label: impl Fn(&'a E) -> &'a str) {
        let Self::Labels(labels) = self else { return };
        let mut unlearned: BTreeMap<&String, BTreeSet<&str>> = BTreeMap::new();
        for (part, name) in [&split.development, &split.held_out].into_iter().zip(&names) {
            let labels = part.iter().map(&label).filter(|label| matches!(self.goal(label), Ok(None)));
            unlearned.entry(name).or_default().extend(labels);
        }
        for (name, unlearned) in unlearned.iter().filter(|(_, unlearned)| !unlearned.is_empty()) {
            let twin = unlearned.first().and_then(|label| labels.iter().find(|known| alike(known) == alike(label)));
            let twin = twin.map_or(String::new(), |twin| format!(" or write it as in training, such as {twin:?}"));
            let unlearned: Vec<String> = unlearned.iter().map(|label| format!("{label:?}")).collect();
            note(format_args!(
                "{name}: the label {} is held out or for development alone, and so is never predicted; give more of it{twin}",
                listed(&unlearned, 1)
            ));
        }
        let mut is_held_out = vec![false; labels.len()];
        for one in &split.held_out {
            if let Ok(Some(Goal::Label(n))) = self.goal(label(one)) {
                is_held_out[n as usize] = true;
            }
        }
        let absent = labels.iter().zip(is_held_out).filter(|(_, is_held_out)| !is_held_out);
        let absent: Vec<String> = absent.map(|(label, _)| format!("{label:?}")).collect();
        if !absent.is_empty() && !split.held_out.is_empty() {
            note(format_args!(
                "{}: nothing with the label {} is held out, so scores say nothing of it",
                names[1],
                listed(&absent, 1)
            ));
        }
    }

    pub fn load(folder: &RunFolder) -> Result<Self> {
        let what = "neither a list of labels nor a mean and a deviation";
        serde_json::from_slice(&folder.read(FILE)?).map_err(|_| folder.damaged(FILE, what))
    }

    pub fn store(&self, folder: &RunFolder) -> Result<()> {
        folder.write(FILE, serde_json::to_string_pretty(self)?.as_bytes())
    }

    pub fn outputs(&self) -> usize {
        match self {
            Self::Labels(labels) => labels.len(),
            Self::Number { .. } => 1,
        }
    }

    pub fn measure(&self) -> &'static str {
        match self {
            Self::Labels(_) => "nats per label",
            Self::Number { .. } => "mean squared error, in variances of the target",
        }
    }

    pub fn vocabulary(&self) -> Vocabulary {
        let kind = if let Self::Labels(_) = self { "labels" } else { "number" };
        Vocabulary { side: "label", kind, size: self.outputs() }
    }

    /// What the model is to give for a label; `None` for one that did not occur in training.
    pub fn goal(&self, label: &str) -> Result<Option<Goal>> {
        match self {
            // In any order: another program may have written the list.
            Self::Labels(labels) => {
                let place = labels.iter().position(|known| known == label);
                let place = place.or_else(|| labels.iter().position(|known| is_same_number(known, label)));
                Ok(place.map(|place| Goal::Label(place as u32)))
            }
            Self::Number { mean, deviation } => match number(label) {
                Some(number) => Ok(Some(Goal::Number(((number - mean) / deviation) as f32))),
                None => bail!("the label {label:?} is no number, and this run predicts numbers; give numbers"),
            },
        }
    }

    /// Examples of all whose label occurred in training; `base` is of the example at a place.
    pub fn examples<R, I>(
        &self,
        all: &[R],
        label: impl Fn(&R) -> &str,
        input: impl Fn(&R) -> Result<I>,
        base: impl Fn(usize) -> Vec<f32>,
    ) -> Result<Vec<Example<I>>> {
        let mut examples = Vec::with_capacity(all.len());
        for (n, one) in all.iter().enumerate() {
            if let Some(goal) = self.goal(label(one))? {
                examples.push(Example { input: input(one)?, goal, base: base(n) });
            }
        }
        Ok(examples)
    }

    /// What is right of these labels, all of which occurred in training.
    pub fn goals<'a>(&self, labels: impl Iterator<Item = &'a str>) -> Result<Vec<Goal>> {
        labels.filter_map(|label| self.goal(label).transpose()).collect()
    }

    /// What is given where nothing is known of an example: the logits of labels that come so often, or the mean.
    fn prior(&self, goals: impl Iterator<Item = Goal>) -> Vec<f32> {
        let mut row = vec![0f32; self.outputs()];
        for goal in goals {
            if let Goal::Label(label) = goal {
                row[label as usize] += 1.0;
            }
        }
        if let Self::Labels(_) = self { row.iter().map(|count| count.ln()).collect() } else { row }
    }

    pub fn certain(&self, goal: Goal) -> Vec<f32> {
        match goal {
            Goal::Number(number) => vec![number],
            Goal::Label(label) => (0..self.outputs()).map(|n| f32::from(u8::from(n == label as usize))).collect(),
        }
    }

    /// What simple methods give for examples with these labels: what is given where nothing is known but the `goals` to learn from, and
    /// `others` by their names.
    pub fn simple(
        &self,
        labels: &[&str],
        goals: impl Iterator<Item = Goal>,
        others: Vec<(String, Vec<Vec<f32>>)>,
        unit: &'static str,
    ) -> Result<Vec<Simple>> {
        let name = if let Self::Labels(_) = self { "the commonest label" } else { "the mean" };
        let prior = (name.to_string(), vec![self.prior(goals); labels.len()]);
        let one = |(name, rows): (String, Vec<Vec<f32>>)| {
            let (score, shown) = match self.score(labels, &rows, unit)? {
                Scores::Number(found) => {
                    let error = found.mean_absolute_error.rate;
                    (error, format!("mean absolute error {error:.0$}", decimals(error)))
                }
                Scores::Labels(found) => {
                    let accuracy = found.accuracy.rate;
                    (accuracy, format!("accuracy {:.1} %", 100.0 * accuracy))
                }
            };
            Ok(Simple { name, shown, score })
        };
        std::iter::once(prior).chain(others).map(one).collect()
    }

    /// The loss of a batch, of which the model gives these `rows`: logits of labels or numbers, to which those of the simple method that it
    /// corrects are added.
    pub fn loss<I>(&self, batch: &[&Example<I>], smoothing: f64, rows: Tensor<2>) -> Result<Loss> {
        let (shape, device) = (rows.dims(), rows.device());
        let tensor = |numbers: Vec<f32>| Tensor::<2>::from_data(TensorData::new(numbers, shape), &device);
        let bases: Vec<f32> = batch.iter().flat_map(|example| example.base.iter().copied()).collect();
        let rows = if bases.is_empty() { rows } else { rows + tensor(bases) };
        let right = tensor(batch.iter().flat_map(|example| self.certain(example.goal)).collect());
        if let Self::Number { .. } = self {
            let error = (rows - right).square().sum();
            return Ok(Loss { plain: error.clone().detach(), smoothed: error });
        }
        let losses = log_softmax(rows, 1).neg();
        let plain = (losses.clone() * right).sum();
        let smoothed = plain.clone() * (1.0 - smoothing) + losses.sum() * (smoothing / shape[1] as f64);
        Ok(Loss { plain: plain.detach(), smoothed })
    }

    /// The answers in what the model gave for one example: all labels, the likeliest first, or the number.
    pub fn answers(&self, row: &[f32]) -> Vec<Answer> {
        let labels = match self {
            Self::Labels(labels) => labels,
            Self::Number { deviation, .. } => {
                // A number has no probability; JSON shows `null`.
                let target = shown(self.foretold(row), deviation / 1000.0).to_string();
                return vec![Answer { target, log_probability: f64::NAN, score: f64::NAN, finished: true }];
            }
        };
        let largest = row.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let sum: f64 = row.iter().map(|x| f64::from(x - largest).exp()).sum();
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        let answer = |label: usize| {
            let log_probability = f64::from(row[label] - largest) - sum.ln();
            Answer { target: labels[label].clone(), log_probability, score: log_probability, finished: true }
        };
        order.into_iter().map(answer).collect()
    }

    /// Answers as cells: the likeliest label and its probability, or a number.
    pub fn cells(answers: &[Answer]) -> Vec<String> {
        match answers.first() {
            Some(best) if best.score.is_nan() => vec![best.target.clone()],
            Some(best) => vec![best.target.clone(), format!("{:.4}", best.log_probability.exp())],
            None => Vec::new(),
        }
    }

    pub fn titles(&self, key: &str, columns: &Columns) -> Titles {
        let label = columns.label.clone().unwrap_or("label".into());
        let answer = match self {
            Self::Labels(_) => vec![label, "probability".into()],
            Self::Number { .. } => vec![label],
        };
        Titles { key: vec![key.into()], answer, always: false }
    }

    /// A number that the model gave, in its own measure.
    fn foretold(&self, row: &[f32]) -> f64 {
        let Self::Number { mean, deviation } = self else { return f64::NAN };
        mean + deviation * f64::from(row[0])
    }

    /// Scores what the model gave for examples with these labels, which a person calls `unit`.
    pub fn score(&self, labels: &[&str], rows: &[Vec<f32>], unit: &'static str) -> Result<Scores> {
        let goals = labels.iter().map(|label| self.goal(label)).collect::<Result<Vec<_>>>()?;
        Ok(if let Self::Labels(names) = self {
            let right =
                |goal: Option<Goal>| if let Some(Goal::Label(label)) = goal { Some(label as usize) } else { None };
            let answers: Vec<_> = goals.into_iter().map(right).zip(rows.iter().map(|row| likeliest(row))).collect();
            Scores::Labels(Confusion::of(names, &answers, unit))
        } else {
            let pair = |(label, row): (&&str, &Vec<f32>)| Some((number(label)?, self.foretold(row)));
            Scores::Number(Errors::of(&labels.iter().zip(rows).filter_map(pair).collect::<Vec<_>>(), unit))
        })
    }

    /// What is to be told, in a few words, of examples with these goals.
    pub fn introduce(&self, goals: impl Iterator<Item = Goal>) -> String {
        let labels = match self {
            Self::Labels(labels) => labels,
            Self::Number { mean, deviation } => {
                return format!(
                    "numbers of mean {mean:.0$} and standard deviation {deviation:.0$}",
                    decimals(*deviation)
                );
            }
        };
        let mut counts = vec![0usize; labels.len()];
        for goal in goals {
            if let Goal::Label(label) = goal {
                counts[label as usize] += 1;
            }
        }
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|&label| Reverse(counts[label]));
        let some = |label: &usize| format!("{} {}", labels[*label], counts[*label]);
        let named = listed(&order.iter().map(some).collect::<Vec<_>>(), 5);
        // A model that always gives the commonest label is right so often.
        let share = 100.0 * counts[order[0]] as f64 / counts.iter().sum::<usize>().max(1) as f64;
        format!("{} labels: {named}; the commonest has {share:.0} %", labels.len())
    }
}

/// What a model gives for each of `rows`, `width` numbers for one. Rows of similar `length` share a batch, so that little is padded.
pub fn outputs<R: Sync, S: Sync>(
    rows: &[R],
    length: impl Fn(&R) -> usize,
    width: usize,
    how: &Answering<'_, S>,
    forward: impl Fn(&[&R]) -> Result<Tensor<2>> + Sync,
) -> Result<Vec<Vec<f32>>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&place| Reverse(length(&rows[place])));
    let batches: Vec<&[usize]> =
        order.chunks(BATCH).flat_map(|part| micro_batches(part, |&place| (1, length(&rows[place])))).collect();
    let found = how.workers.each(&batches, |batch| {
        let some: Vec<&R> = batch.iter().map(|&place| &rows[place]).collect();
        values(forward(&some)?)
    })?;
    let mut all = vec![Vec::new(); rows.len()];
    for (batch, numbers) in batches.iter().zip(found) {
        for (&place, row) in batch.iter().zip(numbers.chunks(width)) {
            all[place] = row.to_vec();
        }
    }
    Ok(all)
}

/// What a model gave, corrected: the sum of its rows and those of a simple method.
pub fn joined(mut rows: Vec<Vec<f32>>, base: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    rows.iter_mut().zip(base).for_each(|(row, base)| row.iter_mut().zip(base).for_each(|(x, y)| *x += y));
    rows
}

/// A number with the digits that it has beside a unit.
pub fn shown(value: f64, unit: f64) -> f64 {
    let digits = (3.0 - unit.abs().log10().floor()).clamp(0.0, 330.0) as usize;
    // Without the sign of a zero.
    format!("{value:.digits$}").parse().unwrap_or(value) + 0.0
}

/// The mean and the standard deviation, which is 1 where there is none.
pub fn moments(numbers: &[f64]) -> (f64, f64) {
    let count = numbers.len().max(1) as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    let deviation = (numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt();
    (mean, if deviation > 0.0 && deviation.is_finite() { deviation } else { 1.0 })
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Scores {
    Labels(Confusion),
    Number(Errors),
}

impl task::Scores for Scores {
    fn is_behind(&self, simple: f64) -> bool {
        match self {
            Self::Labels(confusion) => simple > confusion.accuracy.rate,
            Self::Number(errors) => simple < errors.mean_absolute_error.rate,
        }
    }

    fn picture(&self) -> Option<Matrix> {
        match self {
            Self::Labels(confusion) => Some(confusion.picture()),
            Self::Number(_) => None,
        }
    }
}

impl Display for Scores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Labels(confusion) => confusion.fmt(f),
            Self::Number(errors) => errors.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(labels: &[&str], kind: &mut Option<LabelKind>) -> Result<Target> {
        Target::of(labels.iter().copied(), kind, "f", "texts")
    }

    #[test]
    fn many_different_numbers_are_numbers_and_a_setting_decides() {
        let labels = |label: fn(usize) -> String| -> Vec<String> { (0..42).map(|n| label(n % 21)).collect() };
        let words = |labels: &[String], kind: &mut Option<LabelKind>| {
            target(&labels.iter().map(String::as_str).collect::<Vec<_>>(), kind)
        };
        let mut kind = None;
        let found = words(&labels(|n| format!("{}", n as f64 / 2.0)), &mut kind).unwrap();
        assert_eq!(kind, Some(LabelKind::Number));
        let Target::Number { mean, deviation } = found else { panic!("{found:?}") };
        assert_eq!((mean, (deviation * deviation * 12.0).round()), (5.0, 110.0));
        let Some(Goal::Number(goal)) = found.goal(" 10.0").unwrap() else { panic!() };
        assert!((found.foretold(&[goal]) - 10.0).abs() < 1e-5);
        let level = Target::Number { mean: 2_459_000.5, deviation: 0.25 };
        assert_eq!(level.answers(&[-1.0])[0].target, "2459000.25", "small variation at a high level");
        let Scores::Number(errors) = level.score(&["2459000.25"], &[vec![-1.0]], "texts").unwrap() else { panic!() };
        assert_eq!(errors.mean_absolute_error.rate, 0.0);
        // Whole numbers are classes, and so are codes with zeros before them.
        for names in [labels(|n| n.to_string()), labels(|n| format!("{n:05}")), labels(|n| format!("{n}.0"))] {
            let mut kind = None;
            let found = words(&names, &mut kind).unwrap();
            assert_eq!((found.outputs(), kind), (21, Some(LabelKind::Label)), "{found:?}");
        }
        let numbers = labels(|n| n.to_string());
        let numbers: Vec<&str> = numbers.iter().map(String::as_str).collect();
        assert!(found.goal("many").unwrap_err().to_string().contains("\"many\" is no number"));

        let mut kind = Some(LabelKind::Label);
        assert_eq!(target(&numbers, &mut kind).unwrap().outputs(), 21);
        // One number in two spellings is one label; a code is none.
        let mut kind = None;
        let both = target(&["1", "2", "1.0", "2"], &mut kind).unwrap();
        assert_eq!(both, Target::Labels(vec!["1".into(), "2".into()]));
        assert_eq!((both.goal("2.0e0").unwrap(), both.goal("02").unwrap()), (Some(Goal::Label(1)), None));
        let long = ["9007199254740992", "9007199254740993"].repeat(2);
        assert_eq!(target(&long, &mut None).unwrap().outputs(), 2, "more digits than a double keeps");
        let few = ["1", "2", "1", "2"];
        assert_eq!(target(&few, &mut None).unwrap(), Target::Labels(vec!["1".into(), "2".into()]));
        let mut kind = Some(LabelKind::Number);
        assert!(matches!(target(&few, &mut kind).unwrap(), Target::Number { .. }));
        let error = target(&["1", "x"], &mut kind).unwrap_err().to_string();
        assert!(error.contains("the label \"x\" is none"), "{error}");
    }

    #[test]
    fn several_labels_in_one_are_known() {
        for (labels, found) in [
            (&["a", "b", "a;b"][..], &["a;b"][..]),
            (&["a|b", "b | c", "a | c"], &["a|b", "b | c", "a | c"]),
            (&["['a']", "['b']", "['a', 'b']"], &["['a', 'b']"]),
            (&["Paris, France", "Lyon, France", "Nice"], &[]),
            (&["a;", "b", "c"], &[]),
        ] {
            assert_eq!(several(labels.iter().copied()), found, "{labels:?}");
        }
    }

    #[test]
    fn labels_that_look_alike_are_known() {
        let pairs = "Good|good won\u{2019}t|won't a\u{a0}b|A\u{3000}\u{a0}b co\u{ad}op\u{200b}|coop \u{ff11}|1 STRASSE|stra\u{df}e a\u{2013}b|a-b";
        for (a, b) in pairs.split(' ').filter_map(|pair| pair.split_once('|')) {
            assert_eq!(alike(a), alike(b));
        }
        assert_ne!(alike("co-op"), alike("coop"));
        assert_ne!(alike("\u{e9}"), alike("e"));
    }

    #[test]
    fn probabilities_of_all_labels_add_up_to_one() {
        let target = Target::Labels(vec!["a".into(), "b".into(), "c".into()]);
        let answers = target.answers(&[300.0, 302.0, 302.0]);
        let names: Vec<&str> = answers.iter().map(|answer| answer.target.as_str()).collect();
        assert_eq!(names, ["b", "c", "a"]);
        let total: f64 = answers.iter().map(|answer| answer.log_probability.exp()).sum();
        assert!((total - 1.0).abs() < 1e-12 && Target::cells(&answers) == ["b", "0.4683"], "{answers:?}");
    }
}
