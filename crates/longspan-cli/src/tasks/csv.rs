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
