//! A person's file of text: `-` is standard input, and gzip is read as what it holds.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use flate2::bufread::MultiGzDecoder;
use serde_json::Value;

use crate::run::config::RunConfig;

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

/// Makes the paths of a run's files absolute: it may be resumed from another folder.
pub fn make_absolute(config: &mut RunConfig) -> Result<()> {
    let RunConfig { pairs, text, labelled, series, development, held_out, .. } = config;
    let files = [pairs, labelled, series, development, held_out].into_iter().flatten().chain(text);
    for path in files.filter(|path| !is_standard_input(path)) {
        *path = std::path::absolute(&*path)?;
        if path.to_str().is_none() {
            bail!("{}: the name of a folder in it is not UTF-8; rename it, or work in another folder", path.display());
        }
    }
    Ok(())
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

/// What is wrong in a line of a file, with its place.
pub fn in_line<E: Display>(name: impl Display, line: usize) -> impl Fn(E) -> anyhow::Error {
    move |problem| anyhow!("{name}, line {line}: {problem}")
}

/// What `read` makes of the lines of a file and their numbers; `None` for those that hold nothing, as empty ones do. Line ends are taken off.
pub fn each<T, E: Display>(
    bytes: &[u8],
    name: &str,
    mut read: impl FnMut(&str, usize) -> Result<Option<T>, E>,
) -> Result<Vec<T>> {
    let mut all = Vec::new();
    for (line, number) in bytes.split(|&byte| byte == b'\n').zip(1..) {
        let line = utf8(line.strip_suffix(b"\r").unwrap_or(line), &format!("{name}, line {number}"))?;
        if !line.is_empty() {
            all.extend(read(line, number).map_err(in_line(name, number))?);
        }
    }
    Ok(all)
}

/// A line's two columns, which are called so.
pub fn two_columns<'a>(line: &'a str, [first, second]: [&str; 2]) -> Result<[&'a str; 2], String> {
    let columns: Vec<&str> = line.split('\t').collect();
    columns.try_into().map_err(|columns: Vec<&str>| {
        let (plural, help) = match columns.len() {
            1 => ("", format!("separate {first} and {second} by a tab, or learn a text as it is with --text")),
            _ => ("s", "keep two columns, as `cut -f 1,2` does".into()),
        };
        format!("{} column{plural}, expected two ({first}, tab, {second}); {help}", columns.len())
    })
}

/// A line as JSON.
pub fn json(line: &str) -> Result<Value, String> {
    serde_json::from_str(line).map_err(|error| {
        // serde_json counts from the line it was given: its own "line 1" would mislead.
        let problem = error.to_string();
        format!("no JSON: {}", problem.split(" at line ").next().unwrap_or_default())
    })
}
