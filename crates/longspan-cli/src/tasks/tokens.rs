//! Text to tokens and back: characters, words, bytes, or a `tokenizer.json` of the crate `tokenizers`.
//!
//! Ids 0 to 3 are the same for every kind: padding, start, end, unknown. A tokenizer's own ids follow, shifted by 4.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::split::spellings;
use super::tokenizer_file::{Foreign, Stream, guarded};
use crate::run::folder::{RunFolder, tokenizer};
use crate::run::words::plain;

/// Fills the ends of short sequences in a batch.
pub const PAD: u32 = 0;
pub const START: u32 = 1;
/// Ends every source and target.
pub const END: u32 = 2;
/// Stands for every piece of text that the tokenizer does not know.
pub const UNKNOWN: u32 = 3;
/// Ids below this are the special ones.
pub const SPECIALS: u32 = 4;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Characters,
    /// Pieces between white space; joined by single spaces.
    Words,
    Bytes,
    File(std::path::PathBuf),
}

impl FromStr for Kind {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "characters" => Ok(Self::Characters),
            "words" => Ok(Self::Words),
            "bytes" => Ok(Self::Bytes),
            path if path.ends_with(".json") => Ok(Self::File(path.into())),
            other => {
                bail!("unknown tokens {other:?}; known are characters, words, bytes, or the path of a tokenizer.json")
            }
        }
    }
}

/// A tokenizer of a run, as stored in `source_tokenizer.json` and `target_tokenizer.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Tokenizer {
    Characters { vocabulary: Vocabulary },
    Words { vocabulary: Vocabulary },
    Bytes,
    Json { tokenizer: Box<Foreign> },
}

/// Entries in the order of their ids, without the special ones. Serialised as a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    entries: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    fn new(entries: Vec<String>) -> Self {
        let ids = entries.iter().zip(SPECIALS..).map(|(entry, id)| (entry.clone(), id)).collect();
        Self { entries, ids }
    }

    /// Of these pieces, each once.
    fn of<P: Ord + Hash + Into<String>>(pieces: impl Iterator<Item = P>) -> Self {
        // Few of them differ: sorting all would take most of a short run's start.
        let mut entries: Vec<P> = pieces.collect::<HashSet<P>>().into_iter().collect();
        entries.sort_unstable();
        Self::new(entries.into_iter().map(Into::into).collect())
    }

    fn id(&self, entry: &str) -> u32 {
        self.ids.get(entry).copied().unwrap_or(UNKNOWN)
    }

    /// As [`Vocabulary::id`]; a capital that is not known counts as its small letter.
    fn character(&self, c: char) -> u32 {
        match self.id(c.encode_utf8(&mut [0; 4])) {
            UNKNOWN => self.id(&c.to_lowercase().to_string()),
            id => id,
        }
    }

    fn entry(&self, id: u32) -> Option<&str> {
        self.entries.get(id.checked_sub(SPECIALS)? as usize).map(String::as_str)
    }
}

impl Serialize for Vocabulary {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.entries.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let vocabulary = Self::new(Vec::deserialize(deserializer)?);
        if vocabulary.ids.len() == vocabulary.entries.len() {
            Ok(vocabulary)
        } else {
            Err(serde::de::Error::custom("the vocabulary lists an entry twice"))
        }
    }
}

