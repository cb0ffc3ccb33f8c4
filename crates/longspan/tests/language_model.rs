//! A language model over whole texts, in segments with the states carried over each cut, and token by token: the same.

mod support;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::{AttentionConfig, StoredState};
use longspan::generate::{TextOptions, generate_text};
use longspan::layers::{Activation, NormKind};
use longspan::models::{LanguageModel, LanguageModelConfig, LanguageState, Norm, Positions};
use longspan::sample::SampleOptions;
use support::{assert_close, block, numbers};

const VOCAB: usize = 11;
const BATCH: usize = 3;
const TOKENS: usize = 23;

fn config() -> LanguageModelConfig {
    LanguageModelConfig::new(VOCAB).with_block(block()).with_layers(2)
}

fn model(config: &LanguageModelConfig, device: &Device) -> LanguageModel {
    Device::flex().seed(5);
    config.init(device).unwrap()
}

/// Every mechanism with its default options, one with a decay, a hybrid, and the forms of the model.
fn configs() -> Vec<LanguageModelConfig> {
    let mut all: Vec<_> = AttentionConfig::NAMES
        .iter()
        .map(|name| config().with_attention(vec![AttentionConfig::by_name(name).unwrap()]))
        .collect();
    let decay = r#"{"mechanism": "shaw", "relative": {"radius": 3}, "kernel": {"decay": [0.9, 0.99]}}"#;
    all.push(config().with_attention(vec![serde_json::from_str(decay).unwrap()]));
    all.push(config().with_layers(3).with_attention(vec![AttentionConfig::shaw(), AttentionConfig::softmax()]));
    all.push(config().with_tied(false).with_positions(Positions::Sinusoidal).with_block(block().with_norm(Norm::Post)));
    all.push(config().with_block(block().with_kv_heads(Some(1))));
    all.push(config().with_block(block().with_gated_attention(true)));
    all
}

fn text() -> Vec<usize> {
    (0..BATCH * TOKENS).map(|i| (i * i + 3 * i + i / 7) % VOCAB).collect()
}

/// Columns `from..to` of the text, on a device.
fn part(from: usize, to: usize, device: &Device) -> Tensor<2, Int> {
    let rows = (0..BATCH).flat_map(|b| text()[b * TOKENS + from..b * TOKENS + to].to_vec());
    let ids: Vec<i64> = rows.map(|id| id as i64).collect();
    Tensor::from_data(TensorData::new(ids, [BATCH, to - from]), device)
}

/// The tokens after those of [`part`].
fn next(from: usize, to: usize) -> Vec<Option<u32>> {
    let column = |b: usize, t: usize| (t < TOKENS).then(|| text()[b * TOKENS + t] as u32);
    (0..BATCH).flat_map(|b| (from + 1..=to).map(move |t| column(b, t))).collect()
}

#[test]
fn segments_and_steps_give_the_rows_of_the_whole() {
    let device = Device::flex();
    for config in configs() {
        let name = format!("{:?}", config.attention);
        let model = model(&config, &device);
        let whole = model.forward(part(0, TOKENS, &device)).unwrap();
        let rows = |from: usize, to: usize| numbers(whole.clone().narrow(1, from, to - from));
        let some = model.forward_at(part(0, TOKENS, &device), &[TOKENS + 2, 2]).unwrap();
        let all = numbers(whole.clone());
        let expected = [TOKENS + 2, 2].map(|row| &all[row * VOCAB..][..VOCAB]).concat();
        assert_close(&format!("{name}, some rows"), &numbers(some), &expected, 5e-5);
        let mut state = LanguageState::default();
        for (from, to) in [(0, 1), (1, 9), (9, 17)] {
            let got = model.advance(part(from, to, &device), &mut state).unwrap();
            assert_close(&format!("{name}, {from} to {to}"), &numbers(got), &rows(from, to), 5e-5);
        }
        for t in 17..20 {
            let tokens: Vec<usize> = (0..BATCH).map(|b| text()[b * TOKENS + t]).collect();
            let got = model.step(&tokens, &mut state).unwrap();
            assert_close(&format!("{name}, step {t}"), &numbers(got), &rows(t, t + 1), 5e-5);
        }
        let last = model.prefill(part(20, TOKENS, &device), &mut state).unwrap();
        assert_close(&format!("{name}, prefill"), &numbers(last), &rows(TOKENS - 1, TOKENS), 5e-5);
        assert_eq!(state.position(), TOKENS);
    }
}

