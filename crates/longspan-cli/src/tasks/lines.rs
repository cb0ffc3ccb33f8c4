//! A person's file of text: `-` is standard input, and gzip is read as what it holds.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use flate2::bufread::MultiGzDecoder;

/// The first bytes of gzip.
pub const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Whether a path stands for standard input.
pub fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// The name of a file for people.
pub fn name(path: &Path) -> String {
    if is_standard_input(path) { "standard input".into() } else { path.display().to_string() }
}

/// Opens a file.
pub fn open(path: &Path) -> Result<Box<dyn BufRead + Send>> {
    let failed = |error| cannot_read(path, &error);
    let mut reader: Box<dyn BufRead + Send> = if is_standard_input(path) {
        Box::new(BufReader::new(io::stdin()))
    } else {
        Box::new(BufReader::new(File::open(path).map_err(failed)?))
    };
    // Of standard input only a terminal waits here, for its first line.
    if reader.fill_buf().map_err(failed)?.starts_with(&GZIP) {
        return Ok(Box::new(BufReader::new(MultiGzDecoder::new(reader))));
    }
    Ok(reader)
}

/// Reads a whole file.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes).map_err(|error| cannot_read(path, &error))?;
    Ok(bytes)
}

fn cannot_read(path: &Path, error: &io::Error) -> anyhow::Error {
    anyhow!("cannot read {}: {error}; check the name, the permissions, and that it is whole", name(path))
}

/// How examples are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Tabs,
    Csv,
    JsonLines,
}

impl Format {
    /// By the end of the name, in letters of any case, before `.gz`; standard input by its first character.
    pub fn of(path: &Path, bytes: &[u8]) -> Self {
        let braced = is_standard_input(path) && bytes.trim_ascii_start().starts_with(b"{");
        match ending(path).as_str() {
            "jsonl" | "ndjson" => Self::JsonLines,
            "csv" => Self::Csv,
            _ if braced => Self::JsonLines,
            _ => Self::Tabs,
        }
    }
}

/// The end of a file's name in small letters, before `.gz`.
pub fn ending(path: &Path) -> String {
    let name = path.to_string_lossy().to_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.rsplit_once('.').map_or("", |(_, end)| end).into()
}

/// The bytes of a file without the mark at their beginning, if they are UTF-8.
pub fn unmarked<'a>(bytes: &'a [u8], name: &str) -> Result<&'a [u8]> {
    if bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff") {
        bail!("{name}: UTF-16 text; convert it, such as with `iconv -f utf-16 -t utf-8`");
    }
    Ok(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes))
}

/// A line as text, or an error that says where it is not UTF-8.
pub fn utf8<'a>(line: &'a [u8], at: &str) -> Result<&'a str> {
    std::str::from_utf8(line).map_err(|error| {
        let byte = error.valid_up_to();
        anyhow!(
            "{at}, byte {}: invalid UTF-8 (0x{:02x}); convert the file, such as with `iconv -f latin1 -t utf8`",
            byte + 1,
            line[byte]
        )
    })
}
