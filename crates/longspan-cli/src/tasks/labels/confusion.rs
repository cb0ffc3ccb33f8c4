//! How often labels are right, and which are taken for which.

use std::fmt::{self, Display};

use serde::Serialize;

use crate::tasks::scores::Rate;
use crate::terminal::plot::Matrix;
use crate::terminal::samples::visible;

/// Labels of a matrix that is shown whole.
const SHOWN: usize = 12;

/// Columns of a label.
const WIDTH: usize = 12;

/// Right and wrong answers by label.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Confusion {
    /// What a person calls the examples.
    #[serde(skip)]
    unit: &'static str,
    pub examples: usize,
    pub accuracy: Rate,
    /// The mean of the labels' F1, of those that occur or are answered.
    pub macro_f1: f64,
    pub labels: Vec<String>,
    /// Rows are the labels as they are, columns those that were answered.
    pub confusion: Vec<Vec<usize>>,
    /// Examples whose label did not occur in training: no answer to them is right.
    pub unknown_labels: usize,
}

impl Confusion {
    /// Of pairs of what is right and what was answered, as places in `labels`.
    pub fn of(labels: &[String], answers: &[(Option<usize>, usize)], unit: &'static str) -> Self {
        let mut confusion = vec![vec![0; labels.len()]; labels.len()];
        let mut unknown_labels = 0;
        // Answers to examples of unknown labels are wrong ones of the label that was answered.
        let mut foreign = vec![0; labels.len()];
        for &(right, answer) in answers {
            match right {
                Some(right) => confusion[right][answer] += 1,
                None => {
                    unknown_labels += 1;
                    foreign[answer] += 1;
                }
            }
        }
        let right: usize = (0..labels.len()).map(|n| confusion[n][n]).sum();
        let f1 = (0..labels.len()).filter_map(|n| {
            let occurs: usize = confusion[n].iter().sum();
            let answered = foreign[n] + confusion.iter().map(|row| row[n]).sum::<usize>();
            (occurs + answered > 0).then(|| 2.0 * confusion[n][n] as f64 / (occurs + answered) as f64)
        });
        let f1: Vec<f64> = f1.collect();
        Self {
            unit,
            examples: answers.len(),
            accuracy: Rate::wilson(right, answers.len()),
            macro_f1: f1.iter().sum::<f64>() / f1.len().max(1) as f64,
            labels: labels.to_vec(),
            confusion,
            unknown_labels,
        }
    }

    /// The matrix as a picture.
    pub fn picture(&self) -> Matrix<'_> {
        Matrix { labels: &self.labels, counts: &self.confusion }
    }

    /// The matrix, or of a large one the labels that are taken for each other most often.
    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |n: usize| -> String { visible(&self.labels[n]).chars().take(WIDTH).collect() };
        if self.labels.len() > SHOWN {
            let mut wrong: Vec<(usize, usize, usize)> = Vec::new();
            for (right, row) in self.confusion.iter().enumerate() {
                let others = row.iter().enumerate().filter(|&(answer, &count)| answer != right && count > 0);
                wrong.extend(others.map(|(answer, &count)| (count, right, answer)));
            }
            wrong.sort_by(|a, b| b.0.cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
            for (count, right, answer) in wrong.into_iter().take(SHOWN) {
                writeln!(f, "{count:>6} × {} taken for {}", name(right), name(answer))?;
            }
            return Ok(());
        }
        write!(f, "{:<WIDTH$} ", "is \\ answered")?;
        let columns: Vec<String> = (0..self.labels.len()).map(name).collect();
        let width = |n: usize| columns[n].chars().count().max(6);
        for (n, column) in columns.iter().enumerate() {
            write!(f, " {column:>0$}", width(n))?;
        }
        writeln!(f)?;
        for (n, row) in self.confusion.iter().enumerate() {
            // One column more, as wide as the heading.
            write!(f, "{:<1$} ", columns[n], WIDTH + 1)?;
            for (answer, count) in row.iter().enumerate() {
                write!(f, " {count:>0$}", width(answer))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Display for Confusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}, {} labels", self.examples, self.unit, self.labels.len())?;
        writeln!(f, "accuracy             {}", self.accuracy)?;
        writeln!(f, "macro F1             {:.1} %", 100.0 * self.macro_f1)?;
        if self.unknown_labels > 0 {
            writeln!(
                f,
                "{} {} have labels that did not occur in training, and count as wrong",
                self.unknown_labels, self.unit
            )?;
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
        assert_eq!(found.confusion, [[2, 1, 0], [1, 1, 0], [0, 0, 0]]);
        assert_eq!((found.examples, found.unknown_labels), (6, 1));
        assert_eq!(found.accuracy.rate, 0.5);
        // F1 of the first: 2·2/(3+3); of the second 2·1/(2+3); the third does not occur.
        assert!((found.macro_f1 - (2.0 / 3.0 + 0.4) / 2.0).abs() < 1e-12);
        let text = found.to_string();
        assert!(text.contains("accuracy             50.0 %") && text.contains("1 texts have labels"), "{text}");
        let rows: Vec<&str> = text.lines().rev().take(4).collect();
        assert!(rows[3].contains("label2") && rows[2].starts_with("label0") && rows[2].ends_with('0'), "{text}");
    }

    #[test]
    fn a_large_matrix_shows_what_is_confused_most() {
        let mut answers: Vec<_> = (0..20).map(|n| (Some(n), n)).collect();
        answers.extend([(Some(3), 5), (Some(3), 5), (Some(7), 1)]);
        let text = Confusion::of(&labels(20), &answers, "texts").to_string();
        assert!(text.contains("2 × label3 taken for label5\n     1 × label7 taken for label1\n"), "{text}");
    }
}
