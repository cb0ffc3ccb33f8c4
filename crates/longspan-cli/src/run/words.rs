//! Settings that are words, and errors in words.

use std::fmt::Display;
use std::path::Path;

use longspan::layers::{Activation, NormKind};
use longspan::models::{Norm, Pooling};
use serde::{Deserialize, Serialize};

/// Enums of the library whose variants are written as words.
macro_rules! words {
    ($($name:ident: $of:literal { $($(#[$attribute:meta])? $variant:ident),* })*) => {$(
        #[derive(Serialize, Deserialize)]
        #[serde(remote = $of, rename_all = "kebab-case")]
        pub enum $name { $($(#[$attribute])? $variant),* }
    )*};
}

words! {
    NormWord: "Norm" { Pre, Post }
    NormKindWord: "NormKind" { Layer, Rms }
    ActivationWord: "Activation" { #[serde(skip)] Identity, Relu, Gelu, GeluTanh, Silu }
    PoolingWord: "Pooling" { Mean, Last, Attention }
}

pub fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// What a file is called.
pub fn name(path: &Path) -> String {
    if is_standard_input(path) { "standard input".into() } else { path.display().to_string() }
}

/// An error of a reader of JSON or TOML without the names of Rust's types.
pub fn plain(error: &(impl Display + ?Sized)) -> String {
    const NAMES: [(&str, &str); 15] = [
        ("unknown variant", "unknown value"),
        ("expected path string", "expected the name of a file"),
        ("expected usize", "expected a whole number from 0"),
        ("expected u64", "expected a whole number from 0"),
        ("expected u32", "expected a whole number from 0"),
        ("expected u8", "expected a whole number from 0 to 255"),
        ("expected f64", "expected a number"),
        ("expected a map", "expected a table such as {relative = {shared = true}}"),
        ("expected a sequence", "expected a list such as [\"novel.txt\"]"),
        ("invalid type: map", "invalid type: table"),
        ("expected struct ", "expected an object: "),
        ("expected internally tagged enum ", "expected an object with a `type`: "),
        ("data did not match any variant of untagged enum ", "no known kind of "),
        ("UnkIdNotInVocabulary", "whose `unk_id` is not in it"),
        ("expected ident", "this is no JSON"),
    ];
    let text = NAMES.iter().fold(error.to_string(), |text, (rust, words)| text.replace(rust, words));
    ["Untagged", "Wrapper", "Helper", "Deserializer"].iter().fold(text, |text, suffix| text.replace(suffix, ""))
}

/// Asks whether the known name closest to `name` was meant, if one is close enough.
pub fn nearest(name: &str, known: &[&str]) -> String {
    let plain = |text: &str| text.to_lowercase().replace('-', "_");
    let wanted = plain(name);
    known
        .iter()
        .map(|candidate| (strsim::levenshtein(&wanted, &plain(candidate)), *candidate))
        .min()
        .filter(|(distance, candidate)| *distance <= candidate.len().max(wanted.len()) / 2)
        .map_or(String::new(), |(_, candidate)| format!("did you mean `{candidate}`? "))
}
