//! A few answers of a model, as a table.

/// Sources and answers in two columns.
pub fn table(samples: &[(String, String)]) -> String {
    samples.iter().map(|(source, answer)| format!("  {source:<14} {answer}\n")).collect()
}