#[test]
fn losses_of_segments_add_up_in_training_and_out_of_it() {
    let training = Device::flex().autodiff();
    for config in configs() {
        let name = format!("{:?}", config.attention);
        let model = model(&config, &training);
        let value = |loss: Tensor<1>| loss.into_scalar::<f32>();
        let whole = model.loss(part(0, TOKENS, &training), next(0, TOKENS), 0.1).unwrap();
        let (mut plain, mut smoothed) = (0.0, 0.0);
        let mut state = LanguageState::default();
        for (from, to) in [(0, 8), (8, 16), (16, TOKENS)] {
            let loss = model.loss_from(part(from, to, &training), next(from, to), 0.1, &mut state).unwrap();
            plain += value(loss.plain);
            smoothed += value(loss.smoothed);
        }
        assert_close(&name, &[plain, smoothed], &[value(whole.plain.clone()), value(whole.smoothed)], 5e-5);
        let valid = model.valid();
        let device = Device::flex();
        let mut state = LanguageState::default();
        let first = valid.loss_from(part(0, 8, &device), next(0, 8), 0.0, &mut state).unwrap();
        let rest = valid.loss_from(part(8, TOKENS, &device), next(8, TOKENS), 0.0, &mut state).unwrap();
        assert_close(&name, &[value(first.plain) + value(rest.plain)], &[value(whole.plain)], 5e-5);
    }
}

#[test]
fn the_gradient_of_a_segment_is_that_of_its_loss_with_the_state_held_fixed() {
    let training = Device::flex().autodiff();
    for config in configs() {
        let name = format!("{:?}", config.attention);
        let model = model(&config, &training);
        let mut before = LanguageState::default();
        model.advance(part(0, 10, &training), &mut before).unwrap();
        let loss = |model: &LanguageModel| {
            let mut state = before.clone();
            model.loss_from(part(10, TOKENS, &training), next(10, TOKENS), 0.1, &mut state).unwrap().smoothed
        };
        let gradients = GradientsParams::from_grads(loss(&model).backward(), &model);
        // Along its own gradient a function rises by the square of the gradient's norm.
        let squares = along::squares(&model, &gradients);
        // A fresh AFT-conv has parameters of no influence yet.
        let whole = model.loss(part(0, TOKENS, &training), next(0, TOKENS), 0.1).unwrap().smoothed.backward();
        let whole = along::squares(&model, &GradientsParams::from_grads(whole, &model));
        for (n, (square, whole)) in squares.iter().zip(whole).enumerate() {
            assert_eq!(*square > 0.0, whole > 0.0, "{name}: parameter {n}");
        }
        let square: f64 = squares.iter().sum();
        let step = 0.05 / square;
        let at = |step: f64| f64::from(loss(&along::moved(model.clone(), &gradients, step)).into_scalar::<f32>());
        let slope = (at(step) - at(-step)) / (2.0 * step);
        assert!((slope - square).abs() < 0.01 * square, "{name}: {slope} instead of {square}");
    }
}

/// Models moved along a gradient.
mod along {
    use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
    use burn::optim::GradientsParams;
    use burn::tensor::Tensor;

    /// The square of each parameter's gradient; 0 where it has none.
    pub fn squares(model: &impl Module, gradients: &GradientsParams) -> Vec<f64> {
        struct Squares<'a>(&'a GradientsParams, Vec<f64>);
        impl ModuleVisitor for Squares<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let square = self.0.get::<D>(param.id).map(|g| g.clone().mul(g).sum().into_scalar::<f32>());
                self.1.push(square.map_or(0.0, f64::from));
            }
        }
        let mut squares = Squares(gradients, Vec::new());
        model.visit(&mut squares);
        squares.1
    }

    /// The model a step along the gradient.
    pub fn moved<M: Module>(model: M, gradients: &GradientsParams, step: f64) -> M {
        struct Move<'a>(&'a GradientsParams, f64);
        impl ModuleMapper for Move<'_> {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                let (id, value, mapper) = param.consume();
                let gradient = self.0.get::<D>(id).expect("every parameter has one");
                let moved = value.inner() + gradient.mul_scalar(self.1);
                Param::from_mapped_value(id, Tensor::from_inner(moved).require_grad(), mapper)
            }
        }
        model.map(&mut Move(gradients, step))
    }
}