impl Tokenizer {
    pub fn build<'a>(kind: &Kind, texts: impl Iterator<Item = &'a str>) -> Result<Self> {
        Ok(match kind {
            Kind::Characters => Self::Characters { vocabulary: Vocabulary::of(texts.flat_map(str::chars)) },
            Kind::Words => Self::Words { vocabulary: Vocabulary::of(texts.flat_map(str::split_whitespace)) },
            Kind::Bytes => Self::Bytes,
            Kind::File(path) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read the tokenizer {}", path.display()))?;
                let tokenizer = Foreign::parse(&text).map_err(|error| anyhow!("{}: {error}", path.display()))?;
                Self::Json { tokenizer: Box::new(tokenizer) }
            }
        })
    }

    pub fn load(folder: &RunFolder, side: &str) -> Result<Self> {
        Self::stored(&folder.file(&tokenizer(side)), &folder.read(&tokenizer(side))?)
    }

    pub fn store(&self, folder: &RunFolder, side: &str) -> Result<()> {
        folder.write(&tokenizer(side), self.to_json()?.as_bytes())
    }

    pub fn stored(path: &Path, bytes: &[u8]) -> Result<Self> {
        guarded(|| serde_json::from_slice(bytes))
            .ok_or_else(|| anyhow!("what it holds breaks its reader"))
            .and_then(|result| Ok(result?))
            .map_err(|error| {
                anyhow!("{}: {}; the file is damaged: restore it or train again", path.display(), plain(&error))
            })
    }

    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Self::Characters { .. } => "characters",
            Self::Words { .. } => "words",
            Self::Bytes => "bytes",
            Self::Json { .. } => "tokenizer.json",
        }
    }

    pub fn len(&self) -> usize {
        let own = match self {
            Self::Characters { vocabulary } | Self::Words { vocabulary } => vocabulary.entries.len(),
            Self::Bytes => 256,
            // Not the number of entries: ids may have gaps.
            Self::Json { tokenizer } => tokenizer.last as usize + 1,
        };
        own + SPECIALS as usize
    }

    /// Text to ids, without start and end. What is not known becomes [`UNKNOWN`]; among characters, a capital that is not
    /// known counts as its small letter, and letters with marks may be composed or decomposed.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_as_spelled(&self.spelled(text))
    }

    fn encode_as_spelled(&self, text: &str) -> Result<Vec<u32>> {
        Ok(match self {
            Self::Characters { vocabulary } => text.chars().map(|c| vocabulary.character(c)).collect(),
            Self::Words { vocabulary } => text.split_whitespace().map(|word| vocabulary.id(word)).collect(),
            Self::Bytes => text.bytes().map(|byte| SPECIALS + u32::from(byte)).collect(),
            Self::Json { tokenizer } => tokenizer.encode(text)?.into_iter().map(|(id, _)| tokenizer.id(id)).collect(),
        })
    }

    /// A text as it stands, composed or decomposed: that of which most is known.
    fn spelled<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let unknown = |text: &str| self.unknown_pieces(text).len();
        if text.is_ascii() || matches!(self, Self::Bytes | Self::Json { .. }) || unknown(text) == 0 {
            return text.into();
        }
        spellings(text).into_iter().min_by_key(|text| unknown(text)).expect("one of them is the text as it stands")
    }

    /// As [`encode`](Self::encode), of a piece of a text after the bytes `before` it. Only a tokenizer of bytes takes them as they
    /// are; they must be UTF-8 for the others.
    pub fn encode_piece(&self, before: &[u8], bytes: &[u8]) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(bytes.iter().map(|&byte| SPECIALS + u32::from(byte)).collect()),
            Self::Json { tokenizer } => {
                let ids = tokenizer.encode_after(std::str::from_utf8(before)?, std::str::from_utf8(bytes)?)?;
                Ok(ids.into_iter().map(|(id, _)| tokenizer.id(id)).collect())
            }
            _ => self.encode_as_spelled(std::str::from_utf8(bytes)?),
        }
    }

    /// The ids that no text has: padding, start, unknown, and what a tokenizer.json has for unknown, whose id here is [`UNKNOWN`].
    pub fn never(&self) -> Vec<usize> {
        let own = if let Self::Json { tokenizer } = self { tokenizer.unknown } else { None };
        [PAD, START, UNKNOWN].into_iter().chain(own.map(|own| own + SPECIALS)).map(|id| id as usize).collect()
    }

    /// Whether an id stands for text that answers do not print: what is not known, and special tokens of a tokenizer.json.
    pub fn is_hidden(&self, id: u32) -> bool {
        match (self, id.checked_sub(SPECIALS)) {
            (_, None) => true,
            (Self::Json { tokenizer }, Some(own)) => tokenizer.special.contains(&own),
            _ => false,
        }
    }

    /// A byte-pair encoding with at most `size` entries, learned from texts: over bytes, so that it knows every text.
    pub fn train(size: usize, texts: impl Iterator<Item = String> + Send) -> Result<Self> {
        let failed = |error: tokenizers::Error| anyhow!("cannot learn a byte-pair encoding: {error}");
        let level = || ByteLevel::default().add_prefix_space(false);
        let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
        tokenizer.with_pre_tokenizer(Some(level())).with_decoder(Some(level()));
        let mut trainer = TrainerWrapper::from(
            BpeTrainer::builder()
                .vocab_size(size)
                .show_progress(false)
                .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
                .build(),
        );
        tokenizer.train(&mut trainer, texts).map_err(failed)?;
        Ok(Self::Json { tokenizer: Box::new(Foreign::try_from(tokenizer)?) })
    }

    pub fn decoder(&self) -> Decoder<'_> {
        match self {
            Self::Json { tokenizer } => Decoder::Json(tokenizer.stream()),
            _ => Decoder::Own { tokenizer: self, bytes: Vec::new() },
        }
    }

    /// Ids to text; special ids are left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let own = ids.iter().copied().filter(|&id| id >= SPECIALS);
        Ok(match self {
            Self::Characters { vocabulary } => own.filter_map(|id| vocabulary.entry(id)).collect(),
            Self::Words { vocabulary } => own.filter_map(|id| vocabulary.entry(id)).collect::<Vec<_>>().join(" "),
            Self::Bytes => {
                let bytes: Vec<u8> = own.filter_map(|id| u8::try_from(id - SPECIALS).ok()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Self::Json { tokenizer } => {
                let ids: Vec<u32> = own.map(|id| id - SPECIALS).collect();
                tokenizer.decode(&ids)?
            }
        })
    }

    /// What is not known of a text as [`encode`](Self::encode) reads it, in order.
    pub fn unknown(&self, text: &str) -> Vec<String> {
        self.unknown_pieces(&self.spelled(text)).into_iter().map(String::from).collect()
    }

    /// The pieces of `text` as it stands that are not known, in order.
    pub fn unknown_pieces<'a>(&self, text: &'a str) -> Vec<&'a str> {
        match self {
            Self::Characters { vocabulary } => text
                .char_indices()
                .filter(|(_, c)| vocabulary.character(*c) == UNKNOWN)
                .map(|(at, c)| &text[at..at + c.len_utf8()])
                .collect(),
            Self::Words { vocabulary } => {
                text.split_whitespace().filter(|word| vocabulary.id(word) == UNKNOWN).collect()
            }
            // Bytes are all known.
            Self::Bytes => Vec::new(),
            Self::Json { tokenizer } => match tokenizer.encode(text) {
                Ok(pieces) => pieces
                    .into_iter()
                    .filter(|(id, _)| tokenizer.id(*id) == UNKNOWN)
                    .filter_map(|(_, (start, end))| text.get(start..end))
                    .collect(),
                // Answering the text reports the error.
                Err(_) => Vec::new(),
            },
        }
    }
}

