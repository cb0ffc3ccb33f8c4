//! How often labels are right, and which are taken for which.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{self, Display};

use serde::Serialize;

use crate::tasks::scores::Interval;
use crate::terminal::plot::Matrix;
use crate::terminal::samples::{counted, visible};

/// Labels of a matrix that is shown whole.
const SHOWN: usize = 12;

const WIDTH: usize = 12;

/// Above the labels as they are, before those that were predicted.
const HEADING: &str = "true \\ predicted";

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Confusion {
    #[serde(skip)]
    unit: &'static str,
    pub examples: usize,
    pub accuracy: Interval,
    /// The mean of the labels' F1, of those that occur or are answered.
    pub macro_f1: f64,
    pub labels: Vec<String>,
    /// How often each label was predicted for each, without what never happened: there are as many cells as the square of the labels.
    pub confusion: Vec<Cell>,
    /// Examples whose label did not occur in training: no answer to them is right.
    pub unknown_labels: usize,
    /// The same as `confusion`, by the places of both labels.
    #[serde(skip)]
    counts: BTreeMap<(usize, usize), usize>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    pub label: String,
    pub predicted: String,
    pub count: usize,
}

impl Confusion {
    /// Of pairs of what is right and what was answered, as places in `labels`.
    pub fn of(labels: &[String], answers: &[(Option<usize>, usize)], unit: &'static str) -> Self {
        let mut counts: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let (mut occurs, mut answered) = (vec![0; labels.len()], vec![0; labels.len()]);
        let mut unknown_labels = 0;
        for &(right, answer) in answers {
            // Answers to examples of unknown labels are wrong ones of the label that was answered.
            answered[answer] += 1;
            match right {
                Some(right) => {
                    occurs[right] += 1;
                    *counts.entry((right, answer)).or_default() += 1;
                }
                None => unknown_labels += 1,
            }
        }
        let right = |n: usize| counts.get(&(n, n)).copied().unwrap_or(0);
        let all = |n: usize| occurs[n] + answered[n];
        let known = (0..labels.len()).filter(|n| all(*n) > 0);
        let f1: Vec<f64> = known.map(|n| 2.0 * right(n) as f64 / all(n) as f64).collect();
        let cell = |(&(label, predicted), &count): (&(usize, usize), &usize)| Cell {
            label: labels[label].clone(),
            predicted: labels[predicted].clone(),
            count,
        };
        Self {
            unit,
            examples: answers.len(),
            accuracy: Interval::wilson((0..labels.len()).map(right).sum(), answers.len()),
            macro_f1: f1.iter().sum::<f64>() / f1.len().max(1) as f64,
            labels: labels.to_vec(),
            confusion: counts.iter().map(cell).collect(),
            unknown_labels,
            counts,
        }
    }

    /// The matrix as a picture, of many labels those that are confused most.
    pub fn picture(&self) -> Matrix {
        let mut wrong = vec![0; self.labels.len()];
        let mut totals = vec![0; self.labels.len()];
        for (&(label, predicted), &count) in &self.counts {
            totals[label] += count;
            if label != predicted {
                wrong[label] += count;
                wrong[predicted] += count;
            }
        }
        let mut drawn: Vec<usize> = (0..self.labels.len()).collect();
        drawn.sort_by_key(|&label| (Reverse(wrong[label]), label));
        drawn.truncate(Matrix::MOST);
        drawn.sort_unstable();
        let count = |label, predicted| self.counts.get(&(label, predicted)).copied().unwrap_or(0);
        Matrix {
            labels: drawn.iter().map(|&label| self.labels[label].clone()).collect(),
            counts: drawn.iter().map(|&label| drawn.iter().map(|&other| count(label, other)).collect()).collect(),
            totals: drawn.iter().map(|&label| totals[label]).collect(),
            of: self.labels.len(),
        }
    }

