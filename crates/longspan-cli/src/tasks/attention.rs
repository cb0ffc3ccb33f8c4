//! The mechanism that settings name, with its options.

use anyhow::{Result, anyhow, bail};
use longspan::attention::{AftFullOptions, AftLocalOptions, AttentionConfig};
use longspan::kernels::FeatureMap;
use serde_json::{Map, Value, json};

use crate::run::config::ModelSettings;
use crate::run::words::nearest;

pub fn names() -> String {
    AttentionConfig::NAMES.join(", ")
}

/// The mechanism of a run whose sequences have up to so many positions.
pub fn of_run(settings: &ModelSettings, positions: usize) -> Result<AttentionConfig> {
    let feature_map: FeatureMap = settings.feature_map.parse()?;
    let feature_map = json!(feature_map.to_string());
    // Settings with keys of their own.
    let everywhere = [
        ("/kernel/feature_map", feature_map.clone()),
        ("/feature_map", feature_map),
        ("/relative/radius", json!(settings.radius)),
        // Tables by position have a row for every position of the longest sequence.
        ("/length", json!(AftLocalOptions::default().length.max(positions))),
    ];
    let attention = named(&settings.attention, &everywhere, &settings.attention_options)?;
    if let AttentionConfig::AftFull(AftFullOptions { length, .. })
    | AttentionConfig::AftLocal(AftLocalOptions { length, .. }) = &attention
        && *length < positions
    {
        bail!(
            "attention_options: length = {length} has no room for the {positions} positions that max_tokens and \
             answer_tokens allow; raise it, or lower those with --set"
        );
    }
    Ok(attention)
}

/// The mechanisms of the layers of a run that may have several, `shaw,shaw,softmax`, each as [`of_run`] has it. Where they differ,
/// the options of each stand under its name.
pub fn of_layers(settings: &ModelSettings, positions: usize) -> Result<Vec<AttentionConfig>> {
    let names: Vec<&str> = settings.attention.split(',').map(str::trim).collect();
    let alike = names.iter().all(|name| *name == names[0]);
    if let Some(other) = settings.attention_options.keys().find(|key| !alike && !names.contains(&key.as_str())) {
        bail!(
            "attention_options: {other}: expected the options of each mechanism under its name, such as {{{} = {{…}}}}",
            names[0]
        );
    }
    let one = |name: &str| {
        let attention_options = match settings.attention_options.get(name) {
            _ if alike => settings.attention_options.clone(),
            None => Map::new(),
            Some(Value::Object(own)) => own.clone(),
            Some(other) => bail!("attention_options: {name}: expected a table of options, got {other}"),
        };
        of_run(&ModelSettings { attention: name.into(), attention_options, ..settings.clone() }, positions)
    };
    names.iter().map(|name| one(name)).collect()
}

/// Refuses to split sequences of mechanisms that have no sum of states to read and learn through.
pub fn check_split(settings: &ModelSettings) -> Result<()> {
    const SPLIT: [&str; 5] = ["kernelized", "shaw", "fourier", "short-convolution", "gated"];
    let other = settings.attention.split(',').map(str::trim).find(|name| !SPLIT.contains(name));
    if let Some(name) = other {
        let why = match name {
            "softmax" => "it needs every key, so processes would exchange more the longer a sequence is",
            _ => "the sums of its states have no gradients",
        };
        bail!("--split-sequence: not with {name} attention: {why}; choose {} with --attention", SPLIT.join(", "));
    }
    let of = |options: &Map<String, Value>| options.get("convolution").is_some_and(|width| !width.is_null());
    let options = &settings.attention_options;
    if of(options) || options.values().filter_map(Value::as_object).any(of) {
        bail!(
            "--split-sequence: not with the option convolution: what tokens add depends on those right before them; leave it out, or put \
             short-convolution blocks between others with --attention"
        );
    }
    Ok(())
}

