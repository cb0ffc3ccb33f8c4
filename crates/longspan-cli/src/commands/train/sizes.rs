//! The sizes of a model for which a person chose none: from the data, and from the minutes given.

use std::time::Instant;

use anyhow::Result;
use burn::tensor::{Device, Tensor};
use longspan::layers::{Activation, After, linear};

use crate::run::config::{Common, Config, ModelSettings, TaskSettings};

/// Settings that are chosen together, where none of them is given.
pub const KEYS: [&str; 6] = ["d_model", "heads", "d_ff", "layers", "encoder_layers", "decoder_layers"];

const WIDTHS: [usize; 10] = [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024];

/// From this width on, models grow in depth, too.
const DEEPER: usize = 256;

/// More weights than this for each token of the data only learn it by heart.
const WEIGHTS_PER_TOKEN: f64 = 30.0;

/// Tokens for each weight that a given time is best divided into (Hoffmann et al. 2022).
const TOKENS_PER_WEIGHT: f64 = 20.0;

/// What training reaches of the machine's product rate.
const SHARE_OF_PRODUCTS: f64 = 0.4;

/// Sets the sizes for data of so many tokens, and what is [`learned_in`] the minutes if some are given, and says what they are for if they
/// are not the usual ones. Without minutes, models only become smaller.
pub fn choose<S: TaskSettings>(config: &mut Config<S>, tokens: f64, learned: Option<f64>) -> Result<Option<String>> {
    let default = config.clone();
    let by_data = WEIGHTS_PER_TOKEN * tokens;
    let by_time = learned.map_or(weights(&default), |learned| (learned / TOKENS_PER_WEIGHT).sqrt());
    let wanted = by_data.min(by_time).max(1.0);
    let distance = |config: &Config<S>| (weights(config) / wanted).ln().abs();
    let sizes = WIDTHS.iter().map(|width| resized(&default, *width)).collect::<Result<Vec<_>>>()?;
    if let Some(sizes) = sizes.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b))) {
        *config = sizes;
    }
    Ok((config.model.d_model != default.model.d_model).then(|| match default.training.minutes {
        Some(minutes) if by_time < by_data => format!("{minutes} minutes of this machine"),
        _ => format!("{tokens:.0} tokens of data"),
    }))
}

/// Weights times the tokens that they learn from in some minutes, of 6 flops each: 2 forward, 4 backward.
pub fn learned_in(minutes: f64) -> Result<f64> {
    Ok(at_rate(minutes, product_rate()?))
}

fn at_rate(minutes: f64, rate: f64) -> f64 {
    SHARE_OF_PRODUCTS * rate * 60.0 * minutes / 6.0
}

/// How many times a run will go over its data, about.
pub fn passes<S: TaskSettings>(config: &Config<S>, (tokens, per_epoch): (f64, usize), learned: Option<f64>) -> f64 {
    let steps = config.training.steps.unwrap_or(0) as f64 / per_epoch.max(1) as f64;
    learned.map_or(steps, |learned| learned / weights(config) / tokens.max(1.0))
}

/// Flops a second of products like a model's, on all threads.
fn product_rate() -> Result<f64> {
    let [m, k, n] = [1024, 256, 1024];
    let ones = |shape| Tensor::<2>::ones(shape, &Device::flex());
    let (x, weight) = (ones([m, k]), ones([k, n]));
    let mut least = f64::INFINITY;
    // The first one also finds its memory.
    for _ in 0..4 {
        let started = Instant::now();
        linear(x.clone(), weight.clone(), None, Activation::Identity, After::default())?;
        least = least.min(started.elapsed().as_secs_f64());
    }
    Ok(2.0 * (m * k * n) as f64 / least)
}

/// The settings at another width, in the same proportions.
fn resized<S: TaskSettings>(config: &Config<S>, width: usize) -> Result<Config<S>> {
    let ModelSettings { d_model: default, heads, d_ff, .. } = config.model;
    // Small models keep their heads, large ones the width of a head.
    let heads = heads * width.max(default) / default;
    let mut sizes = config.edited(|all| {
        for (_, layers) in all.iter_mut().filter(|(key, _)| key.ends_with("layers")) {
            *layers = (layers.as_u64().unwrap_or(1) as usize * width.max(DEEPER) / DEEPER).into();
        }
        Ok(())
    })?;
    sizes.model.heads = (1..=heads).rev().find(|heads| width.is_multiple_of(*heads)).unwrap_or(1);
    (sizes.model.d_model, sizes.model.d_ff) = (width, d_ff * width / default);
    Ok(sizes)
}

