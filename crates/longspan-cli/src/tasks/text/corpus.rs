//! The texts of a run as one long row of bytes, of which no more than a piece is read at a time.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use anyhow::{Result, bail};
use sha2::{Digest, Sha256};

use crate::tasks::lines::{self, cannot_read};
use crate::terminal::notes::note_some;
use crate::terminal::samples::counted;

/// Bytes of a piece: a thousand tokens or more, and little beside a model.
const PIECE: u64 = 16 * 1024;

/// Bytes before a piece that some tokenizers need to cut it.
const BEFORE: u64 = 64;

/// Bytes at the beginning of a file that tell what it is.
const HEAD: usize = 8 * 1024;

#[derive(Debug)]
pub struct Corpus {
    documents: Vec<Document>,
    /// Where each begins, and the end of the last.
    bounds: Vec<u64>,
    /// Whether every text is UTF-8, rather than any bytes.
    utf8: bool,
    /// When each plain file was changed last.
    modified: Mutex<Vec<Option<SystemTime>>>,
    /// What [`scan`](Self::scan) found.
    sha256: OnceLock<String>,
}

#[derive(Debug)]
struct Document {
    name: String,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// A plain file: bytes from `skip` on, read where they are wanted.
    File { path: PathBuf, skip: u64, length: u64 },
    /// What can be read once, or has to be unpacked.
    Memory(Vec<u8>),
}

/// Some bytes of one document. Of UTF-8 no character is cut.
#[derive(Debug)]
pub struct Piece {
    pub bytes: Vec<u8>,
    /// The last bytes before them, in the same document.
    pub before: Vec<u8>,
    /// Where the next piece begins.
    pub end: u64,
    pub ends_document: bool,
}

impl Corpus {
    /// The texts at these paths. The files of a folder come in the order of their names; those that are hidden or binary are
    /// passed over.
    pub fn open(paths: &[PathBuf], utf8: bool) -> Result<Self> {
        let (modified, sha256) = (Mutex::default(), OnceLock::new());
        let mut corpus = Self { documents: Vec::new(), bounds: vec![0], utf8, modified, sha256 };
        for path in paths {
            if !lines::is_standard_input(path) && path.is_dir() {
                let mut binary = Vec::new();
                corpus.add_folder(path, &mut binary)?;
                note_some(binary.len(), |count| {
                    format!("{}: left out {}, such as {}", path.display(), counted(count, "binary files"), binary[0])
                });
            } else {
                corpus.add(path)?;
            }
        }
        if corpus.len() == 0 {
            let names: Vec<String> = paths.iter().map(|path| lines::name(path)).collect();
            bail!("{}: no text in it; give files of text", names.join(", "));
        }
        Ok(corpus)
    }

    pub fn len(&self) -> u64 {
        self.bounds[self.documents.len()]
    }

    pub fn documents(&self) -> usize {
        self.documents.len()
    }

