//! Token-by-token decoding gives the rows of the parallel forward pass, and searches find what they should.

mod support;

use std::sync::{Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::{AttentionConfig, KernelConfig, KernelizedOptions, RelativeConfig, ShawOptions};
use longspan::generate::{GenerateOptions, beam_search, greedy};
use longspan::kernels::FeatureMap;
use longspan::layers::{Activation, NormKind};
use longspan::models::{BlockConfig, Norm, Positions, Seq2Seq, Seq2SeqConfig};
use support::{assert_close, numbers};

fn device() -> Device {
    Device::flex()
}

/// A model as it is decoded with.
fn model(attention: AttentionConfig, cross: AttentionConfig, norm: Norm, kv_heads: Option<usize>) -> Seq2Seq {
    training_model(attention, cross, norm, kv_heads).valid()
}

/// A model on a training device, where states are tensors that autodiff can follow.
fn training_model(attention: AttentionConfig, cross: AttentionConfig, norm: Norm, kv_heads: Option<usize>) -> Seq2Seq {
    let block = block().with_kv_heads(kv_heads).with_norm(norm);
    drawn(&config().with_block(block).with_attention(attention).with_cross_attention(cross))
}

/// A model whose weights have been drawn.
fn drawn(config: &Seq2SeqConfig) -> Seq2Seq {
    /// Weights are drawn when they are first looked at, from a generator that all tests share.
    struct Look;
    impl ModuleVisitor for Look {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            param.val();
        }
    }
    static DRAWING: Mutex<()> = Mutex::new(());
    let _alone = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
    device().seed(11);
    let model = config.init(&device().autodiff()).unwrap();
    model.visit(&mut Look);
    model
}

fn block() -> BlockConfig {
    BlockConfig::new().with_d_model(24).with_d_ff(40).with_dropout(0.0)
}

fn config() -> Seq2SeqConfig {
    Seq2SeqConfig::new(13, 7).with_block(block()).with_positions(Positions::Sinusoidal)
}

fn ids(numbers: &[usize], shape: [usize; 2]) -> Tensor<2, Int> {
    let numbers: Vec<i64> = numbers.iter().map(|&n| n as i64).collect();
    Tensor::from_data(TensorData::new(numbers, shape), &device())
}

const SOURCE: [usize; 15] = [3, 9, 12, 4, 5, 6, 7, 0, 0, 0, 8, 0, 0, 0, 0];
const LENGTHS: [usize; 3] = [5, 2, 1];
const TARGET: [usize; 18] = [1, 4, 2, 6, 3, 5, 1, 2, 2, 2, 6, 4, 1, 6, 5, 4, 3, 2];

/// Mechanisms for self-attention.
fn mechanisms() -> Vec<AttentionConfig> {
    let mut all = vec![AttentionConfig::softmax()];
    for feature_map in [FeatureMap::EluPlusOne, FeatureMap::Softplus, FeatureMap::Exp] {
        let kernel = KernelConfig { feature_map, ..KernelConfig::default() };
        all.push(AttentionConfig::Kernelized(KernelizedOptions { kernel: kernel.clone() }));
        for radius in [0, 1, 3, 9] {
            for content in [true, false] {
                let relative = RelativeConfig { radius, content, ..RelativeConfig::default() };
                all.push(AttentionConfig::Shaw(ShawOptions { relative, kernel: kernel.clone() }));
            }
        }
    }
    all.push(AttentionConfig::Shaw(ShawOptions {
        relative: RelativeConfig { radius: 2, shared: true, ..RelativeConfig::default() },
        kernel: KernelConfig { normalize: false, ..KernelConfig::default() },
    }));
    all
}

