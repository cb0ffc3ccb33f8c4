//! A classifier sees what it should, whatever stands in the padding, and learns.

mod support;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::AttentionConfig;
use longspan::models::{Classifier, ClassifierConfig, Pooling, Positions};
use support::{assert_close, block, numbers};

fn config() -> ClassifierConfig {
    ClassifierConfig::new(12, 3).with_block(block())
}

fn ids(rows: &[Vec<usize>]) -> (Tensor<2, Int>, Vec<usize>) {
    padded(rows, 0)
}

/// Rows padded with any token.
fn padded(rows: &[Vec<usize>], pad: i64) -> (Tensor<2, Int>, Vec<usize>) {
    let longest = rows.iter().map(Vec::len).max().unwrap();
    let row = |row: &Vec<usize>| (0..longest).map(|t| row.get(t).map_or(pad, |&id| id as i64)).collect::<Vec<_>>();
    let numbers: Vec<i64> = rows.iter().flat_map(row).collect();
    let tensor = Tensor::from_data(TensorData::new(numbers, [rows.len(), longest]), &Device::flex());
    (tensor, rows.iter().map(Vec::len).collect())
}

fn logits(model: &Classifier, (tokens, lengths): (Tensor<2, Int>, Vec<usize>)) -> Vec<f32> {
    numbers(model.forward(tokens, &lengths).unwrap())
}

#[test]
fn a_sequence_has_the_same_logits_alone_and_in_a_batch_whatever_its_padding() {
    let rows = [vec![3, 4, 5, 6, 7], vec![8], vec![1, 9, 2]];
    for name in AttentionConfig::NAMES {
        for causal in [false, true] {
            for pooling in [Pooling::Mean, Pooling::Last, Pooling::Attention] {
                let name = format!("{name} {causal} {pooling:?}");
                Device::flex().seed(4);
                let attention = vec![AttentionConfig::by_name(name.split(' ').next().unwrap()).unwrap()];
                let config = config().with_attention(attention).with_causal(causal).with_pooling(pooling);
                let model = config.init(&Device::flex()).unwrap();
                let all = logits(&model, ids(&rows));
                assert_eq!(all, logits(&model, padded(&rows, 11)), "{name}");
                for (n, row) in rows.iter().enumerate() {
                    let alone = logits(&model, ids(std::slice::from_ref(row)));
                    assert_close(&format!("{name}, row {n}"), &alone, &all[n * 3..][..3], 1e-4);
                }
            }
        }
    }
}

#[test]
fn pooling_and_direction_decide_on_what_counts() {
    // With no block at all, the last row is the last token alone, and the mean does not know the order.
    let bare = |pooling| config().with_layers(0).with_pooling(pooling).init(&Device::flex()).unwrap();
    let last = bare(Pooling::Last);
    assert_eq!(logits(&last, ids(&[vec![1, 2, 3]])), logits(&last, ids(&[vec![7, 3]])));
    let mean = bare(Pooling::Mean);
    assert_eq!(logits(&mean, ids(&[vec![1, 2]])), logits(&mean, ids(&[vec![2, 1]])));
    assert_ne!(logits(&mean, ids(&[vec![1, 2]])), logits(&mean, ids(&[vec![3, 1]])));
    let placed = config().with_layers(1).with_positions(Positions::Sinusoidal).init(&Device::flex()).unwrap();
    assert_ne!(logits(&placed, ids(&[vec![1, 2]])), logits(&placed, ids(&[vec![2, 1]])));
}

