//! A `tokenizer.json` of the crate `tokenizers`, which a person brings along: it may be anything.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper};

use super::tokens::{SPECIALS, UNKNOWN};
use crate::run::words::plain;

/// A tokenizer of the crate `tokenizers`. Serialised as its `tokenizer.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "tokenizers::Tokenizer", into = "tokenizers::Tokenizer")]
pub struct Foreign {
    inner: tokenizers::Tokenizer,
    pub unknown: Option<u32>,
    pub last: u32,
    /// How many times as long a text may be after the normalizer.
    growth: f64,
    pub special: HashSet<u32>,
    /// Whether tokens such as `<0xE6>` are bytes of characters.
    byte_fallback: bool,
    /// Whether something is put before each text, such as a space.
    prefixed: bool,
}

/// The longest text in bytes that a normalizer may make: `tokenizers` keeps about 20 bytes for each of them.
const LONGEST_TEXT: f64 = 64e6;

/// How many times as long a decoder may make an answer.
const LARGEST_GROWTH: f64 = 1000.0;

/// How many times as long the replacements in a part of a tokenizer.json can make a text, at most.
fn growth(part: &impl Serialize) -> Result<f64> {
    fn of(value: &Value) -> f64 {
        let inner = match value {
            Value::Object(fields) => fields.values().map(of).product(),
            Value::Array(items) => items.iter().map(of).product(),
            _ => 1.0,
        };
        let (Some("Replace"), Some(content)) = (value["type"].as_str(), value["content"].as_str()) else {
            return inner;
        };
        // A pattern that matches nothing at all matches between all characters.
        let between = value["pattern"]["String"].as_str().is_none_or(str::is_empty);
        inner * (content.len() + usize::from(between)).max(1) as f64
    }
    Ok(of(&serde_json::to_value(part)?))
}

/// Whether an object in a part of a tokenizer.json, at any depth, fulfils a condition.
fn any(part: &impl Serialize, holds: fn(&Value) -> bool) -> Result<bool> {
    fn of(value: &Value, holds: fn(&Value) -> bool) -> bool {
        match value {
            Value::Object(fields) => holds(value) || fields.values().any(|inner| of(inner, holds)),
            Value::Array(items) => items.iter().any(|inner| of(inner, holds)),
            _ => false,
        }
    }
    Ok(of(&serde_json::to_value(part)?, holds))
}

/// Whether a normalizer or pre-tokenizer puts something before each text.
fn puts_before(part: &Value) -> bool {
    part["type"] == "Prepend"
        || part["add_prefix_space"] == true
        || part["prepend_scheme"].as_str().is_some_and(|scheme| scheme != "never")
}

/// Ids are 32-bit integers with a sign, and the special ones come before.
const LARGEST_ID: u32 = i32::MAX as u32 - SPECIALS;

impl TryFrom<tokenizers::Tokenizer> for Foreign {
    type Error = anyhow::Error;

    fn try_from(inner: tokenizers::Tokenizer) -> Result<Self> {
        let unknown = match inner.get_model() {
            ModelWrapper::BPE(model) => model.get_unk_token().as_ref().and_then(|token| inner.token_to_id(token)),
            ModelWrapper::WordPiece(model) => inner.token_to_id(&model.unk_token),
            ModelWrapper::WordLevel(model) => inner.token_to_id(&model.unk_token),
            // Its field is private.
            ModelWrapper::Unigram(model) => {
                serde_json::to_value(model)?["unk_id"].as_u64().and_then(|id| u32::try_from(id).ok())
            }
        };
        let last = inner.get_vocab(true).into_values().max().unwrap_or(0);
        if last > LARGEST_ID {
            bail!(
                "the tokenizer.json has the id {last}, the largest possible is {LARGEST_ID}; number its tokens from 0"
            );
        }
        let decoder = inner.get_decoder().map_or(Ok(1.0), growth)?;
        if decoder > LARGEST_GROWTH {
            bail!(
                "the decoder of the tokenizer.json can make an answer {decoder:.0} times as long; remove a `Replace` from it"
            );
        }
        let growth = inner.get_normalizer().map_or(Ok(1.0), growth)?;
        let special = inner.get_added_tokens_decoder().into_iter();
        let special = special.filter(|(_, token)| token.special).map(|(id, _)| id).collect();
        let byte_fallback =
            inner.get_decoder().map_or(Ok(false), |part| any(part, |part| part["type"] == "ByteFallback"))?;
        let prefixed = inner.get_normalizer().map_or(Ok(false), |part| any(part, puts_before))?
            || inner.get_pre_tokenizer().map_or(Ok(false), |part| any(part, puts_before))?;
        Ok(Self { inner, unknown, last, growth, special, byte_fallback, prefixed })
    }
}

