//! The whole model learns: reversing short sequences, which takes the order of both sides.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::AttentionConfig;
use longspan::models::{BlockConfig, Positions, Seq2SeqConfig};

const END: i32 = 1;
const START: i32 = 2;

/// Random sources over 6 letters with their reversals, padded with 0: `(source, lengths, target_in, target_out)`.
fn batch(seed: u64, rows: usize, longest: usize) -> (Vec<i32>, Vec<usize>, Vec<i32>, Vec<i32>) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % n
    };
    let (mut source, mut lengths, mut target_in, mut target_out) = (vec![], vec![], vec![], vec![]);
    for _ in 0..rows {
        let length = 1 + next(longest as u64) as usize;
        let word: Vec<i32> = (0..length).map(|_| 3 + next(6) as i32).collect();
        let pad = longest - length;
        source.extend(word.iter().copied().chain(std::iter::repeat_n(0, pad)));
        lengths.push(length);
        target_in.extend([START].into_iter().chain(word.iter().rev().copied()).chain(std::iter::repeat_n(0, pad)));
        target_out.extend(word.iter().rev().copied().chain([END]).chain(std::iter::repeat_n(0, pad)));
    }
    (source, lengths, target_in, target_out)
}

fn loss_after(attention: AttentionConfig, positions: Positions, steps: u64) -> f32 {
    let device = Device::flex().autodiff();
    device.seed(7);
    let mut model = Seq2SeqConfig::new(9, 9)
        .with_block(BlockConfig::new().with_d_model(32).with_heads(2).with_d_ff(64).with_dropout(0.0))
        .with_encoder_layers(1)
        .with_decoder_layers(1)
        .with_attention(attention)
        .with_positions(positions)
        .init(&device)
        .unwrap();
    let mut optimizer = AdamWConfig::new().init();
    let loss_of = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])).init(&device);
    let mut last = f32::NAN;
    for step in 0..steps {
        let (rows, longest) = (64, 5);
        let (source, lengths, target_in, target_out) = batch(step + 1, rows, longest);
        let ids = |x: Vec<i32>, n| Tensor::<2, Int>::from_data(TensorData::new(x, [rows, n]), &device);
        let logits = model.forward(ids(source, longest), &lengths, ids(target_in, longest + 1)).unwrap();
        let targets = ids(target_out, longest + 1).reshape([rows * (longest + 1)]);
        let loss = loss_of.forward(logits.reshape([rows * (longest + 1), 9]), targets);
        last = loss.clone().into_scalar::<f32>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-3, model, gradients);
    }
    last
}

#[test]
fn a_model_with_relative_positions_learns_to_reverse() {
    let loss = loss_after(AttentionConfig::shaw(), Positions::None, 300);
    assert!(loss < 0.5, "loss {loss}");
}

#[test]
fn the_softmax_baseline_learns_to_reverse() {
    let loss = loss_after(AttentionConfig::softmax(), Positions::Sinusoidal, 300);
    assert!(loss < 0.5, "loss {loss}");
}
