//! Pairs as CSV: a header that names the columns `source` and `target`, fields with commas or line ends in quotes.

use anyhow::{Result, anyhow, bail};
use csv_core::{ReadFieldResult, Reader};

use super::example::Entry;
use crate::tasks::lines::utf8;

/// The pairs of a file. Other columns are not looked at.
pub fn entries(bytes: &[u8], name: &str) -> Result<Vec<Entry>> {
    let mut records = records(bytes, name)?.into_iter();
    let Some((line, header)) = records.next() else { return Ok(Vec::new()) };
    let column = |wanted: &str| {
        header.iter().position(|title| title.trim().to_lowercase() == wanted).ok_or_else(|| {
            anyhow!(
                "{name}, line {line}: the header is {:?} and has no column `{wanted}`; let the first line name two columns \
                 `source` and `target`, with commas between them",
                header.join(",").chars().take(60).collect::<String>()
            )
        })
    };
    let (source, target) = (column("source")?, column("target")?);
    records
        .map(|(line, fields)| {
            if fields.len() != header.len() {
                let plural = if fields.len() == 1 { "" } else { "s" };
                bail!(
                    "{name}, line {line}: {} column{plural}, the header has {}; put a field with commas in quotes",
                    fields.len(),
                    header.len()
                );
            }
            Ok(Entry { line, source: fields[source].clone(), target: fields[target].clone() })
        })
        .collect()
}

/// A line's number, and the fields of the record that begins there.
type Record = (usize, Vec<String>);

/// All records, without empty lines.
fn records(bytes: &[u8], name: &str) -> Result<Vec<Record>> {
    let mut reader = Reader::new();
    // A field is never longer than the file and its last line end.
    let mut field = vec![0; bytes.len() + 2];
    let (mut rest, mut line, mut records) = (bytes, 1, Vec::new());
    loop {
        // The reader would pass over empty lines too, but not say where the record begins.
        while let [end @ (b'\r' | b'\n'), more @ ..] = rest {
            line += usize::from(*end == b'\n');
            rest = more;
        }
        if rest.is_empty() {
            return Ok(records);
        }
        let (start, at, mut fields) = (rest, format!("{name}, line {line}"), Vec::new());
        let (mut written, mut at_end) = (0, false);
        loop {
            let (result, read, more) = reader.read_field(rest, &mut field[written..]);
            (rest, written) = (&rest[read..], written + more);
            match result {
                // The last record may lack its line end. Within quotes that is no end, and the reader would keep silent.
                ReadFieldResult::InputEmpty if !at_end => (rest, at_end) = (b"\n", true),
                ReadFieldResult::InputEmpty => bail!(
                    "{at}: a quote is opened and never closed; close it, or double it where it is meant as a character"
                ),
                ReadFieldResult::OutputFull => {}
                ReadFieldResult::Field { record_end } => {
                    fields.push(utf8(&field[..written], &at)?.to_string());
                    written = 0;
                    if record_end {
                        break;
                    }
                }
                ReadFieldResult::End => break,
            }
        }
        let text = &start[..start.len() - rest.len()];
        records.push((line, fields));
        line += text.iter().filter(|&&byte| byte == b'\n').count();
    }
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