#[test]
fn attention_pooling_weighs_rows_by_its_query() {
    let device = Device::flex().autodiff();
    Device::flex().seed(4);
    let mut model = config().with_layers(1).with_pooling(Pooling::Attention).init(&device).unwrap();
    let rows = [vec![3, 4, 5], vec![6, 7]];
    let (tokens, lengths) = ids(&rows);
    let loss = model.loss(tokens.autodiff(), &lengths, &[0, 2], 0.0).unwrap();
    let gradients = GradientsParams::from_grads(loss.smoothed.backward(), &model);
    let id = model.pooling_query.as_ref().unwrap().id;
    let query = gradients.get::<1>(id).unwrap().abs().max().into_scalar::<f32>();
    assert!(query > 1e-6, "the query has no gradient: {query}");
    // At 0 it weighs all rows alike; far along a direction it does not.
    let at_zero = logits(&model.valid(), ids(&rows));
    let mut mean = config().with_layers(1).with_pooling(Pooling::Mean).init(&Device::flex()).unwrap();
    let Classifier { embedding, blocks, norm, output, .. } = model.valid();
    (mean.embedding, mean.blocks, mean.norm, mean.output) = (embedding, blocks, norm, output);
    assert_close("at 0", &at_zero, &logits(&mean, ids(&rows)), 1e-5);
    model.pooling_query = model.pooling_query.map(|old| {
        let far: Vec<f32> = (0..16).map(|n| 40.0 * (n as f32 - 7.5)).collect();
        Param::initialized(old.id, Tensor::from_data(TensorData::new(far, [16]), &device))
    });
    assert_ne!(at_zero, logits(&model.valid(), ids(&rows)));
}

#[test]
fn the_squared_error_is_the_sum_over_all_numbers() {
    let model = config().with_layers(1).init(&Device::flex()).unwrap();
    let (tokens, lengths) = ids(&[vec![3, 4, 5], vec![6, 7]]);
    let targets = [0.5, -1.0, 2.0, 0.0, 1.0, -3.0];
    let found = logits(&model, (tokens.clone(), lengths.clone()));
    let expected: f32 = found.iter().zip(&targets).map(|(y, t)| (y - t).powi(2)).sum();
    let got = model.squared_error(tokens.clone(), &lengths, &targets).unwrap().into_scalar::<f32>();
    assert!((got - expected).abs() < 1e-4 * expected, "{got} instead of {expected}");
    let error = model.squared_error(tokens, &lengths, &targets[..5]).unwrap_err().to_string();
    assert!(error.contains("targets: expected 6, one a number, got 5"), "{error}");
}

#[test]
fn it_learns_an_order_that_counts_alone_do_not_tell() {
    // Which of 1, 2 and 3 comes first, among others.
    let device = Device::flex().autodiff();
    device.seed(3);
    let mut model = config().with_block(block().with_d_model(32)).init(&device).unwrap();
    let mut optimizer = AdamWConfig::new().init();
    let example = |n: usize| {
        let first = n * 7 % 3;
        let others = [(first + 1 + n % 2) % 3, (first + 2 - n % 2) % 3];
        let noise = |k: usize| 4 + (n * 5 + k * 3 + n / 11) % 8;
        let row = vec![noise(0), first + 1, noise(1), others[0] + 1, noise(2), others[1] + 1, noise(3)];
        (row, first as u32)
    };
    let batch = |from: usize| {
        let (rows, classes): (Vec<_>, Vec<_>) = (from..from + 24).map(example).unzip();
        let (tokens, lengths) = ids(&rows);
        (tokens, lengths, classes)
    };
    for step in 0..300 {
        let (tokens, lengths, classes) = batch(step * 24);
        let loss = model.loss(tokens.autodiff(), &lengths, &classes, 0.0).unwrap();
        let gradients = GradientsParams::from_grads(loss.smoothed.mul_scalar(1.0 / 24.0).backward(), &model);
        model = optimizer.step(4e-3, model, gradients);
    }
    let (tokens, lengths, classes) = batch(1_000_003);
    let loss = model.valid().loss(tokens, &lengths, &classes, 0.0).unwrap().plain.into_scalar::<f32>() / 24.0;
    assert!(loss < 0.1, "the loss is still {loss}; a guess has {}", 3f32.ln());
}

#[test]
fn mistakes_are_errors() {
    let error = |config: ClassifierConfig| config.init(&Device::flex()).map(drop).unwrap_err().to_string();
    assert!(error(ClassifierConfig::new(12, 0)).contains("outputs"));
    assert!(error(config().with_attention(Vec::new())).contains("attention"));
    let model = config().init(&Device::flex()).unwrap();
    let (tokens, _) = ids(&[vec![1, 2]]);
    for lengths in [vec![], vec![3], vec![0], vec![1, 1]] {
        let error = model.forward(tokens.clone(), &lengths).unwrap_err().to_string();
        assert!(error.contains("lengths"), "{error}");
    }
    assert!(model.loss(tokens, &[2], &[3], 0.0).unwrap_err().to_string().contains("below 3"));
}