#[test]
fn states_are_selected_joined_and_stored_to_the_bit() {
    for config in configs() {
        let name = format!("{:?}", config.attention);
        for device in [Device::flex(), Device::flex().autodiff()] {
            let model = model(&config, &device);
            let mut state = LanguageState::default();
            model.advance(part(0, 9, &device), &mut state).unwrap();
            let rest = |state: &LanguageState| {
                let mut state = state.clone();
                numbers(model.advance(part(9, TOKENS, &device), &mut state).unwrap())
            };
            let expected = rest(&state);
            let one = |b: usize| state.select(&[b]).unwrap();
            let joined = LanguageState::join(&[&one(0), &one(1), &one(2)]).unwrap();
            assert_eq!(rest(&joined), expected, "{name}: joined");
            let stored: Vec<_> = model.store(&state).unwrap().into_iter().map(StoredState::into_parts).collect();
            let text = serde_json::to_string(&stored.iter().map(|(form, _)| form).collect::<Vec<_>>()).unwrap();
            let forms: Vec<_> = serde_json::from_str(&text).unwrap();
            let tensors = stored.into_iter().map(|(_, tensors)| tensors);
            let stored: Vec<_> = std::iter::zip(forms, tensors).map(|(f, t)| StoredState::from_parts(f, t)).collect();
            let restored = model.restore(&stored, state.position()).unwrap();
            assert_eq!(rest(&restored), expected, "{name}: restored");
            assert!(LanguageState::join(&[&state, &LanguageState::default()]).is_err());
        }
    }
}

#[test]
fn only_softmax_keeps_its_past() {
    for name in AttentionConfig::NAMES {
        let config = config().with_attention(vec![AttentionConfig::by_name(name).unwrap()]);
        assert_eq!(model(&config, &Device::flex()).keeps_past(), *name == "softmax", "{name}");
    }
}

#[test]
fn it_learns_what_stands_before_the_cut() {
    // The second half of each text repeats the first, which stands in another segment: only the state tells it.
    let device = Device::flex().autodiff();
    device.seed(2);
    let attention = vec![AttentionConfig::shaw()];
    let mut model = config().with_block(block().with_d_model(32)).with_attention(attention).init(&device).unwrap();
    let mut optimizer = AdamWConfig::new().init();
    let tensor = |ids: &[usize], width: usize| {
        let ids: Vec<i64> = ids.iter().map(|&id| id as i64).collect();
        Tensor::<2, Int>::from_data(TensorData::new(ids, [8, width]), &device)
    };
    let mut last = f32::MAX;
    for step in 0..400 {
        // Each text is one token, four times; and four times again behind the cut.
        let token = |text: usize| 1 + (step * 31 + text * 7 + step * text) % 10;
        let first: Vec<usize> = (0..8).flat_map(|text| [token(text); 4]).collect();
        let second: Vec<usize> = vec![0; 8];
        let next: Vec<Option<u32>> = (0..8).map(|text| Some(token(text) as u32)).collect();
        let mut state = LanguageState::default();
        model.advance(tensor(&first, 4), &mut state).unwrap();
        let loss = model.loss_from(tensor(&second, 1), next, 0.0, &mut state).unwrap();
        last = loss.plain.into_scalar::<f32>() / 8.0;
        let gradients = GradientsParams::from_grads(loss.smoothed.mul_scalar(1.0 / 8.0).backward(), &model);
        model = optimizer.step(5e-3, model, gradients);
    }
    assert!(last < 0.1, "the loss is still {last}; a guess has {}", 10f32.ln());
}