#[test]
fn step_by_step_gives_the_rows_of_forward() {
    for norm in [Norm::Pre, Norm::Post] {
        for attention in mechanisms() {
            for cross in [AttentionConfig::kernelized(), AttentionConfig::softmax(), attention.clone()] {
                for kv_heads in [None, Some(2)] {
                    let name = format!("{norm:?} {attention:?} {cross:?} {kv_heads:?}");
                    let training = training_model(attention.clone(), cross.clone(), norm, kv_heads);
                    assert_steps(&format!("{name}, decoding"), &training.valid(), |x| x);
                    assert_steps(&format!("{name}, training"), &training, Tensor::autodiff);
                }
            }
        }
    }
}

#[test]
fn norms_activations_and_gates_step_as_they_train_and_recomputing_changes_no_gradient() {
    let block = block()
        .with_norm_kind(NormKind::Rms)
        .with_activation(Activation::Silu)
        .with_gated(true)
        .with_gated_attention(true);
    let [kept, formed_again] =
        [false, true].map(|recompute| drawn(&config().with_block(block.clone().with_recompute(recompute))));
    assert_steps("decoding", &kept.valid(), |x| x);
    assert_steps("training", &kept, Tensor::autodiff);
    let plain = drawn(&self::config());
    let of_attention = 6 * (24 * 24 + 24 + 24);
    let gates = 4 * (24 * 40 + 40) + of_attention;
    assert_eq!(kept.num_params() - plain.num_params(), gates - 12 * 24, "ten gates, and no norm's beta");
    let gradient = |model: &Seq2Seq| {
        let next: Vec<_> = TARGET.iter().map(|&id| Some(id as u32)).collect();
        let source = ids(&SOURCE, [3, 5]).autodiff();
        let loss = model.loss(source, &LENGTHS, ids(&TARGET, [3, 6]).autodiff(), next, 0.1).unwrap();
        let gradients = loss.smoothed.backward();
        numbers(model.encoder[0].attention.query_key_value.weight.val().grad(&gradients).unwrap())
    };
    assert_eq!(gradient(&kept), gradient(&formed_again));
}

/// Asserts that the steps of `model` are the rows of its forward pass; `place` puts tokens on its device.
fn assert_steps(name: &str, model: &Seq2Seq, place: impl Fn(Tensor<2, Int>) -> Tensor<2, Int>) {
    let source = || place(ids(&SOURCE, [3, 5]));
    let whole = numbers(model.forward(source(), &LENGTHS, place(ids(&TARGET, [3, 6]))).unwrap());
    let mut state = model.start(model.encode(source(), &LENGTHS).unwrap());
    for t in 0..6 {
        let tokens: Vec<usize> = (0..3).map(|b| TARGET[b * 6 + t]).collect();
        let row = numbers(model.step(&tokens, &mut state).unwrap());
        let expected: Vec<f32> = (0..3).flat_map(|b| whole[(b * 6 + t) * 7..][..7].to_vec()).collect();
        assert_close(&format!("{name}, token {t}"), &row, &expected, 2e-5);
    }
}

#[test]
fn a_selected_state_goes_on_as_its_own_row() {
    for attention in mechanisms() {
        let model = model(attention.clone(), attention.clone(), Norm::Pre, None);
        let mut state = model.start(model.encode(ids(&SOURCE, [3, 5]), &LENGTHS).unwrap());
        model.step(&[1, 2, 3], &mut state).unwrap();
        model.step(&[4, 5, 6], &mut state).unwrap();
        let mut picked = state.select(&[2, 0, 0, 1]).unwrap();
        let all = numbers(model.step(&[1, 2, 3], &mut state).unwrap());
        let some = numbers(model.step(&[3, 1, 1, 2], &mut picked).unwrap());
        let row = |b: usize| all[b * 7..][..7].to_vec();
        assert_close(&format!("{attention:?}"), &some, &[row(2), row(0), row(0), row(1)].concat(), 2e-5);
    }
}

