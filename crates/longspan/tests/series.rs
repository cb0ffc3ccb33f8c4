//! A model of series sees values and times, whatever stands in the padding, and learns from times alone.

mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor, TensorData};
use longspan::attention::{AttentionConfig, AttentionMask, MultiHeadAttentionConfig};
use longspan::models::{Pooling, SeriesModel, SeriesModelConfig};
use support::{assert_close, block, numbers};

fn config() -> SeriesModelConfig {
    SeriesModelConfig::new(2, 3).with_block(block())
}

/// A series: its points' values on two channels and their times.
type Series = (Vec<[f32; 2]>, Vec<f32>);

fn series(points: usize, seed: usize) -> Series {
    let values = (0..points).map(|n| [((n * 7 + seed) % 5) as f32 - 2.0, ((n * 3 + 2 * seed) % 7) as f32 / 3.0]);
    (values.collect(), (0..points).map(|n| n as f32 * 1.3 + ((n * n + seed) % 4) as f32 * 0.2).collect())
}

/// A batch, padded with a number.
fn batch(rows: &[Series], pad: f32) -> (Tensor<3>, Tensor<2>, Vec<usize>) {
    let longest = rows.iter().map(|row| row.1.len()).max().unwrap();
    let (mut values, mut times) = (Vec::new(), Vec::new());
    for (row, at) in rows {
        values.extend(row.iter().flatten().copied().chain(std::iter::repeat_n(pad, 2 * (longest - at.len()))));
        times.extend(at.iter().copied().chain(std::iter::repeat_n(pad, longest - at.len())));
    }
    let values = Tensor::from_data(TensorData::new(values, [rows.len(), longest, 2]), &Device::flex());
    let times = Tensor::from_data(TensorData::new(times, [rows.len(), longest]), &Device::flex());
    (values, times, rows.iter().map(|row| row.1.len()).collect())
}

fn logits(model: &SeriesModel, rows: &[Series], pad: f32) -> Vec<f32> {
    let (values, times, lengths) = batch(rows, pad);
    numbers(model.forward(values, times, &lengths).unwrap())
}

/// The backend has one generator a process: a test whose weights are to be the same each time draws alone.
fn alone() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_series_has_the_same_logits_alone_and_in_a_batch_whatever_its_padding() {
    let _alone = alone();
    let rows = [series(9, 1), series(1, 2), series(4, 3)];
    for name in AttentionConfig::NAMES {
        for pooling in [Pooling::Mean, Pooling::Last, Pooling::Attention] {
            let attention = vec![AttentionConfig::by_name(name).unwrap()];
            let model = config().with_attention(attention).with_pooling(pooling).init(&Device::flex()).unwrap();
            let all = logits(&model, &rows, 0.0);
            assert_eq!(all, logits(&model, &rows, -77.0), "{name} {pooling:?}");
            for (n, row) in rows.iter().enumerate() {
                let alone = logits(&model, std::slice::from_ref(row), 0.0);
                assert_close(&format!("{name} {pooling:?}, series {n}"), &alone, &all[n * 3..][..3], 1e-4);
            }
        }
    }
}

#[test]
fn rows_at_points_are_those_whose_mean_is_told() {
    let _alone = alone();
    let rows = [series(9, 1), series(1, 2), series(4, 3)];
    let model = config().init(&Device::flex()).unwrap();
    let (values, times, lengths) = batch(&rows, 0.0);
    let points = model.at_points(values, times, &lengths).unwrap();
    assert_eq!(points.dims(), [3, 9, 3]);
    let all = logits(&model, &rows, 0.0);
    for (n, length) in lengths.into_iter().enumerate() {
        let mean = points.clone().slice([n..n + 1, 0..length, 0..3]).mean_dim(1);
        assert_close(&format!("series {n}"), &numbers(mean), &all[3 * n..][..3], 1e-5);
    }
}

#[test]
fn only_differences_of_times_count_and_only_for_fourier() {
    let _alone = alone();
    let row = series(12, 5);
    let moved = |shift: f32, scale: f32| (row.0.clone(), row.1.iter().map(|t| t * scale + shift).collect::<Vec<_>>());
    for (name, sees) in [("fourier", true), ("shaw", false)] {
        let attention = vec![AttentionConfig::by_name(name).unwrap()];
        let model = config().with_attention(attention).init(&Device::flex()).unwrap();
        let plain = logits(&model, std::slice::from_ref(&row), 0.0);
        assert_close(name, &logits(&model, &[moved(8.0, 1.0)], 0.0), &plain, 1e-4);
        let stretched = logits(&model, &[moved(0.0, 3.0)], 0.0);
        let same = plain.iter().zip(&stretched).all(|(a, b)| (a - b).abs() <= 1e-3);
        assert_eq!(!same, sees, "{name}: {plain:?} {stretched:?}");
    }
}