impl From<Foreign> for tokenizers::Tokenizer {
    fn from(foreign: Foreign) -> Self {
        foreign.inner
    }
}

/// Ids that become text as they come. Memory does not grow.
///
/// `tokenizers` has a `DecodeStream`, which ends with an error where bytes are no character, and drops those at the end.
pub struct Stream<'a> {
    tokenizer: &'a Foreign,
    /// The latest ids whose text is out: what comes after them depends on them, such as a space between.
    before: Vec<u32>,
    /// Those after them.
    held: Vec<u32>,
    /// Ids of single bytes, and these bytes, that may become a character.
    bytes: (Vec<u32>, Vec<u8>),
}

/// Ids whose text is held back, at most, though its last character seems not to be complete.
const MOST_HELD: usize = 64;

impl Stream<'_> {
    /// The text that is complete with this id. What cannot become a character is a replacement character.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.tokenizer.special.contains(&id) {
            return Ok(String::new());
        }
        if let Some(byte) = self.tokenizer.byte(id) {
            return self.push_byte(id, byte);
        }
        let broken = self.broken()?;
        self.held.push(id);
        Ok(broken + &self.complete(self.held.len() < MOST_HELD)?)
    }

    /// The text that was held back, when no more ids come.
    pub fn finish(&mut self) -> Result<String> {
        Ok(self.broken()? + &self.complete(false)?)
    }

    fn push_byte(&mut self, id: u32, byte: u8) -> Result<String> {
        let mut text = String::new();
        self.bytes.0.push(id);
        self.bytes.1.push(byte);
        while let Err(error) = std::str::from_utf8(&self.bytes.1) {
            // Without a length it may still become a character. The decoder sees whole characters only.
            let Some(wrong) = error.error_len() else { return Ok(text) };
            text.push_str(&self.complete(false)?);
            text.push(char::REPLACEMENT_CHARACTER);
            self.bytes.0.drain(..wrong);
            self.bytes.1.drain(..wrong);
        }
        self.held.append(&mut self.bytes.0);
        self.bytes.1.clear();
        Ok(text + &self.complete(false)?)
    }

    /// Replacement characters for bytes that have not become a character.
    fn broken(&mut self) -> Result<String> {
        self.bytes.0.clear();
        let bytes = std::mem::take(&mut self.bytes.1);
        Ok(if bytes.is_empty() { String::new() } else { self.complete(false)? + &String::from_utf8_lossy(&bytes) })
    }

    /// The text of the ids that are held; none, if `wait`, where its last character may not be complete.
    fn complete(&mut self, wait: bool) -> Result<String> {
        if self.held.is_empty() {
            return Ok(String::new());
        }
        let shown = self.tokenizer.decode_all(&self.before)?;
        let text = self.tokenizer.decode_all(&[self.before.as_slice(), &self.held].concat())?;
        if wait && text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        // A decoder may change what is out already, which cannot be taken back.
        let same = shown.chars().zip(text.chars()).take_while(|(a, b)| a == b);
        let new = text[same.map(|(c, _)| c.len_utf8()).sum::<usize>()..].to_owned();
        if !new.is_empty() {
            self.before = std::mem::take(&mut self.held);
        }
        Ok(new)
    }
}