    /// The matrix, or of a large one the labels that are confused most often.
    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |n: usize| -> String { visible(&self.labels[n]).chars().take(WIDTH).collect() };
        if self.labels.len() > SHOWN {
            let mut wrong: Vec<_> = self.counts.iter().filter(|((label, predicted), _)| label != predicted).collect();
            wrong.sort_by_key(|(places, count)| (Reverse(**count), **places));
            for ((label, predicted), count) in wrong.into_iter().take(SHOWN) {
                writeln!(f, "{count:>6} × {} predicted as {}", name(*label), name(*predicted))?;
            }
            return Ok(());
        }
        write!(f, "{:<1$} ", HEADING, WIDTH + 4)?;
        let columns: Vec<String> = (0..self.labels.len()).map(name).collect();
        let width = |n: usize| columns[n].chars().count().max(6);
        for (n, column) in columns.iter().enumerate() {
            write!(f, " {column:>0$}", width(n))?;
        }
        writeln!(f)?;
        for (n, name) in columns.iter().enumerate() {
            write!(f, "{name:<0$} ", WIDTH + 4)?;
            for answer in 0..columns.len() {
                let count = self.counts.get(&(n, answer)).copied().unwrap_or(0);
                write!(f, " {count:>0$}", width(answer))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Display for Confusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, {}", counted(self.examples, self.unit), counted(self.labels.len(), "labels"))?;
        writeln!(f, "accuracy             {}", self.accuracy.in_percent())?;
        writeln!(f, "macro F1             {:.1} %", 100.0 * self.macro_f1)?;
        if self.unknown_labels > 0 {
            let labels = "with a label that did not occur in training, counted as wrong";
            writeln!(f, "{} of {} {} {labels}", self.unknown_labels, self.examples, self.unit)?;
        }
        self.table(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(count: usize) -> Vec<String> {
        (0..count).map(|n| format!("label{n}")).collect()
    }

    #[test]
    fn rates_are_those_of_the_matrix() {
        let answers = [(Some(0), 0), (Some(0), 0), (Some(0), 1), (Some(1), 1), (Some(1), 0), (None, 1)];
        let found = Confusion::of(&labels(3), &answers, "texts");
        let cells: Vec<(&str, &str, usize)> =
            found.confusion.iter().map(|cell| (cell.label.as_str(), cell.predicted.as_str(), cell.count)).collect();
        let expected =
            [("label0", "label0", 2), ("label0", "label1", 1), ("label1", "label0", 1), ("label1", "label1", 1)];
        assert_eq!(cells, expected);
        assert_eq!((found.examples, found.unknown_labels), (6, 1));
        assert_eq!(found.accuracy.rate, 0.5);
        // F1 of the first: 2·2/(3+3); of the second 2·1/(2+3); the third does not occur.
        assert!((found.macro_f1 - (2.0 / 3.0 + 0.4) / 2.0).abs() < 1e-12);
        let text = found.to_string();
        assert!(text.contains("accuracy             50.0 %") && text.contains("1 of 6 texts with a label"), "{text}");
        let rows: Vec<&str> = text.lines().rev().take(4).collect();
        assert!(rows[3].contains("label2") && rows[2].starts_with("label0") && rows[2].ends_with('0'), "{text}");
    }

    #[test]
    fn a_large_matrix_shows_what_is_confused_most() {
        let mut answers: Vec<_> = (0..20).map(|n| (Some(n), n)).collect();
        answers.extend([(Some(3), 5), (Some(3), 5), (Some(7), 1)]);
        let text = Confusion::of(&labels(20), &answers, "texts").to_string();
        assert!(text.contains("2 × label3 predicted as label5\n     1 × label7 predicted as label1\n"), "{text}");
    }

    #[test]
    fn of_thousands_of_labels_the_most_confused_are_drawn() {
        let mut answers: Vec<_> = (0..3000).map(|n| (Some(n), n)).collect();
        answers.extend((0..40).map(|n| (Some(70 * n + 3), 2999 - n)));
        let found = Confusion::of(&labels(3000), &answers, "texts");
        assert_eq!(found.confusion.len(), 3040);
        let picture = found.picture();
        assert_eq!((picture.labels.len(), picture.of), (Matrix::MOST, 3000));
        assert!(picture.labels.contains(&"label3".into()) && picture.totals.contains(&2), "{picture:?}");
        let cells: usize = picture.counts.iter().map(Vec::len).sum();
        assert_eq!(cells, Matrix::MOST * Matrix::MOST);
    }
}
