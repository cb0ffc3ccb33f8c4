//! Pairs as CSV: a header that names the columns `source` and `target`.

use anyhow::Result;

use super::example::Entry;
use crate::tasks::csv::Table;

/// The pairs of a file. Other columns are not looked at.
pub fn entries(bytes: &[u8], name: &str) -> Result<Vec<Entry>> {
    let Some(table) = Table::read(bytes, name)? else { return Ok(Vec::new()) };
    let column = |wanted| table.column(wanted, "two columns `source` and `target`");
    let (source, target) = (column("source")?, column("target")?);
    let entry = |(line, fields): &(usize, Vec<String>)| Entry {
        line: *line,
        source: fields[source].clone(),
        target: fields[target].clone(),
    };
    Ok(table.records.iter().map(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<(usize, String, String)> {
        let entries = entries(text.as_bytes(), "x").unwrap();
        entries.into_iter().map(|Entry { line, source, target }| (line, source, target)).collect()
    }

    #[test]
    fn columns_are_found_by_name_and_fields_may_be_quoted() {
        let text = "id,Target,source\r\n1,b,a\r\n\r\n2,\"x, \"\"y\"\"\nz\",\"\"\r\n3,,c";
        let expected = [(2, "a", "b"), (4, "", "x, \"y\"\nz"), (6, "c", "")];
        assert_eq!(read(text), expected.map(|(line, a, b)| (line, a.to_string(), b.to_string())));
        assert_eq!(read("source,target\n\n"), []);
        assert_eq!(read(""), []);
        assert_eq!(read("source,target\na,\"b\""), [(2, "a".into(), "b".into())]);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, part) in [
            ("a,b\nc,d\n", "x, line 1: the header is \"a,b\" and has no column `source`"),
            ("source;target\n", "line 1: the header is \"source;target\""),
            ("source,target\na,b\n\na,b,c\n", "x, line 4: 3 columns, the header has 2"),
            ("source,target\na\n", "x, line 2: 1 column, the header has 2"),
            ("source,target\r\n\"a\r\nb\",c\r\n\"d,e\r\n", "x, line 4: a quote is opened and never closed"),
        ] {
            let error = entries(text.as_bytes(), "x").unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let error = entries(b"source,target\na,b\xff\n", "x").unwrap_err().to_string();
        assert!(error.contains("x, line 2, byte 2: invalid UTF-8"), "{error}");
    }
}