#[test]
fn positions_that_count_are_those_of_self_attention() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let attention = AttentionConfig::fourier();
    assert!(attention.takes_positions() && !AttentionConfig::shaw().takes_positions());
    let module = MultiHeadAttentionConfig::new(8, 2).with_attention(attention).init(&device).unwrap();
    let noise: Vec<f32> = (0..2 * 6 * 8).map(|n| ((n * 13 % 17) as f32 - 8.0) / 5.0).collect();
    let x = Tensor::<3>::from_data(TensorData::new(noise, [2, 6, 8]), &device).require_grad();
    let counted: Vec<f32> = (0..12).map(|n| (n % 6) as f32).collect();
    let positions = Tensor::<3>::from_data(TensorData::new(counted, [2, 6, 1]), &device).require_grad();
    for mask in [AttentionMask::causal(), AttentionMask::bidirectional().with_lengths(&[6, 4])] {
        let plain = module.self_attention(x.clone(), &mask).unwrap();
        let placed = module.self_attention_at(x.clone(), positions.clone(), &mask).unwrap();
        let vector = |x: &Tensor<3>| numbers(x.clone());
        assert_close("outputs", &vector(&placed), &vector(&plain), 1e-5);
        let square = |y: Tensor<3>| (y.clone() * y).sum().backward();
        let (of_plain, of_placed) = (square(plain), square(placed));
        assert_close("gradients", &vector(&x.grad(&of_placed).unwrap()), &vector(&x.grad(&of_plain).unwrap()), 1e-4);
        assert!(positions.grad(&of_placed).unwrap().abs().max().into_scalar::<f32>() > 1e-4);
    }
    let mask = AttentionMask::causal();
    let error = module.self_attention_at(x.clone(), positions.clone().narrow(1, 0, 5), &mask).unwrap_err().to_string();
    assert!(error.contains("query positions: expected [2, 6, 1]"), "{error}");
    let packed = AttentionMask::causal().with_packed(&[2, 4]);
    let one = (x.narrow(0, 0, 1), positions.narrow(0, 0, 1));
    let error = module.self_attention_at(one.0, one.1, &packed).unwrap_err().to_string();
    assert!(error.contains("no packed sequences"), "{error}");
}

#[test]
fn it_learns_from_irregular_times_what_counted_points_do_not_tell() {
    let _alone = alone();
    // A wave of one of two frequencies, seen at random times: its values alone, in their order, are alike.
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut example = |n: usize| {
        let class = n % 2;
        let (phase, frequency) = (6.3 * random(), [0.5, 0.8][class]);
        let mut times: Vec<f32> = (0..24).map(|_| 48.0 * random()).collect();
        times.sort_by(f32::total_cmp);
        let values = times.iter().map(|t| [(frequency * t + phase).sin(), (frequency * t + phase).cos()]);
        (values.collect::<Vec<_>>(), times)
    };
    let batches: Vec<Vec<Series>> = (0..201).map(|_| (0..24).map(&mut example).collect()).collect();
    let classes: Vec<u32> = (0..24).map(|n| n % 2).collect();
    let device = Device::flex().autodiff();
    let mut losses = Vec::new();
    for name in ["fourier", "shaw"] {
        device.seed(3);
        let attention = vec![AttentionConfig::by_name(name).unwrap()];
        let mut model = config().with_block(block().with_d_model(32)).with_attention(attention).init(&device).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        for rows in &batches[..200] {
            let (values, times, lengths) = batch(rows, 0.0);
            let loss = model.loss(values.autodiff(), times.autodiff(), &lengths, &classes, 0.0).unwrap();
            let gradients = GradientsParams::from_grads(loss.smoothed.mul_scalar(1.0 / 24.0).backward(), &model);
            model = optimizer.step(4e-3, model, gradients);
        }
        let (values, times, lengths) = batch(&batches[200], 0.0);
        let loss = model.valid().loss(values, times, &lengths, &classes, 0.0).unwrap();
        losses.push(loss.plain.into_scalar::<f32>() / 24.0);
    }
    assert!(losses[0] < 0.3 && losses[1] > 2.0 * losses[0], "{losses:?}; a guess has {}", 2f32.ln());
}

#[test]
fn mistakes_are_errors() {
    let _alone = alone();
    let error = |config: SeriesModelConfig| config.init(&Device::flex()).map(drop).unwrap_err().to_string();
    assert!(error(SeriesModelConfig::new(0, 2)).contains("channels"));
    assert!(error(config().with_attention(Vec::new())).contains("attention"));
    let model = config().init(&Device::flex()).unwrap();
    let (values, times, lengths) = batch(&[series(4, 1)], 0.0);
    let error = |values, times, lengths: &[usize]| model.forward(values, times, lengths).unwrap_err().to_string();
    assert!(error(values.clone().narrow(2, 0, 1), times.clone(), &lengths).contains("values: expected [1, 4, 2]"));
    assert!(error(values.clone(), times.clone().narrow(1, 0, 3), &lengths).contains("times: expected [1, 4]"));
    assert!(error(values, times, &[5]).contains("lengths"));
}