#[test]
fn contents_of_source_padding_do_not_matter() {
    let model = model(AttentionConfig::shaw(), AttentionConfig::kernelized(), Norm::Pre, None);
    let mut other = SOURCE;
    for i in [7, 8, 9, 11, 12, 13, 14] {
        other[i] = 11;
    }
    let logits = |source| numbers(model.forward(ids(source, [3, 5]), &LENGTHS, ids(&TARGET, [3, 6])).unwrap());
    assert_close("padding", &logits(&other), &logits(&SOURCE), 2e-5);
}

/// The log-probability of a whole target by the parallel pass.
fn log_probability(model: &Seq2Seq, source: &[usize], start: usize, tokens: &[usize], end: usize) -> f64 {
    let inputs: Vec<usize> = [start].into_iter().chain(tokens.iter().copied()).collect();
    let outputs = tokens.iter().copied().chain([end]);
    let count = inputs.len();
    let logits = model.forward(ids(source, [1, source.len()]), &[source.len()], ids(&inputs, [1, count])).unwrap();
    let logits = numbers(logits);
    outputs
        .enumerate()
        .map(|(t, token)| {
            let row = &logits[t * 7..][..7];
            f64::from(row[token]) - row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln()
        })
        .sum()
}

#[test]
fn a_beam_of_one_is_greedy_and_probabilities_are_those_of_the_model() {
    let model = model(AttentionConfig::shaw(), AttentionConfig::kernelized(), Norm::Pre, None);
    let options = GenerateOptions::new(1, 2, 8);
    let found = greedy(&model, ids(&SOURCE, [3, 5]), &LENGTHS, &options).unwrap();
    assert_eq!(found.len(), 3);
    for (b, best) in found.iter().enumerate() {
        let source = &SOURCE[b * 5..][..LENGTHS[b]];
        // Alone or in a batch, the same.
        let alone = greedy(&model, ids(source, [1, source.len()]), &[source.len()], &options).unwrap();
        assert_eq!(alone[0].tokens, best.tokens);
        if best.finished {
            let expected = log_probability(&model, source, 1, &best.tokens, 2);
            assert!((best.log_probability - expected).abs() < 1e-4, "{} and {expected}", best.log_probability);
        } else {
            assert_eq!(best.tokens.len(), 8);
        }
    }
}

#[test]
fn a_wide_beam_finds_the_likeliest_of_all_short_targets() {
    let model = model(AttentionConfig::shaw(), AttentionConfig::kernelized(), Norm::Pre, None);
    let options = GenerateOptions { length_penalty: 0.0, ..GenerateOptions::new(1, 2, 2) };
    let source = [3, 9, 12];
    // Every target of at most two tokens over the six that are not the end.
    let letters = [0, 1, 3, 4, 5, 6];
    let mut targets: Vec<Vec<usize>> = vec![vec![]];
    targets.extend(letters.iter().map(|&a| vec![a]));
    targets.extend(letters.iter().flat_map(|&a| letters.iter().map(move |&b| vec![a, b])));
    let best = targets
        .iter()
        .map(|tokens| (log_probability(&model, &source, 1, tokens, 2), tokens.clone()))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .unwrap();
    let found = beam_search(&model, ids(&source, [1, 3]), &[3], 50, &options).unwrap();
    let finished: Vec<_> = found[0].iter().filter(|h| h.finished).collect();
    assert_eq!(finished[0].tokens, best.1);
    assert!((finished[0].log_probability - best.0).abs() < 1e-4);
    assert!(found[0].windows(2).all(|pair| pair[0].score >= pair[1].score));
    // The same again, to the bit.
    assert_eq!(found, beam_search(&model, ids(&source, [1, 3]), &[3], 50, &options).unwrap());
}