/// Turns ids to text as they come: a token may hold a part of a character only. Memory does not grow.
pub enum Decoder<'a> {
    /// Characters, words and bytes, with the bytes of a character that is not complete.
    Own {
        tokenizer: &'a Tokenizer,
        bytes: Vec<u8>,
    },
    Json(Stream<'a>),
}

impl Decoder<'_> {
    /// The text that is complete with this id. What cannot become a character is a replacement character.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let Some(own) = id.checked_sub(SPECIALS) else { return Ok(String::new()) };
        match self {
            Self::Json(stream) => stream.push(own),
            Self::Own { tokenizer: Tokenizer::Bytes, bytes } => {
                bytes.push(own as u8);
                let mut text = String::new();
                while let Err(error) = std::str::from_utf8(bytes) {
                    let valid = error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&bytes[..valid]));
                    bytes.drain(..valid);
                    // Without a length it may still become a character.
                    let Some(wrong) = error.error_len() else { return Ok(text) };
                    text.push(char::REPLACEMENT_CHARACTER);
                    bytes.drain(..wrong);
                }
                text.push_str(&String::from_utf8_lossy(bytes));
                bytes.clear();
                Ok(text)
            }
            Self::Own { tokenizer, .. } => tokenizer.decode(&[id]),
        }
    }

    /// What is not complete when no more ids come: replacement characters.
    pub fn finish(&mut self) -> Result<String> {
        match self {
            Self::Json(stream) => stream.finish(),
            Self::Own { bytes, .. } => Ok(String::from_utf8_lossy(&std::mem::take(bytes)).into_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(kind: Kind) -> Tokenizer {
        Tokenizer::build(&kind, ["bad cab", "ünd"].into_iter()).unwrap()
    }

    #[test]
    fn known_text_comes_back_and_unknown_is_reported() {
        for kind in [Kind::Characters, Kind::Words, Kind::Bytes] {
            let tokenizer = build(kind);
            let ids = tokenizer.encode("bad ünd").unwrap();
            assert!(ids.iter().all(|&id| id >= SPECIALS && (id as usize) < tokenizer.len()));
            assert_eq!(tokenizer.decode(&ids).unwrap(), "bad ünd");
            let again: Tokenizer = serde_json::from_str(&tokenizer.to_json().unwrap()).unwrap();
            assert_eq!(again.encode("bad ünd").unwrap(), ids);
            assert_eq!(again.encode("").unwrap(), [0u32; 0]);
        }
        let characters = build(Kind::Characters);
        assert_eq!(characters.encode("bxé").unwrap()[1..], [UNKNOWN, UNKNOWN]);
        assert_eq!(characters.encode("BÜ").unwrap(), characters.encode("bü").unwrap());
        assert_eq!(characters.unknown_pieces("BÜX"), ["X"]);
        assert_eq!(characters.unknown_pieces("bxé"), ["x", "é"]);
        assert_eq!(build(Kind::Words).unknown_pieces("bad dog"), ["dog"]);
    }

    #[test]
    fn the_unknown_token_of_a_tokenizer_file_is_unknown() {
        let json = |model: &str| {
            let text = format!(
                r#"{{"kind":"json","tokenizer":{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],
                "normalizer":null,"pre_tokenizer":{{"type":"Whitespace"}},"post_processor":null,"decoder":null,
                "model":{model}}}}}"#
            );
            serde_json::from_str::<Tokenizer>(&text)
        };
        for model in [
            r#"{"type":"WordLevel","vocab":{"cat":0,"dog":1,"[UNK]":2},"unk_token":"[UNK]"}"#,
            r#"{"type":"WordPiece","vocab":{"cat":0,"dog":1,"[UNK]":2},"unk_token":"[UNK]",
                "continuing_subword_prefix":"-","max_input_chars_per_word":100}"#,
            r#"{"type":"Unigram","vocab":[["cat",-1.0],["dog",-1.0],["?",-9.0]],"unk_id":2,"byte_fallback":false}"#,
            r#"{"type":"BPE","vocab":{"cat":0,"dog":1,"[UNK]":2},"merges":[],"unk_token":"[UNK]","fuse_unk":true,
                "ignore_merges":true}"#,
        ] {
            let tokenizer = json(model).unwrap();
            assert_eq!(tokenizer.encode("dog zebra cat").unwrap(), [5, UNKNOWN, 4], "{model}");
            assert_eq!(tokenizer.unknown_pieces("dog zebra cat"), ["zebra"], "{model}");
            assert_eq!(tokenizer.len(), 7);
        }
        let none = json(r#"{"type":"WordLevel","vocab":{"cat":0},"unk_token":"[UNK]"}"#).unwrap();
        assert!(none.encode("dog").unwrap_err().to_string().contains("if it has no unknown token, give it one"));
        let huge = json(r#"{"type":"WordLevel","vocab":{"cat":4000000000},"unk_token":"[UNK]"}"#).unwrap_err();
        assert!(huge.to_string().contains("the id 4000000000"), "{huge}");
    }

    #[test]
    fn ids_become_text_as_they_come() {
        let text = "bad ünd cab, bad cab";
        let trained = Tokenizer::train(270, std::iter::repeat_n(text.to_string(), 3)).unwrap();
        assert!(trained.encode(text).unwrap().len() < text.len(), "nothing was merged");
        for tokenizer in [build(Kind::Characters), build(Kind::Bytes), trained] {
            let text = if matches!(tokenizer, Tokenizer::Characters { .. }) { "bad ünd" } else { "ünd 猫 🙂 bad" };
            let mut decoder = tokenizer.decoder();
            let pieces = tokenizer.encode(text).unwrap().into_iter().map(|id| decoder.push(id).unwrap());
            assert_eq!(pieces.collect::<String>(), text, "{}", tokenizer.kind());
        }
        let bytes = build(Kind::Bytes);
        let mut decoder = bytes.decoder();
        let ids = bytes.encode_piece(b"", b"a\xff\xe7\x8cb\xc3").unwrap();
        let pieces: String = ids.into_iter().map(|id| decoder.push(id).unwrap()).collect();
        assert_eq!(pieces, "a\u{fffd}\u{fffd}b");
        assert_eq!(decoder.finish().unwrap(), "\u{fffd}");
    }

    /// A tokenizer.json over letters, with a normalizer, pre-tokenizer, decoder and list of added tokens.
    fn json(added: &str, normalizer: &str, pre: &str, decoder: &str) -> Tokenizer {
        let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
        let entries = ["<unk>", "<end>", "▁"].map(String::from).into_iter().chain(bytes);
        let entries = entries.chain(('a'..='z').map(String::from));
        let vocabulary: HashMap<String, usize> = entries.zip(0..).collect();
        let vocabulary = serde_json::to_string(&vocabulary).unwrap();
        let text = format!(
            r#"{{"kind":"json","tokenizer":{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{added}],
            "normalizer":{normalizer},"pre_tokenizer":{pre},"post_processor":null,"decoder":{decoder},"model":{{"type":"BPE",
            "vocab":{vocabulary},"merges":[],"unk_token":"<unk>","fuse_unk":true,"byte_fallback":true}}}}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    const LLAMA: [&str; 2] = [
        r#"{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}]}"#,
        r#"{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},
            {"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#,
    ];

    #[test]
    fn bytes_of_characters_wait_and_never_end_a_stream() {
        let tokenizer = json("", LLAMA[0], "null", LLAMA[1]);
        let byte = |byte: u8| SPECIALS + 3 + u32::from(byte);
        let text = "a 漢 b🙂c";
        let whole = tokenizer.encode(text).unwrap();
        assert!(whole.contains(&byte(0xe6)));
        assert_eq!(tokenizer.decode(&whole).unwrap(), text);
        let [a, b, space] = ["a", "b", "▁"].map(|text| tokenizer.encode(text).unwrap()[1]);
        for (ids, expected) in [
            (whole.as_slice(), text),
            // A byte that begins a character, before other text and at the end; one that never does, between and at the start.
            (&[space, a, byte(0xe6), b], "a\u{fffd}b"),
            (&[space, a, byte(0xe6), byte(0xbc)], "a\u{fffd}"),
            (
                &[space, a, byte(0xe6), byte(0xbc), byte(0xa2), byte(0xff), byte(0xc3), byte(0x84), space, b],
                "a漢\u{fffd}Ä b",
            ),
            (&[byte(0xff), a], "\u{fffd}a"),
            (&[byte(0xff), byte(0xf0), byte(0x9f), byte(0x99)], "\u{fffd}\u{fffd}"),
        ] {
            let mut decoder = tokenizer.decoder();
            let pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
            assert_eq!(pieces.concat() + &decoder.finish().unwrap(), expected, "{ids:?}");
            assert_eq!(tokenizer.decode(ids).unwrap(), expected, "{ids:?}");
        }
        // Every byte after every other.
        let mut decoder = tokenizer.decoder();
        for id in (0..=255).flat_map(|one| (0..=255).flat_map(move |two| [byte(one), byte(two)])) {
            decoder.push(id).unwrap();
        }
        // The bytes of the learned ones wait, too.
        let learned = Tokenizer::train(257, std::iter::once("a".to_string())).unwrap();
        let ids = learned.encode("a漢").unwrap();
        let mut decoder = learned.decoder();
        let pieces: Vec<String> = ids[..2].iter().map(|&id| decoder.push(id).unwrap()).collect();
        assert_eq!((pieces.concat(), decoder.finish().unwrap().as_str()), ("a".into(), "\u{fffd}"));
    }

    #[test]
    fn a_piece_of_a_text_has_no_space_of_its_own_before_it() {
        let space = |always: &str| {
            format!(r#"{{"type":"Metaspace","replacement":"▁","prepend_scheme":"{always}","split":false}}"#)
        };
        let words =
            format!(r#"{{"type":"Sequence","pretokenizers":[{{"type":"WhitespaceSplit"}},{}]}}"#, space("always"));
        let (before, after) = ("abc de\n", "fg h\nij");
        for (tokenizer, tokens) in [
            (json("", "null", &space("always"), "null"), after.len()),
            (json("", "null", &space("first"), "null"), after.len()),
            (json("", LLAMA[0], "null", "null"), after.len()),
            // Here a space is put before every word, and each of white space is none.
            (json("", "null", &words, "null"), "▁fg▁h▁ij".chars().count()),
        ] {
            let whole = tokenizer.encode(&format!("{before}{after}")).unwrap();
            let [first, second] = [("", before), (before, after)]
                .map(|(before, text)| tokenizer.encode_piece(before.as_bytes(), text.as_bytes()).unwrap());
            assert_eq!(second.len(), tokens);
            assert_eq!([first, second].concat(), whole);
        }
    }

    #[test]
    fn special_tokens_are_hidden_and_no_candidates_where_unknown() {
        let end = r#"{"id":1,"content":"<end>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}"#;
        let tokenizer = json(end, "null", "null", "null");
        let ids = tokenizer.encode("a<end>").unwrap();
        assert_eq!(ids.iter().map(|&id| tokenizer.is_hidden(id)).collect::<Vec<_>>(), [false, true]);
        assert_eq!(tokenizer.decode(&ids).unwrap(), "a");
        assert!([PAD, START, END, UNKNOWN].iter().all(|&id| tokenizer.is_hidden(id)));
        assert_eq!(tokenizer.never(), [0, 1, 3, 4], "the last is <unk>, which encode never gives");
    }

    #[test]
    fn ids_do_not_depend_on_the_order_of_the_texts() {
        let one = Tokenizer::build(&Kind::Characters, ["ab", "c"].into_iter()).unwrap();
        let other = Tokenizer::build(&Kind::Characters, ["c", "ba"].into_iter()).unwrap();
        assert_eq!(one.to_json().unwrap(), other.to_json().unwrap());
    }

    #[test]
    fn a_stored_vocabulary_with_a_double_entry_is_refused() {
        let text = r#"{"kind":"words","vocabulary":["a","a"]}"#;
        assert!(serde_json::from_str::<Tokenizer>(text).is_err());
    }
}