/// What `tokenizers` makes of ids.
fn decoded<R>(call: impl FnOnce() -> tokenizers::Result<R>) -> Result<R> {
    guarded(call)
        .ok_or_else(|| anyhow!("the tokenizer.json breaks on an answer; save it with `tokenizers` again"))?
        .map_err(|error| anyhow!("the tokenizer.json cannot decode: {error}; choose characters, words or bytes"))
}

impl Foreign {
    pub fn parse(text: &str) -> Result<Self> {
        let invalid =
            |error: &dyn Display| anyhow!("not a tokenizer.json: {}; save it with `tokenizers` again", plain(error));
        guarded(|| {
            let mut inner: tokenizers::Tokenizer = text.parse().map_err(|error| invalid(&error))?;
            // Batches are padded here, and a run has a limit of its own.
            inner.with_padding(None);
            inner.with_truncation(None).map_err(|error| invalid(&error))?;
            Self::try_from(inner)
        })
        .unwrap_or_else(|| Err(invalid(&"what it holds breaks its reader")))
    }

    /// Text to its ids, each with the bytes of the text that it stands for.
    pub fn encode(&self, text: &str) -> Result<Vec<(u32, (usize, usize))>> {
        if text.len() as f64 * self.growth > LONGEST_TEXT {
            self.check_growth(text)?;
        }
        let start = || text.chars().take(40).collect::<String>();
        let encoding = guarded(|| self.inner.encode(text, false))
            .ok_or_else(|| anyhow!("the tokenizer.json breaks on {:?}; save it with `tokenizers` again", start()))?;
        let encoding = encoding.map_err(|error| {
            anyhow!(
                "the tokenizer.json cannot encode {:?}: {error}; if it has no unknown token, give it one (`unk_token` in \
                 its vocabulary, or `unk_id`), or choose characters, words or bytes",
                start()
            )
        })?;
        Ok(encoding.get_ids().iter().copied().zip(encoding.get_offsets().iter().copied()).collect())
    }

    /// As [`encode`](Self::encode), of a text that goes on after another: nothing is put before it that is not put between
    /// its words.
    pub fn encode_after(&self, before: &str, text: &str) -> Result<Vec<(u32, (usize, usize))>> {
        if self.prefixed && !before.is_empty() {
            let whole = self.encode(&format!("{before}{text}"))?;
            let rest: Vec<_> = whole.into_iter().skip_while(|(_, (_, end))| *end <= before.len()).collect();
            // A token over the border belongs to neither.
            if rest.first().is_none_or(|(_, (start, _))| *start >= before.len()) {
                return Ok(rest);
            }
        }
        self.encode(text)
    }

    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        if !self.byte_fallback {
            return self.decode_all(ids);
        }
        // One wrong byte would make its neighbours replacement characters, too.
        let mut stream = self.stream();
        let text = ids.iter().map(|&id| stream.push(id)).collect::<Result<String>>()?;
        Ok(text + &stream.finish()?)
    }

    fn decode_all(&self, ids: &[u32]) -> Result<String> {
        decoded(|| self.inner.decode(ids, true))
    }

    pub fn stream(&self) -> Stream<'_> {
        Stream { tokenizer: self, before: Vec::new(), held: Vec::new(), bytes: Default::default() }
    }

    /// The byte that a token such as `<0xE6>` stands for.
    fn byte(&self, id: u32) -> Option<u8> {
        let token = self.byte_fallback.then(|| self.inner.id_to_token(id))??;
        let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
        (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
    }

    /// Runs the normalizer a step at a time, and refuses a text that grows beyond all measure.
    fn check_growth(&self, text: &str) -> Result<()> {
        fn run(step: &NormalizerWrapper, text: &mut NormalizedString) -> Result<()> {
            if let NormalizerWrapper::Sequence(steps) = step {
                return steps.as_ref().iter().try_for_each(|step| run(step, text));
            }
            if (text.len() + 1) as f64 * growth(step)? > LONGEST_TEXT {
                bail!(
                    "the normalizer of the tokenizer.json makes a text longer than {} MB; remove a `Replace` from it, or \
                     shorten the text",
                    LONGEST_TEXT / 1e6
                );
            }
            let normalized = guarded(|| step.normalize(text)).unwrap_or(Ok(()));
            normalized.map_err(|error| anyhow!("the tokenizer.json cannot normalize: {error}; choose another one"))
        }
        let normalizer = self.inner.get_normalizer();
        normalizer.map_or(Ok(()), |normalizer| run(normalizer, &mut NormalizedString::from(text)))
    }

    /// An id of this command. Unknown is the same for every kind of tokenizer.
    pub fn id(&self, own: u32) -> u32 {
        if Some(own) == self.unknown { UNKNOWN } else { own + SPECIALS }
    }
}

