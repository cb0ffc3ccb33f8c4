//! The sizes of a model for which a person chose none: from the data, and from the minutes given.

use std::time::Instant;

use anyhow::Result;
use burn::tensor::{Device, Tensor};
use longspan::layers::{Activation, After, linear};

use crate::run::config::{RunConfig, TaskKind};

/// Settings that are chosen together, where none of them is given.
pub const KEYS: [&str; 6] = ["d_model", "heads", "d_ff", "layers", "encoder_layers", "decoder_layers"];

/// Widths to choose from.
const WIDTHS: [usize; 10] = [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024];

/// From this width on, models grow in depth, too.
const DEEPER: usize = 256;

/// More weights than this for each token of the data only learn it by heart.
const WEIGHTS_PER_TOKEN: f64 = 30.0;

/// Tokens for each weight that a given time is best divided into (Hoffmann et al. 2022).
const TOKENS_PER_WEIGHT: f64 = 20.0;

/// What training reaches of the machine's product rate.
const SHARE_OF_PRODUCTS: f64 = 0.4;

/// Sets the sizes for data of so many tokens, and says what they are for if they are not the usual ones. Without minutes, models
/// only become smaller.
pub fn choose(config: &mut RunConfig, tokens: f64, rate: impl FnOnce() -> Result<f64>) -> Result<Option<String>> {
    let default = config.clone();
    let by_data = WEIGHTS_PER_TOKEN * tokens;
    let by_time = match default.minutes {
        // Flops of a weight and a token: 2 forward, 4 backward.
        Some(minutes) => (SHARE_OF_PRODUCTS * rate()? * 60.0 * minutes / (6.0 * TOKENS_PER_WEIGHT)).sqrt(),
        None => weights(&default),
    };
    let wanted = by_data.min(by_time).max(1.0);
    let distance = |config: &RunConfig| (weights(config) / wanted).ln().abs();
    let sizes = WIDTHS.map(|width| resized(&default, width));
    if let Some(sizes) = sizes.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b))) {
        *config = sizes;
    }
    Ok((config.d_model != default.d_model).then(|| match default.minutes {
        Some(minutes) if by_time < by_data => format!("{minutes} minutes of this machine"),
        _ => format!("{tokens:.0} tokens of data"),
    }))
}

/// Flops a second of products like a model's, on all threads.
pub fn product_rate() -> Result<f64> {
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
fn resized(config: &RunConfig, width: usize) -> RunConfig {
    let default = config.d_model;
    // Small models keep their heads, large ones the width of a head.
    let heads = config.heads * width.max(default) / default;
    let depth = |layers: usize| layers * width.max(DEEPER) / DEEPER;
    RunConfig {
        d_model: width,
        heads: (1..=heads).rev().find(|heads| width.is_multiple_of(*heads)).unwrap_or(1),
        d_ff: config.d_ff * width / default,
        layers: depth(config.layers),
        encoder_layers: depth(config.encoder_layers),
        decoder_layers: depth(config.decoder_layers),
        ..config.clone()
    }
}

/// Weights of the products in all blocks, about.
fn weights(config: &RunConfig) -> f64 {
    let square = config.d_model * config.d_model;
    let block = 4 * square + (2 + usize::from(config.gated)) * config.d_model * config.d_ff;
    let all = match config.kind() {
        TaskKind::Pairs => (config.encoder_layers + config.decoder_layers) * block + config.decoder_layers * 4 * square,
        _ => config.layers * block,
    };
    all as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(config: &RunConfig, minutes: Option<f64>, tokens: f64) -> (RunConfig, Option<String>) {
        let mut config = RunConfig { minutes, ..config.clone() };
        let told = choose(&mut config, tokens, || Ok(250e9)).unwrap();
        (config, told)
    }

    #[test]
    fn enough_data_without_minutes_leave_the_defaults() {
        for config in [
            RunConfig::default(),
            RunConfig::of_dictionary(),
            RunConfig { text: vec!["a".into()], ..RunConfig::of_text() },
        ] {
            let (sizes, told) = chosen(&config, None, 1e6);
            assert_eq!((&sizes, told), (&config, None));
            assert_eq!(chosen(&config, None, f64::INFINITY).0, config);
        }
    }

    #[test]
    fn little_data_makes_small_models() {
        let config = RunConfig { series: Some("a".into()), ..RunConfig::of_series() };
        let (sizes, told) = chosen(&config, Some(1e6), 500.0);
        assert_eq!((sizes.d_model, sizes.heads, sizes.d_ff, sizes.layers), (32, 4, 64, 2));
        assert_eq!(told.unwrap(), "500 tokens of data");
        assert_eq!(chosen(&config, None, 0.0).0.d_model, 32, "whatever is there");
    }

    #[test]
    fn heads_divide_every_width() {
        for width in WIDTHS {
            let RunConfig { d_model, heads, .. } = resized(&RunConfig::of_dictionary(), width);
            assert!(
                d_model.is_multiple_of(heads) && (16..=64).contains(&(d_model / heads)),
                "{heads} heads of {d_model}"
            );
        }
    }

    #[test]
    fn more_minutes_make_larger_models() {
        let config = RunConfig { text: vec!["a".into()], ..RunConfig::of_text() };
        let widths: Vec<usize> =
            [0.01, 1.0, 10.0, 60.0, 600.0, 1e6].map(|minutes| chosen(&config, Some(minutes), 1e9).0.d_model).into();
        assert_eq!(widths, [32, 64, 128, 192, 256, 1024]);
        let (sizes, told) = chosen(&config, Some(60.0), 1e9);
        assert_eq!((sizes.heads, sizes.d_ff, sizes.layers), (6, 768, 4));
        assert_eq!(told.unwrap(), "60 minutes of this machine");
        assert_eq!(chosen(&config, Some(1e6), 1e9).0.layers, 16);
    }
}
