//! Values of JSON one after the other, as lines have them or a list, each with the line in which it begins.

use std::fmt;

use anyhow::{Result, anyhow, bail};
use serde::de::{self, Deserialize, MapAccess, Visitor};
use serde_json::{Deserializer, Map, Value};

/// Hands each value of a text to `take`, with its line; `name` is the text's name in errors.
pub fn each(text: &str, name: &str, mut take: impl FnMut(Value, usize) -> Result<()>) -> Result<()> {
    let is_list = text.trim_start().starts_with('[');
    let (mut rest, mut line) = (text, 1);
    let mut skip = |rest: &mut &str, bytes: usize| {
        line += rest.as_bytes()[..bytes].iter().filter(|&&byte| byte == b'\n').count();
        *rest = &rest[bytes..];
        line
    };
    let between = |text: &str, mark: Option<char>| {
        let after = text.trim_start();
        let after = mark.and_then(|mark| after.strip_prefix(mark)).unwrap_or(after);
        text.len() - after.trim_start().len()
    };
    let white = between(rest, is_list.then_some('['));
    let mut here = skip(&mut rest, white);
    while !rest.is_empty() {
        if is_list && let Some(after) = rest.strip_prefix(']') {
            if after.trim().is_empty() {
                return Ok(());
            }
            bail!("{name}, line {here}: text after the end of the list; take it out");
        }
        let failed = |error| {
            anyhow!("{name}, line {}: {}", here + serde_json::Error::line(&error).max(1) - 1, problem(&error, rest))
        };
        let (value, read) = first(rest).map_err(failed)?;
        if let Some(problem) = rounded(&value, &rest[..read]) {
            bail!("{name}, line {here}: {problem}");
        }
        take(value, here)?;
        skip(&mut rest, read);
        let white = between(rest, is_list.then_some(','));
        here = skip(&mut rest, white);
    }
    if is_list {
        Err(anyhow!("{name}, line {here}: the list has no end; give the whole file, up to its ]"))
    } else {
        Ok(())
    }
}

pub fn line(text: &str) -> Result<Value, String> {
    let (value, read) = first(text).map_err(|error| problem(&error, text))?;
    if let Some(problem) = rounded(&value, &text[..read]) {
        return Err(problem);
    }
    if text[read..].trim().is_empty() { Ok(value) } else { Err("no JSON: trailing characters".into()) }
}

/// The first value of a text, and how many bytes it takes.
pub fn first(text: &str) -> serde_json::Result<(Value, usize)> {
    if text.trim_start().starts_with('{') {
        let mut all = Deserializer::from_str(text).into_iter::<Object>();
        let object = all.next().transpose()?.map_or(Value::Null, |object| Value::Object(object.0));
        return Ok((object, all.byte_offset()));
    }
    let mut all = Deserializer::from_str(text).into_iter::<Value>();
    // Without any value the error of an empty text.
    let value = all.next().unwrap_or_else(|| serde_json::from_str(""))?;
    Ok((value, all.byte_offset()))
}

/// An object whose keys all differ: of two alike a `Value` would keep the last.
struct Object(Map<String, Value>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: de::Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Object, A::Error> {
                let mut object = Map::new();
                while let Some((key, value)) = entries.next_entry::<String, Value>()? {
                    if object.contains_key(&key) {
                        return Err(de::Error::custom(format_args!("the key `{key}` comes twice; take one out")));
                    }
                    object.insert(key, value);
                }
                Ok(Object(object))
            }
        }
        input.deserialize_map(Entries)
    }
}

/// What is wrong with a value that was read from this text, if a whole number has more digits there than it keeps.
fn rounded(value: &Value, text: &str) -> Option<String> {
    match value {
        Value::Number(number) if number.is_f64() => {
            let whole = number.as_f64().filter(|number| number.fract() == 0.0 && number.abs() >= u64::MAX as f64)?;
            let long = text.split(|c: char| !c.is_ascii_digit()).find(|digits| digits.len() >= 20)?;
            let is_rounded = !text.contains(&whole.to_string());
            is_rounded.then(|| format!("a number such as {long} would be rounded; write so many digits in quotes"))
        }
        Value::Array(items) => items.iter().find_map(|one| rounded(one, text)),
        Value::Object(object) => object.values().find_map(|one| rounded(one, text)),
        _ => None,
    }
}

/// What is wrong, without the place, which counts from the text that was given.
fn problem(error: &serde_json::Error, text: &str) -> String {
    let words = error.to_string();
    let words = words.split(" at line ").next().unwrap_or_default();
    let place = text.lines().nth(error.line().saturating_sub(1)).unwrap_or_default();
    let strange = ["NaN", "Infinity", "nan", "inf"].iter().find(|word| place.contains(*word));
    match strange.filter(|_| {
        words.contains("expected value") || words.contains("expected ident") || words.contains("invalid number")
    }) {
        Some(word) => format!("no JSON: it has no {word}; write null for a missing value"),
        None if error.is_data() => words.into(),
        None => format!("no JSON: {words}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(usize, String)> {
        let mut all = Vec::new();
        each(text, "f", |value, line| {
            all.push((line, value.to_string()));
            Ok(())
        })
        .unwrap();
        all
    }

    #[test]
    fn lines_and_lists_are_read_with_their_lines() {
        let expected = [(1, "{\"a\":1}".to_string()), (3, "{\"b\":[2]}".to_string())];
        assert_eq!(found("{\"a\": 1}\n\n{\"b\": [2]}\n"), expected);
        assert_eq!(found("[{\"a\": 1},\n\n{\"b\":\n[2]}\n]\n"), expected);
        assert_eq!((found(""), found(" [ ]\n"), found("\n\n")), (vec![], vec![], vec![]));
        let error = |text| each(text, "f", |_, _| Ok(())).unwrap_err().to_string();
        assert_eq!(error("{}\n{\"x\": NaN}\n"), "f, line 2: no JSON: it has no NaN; write null for a missing value");
        assert_eq!(
            error("[{},\n{\"x\":\n -Infinity}]\n"),
            "f, line 3: no JSON: it has no Infinity; write null for a missing value"
        );
        assert!(error("{}\n{").starts_with("f, line 2: no JSON: EOF"), "{}", error("{}\n{"));
        assert!(error("[{}").contains("the list has no end") && error("[] 1").contains("text after the end"));
    }
}
