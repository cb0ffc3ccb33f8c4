//! A person's file of text: `-` is standard input, gzip is read as what it holds, and zip as the one file in it.

use std::borrow::Cow;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use flate2::bufread::MultiGzDecoder;
use zip::ZipArchive;
use zip::read::read_zipfile_from_stream;

pub use crate::run::words::{is_standard_input, name};
use crate::terminal::samples::counted;

/// The first bytes of gzip,
pub const GZIP: [u8; 2] = [0x1f, 0x8b];

/// and of zip.
const ZIP: &[u8] = b"PK\x03\x04";

/// The mark of UTF-8 before a text, which is none of its characters.
pub const MARK: &[u8] = b"\xef\xbb\xbf";

pub fn open(path: &Path) -> Result<Box<dyn BufRead + Send>> {
    let failed = |error| cannot_read(path, &error);
    let mut reader: Box<dyn BufRead + Send> = if is_standard_input(path) {
        Box::new(BufReader::new(io::stdin()))
    } else {
        Box::new(BufReader::new(File::open(path).map_err(failed)?))
    };
    // Of standard input only a terminal waits here, for its first line.
    let head = reader.fill_buf().map_err(failed)?;
    if head.starts_with(&GZIP) {
        reader = Box::new(BufReader::new(MultiGzDecoder::new(reader)));
    } else if head.starts_with(ZIP) {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).map_err(failed)?;
        reader = Box::new(Cursor::new(unzip(&bytes, &name(path))?));
    }
    if reader.fill_buf().map_err(failed)?.starts_with(MARK) {
        reader.consume(MARK.len());
    }
    Ok(reader)
}

/// The one file in a zip archive, beside folders and what macOS adds.
fn unzip(bytes: &[u8], name: &str) -> Result<Vec<u8>> {
    let failed = |error: &dyn Display| {
        anyhow!("{name}: cannot read the zip archive: {error}; unpack it, and give the file in it")
    };
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(|error| failed(&error))?;
    let hidden = |file: &str| {
        file.ends_with('/') || file.starts_with("__MACOSX/") || file.rsplit('/').next().unwrap_or(file).starts_with('.')
    };
    let names = archive
        .file_names()
        .map(|name| name.map(String::from))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| failed(&error))?;
    let files: Vec<String> = names.into_iter().filter(|file| !hidden(file)).collect();
    let [file] = &files[..] else {
        bail!(
            "{name}: the zip archive holds {}, and one is read; unpack it, and give one of them, or save Excel, Word and OpenDocument as \
             CSV or text",
            counted(files.len(), "files")
        );
    };
    let mut contents = Vec::new();
    archive
        .by_name(file)
        .map_err(|error| failed(&error))?
        .read_to_end(&mut contents)
        .map_err(|error| failed(&error))?;
    Ok(contents)
}

/// The first line of a file with anything in it; that of standard input is read again by [`open`].
pub fn first_line(path: &Path) -> Result<String> {
    let first = |head: &[u8]| {
        let head = head.strip_prefix(MARK).unwrap_or(head);
        String::from_utf8_lossy(head).lines().find(|line| !line.trim().is_empty()).unwrap_or_default().to_owned()
    };
    let failed = |error| cannot_read(path, &error);
    if !is_standard_input(path) {
        return Ok(first(open(path)?.fill_buf().map_err(failed)?));
    }
    let mut input = io::stdin().lock();
    let mut head = input.fill_buf().map_err(failed)?;
    let mut unpacked = [0; 4096];
    // What was unpacked before the end of the buffer, which is no end of the file.
    let count = if head.starts_with(&GZIP) {
        MultiGzDecoder::new(head).read(&mut unpacked).unwrap_or(0)
    } else if head.starts_with(ZIP) {
        let file = read_zipfile_from_stream(&mut head).ok().flatten();
        file.and_then(|mut file| file.read(&mut unpacked).ok()).ok_or_else(|| {
            anyhow!("standard input: a zip archive whose beginning cannot be read alone; give its name, or what it holds, as `unzip -p` does")
        })?
    } else {
        return Ok(first(head));
    };
    Ok(first(&unpacked[..count]))
}

pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes).map_err(|error| cannot_read(path, &error))?;
    Ok(bytes)
}

pub fn cannot_read(path: &Path, error: &io::Error) -> anyhow::Error {
    anyhow!("cannot read {}: {error}; check the name, the permissions, and that it is whole", name(path))
}

/// The end of a file's name in small letters, before `.gz` or `.zip`.
pub fn ending(path: &Path) -> String {
    let name = path.to_string_lossy().to_lowercase();
    let name = name.strip_suffix(".gz").or(name.strip_suffix(".zip")).unwrap_or(&name);
    name.rsplit_once('.').map_or("", |(_, end)| end).into()
}

/// The bytes of a file as text, without a byte order mark. Line ends of old Macs become those of today.
pub fn text<'a>(bytes: &'a [u8], name: &str) -> Result<Cow<'a, str>> {
    if bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff") {
        bail!("{name}: UTF-16 text; convert it, such as with `iconv -f utf-16 -t utf-8`");
    }
    if bytes.contains(&0) {
        bail!(
            "{name}: no text, since it has bytes of 0; write Parquet, Feather, HDF5, SQLite, Excel or files of NumPy and R as CSV, unpack \
             bzip2, xz and zstd, or convert UTF-16 with `iconv -f utf-16le -t utf-8`"
        );
    }
    let bytes = bytes.strip_prefix(MARK).unwrap_or(bytes);
    let Ok(text) = std::str::from_utf8(bytes) else {
        for (line, number) in bytes.split(|&byte| byte == b'\n').zip(1..) {
            utf8(line, &format!("{name}, line {number}"))?;
        }
        bail!(
            "{name}: invalid UTF-8; convert it from the encoding that it has, such as with `iconv -f latin1 -t utf8`"
        );
    };
    let old = text.contains('\r') && !text.contains('\n');
    Ok(if old { Cow::Owned(text.replace('\r', "\n")) } else { Cow::Borrowed(text) })
}

/// A line as text, or an error that says where it is not UTF-8.
pub fn utf8<'a>(line: &'a [u8], at: &str) -> Result<&'a str> {
    std::str::from_utf8(line).map_err(|error| {
        let byte = error.valid_up_to();
        anyhow!(
            "{at}, byte {}: invalid UTF-8 (0x{:02x}); convert it from the encoding that it has, such as with `iconv -f latin1 -t utf8`",
            byte + 1,
            line[byte]
        )
    })
}

/// What is wrong in a line of a file, with its place.
pub fn in_line<E: Display>(name: impl Display, line: usize) -> impl Fn(E) -> anyhow::Error {
    move |problem| anyhow!("{name}, line {line}: {problem}")
}

/// What `read` makes of the lines of a text and their numbers; `None` for those that hold nothing, as empty ones do. Line ends are taken off.
pub fn each<T, E: Display>(
    text: &str,
    name: &str,
    mut read: impl FnMut(&str, usize) -> Result<Option<T>, E>,
) -> Result<Vec<T>> {
    let mut all = Vec::new();
    for (line, number) in text.split('\n').zip(1..) {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if !line.is_empty() {
            all.extend(read(line, number).map_err(in_line(name, number))?);
        }
    }
    Ok(all)
}