#[test]
fn mistakes_are_errors() {
    let device = Device::flex();
    let error = |result: longspan::Result<LanguageModel>| result.map(drop).unwrap_err().to_string();
    assert!(error(config().with_attention(Vec::new()).init(&device)).contains("attention: expected at least one"));
    assert!(error(config().with_block(block().with_heads(3)).init(&device)).contains("heads"));
    assert!(error(config().with_block(block().with_dropout(1.0)).init(&device)).contains("dropout"));
    assert!(error(LanguageModelConfig::new(0).init(&device)).contains("vocab"));
    let model = model(&config(), &device);
    let mut state = LanguageState::default();
    assert!(model.step(&[VOCAB], &mut state).unwrap_err().to_string().contains("below 11"));
    assert!(model.prefill(part(0, 0, &device), &mut state).unwrap_err().to_string().contains("at least one"));
    let beyond = model.forward_at(part(0, 3, &device), &[3 * BATCH]).unwrap_err().to_string();
    assert!(beyond.contains("rows: expected rows below"), "{beyond}");
    model.advance(part(0, 3, &device), &mut state).unwrap();
    assert!(model.step(&[1], &mut state).is_err(), "another batch");
    let other = self::model(&config().with_layers(1), &device);
    assert!(other.step(&[1, 1, 1], &mut state).unwrap_err().to_string().contains("1 layers"));
}

/// Token by token without tensors, after a prompt and from the beginning, alone and in a batch.
#[test]
fn a_decoder_gives_the_logits_of_the_model() {
    let device = Device::flex();
    let block = || block().with_heads(4);
    let base = || LanguageModelConfig::new(11).with_block(block()).with_layers(3);
    let gated = block().with_activation(Activation::Silu).with_gated(true).with_norm_kind(NormKind::Rms);
    let configs = [
        base(),
        base().with_tied(false).with_block(block().with_norm(Norm::Post)).with_positions(Positions::Sinusoidal),
        base().with_block(gated.with_kv_heads(Some(2))),
        base().with_attention(vec![AttentionConfig::kernelized(), AttentionConfig::by_name("aft-conv").unwrap()]),
        base().with_block(block().with_gated_attention(true).with_kv_heads(Some(2))),
    ];
    for config in configs {
        let model = config.init(&device).unwrap();
        for batch in [1, 3] {
            let ids: Vec<i64> = (0..batch * 9).map(|n| (n * n + 3 * n) as i64 % 11).collect();
            let whole = Tensor::<2, Int>::from_data(TensorData::new(ids.clone(), [batch, 9]), &device);
            let expected = model.forward(whole.clone()).unwrap();
            let mut state = LanguageState::default();
            model.advance(whole.narrow(1, 0, 4), &mut state).unwrap();
            for (mut decoder, first) in [
                (model.decoder(&LanguageState::default(), batch).unwrap(), 0),
                (model.decoder(&state, batch).unwrap(), 4),
            ] {
                for token in first..9 {
                    let column: Vec<usize> = (0..batch).map(|entry| ids[entry * 9 + token] as usize).collect();
                    let logits = decoder.step(&column).unwrap().to_vec();
                    let row = expected.clone().narrow(1, token, 1).into_data().try_to_vec::<f32>().unwrap();
                    for (got, expected) in logits.iter().zip(&row) {
                        assert!((got - expected).abs() < 2e-4, "{config:?}, token {token}: {got}, not {expected}");
                    }
                }
                assert_eq!(decoder.position(), 9);
                let mut again = model.decoder(&decoder.state().unwrap(), batch).unwrap();
                let next = vec![5; batch];
                assert_eq!(again.step(&next).unwrap(), decoder.step(&next).unwrap());
                assert!(decoder.step(&[11]).is_err() && decoder.step(&[]).is_err());
            }
            assert!(model.decoder(&state, batch + 1).is_err());
        }
    }
    let softmax = base().with_attention(vec![AttentionConfig::softmax()]).init(&device).unwrap();
    let error = softmax.decoder(&LanguageState::default(), 1).unwrap_err().to_string();
    assert!(error.contains("grows with every token"), "{error}");
    let training = base().init(&device.autodiff()).unwrap();
    assert!(training.decoder(&LanguageState::default(), 1).is_err());
}

