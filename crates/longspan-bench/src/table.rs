//! Tables of text, for the terminal and for the page.

use minijinja::{Value, context};

/// Columns that a terminal is taken to have.
pub const WIDTH: usize = 100;

/// Named columns; the first `words` are set left, the others right.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// How many columns are words.
    pub words: usize,
    /// Names of the columns.
    pub head: Vec<String>,
    /// The cells of each row.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Columns of these names.
    pub fn new(words: usize, head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Self {
        Self { words, head: head.iter().map(|&name| name.to_owned()).collect(), rows: rows.into_iter().collect() }
    }

    /// One line for each row, columns two spaces apart.
    pub fn to_text(&self) -> String {
        let lines = || std::iter::once(&self.head).chain(&self.rows);
        let widths: Vec<usize> = (0..self.head.len())
            .map(|column| lines().map(|line| line[column].chars().count()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for line in lines() {
            let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
                if column < self.words { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

/// As templates take it.
impl From<Table> for Value {
    fn from(Table { words, head, rows }: Table) -> Self {
        context! { words, head, rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stand_left_and_numbers_right() {
        let table =
            Table::new(1, &["", "time"], [vec!["µs".into(), "1".into()], vec!["long".into(), "12.5 µs".into()]]);
        assert_eq!(table.to_text(), "         time\nµs          1\nlong  12.5 µs\n");
    }
}