    fn add_folder(&mut self, folder: &Path, binary: &mut Vec<String>) -> Result<()> {
        let entries = fs::read_dir(folder).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        let entries = entries.map_err(|error| cannot_read(folder, &error))?;
        let mut paths: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).collect();
        paths.sort();
        for path in paths {
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')) {
                continue;
            }
            if path.is_dir() {
                self.add_folder(&path, binary)?;
            } else if path.is_file() {
                if self.utf8 && what_is_wrong(&head(&path)?).is_some() {
                    binary.push(path.display().to_string());
                } else {
                    self.add(&path)?;
                }
            }
        }
        Ok(())
    }

    /// Adds a file. An empty one adds nothing.
    fn add(&mut self, path: &Path) -> Result<()> {
        let name = lines::name(path);
        let plain = !lines::is_standard_input(path) && path.is_file() && !head(path)?.starts_with(&lines::GZIP);
        let (head, source, modified) = if plain {
            let data = fs::metadata(path).map_err(|error| cannot_read(path, &error))?;
            let head = head(path)?;
            let skip = if head.starts_with(lines::MARK) { lines::MARK.len() as u64 } else { 0 };
            let length = data.len().saturating_sub(skip);
            (head, Source::File { path: path.into(), skip, length }, data.modified().ok())
        } else {
            let bytes = lines::read(path)?;
            (bytes[..bytes.len().min(HEAD)].to_vec(), Source::Memory(bytes), None)
        };
        if self.utf8
            && let Some(problem) = what_is_wrong(&head)
        {
            bail!("{name}: {problem}");
        }
        if let Some(flag) = other_task(path, &head) {
            bail!("{name}: it looks like {flag}, or rename the file if it is meant as one text");
        }
        let length = match &source {
            Source::File { length, .. } => *length,
            Source::Memory(bytes) => bytes.len() as u64,
        };
        if length > 0 {
            self.bounds.push(self.len() + length);
            self.documents.push(Document { name, source });
            self.times().push(modified);
        }
        Ok(())
    }

    fn document(&self, at: u64) -> usize {
        self.bounds.partition_point(|&bound| bound <= at).saturating_sub(1).min(self.documents.len() - 1)
    }

    fn times(&self) -> MutexGuard<'_, Vec<Option<SystemTime>>> {
        self.modified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all texts hold what they held when they were read first, in spite of other times of change.
    fn is_the_same(&self) -> Result<bool> {
        let Some(before) = self.sha256.get() else { return Ok(false) };
        let mut now = Vec::new();
        for document in &self.documents {
            now.push(match &document.source {
                Source::Memory(_) => None,
                Source::File { path, skip, length } => {
                    let data = fs::metadata(path).map_err(|error| cannot_read(path, &error))?;
                    if data.len() != skip + length {
                        return Ok(false);
                    }
                    data.modified().ok()
                }
            });
        }
        // So that reading it again does not ask again.
        let old = std::mem::replace(&mut *self.times(), now);
        let same = self.fingerprint(|_, _| ()).is_ok_and(|now| now == *before);
        if !same {
            *self.times() = old;
        }
        Ok(same)
    }

    /// Bytes from `at` to `end`, which lie in one document. A file that was changed since it was first read is refused, unless it
    /// holds the same.
    fn read(&self, at: u64, end: u64) -> Result<Vec<u8>> {
        let n = self.document(at);
        let (document, from) = (&self.documents[n], at - self.bounds[n]);
        let count = (end - at) as usize;
        match &document.source {
            Source::Memory(bytes) => Ok(bytes[from as usize..][..count].to_vec()),
            Source::File { path, skip, length } => {
                let failed = |error: std::io::Error| cannot_read(path, &error);
                let mut file = File::open(path).map_err(failed)?;
                let data = file.metadata().map_err(failed)?;
                let touched = data.modified().ok() != self.times()[n];
                if data.len() != skip + length || (touched && !self.is_the_same()?) {
                    bail!(
                        "{}: changed since it was first read; put it back, or train a new run on a copy that stays",
                        document.name
                    );
                }
                file.seek(SeekFrom::Start(skip + from)).map_err(failed)?;
                let mut bytes = vec![0; count];
                file.read_exact(&mut bytes).map_err(failed)?;
                Ok(bytes)
            }
        }
    }

    /// The piece that begins at `at`, and ends at `end` at the latest: with its last line end where there is one in its second
    /// half, so that words stay whole.
    pub fn piece(&self, at: u64, end: u64) -> Result<Piece> {
        let n = self.document(at);
        let last = self.bounds[n + 1].min(end);
        let mut bytes = self.read(at, last.min(at + PIECE))?;
        if at + (bytes.len() as u64) < last && self.utf8 {
            let line = bytes.iter().rposition(|&byte| byte == b'\n').filter(|&place| place >= bytes.len() / 2);
            match line {
                Some(place) => bytes.truncate(place + 1),
                None => bytes.truncate(whole_characters(&bytes)),
            }
        }
        if self.utf8
            && let Err(error) = std::str::from_utf8(&bytes)
        {
            let byte = at - self.bounds[n] + error.valid_up_to() as u64;
            bail!(
                "{}, byte {}: invalid UTF-8 (0x{:02x}); convert the file, such as with `iconv -f latin1 -t utf8`, or take it as \
                 bytes with --tokens bytes",
                self.documents[n].name,
                byte + 1,
                bytes[error.valid_up_to()]
            );
        }
        let mut before = self.read(at.saturating_sub(BEFORE).max(self.bounds[n]), at)?;
        if self.utf8 {
            before.drain(..before.iter().take_while(|&&byte| byte & 0xc0 == 0x80).count());
        }
        let end = at + bytes.len() as u64;
        Ok(Piece { bytes, before, end, ends_document: end == self.bounds[n + 1] })
    }

    /// The pieces of a range, up to the first that cannot be read.
    pub fn pieces(&self, Range { start, end }: Range<u64>) -> impl Iterator<Item = Result<Piece>> {
        let mut at = start;
        std::iter::from_fn(move || {
            let piece = (at < end).then(|| self.piece(at, end))?;
            at = piece.as_ref().map_or(end, |piece| piece.end);
            Some(piece)
        })
    }

    /// The first place from `at` on where a line begins, or a character if the line is long.
    pub fn boundary(&self, at: u64) -> Result<u64> {
        self.boundary_below(at, u64::MAX)
    }

    /// The same, and a line only where it begins before `below`.
    pub fn boundary_below(&self, at: u64, below: u64) -> Result<u64> {
        let n = self.document(at);
        if at == self.bounds[n] || at >= self.len() {
            return Ok(at);
        }
        let bytes = self.read(at, self.bounds[n + 1].min(at + 1024))?;
        let line = bytes.iter().position(|&byte| byte == b'\n').map(|place| place + 1);
        let line = line.filter(|place| at + (*place as u64) < below);
        let place = line.or_else(|| bytes.iter().position(|&byte| byte & 0xc0 != 0x80));
        Ok(at + place.unwrap_or(bytes.len()) as u64)
    }

    /// Reads all of it once, piece by piece, each handed to `visit` with where it begins; the SHA-256 of its bytes and of where
    /// documents end.
    pub fn scan(&self, visit: impl FnMut(u64, &Piece)) -> Result<String> {
        let sha256 = self.fingerprint(visit)?;
        Ok(self.sha256.get_or_init(|| sha256).clone())
    }

    fn fingerprint(&self, mut visit: impl FnMut(u64, &Piece)) -> Result<String> {
        let mut hash = Sha256::new();
        let mut at = 0;
        for piece in self.pieces(0..self.len()) {
            let piece = piece?;
            if self.utf8 && piece.bytes.contains(&0) {
                bail!("{}: {BINARY}", self.documents[self.document(at)].name);
            }
            hash.update(&piece.bytes);
            if piece.ends_document {
                hash.update(piece.end.to_le_bytes());
            }
            visit(at, &piece);
            at = piece.end;
        }
        Ok(format!("{:x}", hash.finalize()))
    }
}