/// Refuses settings for mechanisms that the user `gives` and that none of the run's mechanisms has.
pub fn check_options(settings: &ModelSettings, gives: impl Fn(&str) -> bool) -> Result<()> {
    let names = settings.attention.split(',').map(str::trim);
    let defaults: Vec<Value> =
        names.map(|name| Ok(serde_json::to_value(named(name, &[], &Map::new())?)?)).collect::<Result<_>>()?;
    for (key, paths) in
        [("feature_map", &["/kernel/feature_map", "/feature_map"][..]), ("radius", &["/relative/radius"])]
    {
        if gives(key) && !defaults.iter().any(|options| paths.iter().any(|path| options.pointer(path).is_some())) {
            bail!(
                "`{key}` is not used by {} attention; leave it out, or choose another mechanism with --attention",
                settings.attention
            );
        }
    }
    Ok(())
}

/// The mechanism `name`. Its options are, from weakest to strongest: its defaults; those of `everywhere` (a path in the
/// options and a value) that the mechanism has; `options`, all of which it must have.
pub fn named(name: &str, everywhere: &[(&str, Value)], options: &Map<String, Value>) -> Result<AttentionConfig> {
    let Some(default) = AttentionConfig::by_name(name) else {
        bail!("unknown attention {name:?}; {}known are {}", nearest(name, AttentionConfig::NAMES), names())
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

/// Merges `over` into a table, entry by entry and deep. A table of another `kind` replaces the old one: it has other
/// entries.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::config::{PairsSettings, with};

    #[test]
    fn options_lie_over_each_other() {
        let radius = [("/relative/radius", json!(3)), ("/nowhere", json!(1))];
        let options = |options: Value| options.as_object().cloned().unwrap();
        let given = options(json!({ "relative": { "shared": true } }));
        let config = serde_json::to_value(named("shaw", &radius, &given).unwrap()).unwrap();
        assert_eq!(config["relative"], json!({"radius": 3, "content": true, "shared": true, "raw": false}));
        let table = named("toeplitz", &[], &options(json!({ "bias": { "kind": "table", "reach": 3 } }))).unwrap();
        assert_eq!(serde_json::to_value(table).unwrap()["bias"], json!({"kind": "table", "reach": 3}));
        let unknown = named("shaw", &[], &options(json!({ "width": 3 }))).unwrap_err().to_string();
        assert!(unknown.contains("`width`") && unknown.contains("radius"), "{unknown}");
        assert!(named("shaw", &[], &options(json!({ "relative": { "radius": "x" } }))).is_err());
    }

    #[test]
    fn layers_may_differ() {
        let names = |attention: &str| -> Result<Vec<&str>> {
            let settings = with::<PairsSettings>(json!({ "pairs": "a", "attention": attention })).model;
            Ok(of_layers(&settings, 9)?.iter().map(AttentionConfig::name).collect())
        };
        assert_eq!(names("shaw").unwrap(), ["shaw"]);
        assert_eq!(names("shaw, shaw,softmax").unwrap(), ["shaw", "shaw", "softmax"]);
        assert!(names("shaw,").unwrap_err().to_string().contains("unknown attention \"\""));

        let found = |attention: &str, options: Value| {
            let given = json!({ "pairs": "a", "attention": attention, "attention_options": options });
            of_layers(&with::<PairsSettings>(given).model, 9)
        };
        let window = AttentionConfig::SoftmaxWindow(longspan::attention::SoftmaxWindowOptions { window: 4 });
        assert_eq!(found("softmax-window", json!({ "window": 4 })).unwrap()[0], window);
        assert_eq!(found("shaw,softmax-window", json!({ "softmax-window": { "window": 4 } })).unwrap()[1], window);
        for wrong in [
            json!({ "window": 4 }),
            json!({ "softmax-window": 4 }),
            json!({ "softmax-window": { "width": 4 } }),
            json!({ "softmax": {} }),
        ] {
            let error = found("shaw,softmax-window", wrong).unwrap_err().to_string();
            assert!(error.contains("attention_options") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn sequences_behind_a_convolution_are_not_split() {
        let split = |attention: &str, options: Value| {
            let given = json!({ "pairs": "a", "attention": attention, "attention_options": options });
            check_split(&with::<PairsSettings>(given).model)
        };
        for (attention, options) in
            [("gated", json!({ "convolution": 4 })), ("gated,shaw", json!({ "gated": { "convolution": 4 } }))]
        {
            assert!(split(attention, options).unwrap_err().to_string().contains("not with the option convolution"));
        }
        split("gated", json!({ "convolution": null })).unwrap();
    }
}
