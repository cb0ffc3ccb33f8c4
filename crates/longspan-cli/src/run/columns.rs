//! Which columns of a table are what, as a person names them.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::config::TaskKind;

/// Columns by their names; those that are not named are found by the header.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Args)]
#[serde(default, deny_unknown_fields)]
pub struct Columns {
    /// Of a table of series, the column of times or dates; several with commas between them are one time; `row` counts rows
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<String>,
    /// The column that says which series a row is of
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The columns of values
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub channels: Vec<String>,
    /// Of them, those whose values at the times to forecast are known
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub known: Vec<String>,
    /// The column of labels
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Of a table of labelled texts, the column of texts
    #[arg(long = "text-column", value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Of a table of pairs, the columns of both sides
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    #[arg(long, value_name = "NAME", help = "See --source")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// How dates are written, such as %d/%m/%Y, or `number` for whole numbers that are no dates
    #[arg(long, value_name = "FORMAT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dates: Option<String>,
    /// Which mark numbers have before their fractions, where 1,234 or 1.234 may be two numbers
    #[arg(long, value_name = "MARK")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decimal: Option<Decimal>,
    /// A row of the table is a whole series, a column a time
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wide: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Decimal {
    #[default]
    Point,
    Comma,
}

impl Decimal {
    pub fn mark(self) -> char {
        if self == Self::Point { '.' } else { ',' }
    }
}

impl Columns {
    /// Refuses columns that a task does not read.
    pub fn check(&self, kind: TaskKind) -> Result<()> {
        let read: &[&str] = match kind {
            TaskKind::Pairs => &["source", "target"],
            TaskKind::Labelled => &["text", "label", "decimal"],
            TaskKind::Forecast => &["time", "id", "channels", "known", "label", "dates", "decimal", "wide"],
            _ => &["time", "id", "channels", "label", "dates", "decimal", "wide"],
        };
        let Value::Object(named) = serde_json::to_value(self)? else { return Ok(()) };
        let Some(key) = named.keys().find(|key| !read.contains(&key.as_str())) else { return Ok(()) };
        let flag = if key == "text" { "text-column" } else { key };
        let help = if key == "known" { "; labels are predicted from all that a series has" } else { "" };
        bail!("--{flag} is not used by {}{help}: leave it out", kind.flag())
    }

    /// Which of these channels are known ahead; none where nobody named any.
    pub fn known_among(&self, names: &[String]) -> Vec<bool> {
        names.iter().filter(|_| !self.known.is_empty()).map(|name| self.has_known(name)).collect()
    }

    /// Whether a channel of this name is known ahead.
    pub fn has_known(&self, name: &str) -> bool {
        self.known.iter().any(|known| known.to_lowercase() == name.to_lowercase())
    }

    /// All names that were given.
    pub fn named(&self) -> impl Iterator<Item = &String> {
        let single = [&self.time, &self.id, &self.label, &self.text, &self.source, &self.target];
        single.into_iter().flatten().chain(&self.channels)
    }

    /// Whether a person named a column of texts or labels so, in letters of any case.
    pub fn names_text(&self, title: &str) -> bool {
        let mut named = [&self.text, &self.label, &self.source, &self.target].into_iter().flatten();
        named.any(|name| name.to_lowercase() == title.to_lowercase())
    }
}