const BINARY: &str = "a binary file: it has bytes of value 0; give text, or take it as it is with --tokens bytes";

/// Why the beginning of a file is not that of a text in UTF-8.
fn what_is_wrong(head: &[u8]) -> Option<&'static str> {
    if head.starts_with(b"\xff\xfe") || head.starts_with(b"\xfe\xff") {
        return Some("UTF-16 text; convert it, such as with `iconv -f utf-16 -t utf-8`");
    }
    if head.starts_with(b"%PDF") {
        return Some("a PDF; write what it says as text, such as with `pdftotext`");
    }
    head.contains(&0).then_some(BINARY)
}

/// What else a file looks like, and the flag that takes it.
fn other_task(path: &Path, head: &[u8]) -> Option<&'static str> {
    let name = path.to_string_lossy().to_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let text = String::from_utf8_lossy(head);
    let mut some = text.lines().filter(|line| !line.is_empty()).take(20).peekable();
    some.peek()?;
    match name.rsplit_once('.').map_or("", |(_, end)| end) {
        "csv" => some
            .next()?
            .contains([',', ';'])
            .then_some("a table; give it with --labelled, --pairs or --series, or a column of it as text"),
        "tsv" => some
            .all(|line| line.matches('\t').count() == 1)
            .then_some("pairs or labelled texts (two columns); give it with --pairs or --labelled"),
        "jsonl" | "ndjson" => {
            let first: serde_json::Value = serde_json::from_str(some.next()?).ok()?;
            if first.get("messages").or(first.get("conversations")).is_some_and(serde_json::Value::is_array) {
                return Some("chats; write what is said as text, or questions and answers as pairs for --pairs");
            }
            let has = |keys: [&str; 2]| keys.iter().all(|key| first.get(key).is_some());
            if has(["text", "label"]) {
                return Some("labelled texts; give it with --labelled");
            }
            has(["source", "target"]).then_some("pairs (source and target); give it with --pairs")
        }
        _ => None,
    }
}