/// Weights of the products in all blocks, about.
fn weights<S: TaskSettings>(config: &Config<S>) -> f64 {
    let ModelSettings { d_model, d_ff, gated, .. } = config.model;
    let Common { blocks, crossing, .. } = config.common();
    let block = 4 * d_model * d_model + (2 + usize::from(gated)) * d_model * d_ff;
    (blocks * block + crossing * 4 * d_model * d_model) as f64
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::run::config::{PairsSettings, SeriesSettings, TextSettings, with};

    fn chosen<S: TaskSettings>(config: &Config<S>, minutes: Option<f64>, tokens: f64) -> (Config<S>, Option<String>) {
        let mut config = config.clone();
        config.training.minutes = minutes;
        let said = choose(&mut config, tokens, minutes.map(|minutes| at_rate(minutes, 250e9))).unwrap();
        (config, said)
    }

    fn keeps_its_sizes<S: TaskSettings>(config: &Config<S>) {
        for tokens in [1e6, f64::INFINITY] {
            assert_eq!(chosen(config, None, tokens), (config.clone(), None));
        }
    }

    #[test]
    fn enough_data_without_minutes_leave_the_defaults() {
        keeps_its_sizes(&with::<PairsSettings>(json!({ "pairs": "a" })));
        keeps_its_sizes(&with::<PairsSettings>(json!({})));
        keeps_its_sizes(&with::<TextSettings>(json!({ "text": ["a"] })));
    }

    #[test]
    fn little_data_makes_small_models() {
        let config = with::<SeriesSettings>(json!({ "series": "a" }));
        let (sizes, said) = chosen(&config, Some(1e6), 500.0);
        let ModelSettings { d_model, heads, d_ff, .. } = sizes.model;
        assert_eq!((d_model, heads, d_ff, sizes.task.stack.layers), (32, 4, 64, 2));
        assert_eq!(said.unwrap(), "500 tokens of data");
        assert_eq!(chosen(&config, None, 0.0).0.model.d_model, 32, "whatever is there");
    }

    #[test]
    fn heads_divide_every_width() {
        for width in WIDTHS {
            let ModelSettings { d_model, heads, .. } = resized(&with::<PairsSettings>(json!({})), width).unwrap().model;
            assert!(
                d_model.is_multiple_of(heads) && (16..=64).contains(&(d_model / heads)),
                "{heads} heads of {d_model}"
            );
        }
    }

    #[test]
    fn passes_come_from_steps_or_from_minutes() {
        let config = with::<TextSettings>(json!({ "text": ["a"], "steps": 1000 }));
        assert_eq!(passes(&config, (1e6, 250), None), 4.0);
        // 655,360 weights of 6 flops a token, at 0.4 of the rate.
        let found = passes(&config, (1e6, 250), Some(at_rate(10.0, 1e11)));
        assert!((found - 0.4e11 * 600.0 / (6.0 * 655_360.0) / 1e6).abs() < 1e-9, "{found}");
    }

    #[test]
    fn more_minutes_make_larger_models() {
        let config = with::<TextSettings>(json!({ "text": ["a"] }));
        let widths =
            [0.01, 1.0, 10.0, 60.0, 600.0, 1e6].map(|minutes| chosen(&config, Some(minutes), 1e9).0.model.d_model);
        assert_eq!(widths, [32, 64, 128, 192, 384, 1024]);
        let (sizes, said) = chosen(&config, Some(60.0), 1e9);
        assert_eq!((sizes.model.heads, sizes.model.d_ff, sizes.task.layers), (12, 384, 4));
        assert_eq!(said.unwrap(), "60 minutes of this machine");
        assert_eq!(chosen(&config, Some(1e6), 1e9).0.task.layers, 16);
    }
}
