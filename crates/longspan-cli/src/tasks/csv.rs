//! CSV with a header: fields with commas or line ends stand in quotes, as RFC 4180 has it.

use anyhow::{Result, anyhow, bail};
use csv_core::{ReadFieldResult, Reader};

use super::lines::utf8;

/// A file's columns and its records.
pub struct Table {
    /// Names of the columns as they stand, without the space around them.
    pub header: Vec<String>,
    /// Records with as many fields as the header has, each with the line in which it begins.
    pub records: Vec<Record>,
    name: String,
    line: usize,
}

impl Table {
    /// Reads a file; `None` where it has nothing but empty lines. `name` is its name in errors.
    pub fn read(bytes: &[u8], name: &str) -> Result<Option<Self>> {
        let mut records = records(bytes, name)?.into_iter();
        let Some((line, header)) = records.next() else { return Ok(None) };
        let header: Vec<String> = header.iter().map(|title| title.trim().to_owned()).collect();
        let records: Vec<Record> = records.collect();
        if let Some((line, fields)) = records.iter().find(|(_, fields)| fields.len() != header.len()) {
            let plural = if fields.len() == 1 { "" } else { "s" };
            bail!(
                "{name}, line {line}: {} column{plural}, the header has {}; put a field with commas in quotes",
                fields.len(),
                header.len()
            );
        }
        Ok(Some(Self { header, records, name: name.into(), line }))
    }

    /// The place of a column, if there is one, whatever the case of its letters.
    pub fn find(&self, wanted: &str) -> Option<usize> {
        self.header.iter().position(|title| title.to_lowercase() == wanted)
    }

    /// The place of a column that has to be there, as one of `all` that have to.
    pub fn column(&self, wanted: &str, all: &str) -> Result<usize> {
        self.find(wanted).ok_or_else(|| {
            anyhow!(
                "{}, line {}: the header is {:?} and has no column `{wanted}`; let the first line name {all}, with commas between \
                 them",
                self.name,
                self.line,
                self.header.join(",").chars().take(60).collect::<String>()
            )
        })
    }
}

/// Two columns of a file by their names, each row with the line in which it begins. Others are not looked at.
pub fn two_columns(bytes: &[u8], name: &str, columns: [&str; 2]) -> Result<Vec<(usize, [String; 2])>> {
    let Some(table) = Table::read(bytes, name)? else { return Ok(Vec::new()) };
    let both = format!("two columns `{}` and `{}`", columns[0], columns[1]);
    let (first, second) = (table.column(columns[0], &both)?, table.column(columns[1], &both)?);
    let row = |(line, fields): &Record| (*line, [fields[first].clone(), fields[second].clone()]);
    Ok(table.records.iter().map(row).collect())
}

/// A line's number, and the fields of the record that begins there.
pub type Record = (usize, Vec<String>);

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

    fn pairs(bytes: &[u8]) -> Result<Vec<(usize, [String; 2])>> {
        two_columns(bytes, "x", ["source", "target"])
    }

    fn read(text: &str) -> Vec<(usize, [String; 2])> {
        pairs(text.as_bytes()).unwrap()
    }

    #[test]
    fn columns_are_found_by_name_and_fields_may_be_quoted() {
        let text = "id,Target,source\r\n1,b,a\r\n\r\n2,\"x, \"\"y\"\"\nz\",\"\"\r\n3,,c";
        let expected = [(2, "a", "b"), (4, "", "x, \"y\"\nz"), (6, "c", "")];
        assert_eq!(read(text), expected.map(|(line, a, b)| (line, [a, b].map(String::from))));
        assert_eq!(read("source,target\n\n"), []);
        assert_eq!(read(""), []);
        assert_eq!(read("source,target\na,\"b\""), [(2, ["a", "b"].map(String::from))]);
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
            let error = pairs(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let error = pairs(b"source,target\na,b\xff\n").unwrap_err().to_string();
        assert!(error.contains("x, line 2, byte 2: invalid UTF-8"), "{error}");
    }
}
