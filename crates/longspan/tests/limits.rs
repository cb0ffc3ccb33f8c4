//! What callers may bring at the edges: states of other models, errors in the middle, masks twice, frozen parts, sizes that no machine has.

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::{Initializer, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use longspan::attention::{
    Attention, AttentionConfig, AttentionMask, AttentionState, MultiHeadAttentionConfig, ShawOptions, StoredState,
};
use longspan::checkpoint::{load_weights, save_weights};
use longspan::generate::{GenerateOptions, TextOptions, generate_text, greedy};
use longspan::kernels::{Call, Dims, Kernel, Mask, Output, Scratch, View, ViewMut};
use longspan::layers::{
    Activation, After, FeedForwardConfig, GatedRmsNormConfig, NormKind, TokenNormConfig, clip_gradients, cross_entropy,
    dropout, embedding, linear, pinball, squared_error, with_dropout_seed,
};
use longspan::models::{
    BlockConfig, ClassifierConfig, LanguageModel, LanguageModelConfig, LanguageState, Pooling, Positions, Seq2SeqConfig,
};

fn model(attention: &[&str], device: &Device) -> LanguageModel {
    let attention: Vec<AttentionConfig> = attention.iter().map(|text| serde_json::from_str(text).unwrap()).collect();
    let block = BlockConfig::new().with_d_model(16).with_d_ff(32).with_heads(4).with_dropout(0.0);
    let layers = attention.len();
    let config = LanguageModelConfig::new(11).with_block(block).with_layers(layers).with_attention(attention);
    config.init(device).unwrap()
}

const SHAW: &str = r#"{"mechanism": "shaw"}"#;
const SOFTMAX: &str = r#"{"mechanism": "softmax"}"#;

fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_to_vec().unwrap()
}

fn tokens<const N: usize>(batch: usize, ids: [i64; N]) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(ids.to_vec(), [batch, N / batch]), &Device::flex())
}

