//! Trains a language model and a classifier by Burn's `Learner` on drawn sequences:
//! `cargo run --release -p longspan --features train --example learner`.

use std::path::Path;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Learner, SupervisedTraining};
use longspan::generate::{TextOptions, generate_text};
use longspan::models::{BlockConfig, ClassifierConfig, LanguageModelConfig, LanguageState};
use longspan::sample::SampleOptions;
use longspan::train::TokenBatcher;

fn main() -> longspan::Result<()> {
    let device = Device::flex().autodiff();
    let folder = std::env::temp_dir().join(format!("longspan-learner-{}", std::process::id()));
    let block = || BlockConfig::new().with_d_model(32).with_d_ff(64).with_heads(4).with_dropout(0.0);

    // Texts that count upwards in steps of 1 to 3, of different lengths.
    let text = |n: u32| -> Vec<u32> { (0..12 + n % 7).map(|i| (n + i * (1 + n % 3)) % 11).collect() };
    let texts = |from: u32, to: u32, batch| {
        let loader = DataLoaderBuilder::new(TokenBatcher).batch_size(batch).shuffle(1);
        loader.build(InMemDataset::new((from..to).map(text).collect::<Vec<_>>()))
    };
    let model = LanguageModelConfig::new(11).with_block(block()).with_layers(2).init(&device)?;
    let training = SupervisedTraining::new(folder.join("text"), texts(0, 480, 16), texts(480, 512, 16))
        .metrics((LossMetric::new(),))
        .num_epochs(3);
    let model = training.launch(Learner::new(model, AdamWConfig::new().init(), 3e-3)).model;
    let sample = SampleOptions { temperature: 0.0, ..Default::default() };
    let options = TextOptions { max_tokens: 6, sample, ..Default::default() };
    println!(
        "2, 4, 6, 8, then {:?}",
        generate_text(&model, &[2, 4, 6, 8], &mut LanguageState::default(), &options, |_| true)?
    );

    // Whether a text counts by 1, 2 or 3.
    let labelled = |from: u32, to: u32| {
        let texts: Vec<_> = (from..to).map(|n| (text(n), n % 3)).collect();
        DataLoaderBuilder::new(TokenBatcher).batch_size(16).shuffle(1).build(InMemDataset::new(texts))
    };
    let model = ClassifierConfig::new(11, 3).with_block(block()).init(&device)?;
    SupervisedTraining::new(folder.join("classes"), labelled(0, 480), labelled(480, 512))
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .num_epochs(8)
        .launch(Learner::new(model, AdamWConfig::new().init(), 3e-3));
    println!("logs and metrics: {}", Path::new(&folder).display());
    Ok(())
}