#[test]
fn mistakes_are_errors() {
    let model = model(AttentionConfig::shaw(), AttentionConfig::kernelized(), Norm::Pre, None);
    let options = GenerateOptions::new(1, 2, 8);
    let error = |result: Result<_, longspan::Error>| result.map(|_: Vec<_>| ()).unwrap_err().to_string();
    assert!(error(beam_search(&model, ids(&[1], [1, 1]), &[1], 0, &options)).contains("width"));
    assert!(error(beam_search(&model, ids(&[1], [1, 1]), &[2], 1, &options)).contains("source_lengths"));
    let outside = GenerateOptions::new(1, 7, 8);
    assert!(error(beam_search(&model, ids(&[1], [1, 1]), &[1], 1, &outside)).contains("end"));
    let mut state = model.start(model.encode(ids(&[1], [1, 1]), &[1]).unwrap());
    assert!(model.step(&[9], &mut state).unwrap_err().to_string().contains("below 7"));
    assert!(model.step(&[1, 1], &mut state).unwrap_err().to_string().contains("1 tokens"));
    assert!(state.select(&[1]).unwrap_err().to_string().contains("indices"));
}

/// A source that is read in segments, of which a decoder keeps little, gives what one that is held whole gives.
#[test]
fn long_sources_are_read_in_segments() {
    const TOKENS: usize = 70_001;
    let shaw = |radius| {
        let relative = RelativeConfig { radius, ..RelativeConfig::default() };
        AttentionConfig::Shaw(ShawOptions { relative, kernel: KernelConfig::default() })
    };
    let source: Vec<usize> = (0..TOKENS).map(|n| n * n % 13).collect();
    let source = |n: usize| ids(&source[..n], [1, n]);
    let target = ids(&TARGET[..6], [1, 6]);
    for (attention, cross, norm, gated) in [
        (shaw(9), shaw(3), Norm::Pre, true),
        (AttentionConfig::kernelized(), shaw(0), Norm::Post, true),
        (shaw(0), AttentionConfig::kernelized(), Norm::Pre, false),
    ] {
        let name = format!("{attention:?} {cross:?} {norm:?} {gated}");
        let block = block().with_kv_heads(Some(2)).with_norm(norm).with_gated_attention(gated);
        let training = drawn(&config().with_block(block).with_attention(attention).with_cross_attention(cross));
        let source = Tensor::from_data(source(TOKENS).into_data(), &device().autodiff());
        let target = Tensor::from_data(target.clone().into_data(), &device().autodiff());
        let whole = numbers(training.forward(source.clone(), &[TOKENS], target).unwrap());
        let model = training.valid();
        let source = source.inner();
        let memories = [model.encode(source.clone(), &[TOKENS]), model.encode_for(source, &[TOKENS], 6)];
        for (memory, kept) in memories.into_iter().zip(["all", "6"]) {
            let mut state = model.start(memory.unwrap()).select(&[0, 0]).unwrap();
            for (t, row) in whole.chunks(7).enumerate() {
                let logits = numbers(model.step(&[TARGET[t], TARGET[t]], &mut state).unwrap());
                assert_close(&format!("{name}, {kept} kept, step {t}"), &logits, &[row, row].concat(), 2e-5);
            }
            let beyond = model.step(&[1, 1], &mut state);
            assert_eq!(beyond.is_err(), kept == "6", "{name}");
        }
    }
}

#[test]
fn a_text_is_decoded_to_the_same_bits_whatever_is_beside_it() {
    let model = model(AttentionConfig::shaw(), AttentionConfig::shaw(), Norm::Pre, None);
    let decode = |rows: usize| {
        let source = ids(&SOURCE[..5].repeat(rows), [rows, 5]);
        let mut state = model.start(model.encode(source, &vec![5; rows]).unwrap());
        let logits = TARGET[..6].iter().map(|&token| numbers(model.step(&vec![token; rows], &mut state).unwrap()));
        logits.flat_map(|logits| logits[..7].to_vec()).map(f32::to_bits).collect::<Vec<_>>()
    };
    let alone = decode(1);
    for rows in [2, 4, 5, 40] {
        assert_eq!(decode(rows), alone, "{rows} rows");
    }
}