/// A position beyond a table is refused by the second block: the first must not have moved on.
#[test]
fn an_error_in_a_later_block_leaves_the_whole_state_as_it_was() {
    let model = model(&[SHAW, r#"{"mechanism": "aft-local", "window": 2, "length": 3}"#], &Device::flex());
    let mut state = LanguageState::default();
    model.advance(tokens(1, [1, 2, 3]), &mut state).unwrap();
    let before = model.store(&state).unwrap();
    assert!(model.step(&[4], &mut state).is_err());
    assert!(model.advance(tokens(1, [4, 5]), &mut state).is_err());
    assert_eq!((model.store(&state).unwrap(), state.position()), (before, 3));
    // So do losses whose targets are wrong.
    let before = model.store(&state).unwrap();
    let first = LanguageState::default();
    for (next, smoothing) in [(vec![], 0.0), (vec![11], 0.0), (vec![1], 2.0)] {
        let mut state = first.clone();
        assert!(model.loss_from(tokens(1, [1]), &next, smoothing, &mut state).is_err());
        assert_eq!((model.store(&state).unwrap(), state.position()), (model.store(&first).unwrap(), 0));
    }
    assert_eq!(model.store(&state).unwrap(), before);
    // So has a decoder without tensors, which could take two more.
    let mut state = LanguageState::default();
    model.step(&[1], &mut state).unwrap();
    let mut decoder = model.decoder(&state, 1).unwrap();
    decoder.step(&[2]).unwrap();
    decoder.step(&[3]).unwrap();
    let before = model.store(&decoder.state().unwrap()).unwrap();
    assert!(decoder.step(&[4]).is_err());
    assert_eq!((model.store(&decoder.state().unwrap()).unwrap(), decoder.position()), (before, 3));
}

/// Each goes on as it would alone.
#[test]
fn prompts_of_different_lengths_go_on_in_one_batch() {
    let device = Device::flex();
    for attention in [SHAW, r#"{"mechanism": "aft-conv"}"#, r#"{"mechanism": "fourier"}"#] {
        let model = model(&[attention, SHAW], &device);
        let prompt = |ids: &[i64]| {
            let mut state = LanguageState::default();
            let ids = Tensor::<2, Int>::from_data(TensorData::new(ids.to_vec(), [1, ids.len()]), &device);
            model.prefill(ids, &mut state).unwrap();
            state
        };
        let mut alone = [prompt(&[1, 2, 3]), prompt(&[4, 5, 6, 7, 8])];
        let mut both = LanguageState::join(&[&alone[0], &alone[1]]).unwrap();
        let mut decoder = model.decoder(&both, 2).unwrap();
        for tokens in [[3, 4], [9, 1]] {
            let together = numbers(model.step(&tokens, &mut both).unwrap());
            assert_eq!(decoder.step(&tokens).unwrap().len(), 22);
            for (n, state) in alone.iter_mut().enumerate() {
                let own = numbers(model.step(&[tokens[n]], state).unwrap());
                assert!(own.iter().zip(&together[11 * n..]).all(|(a, b)| (a - b).abs() < 1e-5), "{attention}");
            }
        }
        assert_eq!(both.position(), 7);
    }
    // Absolute positions are one for the whole batch.
    let block = BlockConfig::new().with_d_model(16).with_d_ff(32).with_heads(4).with_dropout(0.0);
    let config = LanguageModelConfig::new(11).with_block(block).with_positions(Positions::Sinusoidal);
    let model = config.init(&device).unwrap();
    let [mut one, mut two] = [LanguageState::default(), LanguageState::default()];
    model.step(&[1], &mut one).unwrap();
    model.advance(tokens(1, [1, 2]), &mut two).unwrap();
    let mut both = LanguageState::join(&[&one, &two]).unwrap();
    assert!(model.step(&[3, 3], &mut both).unwrap_err().to_string().contains("absolute positions"));
    assert!(model.decoder(&both, 2).is_err() && model.store(&both).is_err());
}

#[test]
fn a_state_of_another_batch_is_refused_and_kept() {
    let model = model(&[SOFTMAX], &Device::flex());
    let mut state = LanguageState::default();
    model.advance(tokens(2, [1, 2, 3, 4]), &mut state).unwrap();
    let before = model.store(&state).unwrap();
    let error = model.advance(tokens(1, [5, 6]), &mut state).unwrap_err().to_string();
    assert!(error.contains("state: expected keys and values of batch, heads, width and type [([1,"), "{error}");
    assert_eq!(model.store(&state).unwrap(), before);
}

#[test]
fn states_of_other_models_are_refused() {
    let device = Device::flex();
    let (three, two) = (model(&[SHAW, SHAW, SHAW], &device), model(&[SHAW, SHAW], &device));
    let mut state = LanguageState::default();
    three.advance(tokens(1, [1, 2]), &mut state).unwrap();
    let stored = three.store(&state).unwrap();
    assert!(two.restore(&stored, 2).unwrap_err().to_string().contains("those of 2 blocks"));
    assert!(three.restore(&stored, 2).is_ok());

    // 4 heads of 4 numbers, and 2 heads of 8.
    let heads = |heads| MultiHeadAttentionConfig::new(16, heads).init(&device).unwrap();
    let (four, two) = (heads(4), heads(2));
    let x = Tensor::<3>::random([1, 1, 16], Distribution::Default, &device);
    let mut state = AttentionState::default();
    four.step(x.clone(), &mut state).unwrap();
    let stored = four.attention.store(&state).unwrap();
    assert!(two.step(x.clone(), &mut state).unwrap_err().to_string().contains("2 key/value heads"));
    assert!(two.attention.restore(&stored, &device).unwrap_err().to_string().contains("2 key/value heads"));
    assert!(four.step(x, &mut state).is_ok());

    // Other options in the kernels' own form.
    let [three, five] =
        [3, 5].map(|radius| AttentionConfig::from(ShawOptions::default().with_radius(radius)).init(2, 2, 4, &device));
    let x = || Tensor::<4>::ones([1, 2, 1, 4], &device);
    let mut state = AttentionState::default();
    let three = three.unwrap();
    three.step(x(), x(), x(), &mut state).unwrap();
    let stored = three.store(&state).unwrap();
    assert!(five.unwrap().restore(&stored, &device).unwrap_err().to_string().contains("options"));
}

/// Inputs without autodiff to a layer that trains: the rows that inputs with it get, with gradients of what the layer has learned.
#[test]
fn plain_inputs_reach_what_a_training_layer_has_learned() {
    let (device, training) = (Device::flex(), Device::flex().autodiff());
    for name in AttentionConfig::NAMES {
        let attention = AttentionConfig::by_name(name).unwrap().init(2, 2, 4, &training).unwrap();
        let run = |device: &Device| {
            let x = |tokens: usize, width: usize| {
                let numbers: Vec<f32> = (0..2 * tokens * width).map(|i| (i as f32 * 0.7).sin()).collect();
                Tensor::<4>::from_data(TensorData::new(numbers, [1, 2, tokens, width]), device)
            };
            let mut state = AttentionState::default();
            let [q, k, v] = [x(4, 4), x(4, attention.key_dim()), x(4, 4)];
            let part = |x: &Tensor<4>, from, count| x.clone().narrow(2, from, count);
            let rows: Vec<_> = (0..2)
                .map(|t| attention.step(part(&q, t, 1), part(&k, t, 1), part(&v, t, 1), &mut state).unwrap())
                .collect();
            let last = attention.advance(part(&q, 2, 2), part(&k, 2, 2), part(&v, 2, 2), &mut state).unwrap();
            let all = Tensor::cat(rows.into_iter().map(|row| row * 1.0).chain([last * 1.0]).collect(), 2);
            let found = numbers(all.clone());
            let trained = attention.num_params() > 0;
            assert!(!trained || all.device().is_autodiff(), "{name}");
            let gradients = trained.then(|| GradientsParams::from_grads(all.sum().backward(), &attention));
            (found, gradients.map(|gradients| gradients.len()))
        };
        let [(plain, of_plain), (training, of_training)] = [&device, &training].map(run);
        assert!(plain.iter().zip(&training).all(|(a, b)| (a - b).abs() < 1e-5), "{name}");
        assert_eq!(of_plain, of_training, "{name}");
    }
}

#[test]
fn freezing_stops_dropout() {
    let device = Device::flex().autodiff();
    let config = BlockConfig::new().with_d_model(16).with_d_ff(32).with_dropout(0.5);
    let block = config.encoder(&AttentionConfig::kernelized(), &device).unwrap();
    let x = Tensor::<3>::random([1, 5, 16], Distribution::Default, &device);
    let run =
        |block: &longspan::models::EncoderBlock| numbers(block.forward(x.clone(), &AttentionMask::causal()).unwrap());
    assert_ne!(run(&block), run(&block));
    let frozen = block.freeze();
    assert_eq!(run(&frozen), run(&frozen));
    let model = LanguageModelConfig::new(11).with_block(config).init(&device).unwrap().freeze();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(vec![1i64, 2, 3], [1, 3]), &device);
    let run = || numbers(model.forward(ids.clone()).unwrap());
    assert_eq!(run(), run());
}

#[test]
fn a_second_key_mask_joins_the_first() {
    let device = Device::flex();
    let attention = MultiHeadAttentionConfig::new(8, 2).init(&device).unwrap();
    let x = Tensor::<3>::random([2, 4, 8], Distribution::Default, &device);
    let run = |mask: &AttentionMask| attention.self_attention(x.clone(), mask).map(numbers);
    let padding = [true, false, false, false, false, false, false, false];
    let both = [true, false, false, true, false, false, true, true];
    let mask = AttentionMask::causal;
    let expected = run(&mask().with_padding(&both)).unwrap();
    assert_eq!(run(&mask().with_lengths(&[3, 2]).with_padding(&padding)).unwrap(), expected);
    assert_eq!(run(&mask().with_padding(&padding).with_lengths(&[3, 2])).unwrap(), expected);
    assert_eq!(
        run(&mask().with_lengths(&[3, 4]).with_lengths(&[4, 2])).unwrap(),
        run(&mask().with_lengths(&[3, 2])).unwrap()
    );
    // As Burn makes them.
    let tensor = Tensor::<2, Bool>::from_data(TensorData::new(padding.to_vec(), [2, 4]), &device);
    let of_tensor = |tensor| run(&mask().with_padding_mask(tensor));
    assert_eq!(of_tensor(tensor.clone()).unwrap(), run(&mask().with_padding(&padding)).unwrap());
    // As many entries in another shape.
    let error = of_tensor(tensor.transpose()).unwrap_err().to_string();
    assert!(error.contains("one of 2 texts of 4 keys") && error.contains("got a tensor [4, 2]"), "{error}");
    // What has no meaning together is refused.
    assert!(run(&mask().with_padding(&padding).with_lengths(&[3, 2, 1])).is_err());
    assert!(run(&mask().with_lengths(&[3, 2]).with_packed(&[4])).is_err());
    // As many lengths as texts, beside a padding too.
    assert!(run(&mask().with_padding(&padding).with_lengths(&[3])).is_err());
}

#[test]
fn a_limit_that_turns_gradients_round_is_refused() {
    let device = Device::flex().autodiff();
    let linear = burn::nn::LinearConfig::new(2, 2).init(&device);
    let x = Tensor::<2>::ones([1, 2], &device);
    let mut gradients = GradientsParams::from_grads(linear.forward(x).sum().backward(), &linear);
    for limit in [-1.0, f64::NAN] {
        assert!(clip_gradients(&linear, &mut gradients, limit).is_err(), "{limit}");
    }
    assert!(clip_gradients(&linear, &mut gradients, 0.5).unwrap() > 0.5);
    assert!((clip_gradients(&linear, &mut gradients, 0.5).unwrap() - 0.5).abs() < 1e-5);
}

#[test]
fn tables_that_no_machine_holds_are_refused() {
    let config = |radius: usize| format!(r#"{{"mechanism": "shaw", "relative": {{"radius": {radius}}}}}"#);
    for radius in [usize::MAX, usize::MAX / 64] {
        let config: AttentionConfig = serde_json::from_str(&config(radius)).unwrap();
        let error = MultiHeadAttentionConfig::new(16, 4).with_attention(config).init(&Device::flex()).unwrap_err();
        assert!(error.to_string().contains("radius"), "{error}");
    }
    for name in AttentionConfig::NAMES {
        let attention = AttentionConfig::by_name(name).unwrap();
        for [heads, head_dim] in [[1 << 40, 1 << 10], [1, usize::MAX], [1 << 33, 1 << 33]] {
            assert!(attention.init(heads, heads, head_dim, &Device::flex()).is_err(), "{name}");
        }
    }
    // A table of as many columns as rows, and buckets into which nothing falls.
    for text in [
        r#"{"mechanism": "aft-full", "length": 16777215, "rank": null}"#,
        r#"{"mechanism": "toeplitz", "bias": {"kind": "buckets", "buckets": 3, "max_distance": 8, "bidirectional": true}}"#,
    ] {
        let config: AttentionConfig = serde_json::from_str(text).unwrap();
        assert!(config.init(2, 2, 4, &Device::flex()).is_err(), "{text}");
    }
    // In single precision these are 0 and infinity.
    for epsilon in [1e-50, 1e50] {
        assert!(TokenNormConfig::new(4).with_epsilon(epsilon).init(&Device::flex()).is_err());
        assert!(GatedRmsNormConfig::new(1, 4).with_epsilon(epsilon).init(&Device::flex()).is_err());
    }
}

/// Of every text that is not there: results of size 0, losses of 0 with a backward, and states that stay as they were.
#[test]
fn no_tokens_and_no_texts_give_nothing_and_change_nothing() {
    let device = Device::flex().autodiff();
    for attention in [SHAW, SOFTMAX, r#"{"mechanism": "toeplitz"}"#, r#"{"mechanism": "aft-conv"}"#] {
        let model = model(&[attention, SHAW], &device);
        for (model, device) in [(model.clone(), device.clone()), (model.valid(), Device::flex())] {
            for [batch, count] in [[1, 0], [2, 0], [0, 5], [0, 0]] {
                let ids = || Tensor::<2, Int>::zeros([batch, count], &device);
                assert_eq!(model.forward(ids()).unwrap().dims(), [batch, count, 11], "{attention}");
                let loss = model.loss(ids(), vec![None; batch * count], 0.1).unwrap();
                assert_eq!(numbers(loss.smoothed.clone()), [0.0]);
                if device.is_autodiff() {
                    loss.smoothed.backward();
                }
                let mut state = LanguageState::default();
                assert_eq!(model.advance(ids(), &mut state).unwrap().dims(), [batch, count, 11]);
                assert_eq!(model.forward_at(ids(), &[]).unwrap().dims(), [0, 11]);
            }
            // Between tokens, too.
            let mut state = LanguageState::default();
            let step = |state: &mut LanguageState| numbers(model.step(&[4, 5], state).unwrap());
            let mut other = {
                model.step(&[1, 2], &mut state).unwrap();
                state.clone()
            };
            model.advance(Tensor::zeros([2, 0], &device), &mut state).unwrap();
            assert_eq!(step(&mut state), step(&mut other));
        }
    }
    let device = Device::flex();
    let block = BlockConfig::new().with_d_model(16).with_d_ff(32).with_heads(4).with_dropout(0.0);
    for cross in [AttentionConfig::kernelized(), AttentionConfig::shaw(), AttentionConfig::softmax()] {
        let model = Seq2SeqConfig::new(11, 7).with_block(block.clone()).with_cross_attention(cross);
        let model = model.init(&device).unwrap();
        let ids = |batch, count| Tensor::<2, Int>::ones([batch, count], &device);
        assert_eq!(model.forward(ids(2, 0), &[0, 0], ids(2, 3)).unwrap().dims(), [2, 3, 7]);
        assert_eq!(model.forward(ids(2, 3), &[3, 1], ids(2, 0)).unwrap().dims(), [2, 0, 7]);
        // A source without tokens is one that is all padding.
        let options = GenerateOptions::new(1, 2, 4);
        let [nothing, padding] = [ids(1, 0), ids(1, 3)].map(|source| greedy(&model, source, &[0], &options).unwrap());
        assert_eq!(nothing[0].tokens, padding[0].tokens);
    }
    let rows = |shape| {
        let x = Tensor::<3>::zeros(shape, &device);
        linear(x, Tensor::zeros([2, 16], &device), None, Activation::Identity, After::default()).unwrap().dims()
    };
    assert_eq!([rows([2, 0, 2]), rows([0, 0, 2]), rows([0, 3, 2])], [[2, 0, 16], [0, 0, 16], [0, 3, 16]]);
}

/// Number types, widths and sizes of other layers: each an error that names them.
#[test]
fn what_does_not_fit_a_layer_is_an_error_and_no_panic() {
    let device = Device::flex();
    let x = |width| Tensor::<3>::ones([1, 2, width], &device);
    let wide = |width| x(width).cast(FloatDType::F64);
    let attention = MultiHeadAttentionConfig::new(8, 2).init(&device).unwrap();
    let feed_forward = FeedForwardConfig::new(8, 16).init(&device).unwrap();
    let norm = TokenNormConfig::new(8).init(&device).unwrap();
    let block = BlockConfig::new().with_d_model(8).with_heads(2).with_d_ff(16);
    let block = block.encoder(&AttentionConfig::shaw(), &device).unwrap();
    let output = burn::nn::LinearConfig::new(8, 5).init(&device);
    let weight = || output.weight.val();
    let mask = AttentionMask::causal();
    let layer = |x: Tensor<3>, bias: usize| {
        let bias = Some(Tensor::zeros([bias], &device));
        linear(x, weight(), bias, Activation::Identity, After::default()).map(drop)
    };
    let mut errors = Vec::new();
    for x in [x(7), wide(8)] {
        errors.extend([
            attention.self_attention(x.clone(), &mask).map(drop),
            attention.cross_attention(x.clone(), x.clone(), &mask).map(drop),
            attention.step(x.clone().narrow(1, 0, 1), &mut AttentionState::default()).map(drop),
            attention.advance(x.clone(), &mut AttentionState::default()).map(drop),
            attention.remember(x.clone(), &mask).map(drop),
            feed_forward.forward(x.clone()).map(drop),
            norm.forward(x.clone()).map(drop),
            block.forward(x.clone(), &mask).map(drop),
            cross_entropy(x.clone(), &output, vec![Some(1); 2], 0.0).map(drop),
            layer(x.clone(), 5),
        ]);
    }
    errors.extend([layer(x(8), 4), dropout(x(8), 1.0).map(drop), dropout(x(8), f64::NAN).map(drop)]);
    let residual = After { dropout: 0.0, residual: Some(x(4)) };
    errors.push(linear(x(8), weight(), None, Activation::Identity, residual).map(drop));
    // Burn mixes no strategies of gradient checkpointing.
    let training = Device::flex().autodiff();
    let [trained, lean] = [training.clone(), training.gradient_checkpointing()].map(|device| {
        let attention = MultiHeadAttentionConfig::new(8, 2).init(&device).unwrap();
        (attention, Tensor::<3>::ones([1, 2, 8], &device))
    });
    errors.push(trained.0.self_attention(lean.1.clone(), &mask).map(drop));
    errors.push(lean.0.self_attention(trained.1.clone(), &mask).map(drop));
    let heads = |x: Tensor<3>| x.reshape([1, 2, 2, 4]);
    let (q, k) = (heads(trained.1.clone()), heads(lean.1));
    errors.push(trained.0.attention.forward(q.clone(), k.clone(), k.clone(), &mask).map(drop));
    errors.push(trained.0.attention.forward(k.clone(), k.clone(), k, &mask).map(drop));
    // As many keys as queries.
    let more = Tensor::cat(vec![q.clone(), q.clone()], 2);
    errors.push(trained.0.attention.advance(q, more.clone(), more, &mut AttentionState::default()).map(drop));
    for (n, error) in errors.into_iter().enumerate() {
        let error = error.expect_err(&n.to_string()).to_string();
        assert!(error.contains("expected") && error.contains("got"), "{n}: {error}");
    }
}

/// On a training device, and after it.
#[test]
fn steps_go_on_where_segments_ended_and_the_other_way_round() {
    let device = Device::flex().autodiff();
    let names = AttentionConfig::NAMES.iter().map(|name| format!(r#"{{"mechanism": "{name}"}}"#));
    let others = [
        r#"{"mechanism": "softmax-window", "window": 3}"#,
        r#"{"mechanism": "fourier", "normalizer": "dominant"}"#,
        r#"{"mechanism": "fourier", "normalizer": "unrotated"}"#,
        r#"{"mechanism": "fourier", "normalizer": "none"}"#,
        r#"{"mechanism": "fourier", "normalizer": "unrotated", "rotary": true}"#,
        r#"{"mechanism": "fourier", "kernel": {"feature_map": "exp"}}"#,
    ];
    for attention in names.chain(others.map(String::from)) {
        let model = model(&[&attention, SHAW], &device);
        let ids: Vec<i64> = (0..12).map(|n| n * 7 % 11).collect();
        let whole = Tensor::<2, Int>::from_data(TensorData::new(ids.clone(), [1, 12]), &device);
        let expected = numbers(model.forward(whole.clone()).unwrap());
        let after = |count: usize, state: &mut LanguageState| {
            let next = vec![Some(0); count];
            let loss = model.loss_from(whole.clone().narrow(1, state.position(), count), next, 0.0, state).unwrap();
            loss.smoothed.backward();
        };
        for segments_first in [true, false] {
            let mut state = LanguageState::default();
            let mut found = Vec::new();
            for turn in 0..4 {
                if (turn % 2 == 0) == segments_first {
                    after(2, &mut state);
                } else {
                    let logits = model.step(&[ids[state.position()] as usize], &mut state).unwrap();
                    found.push((state.position(), numbers(logits)));
                }
            }
            // The state serves without training as well.
            let model = model.valid();
            while state.position() < 12 {
                let logits = model.step(&[ids[state.position()] as usize], &mut state).unwrap();
                found.push((state.position(), numbers(logits)));
            }
            for (position, found) in found {
                for (found, expected) in found.iter().zip(&expected[11 * (position - 1)..]) {
                    assert!((found - expected).abs() < 1e-4, "{attention}, {position}: {found}, not {expected}");
                }
            }
        }
    }
}

/// With autodiff states are tensors, which fit by their sizes where their meaning is another.
#[test]
fn states_of_other_options_are_refused_in_training_too() {
    let device = Device::flex().autodiff();
    let window = |n: usize| format!(r#"{{"mechanism": "softmax-window", "window": {n}}}"#);
    let decay = |d: f64| format!(r#"{{"mechanism": "kernelized", "kernel": {{"decay": [{d}, {d}, {d}, {d}]}}}}"#);
    let toeplitz = r#"{"mechanism": "toeplitz"}"#.to_string();
    for (one, other) in [(window(3), window(5)), (decay(0.9), decay(0.5)), (SOFTMAX.into(), toeplitz)] {
        let [a, b] = [&one, &other].map(|attention| model(&[attention], &device));
        let mut state = LanguageState::default();
        (0..4).for_each(|n| drop(a.step(&[n], &mut state).unwrap()));
        assert!(b.step(&[1], &mut state).unwrap_err().to_string().contains("options"), "{one} {other}");
        assert!(b.advance(Tensor::ones([1, 2], &device), &mut state).is_err());
        if one.contains("window") {
            assert!(b.restore(&a.store(&state).unwrap(), 4).unwrap_err().to_string().contains("window"));
        }
        // Joined they go on as they would alone.
        let both = LanguageState::join(&[&state, &state]).unwrap();
        let logits = numbers(a.step(&[1, 1], &mut both.clone()).unwrap());
        let alone = numbers(a.step(&[1], &mut state.clone()).unwrap());
        assert_eq!(logits, [alone.clone(), alone].concat());
        let [restored, mut kept] = [a.restore(&a.store(&state).unwrap(), 4).unwrap(), state];
        assert_eq!(numbers(a.step(&[1], &mut restored.clone()).unwrap()), numbers(a.step(&[1], &mut kept).unwrap()));
    }
}

/// What a query does not see is not kept one by one, with autodiff or without.
#[test]
fn states_do_not_grow() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        let tables = ["softmax", "softmax-window", "aft-full"];
        let names = AttentionConfig::NAMES.iter().filter(|name| !tables.contains(name));
        let names = names.map(|name| format!(r#"{{"mechanism": "{name}"}}"#));
        for attention in names.chain([r#"{"mechanism": "softmax-window", "window": 4}"#.into()]) {
            let model = model(&[&attention], &device);
            let mut state = LanguageState::default();
            let mut sizes = (0..3).map(|_| {
                (0..20).for_each(|n| drop(model.step(&[n % 11], &mut state).unwrap()));
                model.store(&state).unwrap()[0].len()
            });
            let first = sizes.next().unwrap();
            assert!(sizes.all(|size| size == first), "{attention}");
        }
    }
}

#[test]
fn steps_take_the_weights_of_the_model_that_steps() {
    let device = Device::flex();
    let block = BlockConfig::new().with_d_model(16).with_d_ff(32).with_heads(4).with_dropout(0.0);
    let config = Seq2SeqConfig::new(11, 7).with_block(block).with_cross_attention(AttentionConfig::shaw());
    let model = config.init(&device).unwrap();
    let source = Tensor::<2, Int>::from_data([[3, 4, 5]], &device);
    let mut state = model.start(model.encode(source.clone(), &[3]).unwrap());
    model.step(&[1], &mut state).unwrap();
    // Other weights of the output layer alone change the answer to what they say.
    let mut other = model.clone();
    other.output.weight = Param::from_tensor(other.output.weight.val().mul_scalar(2.0));
    other.output.bias = other.output.bias.map(|bias| Param::from_tensor(bias.val().mul_scalar(2.0)));
    let [once, twice] = [&model, &other].map(|model| numbers(model.step(&[2], &mut state.clone()).unwrap()));
    for (once, twice) in once.iter().zip(&twice) {
        assert!((2.0 * once - twice).abs() < 1e-5, "{once} {twice}");
    }
}

#[test]
fn a_loss_without_smoothing_is_one_whichever_field_is_learned_from() {
    let device = Device::flex().autodiff();
    let model = model(&[SHAW], &device);
    let ids = Tensor::<2, Int>::from_data([[1, 2, 3]], &device);
    let loss = |smoothing| model.loss(ids.clone(), vec![Some(2), None, Some(4)], smoothing).unwrap();
    let gradient = |loss: Tensor<1>| numbers(model.embedding.weight.grad(&loss.backward()).unwrap());
    assert_eq!(gradient(loss(0.0).plain), gradient(loss(0.0).smoothed));
    assert!(!loss(0.1).plain.is_tracked());
}

#[derive(Module, Debug)]
struct Mine {
    steps: Param<Tensor<1, Int>>,
    chosen: Param<Tensor<1, Bool>>,
    floor: Param<Tensor<1>>,
}

#[test]
fn buffers_of_any_kind_and_infinities_come_back() {
    let device = Device::flex();
    let mine = |steps: [i64; 3], chosen: [bool; 2], floor: f32| Mine {
        steps: Param::initialized(ParamId::new(), Tensor::from_data(steps, &device)),
        chosen: Param::initialized(ParamId::new(), Tensor::from_data(chosen, &device)),
        floor: Param::from_tensor(Tensor::from_data([floor, 1.0], &device)),
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.safetensors");
    save_weights(&path, &mine([7, -8, 9], [true, false], f32::NEG_INFINITY)).unwrap();
    let loaded = load_weights(&path, mine([0; 3], [false, true], 0.0)).unwrap();
    assert_eq!(loaded.steps.val().into_data().iter::<i64>().collect::<Vec<_>>(), [7, -8, 9]);
    assert_eq!(loaded.chosen.val().into_data().iter::<bool>().collect::<Vec<_>>(), [true, false]);
    assert_eq!(numbers(loaded.floor.val()), [f32::NEG_INFINITY, 1.0]);
}

/// As Burn's own encoder does.
#[test]
fn quantized_weights_run_under_every_mechanism() {
    use burn::module::Quantizer;
    use burn::tensor::quantization::{Calibration, QuantScheme};

    let device = Device::flex();
    for name in AttentionConfig::NAMES {
        let block = BlockConfig::new().with_d_model(16).with_d_ff(32).with_heads(4);
        let block = block.encoder(&AttentionConfig::by_name(name).unwrap(), &device).unwrap();
        let x = Tensor::<3>::random([1, 5, 16], Distribution::Default, &device);
        let expected = numbers(block.forward(x.clone(), &AttentionMask::causal()).unwrap());
        let small = block.quantize_weights(&mut Quantizer::new(Calibration::MinMax, QuantScheme::default()));
        let found = numbers(small.forward(x, &AttentionMask::causal()).unwrap());
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 0.2), "{name}: {found:?}, not {expected:?}");
    }
}

/// What a mechanism makes is taken by one of the same options and heads alone, stored or not.
#[test]
fn states_and_memories_of_other_options_are_refused() {
    let device = Device::flex();
    let training = device.clone().autodiff();
    let kernel = |map: &str| format!(r#"{{"mechanism": "kernelized", "kernel": {{"feature_map": "{map}"}}}}"#);
    let attention = |text: &str, heads: usize, device: &Device| {
        let config: AttentionConfig = serde_json::from_str(text).unwrap();
        config.init(heads, heads, 4, device).unwrap()
    };
    let x = |heads: usize, tokens: usize, device: &Device| {
        Tensor::<4>::random([1, heads, tokens, 4], Distribution::Default, device)
    };
    let (relu, softplus) = (kernel("relu"), kernel("softplus"));
    // In tensors, as on every device without kernels.
    let [one, other] = [&relu, &softplus].map(|text| attention(text, 2, &training));
    let mut state = AttentionState::default();
    let token = || x(2, 1, &training);
    one.step(token(), token(), token(), &mut state).unwrap();
    let stored = one.store(&state).unwrap();
    assert!(one.restore(&stored, &training).is_ok());
    assert!(other.restore(&stored, &training).unwrap_err().to_string().contains("options"));
    let (form, tensors) = stored.into_parts();
    let form = serde_json::from_str(&serde_json::to_string(&form).unwrap()).unwrap();
    assert!(other.restore(&StoredState::from_parts(form, tensors), &training).is_err());
    // Values of 4 numbers under keys of 8: sums of the same shape but for the features.
    let wide = serde_json::from_str::<AttentionConfig>(&relu).unwrap().init(2, 2, 8, &training).unwrap();
    let keys = || Tensor::<4>::ones([1, 2, 1, 8], &training);
    assert!(wide.step(keys(), keys(), token(), &mut state).is_err());

    let memory = |text: &str, heads: usize| {
        let attention = attention(text, heads, &device);
        let remembered =
            attention.remember(x(heads, 5, &device), x(heads, 5, &device), &AttentionMask::bidirectional());
        (attention, remembered.unwrap())
    };
    let shaw = |radius: usize| format!(r#"{{"mechanism": "shaw", "relative": {{"radius": {radius}}}}}"#);
    for (a, b) in [(relu, softplus), (shaw(2), shaw(3)), (SOFTMAX.into(), shaw(3))] {
        let [(one, memory), (other, _)] = [&a, &b].map(|text| memory(text, 2));
        one.recall(x(2, 1, &device), 0, &memory).unwrap();
        assert!(one.recall(x(2, 1, &device), usize::MAX, &memory).is_err(), "{a}");
        assert!(other.recall(x(2, 1, &device), 0, &memory).is_err(), "{a} {b}");
    }
    // Queries come one by one, so a memory has no order.
    let causal = one.remember(x(2, 5, &training), x(2, 5, &training), &AttentionMask::causal());
    assert!(causal.unwrap_err().to_string().contains("bidirectional"));
}

/// A memory holds no weights: what its keys and values were made by is theirs, and queries go by the mechanism that asks.
#[test]
fn queries_take_the_weights_of_the_mechanism_that_asks() {
    let device = Device::flex();
    let config: AttentionConfig =
        serde_json::from_str(r#"{"mechanism": "kernelized", "kernel": {"feature_map": "hedgehog"}}"#).unwrap();
    let one = config.init(2, 2, 4, &device).unwrap();
    let mut other = one.clone();
    let Attention::Kernelized(attention) = &mut other else { panic!("the mechanism that was asked for") };
    let map = attention.map.as_mut().unwrap();
    map.queries = Param::from_tensor(map.queries.val() * 3.0);
    let x = |tokens| Tensor::<4>::random([1, 2, tokens, 4], Distribution::Default, &device);
    let (q, k, v, mask) = (x(3), x(5), x(5), AttentionMask::bidirectional());
    let memory = one.remember(k.clone(), v.clone(), &mask).unwrap();
    let expected = numbers(other.forward(q.clone(), k, v, &mask).unwrap());
    for (found, expected) in numbers(other.recall(q, 0, &memory).unwrap()).iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-5, "{found}, not {expected}");
    }
}

/// A decoder of two blocks on the memory of one would pass over its second block.
#[test]
fn memories_of_fewer_blocks_are_refused() {
    let device = Device::flex();
    let block = BlockConfig::new().with_d_model(16).with_d_ff(32).with_heads(4).with_dropout(0.0);
    for cross in [AttentionConfig::kernelized(), AttentionConfig::shaw()] {
        let config = |layers| {
            let config = Seq2SeqConfig::new(11, 7).with_block(block.clone()).with_cross_attention(cross.clone());
            config.with_decoder_layers(layers).init(&device).unwrap()
        };
        let source = Tensor::<2, Int>::from_data([[3, 4, 5]], &device);
        let mut state = config(2).start(config(1).encode(source, &[3]).unwrap());
        assert!(config(2).step(&[1], &mut state).is_err());
    }
}

/// Each of these is a mistake, and some of them are of sizes that no machine has: errors, one and all.
#[test]
fn mistakes_are_errors_and_none_is_a_panic() {
    let device = Device::flex();
    let x = |width: usize| Tensor::<3>::ones([1, 2, width], &Device::flex());
    let double = move |width: usize| Tensor::<3>::ones([1, 2, width], &Device::flex()).cast(FloatDType::F64);
    let heads = |text: &'static str| {
        move |device: &Device| {
            let config: AttentionConfig = serde_json::from_str(text).unwrap();
            let attention = config.init(2, 2, 4, device)?;
            let x = || Tensor::<4>::ones([1, 2, 3, 4], device);
            attention.forward(x(), x(), x(), &AttentionMask::causal()).map(drop)
        }
    };
    type Mistake = Box<dyn Fn(&Device) -> longspan::Result<()>>;
    let huge = usize::MAX / 2;
    let block = || BlockConfig::new().with_d_model(16).with_d_ff(32).with_heads(4);
    let mistakes: Vec<(&str, Mistake)> = vec![
        ("width", Box::new(move |d| MultiHeadAttentionConfig::new(huge, 1).init(d).map(drop))),
        ("d_ff", Box::new(move |d| FeedForwardConfig::new(16, huge).init(d).map(drop))),
        ("norm", Box::new(move |d| TokenNormConfig::new(huge).init(d).map(drop))),
        ("heads", Box::new(move |d| GatedRmsNormConfig::new(huge, huge).init(d).map(drop))),
        ("vocabulary", Box::new(move |d| LanguageModelConfig::new(huge).with_block(block()).init(d).map(drop))),
        ("sources", Box::new(move |d| Seq2SeqConfig::new(huge, 3).with_block(block()).init(d).map(drop))),
        ("axes", Box::new(heads(r#"{"mechanism": "fourier", "axes": 9223372036854775807}"#))),
        (
            "features",
            Box::new(heads(r#"{"mechanism": "kernelized", "kernel": {"feature_map": "prf:4611686018427387904"}}"#)),
        ),
        (
            "features",
            Box::new(heads(r#"{"mechanism": "fourier", "kernel": {"feature_map": "nprf:4611686018427387904"}}"#)),
        ),
        ("features", Box::new(heads(r#"{"mechanism": "toeplitz", "feature_map": "hedgehog:4611686018427387904"}"#))),
        (
            "features",
            Box::new(heads(r#"{"mechanism": "kernelized", "kernel": {"feature_map": "dpfp:4611686018427387904"}}"#)),
        ),
        (
            "radius",
            Box::new(heads(r#"{"mechanism": "toeplitz", "bias": {"kind": "clipped", "radius": 9223372036854775807}}"#)),
        ),
        (
            "distance",
            Box::new(heads(
                r#"{"mechanism": "toeplitz", "bias": {"kind": "buckets", "buckets": 8, "max_distance": 9223372036854775807, "bidirectional": true}}"#,
            )),
        ),
        ("decay", Box::new(heads(r#"{"mechanism": "fourier", "kernel": {"decay": []}}"#))),
        ("decay", Box::new(heads(r#"{"mechanism": "kernelized", "kernel": {"decay": [0.5, 2.0]}}"#))),
        ("gate", Box::new(move |d| GatedRmsNormConfig::new(2, 4).init(d)?.forward(double(8), double(8)).map(drop))),
        ("gate", Box::new(move |d| GatedRmsNormConfig::new(2, 4).init(d)?.forward(x(8), double(8)).map(drop))),
        (
            "positions",
            Box::new(move |d| {
                let positions = Tensor::<2>::ones([2, 4], d).cast(FloatDType::F64);
                embedding(Tensor::ones([1, 2], d), Tensor::ones([3, 4], d), 1.0, Some(positions)).map(drop)
            }),
        ),
        (
            "dropout",
            Box::new(move |d| {
                let after = After { dropout: 1.5, residual: None };
                linear(x(4), Tensor::ones([4, 3], d), None, Activation::Identity, after).map(drop)
            }),
        ),
        (
            "bias",
            Box::new(move |d| {
                let bias = Tensor::<1>::ones([3], d).cast(FloatDType::F64);
                linear(x(4), Tensor::ones([4, 3], d), Some(bias), Activation::Identity, After::default()).map(drop)
            }),
        ),
        (
            "length penalty",
            Box::new(move |d| {
                let model = Seq2SeqConfig::new(5, 5).with_block(block()).init(&d.clone().inner())?;
                let options = GenerateOptions { length_penalty: f64::NAN, ..GenerateOptions::new(1, 2, 3) };
                greedy(&model, Tensor::ones([1, 2], &d.clone().inner()), &[2], &options).map(drop)
            }),
        ),
        (
            "excluded",
            Box::new(move |d| {
                let model = Seq2SeqConfig::new(5, 5).with_block(block()).init(&d.clone().inner())?;
                let options = GenerateOptions::new(1, 2, 3).without([5]);
                greedy(&model, Tensor::ones([1, 2], &d.clone().inner()), &[2], &options).map(drop)
            }),
        ),
        (
            "all tokens",
            Box::new(move |d| {
                let model = LanguageModelConfig::new(3).with_block(block()).init(&d.clone().inner())?;
                let options = TextOptions { excluded: vec![0, 1, 2], ..TextOptions::default() };
                generate_text(&model, &[1], &mut LanguageState::default(), &options, |_| true).map(drop)
            }),
        ),
        (
            "output",
            Box::new(move |d| {
                let mut output = burn::nn::LinearConfig::new(4, 3).init(d);
                output.bias = Some(Param::from_tensor(Tensor::ones([2], d)));
                cross_entropy(x(4), &output, vec![Some(1); 2], 0.0).map(drop)
            }),
        ),
    ];
    for (n, (name, mistake)) in mistakes.iter().enumerate() {
        for device in [device.clone(), device.clone().autodiff()] {
            let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| mistake(&device)));
            let error = answer.unwrap_or_else(|_| panic!("{n}, {name}: a panic"));
            assert!(error.is_err(), "{n}, {name}: no error");
        }
    }
}

/// Places at which nothing is near, on both ends of the numbers.
#[test]
fn offsets_of_any_size_give_what_large_ones_give() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        for name in AttentionConfig::NAMES {
            let attention = AttentionConfig::by_name(name).unwrap().init(2, 2, 4, &device).unwrap();
            let x = || Tensor::<4>::ones([1, 2, 3, 4], &device);
            let keys = || Tensor::<4>::ones([1, 2, 3, attention.key_dim()], &device);
            for offset in [isize::MIN, isize::MIN + 1, isize::MAX - 1, isize::MAX] {
                for mask in [AttentionMask::causal(), AttentionMask::bidirectional()] {
                    let out = attention.forward(x(), keys(), x(), &mask.with_offset(offset));
                    assert!(out.is_err() || out.unwrap().into_data().iter::<f32>().all(f32::is_finite), "{name}");
                }
            }
        }
    }
}

#[test]
fn no_entries_of_a_state_are_a_state_of_none() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        for attention in [SHAW, SOFTMAX, r#"{"mechanism": "fourier"}"#] {
            let model = model(&[attention], &device);
            let mut state = LanguageState::default();
            model.step(&[1, 2], &mut state).unwrap();
            let mut none = state.select(&[]).unwrap();
            assert_eq!(model.step(&[], &mut none).unwrap().dims(), [0, 11], "{attention}");
            let mut one = state.select(&[1]).unwrap();
            model.step(&[1], &mut one).unwrap();
        }
    }
}

/// A mask of pairs on the graph of softmax: the causal one, padding beside it, and one of each text and head.
#[test]
fn any_pairs_can_be_hidden_from_softmax() {
    let device = Device::flex();
    for attention in [AttentionConfig::softmax(), AttentionConfig::softmax_window()] {
        let attention = MultiHeadAttentionConfig::new(8, 2).with_attention(attention).init(&device).unwrap();
        let x = Tensor::<3>::random([2, 5, 8], Distribution::Default, &device);
        let future = Tensor::<2, Bool>::tril_mask([5, 5], 0, &device).reshape([1, 1, 5, 5]);
        let lengths = AttentionMask::bidirectional().with_lengths(&[5, 3]);
        let found = attention.self_attention_hiding(x.clone(), future.clone(), &lengths).unwrap();
        let expected = attention.self_attention(x.clone(), &AttentionMask::causal().with_lengths(&[5, 3])).unwrap();
        for (found, expected) in numbers(found).iter().zip(&numbers(expected)) {
            assert!((found - expected).abs() < 1e-5, "{found}, not {expected}");
        }
        // One text's own: all pairs of the second are hidden, and its rows are the output's bias.
        let own = Tensor::cat(vec![future.clone(), future.clone().bool_not().bool_or(future.clone())], 0);
        let found = attention.self_attention_hiding(x.clone(), own, &AttentionMask::bidirectional()).unwrap();
        let bias = numbers(attention.output.bias.as_ref().unwrap().val());
        for (found, bias) in numbers(found.narrow(0, 1, 1)).iter().zip(bias.iter().cycle()) {
            assert!((found - bias).abs() < 1e-6);
        }
        let small = Tensor::<2, Bool>::tril_mask([4, 4], 0, &device).reshape([1, 1, 4, 4]);
        assert!(
            attention.self_attention_hiding(x.clone(), small, &lengths).unwrap_err().to_string().contains("hidden")
        );
    }
    let shaw = MultiHeadAttentionConfig::new(8, 2).init(&device).unwrap();
    let nothing = Tensor::<2, Bool>::tril_mask([5, 5], 4, &device).reshape([1, 1, 5, 5]);
    let x = Tensor::<3>::ones([1, 5, 8], &device);
    assert!(shaw.self_attention_hiding(x, nothing, &AttentionMask::causal()).is_err());
}

/// Casts what is learned.
struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|x| x.cast(self.0))
    }
}

/// Burn drops what the layers give, which are of the training device.
#[test]
fn plain_inputs_are_dropped_where_the_layer_trains() {
    let (plain, training) = (Device::flex(), Device::flex().autodiff());
    let config = BlockConfig::new().with_d_model(16).with_heads(2).with_d_ff(8).with_dropout(0.5);
    let mut block = config.encoder(&AttentionConfig::shaw(), &training).unwrap();
    let outer = &mut block.feed_forward.outer;
    outer.weight = outer.weight.clone().map(|x| x.zeros_like());
    outer.bias = None;
    for x in [plain, training].map(|device| Tensor::<3>::random([2, 20, 16], Distribution::Default, &device)) {
        let out = block.forward(x.clone(), &AttentionMask::causal()).unwrap();
        let kept = numbers(out).iter().zip(&numbers(x)).filter(|(a, b)| a == b).count();
        assert!((200..440).contains(&kept), "{kept} of 640");
    }
}

#[test]
fn dropout_of_any_numbers_is_drawn_from_the_seed() {
    let device = Device::flex().autodiff();
    for dtype in [FloatDType::F32, FloatDType::F64, FloatDType::BF16, FloatDType::F16] {
        let x = Tensor::<2>::ones([8, 32], &device).cast(dtype);
        let drawn = |seed| with_dropout_seed(seed, || numbers(dropout(x.clone(), 0.5).unwrap().cast(FloatDType::F32)));
        assert_eq!(drawn(3), drawn(3), "{dtype:?}");
        assert_ne!(drawn(3), drawn(4), "{dtype:?}");
        assert!(drawn(3).iter().all(|&x| x == 0.0 || x == 2.0), "{dtype:?}");
    }
}

/// `f16` ends at 65,504: squares and sums of numbers that it holds do not fit into it.
#[test]
fn sums_of_half_width_numbers_are_those_of_single_precision() {
    let device = Device::flex();
    let random = |shape, scale: f64| Tensor::<3>::random(shape, Distribution::Normal(0.0, scale), &device);
    let near = |name: &str, found: Vec<f32>, expected: Vec<f32>| {
        let largest = expected.iter().fold(1e-6_f32, |most, x| most.max(x.abs()));
        let near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 3e-3 * largest);
        assert!(near, "{name}: {found:?}, not {expected:?}");
    };
    let half = FloatDType::F16;
    let narrow = |x: &Tensor<3>| x.clone().cast(half);
    let wide = |x: Tensor<3>| numbers(x.cast(FloatDType::F32));
    let (x, gate) = (random([1, 3, 8], 500.0), random([1, 3, 8], 1.0));
    let norm = TokenNormConfig::new(8).with_kind(NormKind::Rms).init(&device).unwrap();
    let found = norm.clone().map(&mut Cast(half)).forward(narrow(&x)).unwrap();
    near("norm", wide(found), wide(norm.forward(x.clone()).unwrap()));
    let norm = GatedRmsNormConfig::new(2, 4).init(&device).unwrap();
    let found = norm.clone().map(&mut Cast(half)).forward(narrow(&x), narrow(&gate)).unwrap();
    near("gated norm", wide(found), wide(norm.forward(x, gate).unwrap()));
    for (rows, vocabulary) in [(9, 20_000), (30_000, 20)] {
        let (x, output) = (random([1, rows, 8], 1.0), LinearConfig::new(8, vocabulary).init(&device));
        let next: Vec<Option<u32>> = (0..rows).map(|n| Some((n % vocabulary) as u32)).collect();
        for smoothing in [0.0, 0.1] {
            let found =
                cross_entropy(narrow(&x), &output.clone().map(&mut Cast(half)), next.clone(), smoothing).unwrap();
            let expected = cross_entropy(x.clone(), &output, next.clone(), smoothing).unwrap();
            near("loss", numbers(found.smoothed), numbers(expected.smoothed));
        }
    }
    let y: Tensor<2> = random([1, 3000, 2], 9.0).squeeze_dim(0);
    let (found, expected) = (y.clone().cast(half), vec![0.0; 6000]);
    near(
        "squared",
        numbers(squared_error(found.clone(), &expected).unwrap()),
        numbers(squared_error(y, &expected).unwrap()),
    );
    let layer = LinearConfig::new(30, 30).init(&Device::flex().autodiff());
    let norm = |layer: &burn::nn::Linear, dtype| {
        let x = Tensor::<2>::full([5, 30], 200.0, &Device::flex().autodiff()).cast(dtype);
        let mut gradients = GradientsParams::from_grads(layer.forward(x).sum().backward(), layer);
        clip_gradients(layer, &mut gradients, 1.0).unwrap() as f32
    };
    let narrow = layer.clone().map(&mut Cast(half)).map(&mut Leaves);
    near("norm of gradients", vec![norm(&narrow, half)], vec![norm(&layer, FloatDType::F32)]);
}

/// Parameters of their own again.
struct Leaves;

impl ModuleMapper for Leaves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|x| x.detach().require_grad())
    }
}

/// A target that is missing does not count, whatever is predicted of it.
#[test]
fn predictions_of_missing_numbers_may_be_anything() {
    let device = Device::flex().autodiff();
    let y = Tensor::<2>::from_data([[f32::NAN], [1.0]], &device).require_grad();
    let loss = pinball(y.clone(), &[f32::NAN, 3.0], &[0.5]).unwrap();
    let gradient = y.grad(&loss.backward()).unwrap();
    assert_eq!((numbers(loss.inner()), numbers(gradient)), (vec![1.0], vec![0.0, -0.5]));
}

#[test]
fn models_of_several_number_types_are_errors_and_no_panics() {
    let device = Device::flex();
    let block = BlockConfig::new().with_d_model(16).with_heads(2).with_d_ff(8).with_dropout(0.0);
    let x = Tensor::<3>::zeros([1, 4, 16], &device);
    let double = || Cast(FloatDType::F64);
    let whole = block.encoder(&AttentionConfig::shaw(), &device).unwrap();
    let mut blocks = [(); 4].map(|()| whole.clone());
    let [norm, second_norm, layer, bias] = &mut blocks;
    norm.attention_norm = norm.attention_norm.clone().map(&mut double());
    second_norm.feed_forward_norm = second_norm.feed_forward_norm.clone().map(&mut double());
    layer.feed_forward.outer = layer.feed_forward.outer.clone().map(&mut double());
    bias.attention.query_key_value.bias =
        bias.attention.query_key_value.bias.take().map(|bias| bias.map(|x| x.cast(FloatDType::F64)));
    for block in blocks {
        let error = block.forward(x.clone(), &AttentionMask::causal()).unwrap_err().to_string();
        assert!(error.contains("number types") && error.contains("cast"), "{error}");
        let mut state = AttentionState::default();
        assert!(block.step(x.clone().narrow(1, 0, 1), &mut state).is_err());
        assert!(block.advance(x.clone(), &mut state).is_err());
        assert!(block.attention.attention.store(&state).unwrap().is_empty(), "a state moves on after an error");
    }
    let mut model = LanguageModelConfig::new(11).with_block(block.clone()).init(&device).unwrap();
    model.norm = model.norm.map(|norm| norm.map(&mut double()));
    let error = model.decoder(&LanguageState::default(), 1).unwrap_err().to_string();
    assert!(error.contains("of another type"), "{error}");
    let mut state = LanguageState::default();
    assert!(model.step(&[1], &mut state).is_err());
    assert!(model.prefill(tokens(1, [1, 2]), &mut state).is_err());
    assert_eq!((model.store(&state).unwrap().iter().all(StoredState::is_empty), state.position()), (true, 0));
    let mut pairs = Seq2SeqConfig::new(11, 11).with_block(block.clone()).init(&device).unwrap();
    pairs.output = pairs.output.map(&mut double());
    let mut state = pairs.start(pairs.encode(tokens(1, [1, 2]), &[2]).unwrap());
    assert!(pairs.step(&[1], &mut state).is_err());
    assert_eq!(state.position(), 0);
    let config = ClassifierConfig::new(11, 2).with_block(block).with_pooling(Pooling::Attention);
    let mut model = config.init(&device).unwrap();
    model.pooling_query = model.pooling_query.map(|query| query.map(|x| x.cast(FloatDType::F64)));
    let error = model.forward(tokens(1, [1, 2]), &[2]).unwrap_err().to_string();
    assert!(error.contains("pooling: x"), "{error}");
}

/// `recall` says where its queries stand, and all of them see all of a memory.
#[test]
fn what_a_mask_says_of_queries_is_no_part_of_a_memory() {
    let device = Device::flex();
    let attention = MultiHeadAttentionConfig::new(16, 2).init(&device).unwrap();
    let memory = Tensor::<3>::random([1, 200, 16], Distribution::Default, &device);
    for mask in [AttentionMask::bidirectional().with_offset(5), AttentionMask::causal()] {
        for result in [attention.remember(memory.clone(), &mask), attention.remember_for(memory.clone(), &mask, 3)] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("without an offset"), "{error}");
        }
    }
}

#[test]
fn values_of_another_width_than_queries_advance() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        for name in ["kernelized", "shaw", "fourier", "toeplitz", "gated", "delta", "softmax-window"] {
            let attention = AttentionConfig::by_name(name).unwrap().init(2, 2, 4, &device).unwrap();
            let random = |width| Tensor::<4>::random([1, 2, 9, width], Distribution::Default, &device);
            let (q, k, v) = (random(4), random(attention.key_dim()), random(7));
            let whole = attention.forward(q.clone(), k.clone(), v.clone(), &AttentionMask::causal()).unwrap();
            let mut state = AttentionState::default();
            let mut part = |from, count| {
                let [q, k, v] = [&q, &k, &v].map(|x| x.clone().narrow(2, from, count));
                attention.advance(q, k, v, &mut state).unwrap()
            };
            let parts = Tensor::cat(vec![part(0, 4), part(4, 5)], 2);
            assert!((parts - whole).abs().max().into_scalar::<f32>() < 1e-5, "{name}");
        }
    }
}

#[test]
fn decays_are_checked_where_a_mechanism_is_made() {
    for name in ["kernelized", "shaw", "fourier"] {
        for decay in ["[2.0, 0.5]", "[0.5]", "[0.0, 1.0]"] {
            let text = format!(r#"{{"mechanism": "{name}", "kernel": {{"decay": {decay}}}}}"#);
            let config: AttentionConfig = serde_json::from_str(&text).unwrap();
            let error = config.init(2, 2, 4, &Device::flex()).unwrap_err().to_string();
            assert!(error.contains("decay: expected 2 numbers in (0, 1]"), "{error}");
        }
    }
}

/// As one call, in pieces, token by token, and by a decoder; stored and loaded; refused where they have no meaning.
#[test]
fn gates_of_kernelized_attention_stream_and_are_stored() {
    let device = Device::flex();
    for mechanism in ["kernelized", "shaw", "fourier"] {
        let gated = format!(r#"{{"mechanism": "{mechanism}", "kernel": {{"gates": true}}}}"#);
        let one = model(&[&gated], &device);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        save_weights(&path, &one).unwrap();
        let one = load_weights(&path, model(&[&gated], &device)).unwrap();
        let text = tokens(1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let whole = one.forward(text.clone()).unwrap();
        let mut state = LanguageState::default();
        let mut parts = vec![one.advance(text.clone().narrow(1, 0, 4), &mut state).unwrap()];
        state = one.restore(&one.store(&state).unwrap(), state.position()).unwrap();
        parts.push(one.step(&[5], &mut state).unwrap().unsqueeze_dim(1));
        let mut decoder = one.decoder(&state, 1).unwrap();
        for token in 6..11 {
            let logits = decoder.step(&[token]).unwrap().to_vec();
            parts.push(Tensor::<1>::from_data(logits.as_slice(), &device).reshape([1, 1, 11]));
        }
        assert!((Tensor::cat(parts, 1) - whole).abs().max().into_scalar::<f32>() < 1e-4, "{mechanism}");
        // A state without gates is one of another mechanism.
        let plain = model(&[&format!(r#"{{"mechanism": "{mechanism}"}}"#)], &device);
        assert!(plain.step(&[1], &mut state).is_err());
        let config: AttentionConfig = serde_json::from_str(&gated).unwrap();
        let x = Tensor::<3>::zeros([1, 4, 8], &device);
        let attention = MultiHeadAttentionConfig::new(8, 2).with_attention(config).init(&device).unwrap();
        let error = attention.self_attention(x, &AttentionMask::bidirectional()).unwrap_err().to_string();
        assert!(error.contains("causal mask"), "{error}");
    }
    // Keys that bring no gate, whoever calls the kernel.
    let config: AttentionConfig = serde_json::from_str(r#"{"mechanism": "shaw", "kernel": {"gates": true}}"#).unwrap();
    let kernel = config.init(1, 1, 2, &device).unwrap().kernel();
    let kernel: &dyn Kernel<f32> = &*kernel;
    let dims = Dims::square(1, 1, 3, 2);
    let learned: Vec<Vec<f32>> = kernel.parameters(&dims).iter().map(|learned| vec![0.1; learned.len()]).collect();
    let learned: Vec<&[f32]> = learned.iter().map(Vec::as_slice).collect();
    let (narrow, wide) = ([0.1; 6], [0.1; 9]);
    let call = |k| Call::new(dims, View::contiguous(&narrow, dims.q()), k, View::contiguous(&narrow, dims.v()));
    let call = |k| call(k).with_mask(Mask::causal()).with_parameters(&learned);
    let run = |k| {
        let mut out = [0.0; 6];
        kernel.forward(&call(k), Output::new(ViewMut::contiguous(&mut out, dims.out())), &mut Scratch::default())
    };
    run(View::contiguous(&wide, [1, 1, 3, 3])).unwrap();
    assert!(
        run(View::contiguous(&narrow, dims.k())).unwrap_err().to_string().contains("k: expected shape [1, 1, 3, 3]")
    );
    let both = r#"{"mechanism": "shaw", "kernel": {"gates": true, "decay": [0.5, 0.5]}}"#;
    let config: AttentionConfig = serde_json::from_str(both).unwrap();
    let error = config.init(2, 2, 4, &device).unwrap_err().to_string();
    assert!(error.contains("gates: expected false beside a decay"), "{error}");
}

/// Each with its own fan, drawn when it is first looked at; apart, and together again.
#[test]
fn projections_have_fans_of_their_own_and_come_apart() {
    [Device::flex(), Device::flex().autodiff()].iter().for_each(have_fans_and_come_apart);
}

fn have_fans_and_come_apart(device: &Device) {
    let block = BlockConfig::new().with_d_model(32).with_heads(4).with_initializer(Some(Initializer::Zeros));
    let zeros = block.encoder(&AttentionConfig::shaw(), device).unwrap();
    for layer in [&zeros.attention.output, &zeros.feed_forward.inner, &zeros.feed_forward.outer] {
        assert!(numbers(layer.weight.val()).iter().all(|&x| x == 0.0));
    }
    for (gated, kv_heads) in [(false, None), (true, Some(1))] {
        let config = MultiHeadAttentionConfig::new(32, 4).with_gated(gated).with_kv_heads(kv_heads);
        let xavier = Initializer::XavierUniform { gain: 1.0 };
        let attention = config.clone().with_initializer(Some(xavier)).init(device).unwrap();
        assert!(!attention.query_key_value.weight.is_initialized());
        let projections = attention.projections();
        for layer in &projections {
            // Queries and gates stand in one.
            let [inputs, outputs] = layer.weight.dims();
            let most = (6.0 / (inputs + outputs.min(32)) as f32).sqrt();
            let largest = numbers(layer.weight.val()).iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            assert!(largest <= most && largest > 0.9 * most, "{largest} of {most}");
            assert!(numbers(layer.bias.as_ref().unwrap().val()).iter().all(|&x| x == 0.0));
        }
        let together = config.init(device).unwrap().with_projections(projections.clone()).unwrap();
        let weights = [&together, &attention].map(|one| numbers(one.query_key_value.weight.val()));
        assert_eq!(weights[0], weights[1]);
        // What is drawn, taken apart or put together can learn.
        let both = [&attention, &together].map(|one| one.query_key_value.weight.val());
        let mut weights = both.into_iter().chain(projections.iter().map(|layer| layer.weight.val()));
        assert!(weights.all(|weight| weight.is_require_grad() == device.is_autodiff()));
        let [q, mut k, v] = projections;
        k.weight = Param::from_tensor(Tensor::zeros([32, 5], device));
        let error = together.with_projections([q, k, v]).unwrap_err().to_string();
        assert!(error.contains("projections: weight: expected [32, "), "{error}");
    }
}

/// Also where options alone differ, which numbers do not tell.
#[test]
fn states_are_stored_by_what_made_them() {
    let texts = [
        SHAW,
        SOFTMAX,
        r#"{"mechanism": "kernelized"}"#,
        r#"{"mechanism": "kernelized", "kernel": {"feature_map": "relu"}}"#,
        r#"{"mechanism": "kernelized", "kernel": {"decay": [0.5, 0.5]}}"#,
        r#"{"mechanism": "delta"}"#,
    ];
    for device in [Device::flex(), Device::flex().autodiff()] {
        let x = |heads: usize, width: usize| Tensor::<4>::ones([1, heads, 1, width], &device);
        let init = |text: &str| serde_json::from_str::<AttentionConfig>(text).unwrap().init(2, 2, 4, &device).unwrap();
        for one in texts {
            let (made, mut state) = (init(one), AttentionState::default());
            made.step(x(2, 4), x(2, made.key_dim()), x(2, 4), &mut state).unwrap();
            for other in texts {
                let stored = init(other).store(&state);
                assert_eq!(stored.is_ok(), one == other, "{one} by {other}: {stored:?}");
                assert!(stored.map_or_else(|error| error.to_string().contains("options"), |s| !s.is_empty()));
            }
            let heads = serde_json::from_str::<AttentionConfig>(one).unwrap().init(1, 1, 8, &device);
            assert!(heads.is_err() || heads.unwrap().store(&state).is_err(), "{one} by other heads");
        }
    }
}

#[test]
fn states_of_given_positions_are_stored_and_go_on() {
    let device = Device::flex();
    for text in [
        r#"{"mechanism": "fourier"}"#,
        r#"{"mechanism": "fourier", "axes": 2}"#,
        r#"{"mechanism": "fourier", "axes": 2, "normalizer": "unrotated", "rotary": true}"#,
    ] {
        let attention = serde_json::from_str::<AttentionConfig>(text).unwrap().init(2, 2, 4, &device).unwrap();
        let Attention::Fourier(fourier) = &attention else { panic!("fourier") };
        let draw = |_| Tensor::<4>::random([1, 2, 3, 4], Distribution::Default, &device);
        let [q, k, v] = std::array::from_fn(draw);
        let places = Tensor::<3>::random([1, 3, fourier.a.dims()[2]], Distribution::Uniform(-5.0, 5.0), &device);
        let both = [places.clone(), places.clone()];
        let whole = fourier.forward_at(q.clone(), k.clone(), v.clone(), both, &AttentionMask::causal()).unwrap();
        let mut state = AttentionState::default();
        for t in 0..3 {
            let [q, k, v] = [&q, &k, &v].map(|x| x.clone().narrow(2, t, 1));
            let place = places.clone().narrow(1, t, 1);
            let out = fourier.step_at(q.clone(), k.clone(), v.clone(), [place.clone(), place], &mut state).unwrap();
            let apart = (out - whole.clone().narrow(2, t, 1)).abs().max().into_scalar::<f32>();
            assert!(apart < 1e-5, "{text}, token {t}: {apart}");
            state = attention.restore(&attention.store(&state).unwrap(), &device).unwrap();
            // Where tokens are counted there are no such places.
            assert!(fourier.step(q, k, v, &mut state.clone()).is_err());
        }
        let both = [places.clone(), places.clone()];
        let error = fourier.step_at(q.clone(), k.clone(), v.clone(), both, &mut state).unwrap_err().to_string();
        assert!(error.contains("1 query"), "{error}");
        let [q, k, v] = [q, k, v].map(|x| x.narrow(2, 0, 1).autodiff());
        let place = places.narrow(1, 0, 1).autodiff();
        let error = fourier.step_at(q, k, v, [place.clone(), place], &mut state).unwrap_err().to_string();
        assert!(error.contains("forward_at"), "{error}");
    }
}

/// A penalty leaves them what they are: an error, and a token that never comes.
#[test]
fn infinite_logits_of_tokens_that_were_seen_stay_so() {
    let device = Device::flex();
    let block = BlockConfig::new().with_d_model(16).with_d_ff(32);
    let mut model =
        LanguageModelConfig::new(5).with_block(block).with_layers(1).with_tied(false).init(&device).unwrap();
    let mut run = |bias: f32| {
        let output = model.output.as_mut().unwrap();
        output.bias = Some(Param::from_tensor(Tensor::from_data([0.0, bias, 0.0, 0.0, 0.0], &device)));
        let mut options = TextOptions { max_tokens: 200, repetition_penalty: 1.5, ..TextOptions::default() };
        // All that can come are equally likely.
        options.sample.temperature = f64::MAX;
        generate_text(&model, &[1, 2], &mut LanguageState::default(), &options, |_| true)
    };
    assert!(run(f32::INFINITY).unwrap_err().to_string().contains("logits"));
    assert!(run(f32::NAN).unwrap_err().to_string().contains("logits"));
    let text = run(f32::NEG_INFINITY).unwrap();
    assert!(!text.contains(&1) && text.contains(&2));
}

#[test]
fn a_memory_for_no_queries_is_one() {
    let device = Device::flex();
    let config = MultiHeadAttentionConfig::new(16, 2).with_attention(AttentionConfig::kernelized());
    let attention = config.init(&device).unwrap();
    let x = Tensor::<3>::random([1, 9, 16], Distribution::Default, &device);
    let mask = AttentionMask::bidirectional();
    let memory = attention.remember_for(x.clone(), &mask, 0).unwrap();
    assert_eq!(attention.recall(Tensor::zeros([1, 0, 16], &device), 0, &memory).unwrap().dims(), [1, 0, 16]);
    let expected = numbers(attention.cross_attention(x.clone(), x.clone(), &mask).unwrap());
    for longest in [1, 4, 5, usize::MAX] {
        let memory = attention.remember_for(x.clone(), &mask, longest).unwrap();
        let first = numbers(attention.recall(x.clone().narrow(1, 0, 1), 0, &memory).unwrap());
        assert!(first.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{longest}");
    }
}

/// Numbers that no other type of integers holds.
#[test]
fn tokens_and_targets_of_the_largest_numbers_are_errors() {
    let model = model(&[SHAW], &Device::flex());
    let largest =
        || Tensor::<2, Int>::from_data(TensorData::new(vec![u64::MAX; 2], [1, 2]), (&Device::flex(), DType::U64));
    assert!(model.loss(tokens(1, [1, 2]), largest(), 0.0).unwrap_err().to_string().contains("entries below 11"));
    assert!(model.forward(largest()).unwrap_err().to_string().contains("entries below 11"));
}

#[test]
fn who_listens_within_another_hears_the_same() {
    use longspan::profile::profile;
    let model = model(&[SHAW], &Device::flex());
    let run = || drop(model.forward(tokens(1, [1, 2, 3])).unwrap());
    let ((_, inner), outer) = profile(|| profile(run));
    assert!(inner.contains_key("embeddings") && inner.len() >= 3, "{inner:?}");
    assert!(inner.iter().all(|(name, seconds)| outer[name] >= *seconds), "{inner:?} within {outer:?}");
}

/// The places at which numbers are dropped are drawn from 65,536 of them.
#[test]
fn the_highest_probabilities_drop_nearly_all() {
    let x = Tensor::<1>::ones([100_000], &Device::flex().autodiff());
    for probability in [0.99999, 1.0 - f64::EPSILON] {
        let kept = numbers(dropout(x.clone(), probability).unwrap()).into_iter().filter(|&x| x != 0.0).count();
        assert!(kept < 20, "{probability}: {kept}");
    }
}