fn head(path: &Path) -> Result<Vec<u8>> {
    let failed = |error| cannot_read(path, &error);
    let mut bytes = Vec::new();
    File::open(path).map_err(failed)?.take(HEAD as u64).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Bytes up to the last character, which may be cut.
fn whole_characters(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_up_the_texts_and_cut_no_character() {
        let place = tempfile::tempdir().unwrap();
        let long: String = (0..9000).map(|i| if i % 700 == 3 { "\n" } else { "猫é" }).collect();
        let unbroken = "ä".repeat(30_000);
        let texts = [long.as_str(), "short", unbroken.as_str()];
        for (n, text) in texts.iter().enumerate() {
            fs::write(place.path().join(format!("{n}.txt")), text).unwrap();
        }
        fs::write(place.path().join("3.bin"), b"\0").unwrap();
        fs::write(place.path().join(".hidden"), b"x").unwrap();
        let corpus = Corpus::open(&[place.path().into()], true).unwrap();
        assert_eq!((corpus.documents(), corpus.len()), (3, texts.concat().len() as u64));
        let (mut all, mut ends) = (String::new(), Vec::new());
        let sha = corpus
            .scan(|at, piece| {
                assert_eq!(at, all.len() as u64);
                assert!(piece.bytes.len() as u64 <= PIECE);
                all.push_str(std::str::from_utf8(&piece.bytes).unwrap());
                if piece.ends_document {
                    ends.push(all.len());
                }
            })
            .unwrap();
        assert_eq!(all, texts.concat());
        assert_eq!(ends.len(), 3);
        for at in [1, 2, 3, 17_777, all.len() as u64 - 1] {
            let place = corpus.boundary(at).unwrap() as usize;
            assert!(place as u64 >= at && all.is_char_boundary(place), "{at}");
        }
        // A text of one line, the only line break at its end.
        let line = place.path().join("line.txt");
        fs::write(&line, format!("{}\n", "abcdef ".repeat(200))).unwrap();
        let one = Corpus::open(std::slice::from_ref(&line), true).unwrap();
        assert_eq!((one.boundary(1300).unwrap(), one.boundary_below(1300, one.len()).unwrap()), (one.len(), 1300));
        fs::remove_file(line).unwrap();
        fs::write(place.path().join("1.txt"), "shorT").unwrap();
        assert_ne!(Corpus::open(&[place.path().into()], true).unwrap().scan(|_, _| ()).unwrap(), sha);
    }

    #[test]
    fn files_that_are_no_text_are_named() {
        let place = tempfile::tempdir().unwrap();
        let error = |name: &str, bytes: &[u8]| {
            let path = place.path().join(name);
            fs::write(&path, bytes).unwrap();
            let scanned = Corpus::open(&[path], true).and_then(|corpus| corpus.scan(|_, _| ()));
            scanned.unwrap_err().to_string()
        };
        let late = ["é".repeat(50_000).as_bytes(), b"\xe9"].concat();
        assert!(error("e", &late).contains("byte 100001: invalid UTF-8 (0xe9)"));
        assert!(error("g.jsonl", b"{\"source\": \"a\", \"target\": \"b\"}\n").contains("--pairs"));
        assert!(error("c.jsonl", b"{\"messages\": [{\"role\": \"user\"}]}\n").contains("it looks like chats"));
        assert!(error("t.csv", b"text,label\na,b\n").contains("it looks like a table; give it with --labelled"));
        assert!(error("p.pdf", b"%PDF-1.4\n\xe2").contains("a PDF; write what it says as text"));
        assert!(error("k.jsonl", b"{\"text\": \"a\", \"label\": \"b\"}\n").contains("--labelled"));
    }
}
