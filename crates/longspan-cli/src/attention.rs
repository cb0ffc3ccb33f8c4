//! The mechanism that settings name, with its options.

use anyhow::{Result, anyhow, bail};
use longspan::attention::AttentionConfig;
use serde_json::{Map, Value};

use crate::config::nearest;

/// The names of all mechanisms, for help and errors.
pub fn names() -> String {
    AttentionConfig::NAMES.join(", ")
}

/// The mechanism `name`: its default options, under those that `everywhere` sets for whichever mechanism has them (a path in
/// the options, and a value), under `options`, which must all be known to it.
pub fn named(name: &str, everywhere: &[(&str, Value)], options: &Map<String, Value>) -> Result<AttentionConfig> {
    let Some(default) = AttentionConfig::by_name(name) else {
        let nearest = nearest(name, AttentionConfig::NAMES);
        let nearest = nearest.map(|name| format!("did you mean `{name}`? ")).unwrap_or_default();
        bail!("unknown attention {name:?}; {nearest}known are {}", names())
    };
    let mut value = serde_json::to_value(default)?;
    for (path, given) in everywhere {
        if let Some(option) = value.pointer_mut(path) {
            *option = given.clone();
        }
    }
    let known = value.clone();
    merge(&mut value, options);
    serde_json::from_value(value).map_err(|error| {
        let mut known = known;
        if let Some(table) = known.as_object_mut() {
            table.remove("mechanism");
        }
        anyhow!("attention_options: {error}; the options of {name} are {known}")
    })
}

/// Puts `over` over a table, tables within it entry by entry, but for one of another `kind`, which takes the old one's
/// place: its entries are others.
fn merge(under: &mut Value, over: &Map<String, Value>) {
    let Value::Object(under) = under else { return };
    for (key, value) in over {
        match (under.get_mut(key), value) {
            (Some(table @ Value::Object(_)), Value::Object(inner))
                if inner.get("kind").is_none_or(|kind| table.get("kind") == Some(kind)) =>
            {
                merge(table, inner);
            }
            _ => {
                under.insert(key.clone(), value.clone());
            }
        }
    }
}

/// A table of options as it is typed, `{radius = 4}` or `radius = 4`.
pub fn options(text: &str) -> Result<Map<String, Value>> {
    let braced = if text.trim_start().starts_with('{') { text.to_owned() } else { format!("{{{text}}}") };
    let table: toml::Table = format!("options = {braced}")
        .parse()
        .map_err(|_| anyhow!("--options {text}: expected options such as radius=4 or {{radius = 4, shared = true}}"))?;
    match serde_json::to_value(table)? {
        Value::Object(mut table) => match table.remove("options") {
            Some(Value::Object(options)) => Ok(options),
            other => bail!("--options {text}: expected options such as radius=4, got {other:?}"),
        },
        other => bail!("--options {text}: expected a table, got {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn options_lie_over_each_other() {
        let radius = [("/relative/radius", json!(3)), ("/nowhere", json!(1))];
        let given = options("relative = {shared = true}").unwrap();
        let config = serde_json::to_value(named("shaw", &radius, &given).unwrap()).unwrap();
        assert_eq!(config["relative"], json!({"radius": 3, "content": true, "shared": true, "raw": false}));
        let table = named("toeplitz", &[], &options("bias = {kind = 'table', reach = 3}").unwrap()).unwrap();
        assert_eq!(serde_json::to_value(table).unwrap()["bias"], json!({"kind": "table", "reach": 3}));
        let unknown = named("shaw", &[], &options("{width = 3}").unwrap()).unwrap_err().to_string();
        assert!(unknown.contains("`width`") && unknown.contains("radius"), "{unknown}");
        assert!(named("shaw", &[], &options("relative.radius = 'x'").unwrap()).is_err());
        assert!(options("radius").unwrap_err().to_string().contains("radius=4"));
    }

    #[test]
    fn unknown_names_are_answered_with_all() {
        let error = named("shw", &[], &Map::new()).unwrap_err().to_string();
        assert!(error.contains("did you mean `shaw`"), "{error}");
        for name in AttentionConfig::NAMES {
            assert!(error.contains(name), "{error}");
            named(name, &[], &Map::new()).unwrap();
        }
    }
}
