//! Times one training step of a small sequence-to-sequence model: 256 words of 9 letters, width 128, 2 + 2 layers.
//!
//! Arguments: `shaw` (default), `kernelized` or `softmax`, then the dropout.
use std::time::Instant;

use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::AttentionConfig;
use longspan::models::{Positions, Seq2SeqConfig};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let dropout: f64 = args.get(2).map_or(0.1, |x| x.parse().unwrap());
    let attention = match args.get(1).map(String::as_str) {
        Some("softmax") => AttentionConfig::softmax(),
        Some("kernelized") => AttentionConfig::kernelized(),
        _ => AttentionConfig::shaw(),
    };
    let cross = if args.get(1).is_some_and(|x| x == "softmax") {
        AttentionConfig::softmax()
    } else {
        AttentionConfig::kernelized()
    };
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Seq2SeqConfig::new(32, 44)
        .with_d_model(128)
        .with_heads(4)
        .with_d_ff(512)
        .with_dropout(dropout)
        .with_attention(attention)
        .with_cross_attention(cross)
        .with_positions(Positions::None)
        .init(&device)
        .unwrap();
    let mut optimizer = AdamWConfig::new().init();
    let loss_of = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])).init(&device);
    let (rows, ls, lt) = (256, 9, 8);
    let ids = |n: usize| {
        let v: Vec<i64> = (0..rows * n).map(|i| 1 + (i * 7 % 30) as i64).collect();
        Tensor::<2, Int>::from_data(TensorData::new(v, [rows, n]), &device)
    };
    let lengths: Vec<usize> = (0..rows).map(|b| 4 + b % 6).collect();
    let (mut tf, mut tb, mut to) = (0.0, 0.0, 0.0);
    let steps = 30;
    for step in 0..steps + 3 {
        let t0 = Instant::now();
        let logits = model.forward(ids(ls), &lengths, ids(lt)).unwrap();
        let loss = loss_of.forward(logits.reshape([rows * lt, 44]), ids(lt).reshape([rows * lt]));
        let t1 = Instant::now();
        let grads = loss.backward();
        let t2 = Instant::now();
        let gradients = GradientsParams::from_grads(grads, &model);
        model = optimizer.step(1e-3, model, gradients);
        let t3 = Instant::now();
        if step >= 3 {
            tf += (t1 - t0).as_secs_f64();
            tb += (t2 - t1).as_secs_f64();
            to += (t3 - t2).as_secs_f64();
        }
    }
    let ms = |t: f64| t / steps as f64 * 1e3;
    println!("forward {:.1} ms  backward {:.1} ms  optimizer {:.1} ms", ms(tf), ms(tb), ms(to));
}