#[test]
fn texts_go_on_as_they_are_drawn() {
    for name in ["shaw", "softmax"] {
        let attention = vec![AttentionConfig::by_name(name).unwrap()];
        let model = model(&config().with_attention(attention), &Device::flex());
        let text = |prompt: &[usize], state: &mut LanguageState, options: &TextOptions| {
            let mut each = Vec::new();
            let tokens = generate_text(&model, prompt, state, options, |token| {
                each.push(token);
                true
            });
            assert_eq!(tokens.as_ref().ok(), Some(&each));
            each
        };
        let options = TextOptions { max_tokens: 12, seed: 5, ..TextOptions::default() };
        let mut state = LanguageState::default();
        let whole = text(&[1, 2, 3], &mut state, &options);
        assert_eq!((whole.len(), state.position()), (12, 15), "{name}");
        assert_eq!(text(&[1, 2, 3], &mut LanguageState::default(), &options), whole);
        let other = TextOptions { seed: 6, ..options.clone() };
        assert_ne!(text(&[1, 2, 3], &mut LanguageState::default(), &other), whole);
        // The likeliest tokens are those of the model, token by token, and the state holds them all.
        let sample = SampleOptions { temperature: 0.0, ..SampleOptions::default() };
        let likeliest = TextOptions { sample, ..options.clone() };
        let mut state = LanguageState::default();
        let drawn = text(&[1, 2, 3], &mut state, &likeliest);
        let mut own = LanguageState::default();
        let mut logits = Vec::new();
        for (n, token) in [1, 2, 3].iter().chain(&drawn).enumerate() {
            if n >= 3 {
                assert_eq!(sample.draw(&logits, 0.0).unwrap(), *token, "{name}");
            }
            logits = numbers(model.step(&[*token], &mut own).unwrap());
        }
        let [after, expected] = [&mut state, &mut own].map(|state| numbers(model.step(&[2], state).unwrap()));
        assert_close(name, &after, &expected, 1e-4);
        // A text ends before what stops it, and never holds what is excluded.
        let stopped = TextOptions { stop: vec![whole[4]], ..options.clone() };
        let end = whole.iter().position(|&token| token == whole[4]).unwrap();
        assert_eq!(text(&[1, 2, 3], &mut LanguageState::default(), &stopped), whole[..end]);
        let without = TextOptions { excluded: vec![drawn[0]], ..likeliest.clone() };
        assert!(!text(&[1, 2, 3], &mut LanguageState::default(), &without).contains(&drawn[0]));
        let penalty = TextOptions { repetition_penalty: 3.0, max_tokens: 1, ..likeliest.clone() };
        let mut logits = numbers(model.step(&[1], &mut LanguageState::default()).unwrap());
        logits[1] *= if logits[1] > 0.0 { 1.0 / 3.0 } else { 3.0 };
        let expected = sample.draw(&logits, 0.0).unwrap();
        assert_eq!(text(&[1], &mut LanguageState::default(), &penalty), [expected]);
        for repetition_penalty in [1e-38, 1e38] {
            let extreme = TextOptions { repetition_penalty, max_tokens: 3, ..likeliest.clone() };
            assert_eq!(text(&[1], &mut LanguageState::default(), &extreme).len(), 3);
        }
        let mut count = 0;
        let ended = generate_text(&model, &[1], &mut LanguageState::default(), &options, |_| {
            count += 1;
            count < 3
        });
        assert_eq!(ended.unwrap().len(), 3);
        let mut state = LanguageState::default();
        for (prompt, wrong) in [
            (&[][..], options.clone()),
            (&[1_000], options.clone()),
            (&[1], TextOptions { stop: vec![1_000], ..options.clone() }),
            (&[1], TextOptions { repetition_penalty: 0.0, ..options.clone() }),
        ] {
            assert!(generate_text(&model, prompt, &mut state, &wrong, |_| true).is_err());
        }
        assert_eq!(state.position(), 0);
    }
}