/// Calls `tokenizers`, which panics on some files; then `None`, and nothing is printed.
pub fn guarded<R>(call: impl FnOnce() -> R) -> Option<R> {
    static HOOK: Once = Once::new();
    thread_local! {
        static GUARDED: Cell<bool> = const { Cell::new(false) };
    }
    HOOK.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                usual(panic);
            }
        }));
    });
    GUARDED.set(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(false);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokenizer_file_whose_texts_grow_beyond_all_measure_is_refused() {
        let file = |normalizer: &str, decoder: &str| {
            let text = format!(
                r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":{normalizer},
                "pre_tokenizer":null,"post_processor":null,"decoder":{decoder},
                "model":{{"type":"WordLevel","vocab":{{"[UNK]":0,"a":1}},"unk_token":"[UNK]"}}}}"#
            );
            Foreign::parse(&text)
        };
        let step =
            |pattern: &str, content: &str| format!(r#"{{"type":"Replace","pattern":{pattern},"content":"{content}"}}"#);
        let list = |kind: &str, step: &str, count| {
            format!(r#"{{"type":"Sequence","{kind}":[{}]}}"#, vec![step; count].join(","))
        };
        let any = r#"{"Regex":"."}"#;
        let tenfold = step(any, "xxxxxxxxxx");
        let explodes = file(&list("normalizers", &tenfold, 12), "null").unwrap();
        assert!(explodes.encode("a").unwrap_err().to_string().contains("longer than 64 MB; remove a `Replace`"));
        let decoder = file("null", &list("decoders", &tenfold, 12)).unwrap_err().to_string();
        assert!(decoder.contains("times as long; remove a `Replace`"), "{decoder}");
        // Twelve replacements that lengthen nothing, twelve that seldom match, and an empty pattern.
        for harmless in
            [step(r#"{"String":"a"}"#, "b"), step(r#"{"Regex":"zz"}"#, "xxxx"), step(r#"{"String":""}"#, "b")]
        {
            file(&list("normalizers", &harmless, 12), "null").unwrap().encode("a").unwrap();
        }
        file("null", &list("decoders", &step(r#"{"String":"a"}"#, "b"), 12)).unwrap();
    }

    #[test]
    fn a_file_on_which_the_library_panics_is_refused() {
        let text = r###"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
            "pre_tokenizer":null,"post_processor":null,"decoder":{"type":"WordPiece","prefix "##"},
            "model":{"type":"WordLevel","vocab":{"a":1},"unk_token":"[UNK]"}}"###;
        let error = Foreign::parse(text).unwrap_err().to_string();
        assert_eq!(error, "not a tokenizer.json: what it holds breaks its reader; save it with `tokenizers` again");
        assert_eq!(guarded(|| -> u32 { panic!("not printed") }), None);
    }
}
