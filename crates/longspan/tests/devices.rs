//! One list of cases on every device: what the kernels give on Burn's CPU backend, tensor operations give on others.
//! `cargo test --release -p longspan --features ndarray,vulkan --test devices`; without a Vulkan device its cases are passed over, and a
//! processor serves as one where Debian's `mesa-vulkan-drivers` are installed.

mod support;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Bool, DType, Device, Distribution, FloatDType, Gradients, Int, Tensor, TensorData};
use longspan::attention::{
    Attention, AttentionConfig, AttentionMask, AttentionState, BiasConfig, MultiHeadAttentionConfig, StoredState,
};
use longspan::checkpoint::{load_training, load_weights, save_training, save_weights};
use longspan::generate::{GenerateOptions, TextOptions, beam_search, generate_text};
use longspan::layers::{Activation, After, clip_gradients, linear, pinball};
use longspan::models::{
    ClassifierConfig, LanguageModel, LanguageModelConfig, LanguageState, Pooling, Positions, Seq2SeqConfig,
    SeriesModelConfig,
};
use longspan::sample::SampleOptions;
use support::{assert_close, block, numbers};

const VOCAB: usize = 11;
const TOKENS: usize = 90;

/// All devices that are here, beside Flex.
fn devices() -> Vec<(&'static str, Device)> {
    #[allow(deprecated, reason = "the simplest of the devices without kernels")]
    let ndarray = Device::ndarray();
    [("ndarray", ndarray)].into_iter().chain(vulkan().map(|device| ("vulkan", device))).collect()
}

#[cfg(not(feature = "vulkan"))]
fn vulkan() -> Option<Device> {
    None
}

#[cfg(feature = "vulkan")]
fn vulkan() -> Option<Device> {
    let device = || Device::vulkan(burn::tensor::DeviceKind::DefaultDevice);
    let answer = std::panic::catch_unwind(|| numbers(Tensor::<1>::ones([1], &device())));
    if answer.is_err() {
        eprintln!("no Vulkan device: its cases are passed over");
    }
    answer.ok().map(|_| device())
}

fn mechanisms() -> Vec<AttentionConfig> {
    let names = AttentionConfig::NAMES.iter().map(|name| AttentionConfig::by_name(name).unwrap());
    let others = [
        r#"{"mechanism": "shaw", "relative": {"radius": 3}, "kernel": {"decay": [0.9, 0.99]}}"#,
        r#"{"mechanism": "shaw", "kernel": {"feature_map": "exp"}}"#,
        r#"{"mechanism": "fourier", "normalizer": "unrotated", "rotary": true}"#,
        r#"{"mechanism": "toeplitz", "bias": {"kind": "clipped", "radius": 5}}"#,
        r#"{"mechanism": "toeplitz", "bias": {"kind": "table", "reach": 100}, "feature_map": "exp"}"#,
        r#"{"mechanism": "toeplitz", "bias": {"kind": "buckets", "buckets": 8, "max_distance": 20, "bidirectional": false}}"#,
        r#"{"mechanism": "softmax-window", "window": 7}"#,
        r#"{"mechanism": "gated", "gate": "channel"}"#,
        r#"{"mechanism": "gated-delta", "convolution": 4}"#,
        r#"{"mechanism": "shaw", "relative": {"radius": 3}, "kernel": {"gates": true}}"#,
        r#"{"mechanism": "fourier", "kernel": {"gates": true, "feature_map": "exp"}}"#,
    ];
    names.chain(others.map(|text| serde_json::from_str(text).unwrap())).collect()
}

fn language_model(attention: AttentionConfig) -> LanguageModelConfig {
    LanguageModelConfig::new(VOCAB).with_block(block()).with_layers(1).with_attention(vec![attention])
}

/// The same weights on another device.
fn on<M: Module>(model: &M, other: M) -> M {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    save_weights(&path, model).unwrap();
    load_weights(&path, other).unwrap()
}

fn ids(count: usize, device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..2 * count).map(|i| ((i * i + 3 * i + i / 7) % VOCAB) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [2, count]), device)
}

fn targets(count: usize) -> Vec<Option<u32>> {
    (0..2 * count).map(|i| (i % 5 != 4).then_some((i * 3 % VOCAB) as u32)).collect()
}

/// The gradients of all parameters, one after the other.
fn gradients_of(model: &impl Module, gradients: &Gradients) -> Vec<f32> {
    struct Collect<'a>(&'a Gradients, Vec<f32>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let x = param.val();
            self.1.extend(x.grad(self.0).map_or_else(|| vec![0.0; x.dims().iter().product()], numbers));
        }
    }
    let mut all = Collect(gradients, Vec::new());
    model.visit(&mut all);
    all.1
}

#[test]
fn losses_gradients_segments_and_steps() {
    for (device_name, device) in devices() {
        for attention in mechanisms() {
            let name = format!("{device_name}, {attention:?}");
            let config = language_model(attention);
            let flex = Device::flex().autodiff();
            let reference = config.init(&flex).unwrap();
            let training = device.clone().autodiff();
            let model = on(&reference, config.init(&training).unwrap());
            let [(found, of_found), (expected, of_expected)] =
                [(&model, &training), (&reference, &flex)].map(|(model, device)| {
                    let loss = model.loss(ids(TOKENS, device), targets(TOKENS), 0.1).unwrap();
                    (numbers(loss.smoothed.clone()), gradients_of(model, &loss.smoothed.backward()))
                });
            assert_close(&format!("{name}: loss"), &found, &expected, 2e-5);
            let largest = of_expected.iter().fold(1.0_f32, |a, b| a.max(b.abs()));
            let scaled = |x: &[f32]| x.iter().map(|x| x / largest).collect::<Vec<_>>();
            assert_close(&format!("{name}: gradients"), &scaled(&of_found), &scaled(&of_expected), 5e-5);
            // The README's loop: a backward a segment, none of which reaches the one before.
            let mut both = [(&model, &training), (&reference, &flex)].map(|(model, device)| {
                let mut state = LanguageState::default();
                let mut out = Vec::new();
                for (from, to) in [(0, 1), (1, 70), (70, 80)] {
                    let part = ids(TOKENS, device).narrow(1, from, to - from);
                    let loss = model.loss_from(part, targets(to - from), 0.0, &mut state).unwrap();
                    out.extend(numbers(loss.smoothed.clone()));
                    loss.smoothed.backward();
                }
                (out, state)
            });
            assert_close(&format!("{name}: segments"), &both[0].0, &both[1].0, 5e-5);
            // The state goes on without training, stored and restored, as halves joined, token by token.
            let whole = numbers(reference.forward(ids(TOKENS, &flex)).unwrap().narrow(1, 80, 10));
            let model = model.valid();
            let state = std::mem::take(&mut both[0].1);
            let mut state = model.restore(&model.store(&state).unwrap(), state.position()).unwrap();
            let halves = [0, 1].map(|entry| state.select(&[entry]).unwrap());
            state = LanguageState::join(&[&halves[0], &halves[1]]).unwrap();
            let next = ids(TOKENS, &device);
            let mut rows = Vec::new();
            for t in 80..84 {
                let tokens = next.clone().narrow(1, t, 1).try_into_vec_as::<i64>().unwrap();
                let tokens: Vec<usize> = tokens.into_iter().map(|id| id as usize).collect();
                rows.push(model.step(&tokens, &mut state).unwrap().unsqueeze_dim::<3>(1));
            }
            rows.push(model.advance(next.narrow(1, 84, 6), &mut state).unwrap());
            assert_close(&format!("{name}: rows"), &numbers(Tensor::cat(rows, 1)), &whole, 1e-4);
        }
    }
}

/// Their squares have no place in single precision; and of rows without numbers a layer gives its bias.
#[test]
fn large_gradients_and_rows_without_numbers() {
    for (name, device) in devices().into_iter().chain([("flex", Device::flex())]) {
        let training = device.clone().autodiff();
        let model = language_model(AttentionConfig::shaw()).init(&training).unwrap();
        let norms = [1.0, 1e25].map(|scale| {
            let loss = model.loss(ids(9, &training), targets(9), 0.0).unwrap().smoothed * scale;
            let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
            let norm = clip_gradients(&model, &mut gradients, 0.5).unwrap();
            [norm / scale, clip_gradients(&model, &mut gradients, 1.0).unwrap()].map(|norm| norm as f32)
        });
        assert_close(name, &norms[1], &[norms[0][0], 0.5], 1e-5);
        let bias = Tensor::<1>::from_data([1.0, -2.0], &training).require_grad();
        let x = Tensor::<3>::zeros([1, 3, 0], &training);
        let y = linear(x, Tensor::zeros([0, 2], &training), Some(bias.clone()), Activation::Relu, After::default());
        let y = y.unwrap();
        assert_eq!(numbers(y.clone()), [1.0, 0.0, 1.0, 0.0, 1.0, 0.0], "{name}");
        assert_eq!(numbers(bias.grad(&y.sum().backward()).unwrap()), [3.0, 0.0], "{name}");
        let y = pinball(Tensor::zeros([0, 2], &training), &[], &[0.1, 0.9]).unwrap();
        assert_eq!(numbers(y), [0.0], "{name}");
    }
}

/// In segments and token by token, on every device that trains or not; nothing is taken in after the end.
#[test]
fn tables_of_positions_end() {
    for (name, device) in devices().into_iter().chain([("flex", Device::flex())]) {
        for text in [
            r#"{"mechanism": "aft-local", "window": 3, "length": 6}"#,
            r#"{"mechanism": "aft-full", "length": 6}"#,
            r#"{"mechanism": "toeplitz", "bias": {"kind": "table", "reach": 6}}"#,
        ] {
            for device in [device.clone(), device.clone().autodiff()] {
                let model = language_model(serde_json::from_str(text).unwrap()).init(&device).unwrap();
                let mut state = LanguageState::default();
                (0..6).for_each(|token| drop(model.step(&[token, 1], &mut state).unwrap()));
                assert!(model.step(&[1, 2], &mut state).is_err(), "{name}, {text}");
                assert_eq!(state.position(), 6);
                let mut state = LanguageState::default();
                model.advance(ids(4, &device), &mut state).unwrap();
                assert!(model.advance(ids(3, &device), &mut state).is_err(), "{name}, {text}");
                assert_eq!(state.position(), 4);
            }
        }
    }
}

/// They have no weight, as on the CPU backend.
#[test]
fn keys_of_minus_infinity() {
    let flex = Device::flex();
    for (name, device) in devices() {
        for config in mechanisms().into_iter().filter(|config| config.name().starts_with("aft")) {
            let reference = config.init(2, 2, 4, &flex).unwrap();
            let attention = on(&reference, config.init(2, 2, 4, &device).unwrap());
            for mask in [AttentionMask::causal(), AttentionMask::bidirectional()] {
                let run = |attention: &Attention, device: &Device| {
                    let x = |width: usize, none: usize| {
                        let number = |i: usize| if i == none { f32::NEG_INFINITY } else { (i as f32).sin() };
                        let numbers: Vec<f32> = (0..12 * width).map(number).collect();
                        Tensor::<4>::from_data(TensorData::new(numbers, [1, 2, 6, width]), device)
                    };
                    let [q, v] = [x(4, 99), x(4, 99)];
                    numbers(attention.forward(q, x(attention.key_dim(), 3), v, &mask).unwrap())
                };
                let [found, expected] = [run(&attention, &device), run(&reference, &flex)];
                assert!(expected.iter().all(|number| number.is_finite()), "{config:?}");
                assert_close(&format!("{name}, {config:?}, {mask:?}"), &found, &expected, 2e-5);
            }
        }
    }
}

/// Far from the first token, where `a·p` of single precision has few digits behind the point.
#[test]
fn waves_far_from_the_first_token() {
    let flex = Device::flex();
    for (name, device) in devices() {
        for text in [r#"{"mechanism": "fourier"}"#, r#"{"mechanism": "fourier", "kernel": {"gates": true}}"#] {
            let config: AttentionConfig = serde_json::from_str(text).unwrap();
            let reference = config.init(2, 2, 4, &flex).unwrap();
            let attention = on(&reference, config.init(2, 2, 4, &device).unwrap());
            let x = |tokens: usize, width: usize, device: &Device| {
                let numbers: Vec<f32> = (0..2 * tokens * width).map(|i| (i as f32 * 0.7).sin()).collect();
                Tensor::<4>::from_data(TensorData::new(numbers, [1, 2, tokens, width]), device)
            };
            let qkv = |device| [x(5, 4, device), x(5, attention.key_dim(), device), x(5, 4, device)];
            let mut state = AttentionState::default();
            let [q, k, v] = qkv(&device);
            attention.advance(q.clone(), k.clone(), v.clone(), &mut state).unwrap();
            // As if tokens without weight had been read before.
            let (form, tensors) = attention.store(&state).unwrap().into_parts();
            let mut form = serde_json::to_value(form).unwrap();
            form["form"]["sums"]["tokens"] = (1_u64 << 30).into();
            let none = tensors.iter().map(|x| TensorData::zeros::<f32, _>(x.shape().clone())).collect();
            let stored = StoredState::from_parts(serde_json::from_value(form).unwrap(), none);
            let mut state = attention.restore(&stored, &device).unwrap();
            let found = numbers(attention.advance(q, k, v, &mut state).unwrap());
            let [q, k, v] = qkv(&flex);
            let expected = numbers(reference.forward(q, k, v, &AttentionMask::causal()).unwrap());
            if device.supports_dtype(DType::F64) {
                assert_close(&format!("{name}, {text}"), &found, &expected, 2e-5);
            }
        }
    }
}

/// Joined, each goes on as it would alone.
#[test]
fn prompts_of_different_lengths() {
    for (device_name, device) in devices() {
        for attention in mechanisms() {
            let name = format!("{device_name}, {attention:?}");
            // Others count their tokens, or have as many keys and values as tokens.
            let joins = ["kernelized", "shaw", "toeplitz", "aft-simple", "aft-conv", "gated", "delta", "gated-delta"];
            let table = matches!(&attention, AttentionConfig::Toeplitz(options) if matches!(options.bias, BiasConfig::Table { .. }));
            let joins = joins.contains(&attention.name()) && !table;
            let model = language_model(attention).init(&device).unwrap();
            let states = [3, 75].map(|count| {
                let mut state = LanguageState::default();
                model.prefill(ids(TOKENS, &device).narrow(0, 0, 1).narrow(1, 0, count), &mut state).unwrap();
                state
            });
            let joined = LanguageState::join(&[&states[0], &states[1]]);
            if !joins {
                assert!(joined.is_err(), "{name}");
                continue;
            }
            let mut joined = joined.unwrap();
            let [mut short, mut long] = states;
            for token in [4, 7, 1] {
                let both = numbers(model.step(&[token, token + 1], &mut joined).unwrap());
                let alone = [(&mut short, token), (&mut long, token + 1)]
                    .map(|(state, token)| numbers(model.step(&[token], state).unwrap()));
                assert_close(&name, &both, &alone.concat(), 2e-5);
            }
        }
    }
}

/// Padding, positions, and everything around the model: all losses of a short training are those of Flex.
#[test]
fn training_saving_loading_and_streaming() {
    let run = |device: &Device, start: Option<&LanguageModel>| {
        let training = device.clone().autodiff();
        let config = language_model(AttentionConfig::shaw()).with_layers(2).with_positions(Positions::Sinusoidal);
        let mut model = config.init(&training).unwrap();
        if let Some(start) = start {
            model = on(start, model);
        }
        let begun = model.clone();
        let adam = || AdamWConfig::new().init();
        let mut optimizer = adam();
        let mut losses = Vec::new();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("training.safetensors");
        for n in 0..6 {
            let loss = model.loss(ids(20, &training), targets(20), 0.0).unwrap().smoothed / 32.0;
            losses.extend(numbers(loss.clone()));
            let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
            clip_gradients(&model, &mut gradients, 0.5).unwrap();
            model = optimizer.step(1e-2, model, gradients);
            if n == 2 {
                save_training(&path, &model, &optimizer, &n, Vec::new()).unwrap();
                (model, optimizer, _, _) =
                    load_training::<_, i32>(&path, config.init(&training).unwrap(), adam()).unwrap();
            }
        }
        let model = model.valid();
        let options = TextOptions {
            max_tokens: 12,
            sample: SampleOptions { temperature: 0.0, ..Default::default() },
            ..Default::default()
        };
        let text = generate_text(&model, &[1, 2, 3], &mut LanguageState::default(), &options, |_| true).unwrap();
        (losses, text, begun)
    };
    let (expected, text, begun) = run(&Device::flex(), None);
    assert!(expected[5] < expected[0]);
    for (name, device) in devices() {
        let (found, own, _) = run(&device, Some(&begun));
        assert_close(name, &found, &expected, 1e-4);
        assert_eq!(own, text, "{name}");
    }
}

#[test]
fn sources_texts_and_series() {
    let flex = Device::flex();
    // A decay looks one way.
    let decays = |attention: &AttentionConfig| {
        let text = serde_json::to_string(attention).unwrap();
        text.contains("\"decay\":[") || text.contains("\"gates\":true")
    };
    for (name, device) in devices() {
        for attention in mechanisms().into_iter().filter(|attention| !decays(attention)) {
            let name = format!("{name}, {attention:?}");
            let cross = attention.cross_attention();
            let config =
                Seq2SeqConfig::new(VOCAB, VOCAB).with_block(block()).with_encoder_layers(1).with_decoder_layers(1);
            let config = config.with_attention(attention.clone()).with_cross_attention(cross);
            let reference = config.init(&flex).unwrap();
            let model = on(&reference, config.init(&device).unwrap());
            let [found, expected] = [(&model, &device), (&reference, &flex)]
                .map(|(model, device)| numbers(model.forward(ids(9, device), &[9, 4], ids(5, device)).unwrap()));
            assert_close(&format!("{name}: pairs"), &found, &expected, 5e-5);
            let options = GenerateOptions::new(1, 2, 6);
            let [found, expected] = [(&model, &device), (&reference, &flex)].map(|(model, device)| {
                let beams = beam_search(model, ids(9, device), &[9, 4], 3, &options).unwrap();
                let best = |beam: &[longspan::generate::Hypothesis]| beam[0].log_probability as f32;
                beams.iter().map(|beam| best(beam)).collect::<Vec<_>>()
            });
            assert_close(&format!("{name}: beams"), &found, &expected, 5e-5);
            for pooling in [Pooling::Mean, Pooling::Last, Pooling::Attention] {
                let config = ClassifierConfig::new(VOCAB, 3).with_block(block()).with_layers(1);
                let config = config.with_attention(vec![attention.clone()]).with_pooling(pooling);
                let reference = config.init(&flex).unwrap();
                let model = on(&reference, config.init(&device).unwrap());
                assert_eq!(model.forward(Tensor::zeros([0, 0], &device), &[]).unwrap().dims(), [0, 3]);
                let [found, expected] = [(&model, &device), (&reference, &flex)]
                    .map(|(model, device)| numbers(model.forward(ids(70, device), &[70, 5]).unwrap()));
                assert_close(&format!("{name}: classes, {pooling:?}"), &found, &expected, 5e-5);
            }
            let config =
                SeriesModelConfig::new(2, 3).with_block(block()).with_layers(1).with_attention(vec![attention]);
            let reference = config.init(&flex).unwrap();
            let model = on(&reference, config.init(&device).unwrap());
            let [found, expected] = [(&model, &device), (&reference, &flex)].map(|(model, device)| {
                let values: Vec<f32> = (0..40).map(|i| (i as f32 * 0.3).sin()).collect();
                let values = Tensor::<3>::from_data(TensorData::new(values, [2, 10, 2]), device);
                let times: Vec<f32> = (0..20).map(|i| i as f32 * 0.7).collect();
                let times = Tensor::<2>::from_data(TensorData::new(times, [2, 10]), device);
                numbers(model.at_points(values, times, &[10, 10]).unwrap())
            });
            assert_close(&format!("{name}: series"), &found, &expected, 5e-5);
        }
    }
}

/// Places near and far, padding and lengths, and rows that see nothing: the same rows, or an error on both.
#[test]
fn masks_and_offsets() {
    let flex = Device::flex();
    for (device_name, device) in devices() {
        for config in mechanisms() {
            let reference = config.init(2, 2, 4, &flex).unwrap();
            let attention = on(&reference, config.init(2, 2, 4, &device).unwrap());
            for (queries, keys) in [(3, 5), (70, 70), (1, 90)] {
                let x = |tokens: usize, width: usize, step: f32, device: &Device| {
                    let numbers: Vec<f32> = (0..2 * 2 * tokens * width).map(|i| (i as f32 * step).sin()).collect();
                    Tensor::<4>::from_data(TensorData::new(numbers, [2, 2, tokens, width]), device)
                };
                let lengths = |mask: AttentionMask| mask.with_lengths(&[keys, keys / 2]);
                for order in [AttentionMask::causal(), AttentionMask::bidirectional()] {
                    for offset in [0, 7, -2, 1000, -1000, (1 << 24) + 1, -(1 << 33), isize::MAX, isize::MIN] {
                        for mask in [order.clone(), lengths(order.clone())].map(|mask| mask.with_offset(offset)) {
                            let run = |attention: &Attention, device: &Device| {
                                let k = x(keys, attention.key_dim(), 0.7, device);
                                attention.forward(x(queries, 4, 0.3, device), k, x(keys, 4, 0.9, device), &mask)
                            };
                            let name = format!("{device_name}, {config:?}, {queries} of {keys}, {mask:?}");
                            match (run(&attention, &device), run(&reference, &flex)) {
                                // In single precision waves at such places have no digits left.
                                (Ok(_), Ok(_))
                                    if config.name() == "fourier"
                                        && offset.unsigned_abs() > 1000
                                        && !device.supports_dtype(DType::F64) => {}
                                (Ok(found), Ok(expected)) => {
                                    assert_close(&name, &numbers(found), &numbers(expected), 5e-5);
                                }
                                (found, expected) => assert!(found.is_err() && expected.is_err(), "{name}"),
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Under exponential feature maps each row counts from the largest key that it sees: rows of keys that are far smaller than later ones
/// keep their digits, at once and in segments.
#[test]
fn rows_before_far_larger_keys() {
    let flex = Device::flex();
    const TOKENS: usize = 200;
    for (device_name, device) in devices() {
        for (text, level) in [
            (r#"{"mechanism": "kernelized", "kernel": {"feature_map": "exp"}}"#, -120.0),
            (r#"{"mechanism": "kernelized", "kernel": {"feature_map": "exp", "decay": [0.9]}}"#, -120.0),
            (r#"{"mechanism": "kernelized", "kernel": {"feature_map": "prf:8"}}"#, -12.0),
            (r#"{"mechanism": "fourier", "kernel": {"feature_map": "exp"}}"#, -120.0),
            (r#"{"mechanism": "fourier", "normalizer": "unrotated", "kernel": {"feature_map": "exp"}}"#, -120.0),
            (
                r#"{"mechanism": "shaw", "relative": {"radius": 3, "content": false}, "kernel": {"feature_map": "exp"}}"#,
                -120.0,
            ),
            (r#"{"mechanism": "toeplitz", "feature_map": "exp"}"#, -120.0),
            (r#"{"mechanism": "toeplitz", "feature_map": "exp", "bias": {"kind": "clipped", "radius": 3}}"#, -120.0),
            (r#"{"mechanism": "toeplitz", "feature_map": "prf:8", "bias": {"kind": "table", "reach": 210}}"#, -12.0),
        ] {
            let config: AttentionConfig = serde_json::from_str(text).unwrap();
            let reference = config.init(2, 1, 4, &flex).unwrap();
            let attention = on(&reference, config.init(2, 1, 4, &device).unwrap());
            let x = |heads: usize, step: f32, low: f32, device: &Device| {
                let number = |i: usize| (i as f32 * step).sin() + if i / 4 % TOKENS < 100 { low } else { 0.0 };
                let numbers: Vec<f32> = (0..2 * heads * TOKENS * 4).map(number).collect();
                Tensor::<4>::from_data(TensorData::new(numbers, [2, heads, TOKENS, 4]), device)
            };
            let run = |attention: &Attention, device: &Device| {
                let qkv = [x(2, 0.3, 0.0, device), x(1, 0.7, level, device), x(1, 0.9, 0.0, device)];
                let forward = |mask: &AttentionMask| {
                    let [q, k, v] = qkv.clone();
                    numbers(attention.forward(q, k, v, mask).unwrap())
                };
                let mut all = forward(&AttentionMask::causal());
                all.extend(forward(&AttentionMask::causal().with_offset(-7).with_lengths(&[TOKENS, 150])));
                let mut state = AttentionState::default();
                for (from, to) in [(0, 70), (70, 71), (71, TOKENS)] {
                    let [q, k, v] = qkv.clone().map(|x| x.narrow(2, from, to - from));
                    all.extend(numbers(attention.advance(q, k, v, &mut state).unwrap()));
                }
                all
            };
            let name = format!("{device_name}, {text}");
            assert_close(&name, &run(&attention, &device), &run(&reference, &flex), 5e-5);
        }
    }
}

/// What lies on another device than the layer, or than what was made before: each an error, and no panic.
#[test]
fn tensors_of_another_device_are_errors() {
    let flex = Device::flex();
    let refused = |name: &str, call: &mut dyn FnMut() -> longspan::Result<()>| {
        let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        let error = answer.unwrap_or_else(|_| panic!("{name}: a panic")).expect_err(name).to_string();
        assert!(error.contains("expected") && error.contains("got"), "{name}: {error}");
    };
    for (other_name, other) in devices() {
        for (own, away) in [(&flex, &other), (&other, &flex)].map(|(own, away)| (own.clone(), away.clone())) {
            for (own, away) in [
                (own.clone(), away.clone()),
                (own.clone().autodiff(), away.clone()),
                (own.clone(), away.clone().autodiff()),
                (own.autodiff(), away.autodiff()),
            ] {
                let heads = |device: &Device, tokens| Tensor::<4>::ones([1, 2, tokens, 4], device);
                let rows = |device: &Device, tokens| Tensor::<3>::ones([1, tokens, 16], device);
                let mask = AttentionMask::bidirectional();
                for config in mechanisms() {
                    let name = format!("{other_name}, {own:?}, {config:?}");
                    let attention = config.init(2, 2, 4, &own).unwrap();
                    let key = |device: &Device, tokens| Tensor::<4>::ones([1, 2, tokens, attention.key_dim()], device);
                    // What learns nothing lies nowhere.
                    let mut whole =
                        || attention.forward(heads(&away, 3), key(&away, 3), heads(&away, 3), &mask).map(drop);
                    if attention.num_params() == 0 {
                        whole().unwrap()
                    } else {
                        refused(&name, &mut whole)
                    }
                    refused(&name, &mut || {
                        attention.forward(heads(&own, 3), key(&away, 3), heads(&own, 3), &mask).map(drop)
                    });
                    let mut state = AttentionState::default();
                    attention.step(heads(&own, 1), key(&own, 1), heads(&own, 1), &mut state).unwrap();
                    let [own_state, mut away_state] = [&own, &away].map(|device| {
                        let attention = on(&attention, config.init(2, 2, 4, device).unwrap());
                        attention.restore(&attention.store(&state).unwrap(), device).unwrap()
                    });
                    for tokens in [1, 3] {
                        let call = |device: &Device, state: &mut AttentionState| {
                            attention.advance(heads(device, tokens), key(device, tokens), heads(device, tokens), state)
                        };
                        refused(&name, &mut || call(&away, &mut own_state.clone()).map(drop));
                        // The kernels' own states are numbers, which lie on no device.
                        if attention.store(&state).is_ok_and(|stored| !format!("{stored:?}").contains("Kernels")) {
                            refused(&name, &mut || call(&own, &mut away_state).map(drop));
                            refused(&name, &mut || AttentionState::join(&[&own_state, &away_state]).map(drop));
                        }
                    }
                    if let Ok(memory) = attention.remember(key(&own, 3), heads(&own, 3), &mask) {
                        refused(&name, &mut || attention.recall(heads(&away, 1), 0, &memory).map(drop));
                    }
                }
                let name = format!("{other_name}, {own:?}");
                for config in ["shaw", "kernelized", "softmax", "fourier"] {
                    let attention = AttentionConfig::by_name(config).unwrap();
                    let layer =
                        MultiHeadAttentionConfig::new(16, 2).with_attention(attention.clone()).init(&own).unwrap();
                    let block = block().encoder(&attention, &own).unwrap();
                    let memory = layer.remember(rows(&own, 3), &mask).unwrap();
                    let positions = Tensor::<3>::ones([1, 3, 1], &away);
                    refused(&name, &mut || layer.self_attention(rows(&away, 3), &mask).map(drop));
                    refused(&name, &mut || layer.cross_attention(rows(&own, 3), rows(&away, 3), &mask).map(drop));
                    refused(&name, &mut || layer.step(rows(&away, 1), &mut AttentionState::default()).map(drop));
                    refused(&name, &mut || layer.recall(rows(&away, 1), 0, &memory).map(drop));
                    refused(&name, &mut || block.forward(rows(&away, 3), &mask).map(drop));
                    if config == "fourier" {
                        refused(&name, &mut || {
                            layer.self_attention_at(rows(&own, 3), positions.clone(), &mask).map(drop)
                        });
                    }
                    // A part of the layer that was moved alone.
                    let mut moved = layer.clone();
                    moved.attention = on(&layer.attention, attention.init(2, 2, 8, &away).unwrap());
                    if !["kernelized", "softmax"].contains(&config) {
                        refused(&name, &mut || moved.self_attention(rows(&own, 3), &mask).map(drop));
                    }
                }
                let series = SeriesModelConfig::new(16, 3).with_block(block()).with_layers(1).init(&own).unwrap();
                let times = |device: &Device| Tensor::<2>::ones([1, 3], device);
                refused(&name, &mut || series.forward(rows(&away, 3), times(&away), &[3]).map(drop));
                refused(&name, &mut || series.forward(rows(&own, 3), times(&away), &[3]).map(drop));
            }
        }
    }
}

/// Targets, tokens and masks that stay on the device: what lists give, NaN where a list would be an error.
#[test]
fn tensors_in_place_of_lists() {
    let next = targets(TOKENS);
    let numbered = |beyond: bool, device: &Device| {
        let mut numbers: Vec<i64> = next.iter().map(|target| target.map_or(-100, i64::from)).collect();
        numbers[3] = if beyond { VOCAB as i64 } else { numbers[3] };
        Tensor::<2, Int>::from_data(TensorData::new(numbers, [2, TOKENS]), device)
    };
    for (name, device) in devices().into_iter().chain([("flex", Device::flex())]) {
        let device = device.autodiff();
        let model = language_model(AttentionConfig::shaw()).init(&device).unwrap();
        let flex = Device::flex();
        for smoothing in [0.0, 0.1] {
            let run = |next: longspan::layers::Targets| {
                let loss = model.loss(ids(TOKENS, &device), next, smoothing).unwrap();
                let sums = [numbers(loss.plain.clone()), numbers(loss.smoothed.clone())].concat();
                [sums, gradients_of(&model, &loss.smoothed.backward())].concat()
            };
            let expected = run(next.clone().into());
            for place in [&device, &flex] {
                assert_close(name, &run(numbered(false, place).into()), &expected, 1e-6);
            }
        }
        let none = model.loss(ids(0, &device), Tensor::<2, Int>::zeros([2, 0], &device), 0.0).unwrap();
        assert_eq!(numbers(none.smoothed), [0.0]);
        assert!(model.loss(ids(4, &device), Tensor::<1, Int>::zeros([7], &device), 0.0).is_err());
        let beyond = model.loss(ids(TOKENS, &device), numbered(true, &device), 0.0);
        let outside = model.forward(ids(4, &device).add_scalar(VOCAB as i64));
        if name == "flex" {
            assert!(beyond.is_err() && outside.is_err());
        } else {
            assert!(numbers(beyond.unwrap().smoothed)[0].is_nan(), "{name}");
            assert!(numbers(outside.unwrap()).iter().all(|x| x.is_nan()), "{name}");
        }
        let ignored: Vec<bool> = (0..20).map(|i| i % 3 == 1 || i > 15).collect();
        let on_device = || Tensor::<2, Bool>::from_data(TensorData::new(ignored.clone(), [2, 10]), &device);
        for config in mechanisms() {
            let attention = MultiHeadAttentionConfig::new(16, 2).with_attention(config.clone()).init(&device).unwrap();
            let x = Tensor::<3>::random([2, 10, 16], Distribution::Default, &device);
            for start in [AttentionMask::causal(), AttentionMask::bidirectional()] {
                let list = start.clone().with_padding(&ignored);
                let tensor = start.clone().with_padding_mask(on_device());
                for (list, tensor) in [
                    (list.clone(), tensor.clone()),
                    (list.clone().with_lengths(&[9, 4]), tensor.clone().with_lengths(&[9, 4])),
                    (list.clone(), start.clone().with_padding(&ignored).with_padding_mask(on_device())),
                ] {
                    let [found, expected] =
                        [&tensor, &list].map(|mask| attention.self_attention(x.clone(), mask).map(numbers));
                    let name = format!("{name}, {config:?}, {tensor:?}");
                    match (found, expected) {
                        (Ok(found), Ok(expected)) => assert_close(&name, &found, &expected, 1e-6),
                        (found, expected) => assert!(found.is_err() && expected.is_err(), "{name}"),
                    }
                }
                for wrong in [tensor.clone().with_lengths(&[3]), tensor.with_padding(&[true])] {
                    assert!(attention.self_attention(x.clone(), &wrong).is_err(), "{name}");
                }
                let short = start.with_padding_mask(on_device().narrow(1, 0, 9));
                assert!(attention.self_attention(x.clone(), &short).is_err(), "{name}");
            }
        }
    }
}

/// Burn's GELU has the gradient of the approximation, and its sigmoid rounds doubles.
#[test]
fn activations_have_gradients_of_their_own() {
    let x = |device: &Device| {
        let x: Vec<f64> = (0..60).map(|i| f64::from(i) * 0.2 - 6.0).collect();
        Tensor::<2>::from_data(TensorData::new(x, [12, 5]), (device, DType::F64)).require_grad()
    };
    for (name, device) in devices() {
        for activation in [Activation::Gelu, Activation::GeluTanh, Activation::Silu] {
            let device = device.clone().autodiff();
            let one = Tensor::<2>::eye(5, &device).cast(FloatDType::F64);
            let (x, shifted) = (x(&device), |by: f64| (x(&device) + by).inner());
            let run = |x: Tensor<2>, one: Tensor<2>| linear(x, one, None, activation, After::default()).unwrap();
            let gradients = run(x.clone(), one.clone()).sum().backward();
            let found = numbers(x.grad(&gradients).unwrap());
            let [up, down] = [1e-4, -1e-4].map(|by| run(shifted(by), one.clone().inner()));
            let expected = numbers((up - down) / 2e-4);
            assert_close(&format!("{name}, {activation:?}"), &found, &expected, 1e-6);
        }
    }
}

/// However strong a decay is, rows beyond the last key keep their digits, with the gradients of the kernels.
#[test]
fn decays_beyond_the_last_key() {
    for (name, device) in devices() {
        for mechanism in ["kernelized", "shaw", "fourier"] {
            let text = format!(r#"{{"mechanism": "{mechanism}", "kernel": {{"decay": [1e-3, 0.5]}}}}"#);
            let config: AttentionConfig = serde_json::from_str(&text).unwrap();
            let flex = Device::flex().autodiff();
            let reference = config.init(2, 2, 4, &flex).unwrap();
            let attention = on(&reference, config.init(2, 2, 4, &device.clone().autodiff()).unwrap());
            let run = |queries: usize, attention: &Attention, device: &Device| {
                let x = |tokens: usize, step: f32| {
                    let numbers: Vec<f32> = (0..2 * tokens * 4).map(|i| (i as f32 * step).sin()).collect();
                    Tensor::<4>::from_data(TensorData::new(numbers, [1, 2, tokens, 4]), device).require_grad()
                };
                let (q, k, v) = (x(queries, 0.3), x(5, 0.7), x(5, 0.9));
                let out = attention.forward(q.clone(), k.clone(), v.clone(), &AttentionMask::causal()).unwrap();
                let gradients = out.clone().sum().backward();
                [Some(out.inner()), q.grad(&gradients), k.grad(&gradients), v.grad(&gradients)]
                    .map(|x| numbers(x.unwrap()))
            };
            for queries in [40, 300] {
                let found = run(queries, &attention, &device.clone().autodiff());
                for (found, expected) in found.iter().zip(&run(queries, &reference, &flex)) {
                    assert_close(&format!("{name}, {mechanism}, {queries} queries"), found, expected, 2e-4);
                }
            }
        }
    }
}

#[test]
fn an_image_without_keys_has_queries_anywhere() {
    for (_, device) in devices() {
        let text = r#"{"mechanism": "toeplitz", "bias": {"kind": "grid", "height": 5, "width": 1}}"#;
        let config: AttentionConfig = serde_json::from_str(text).unwrap();
        let x = Tensor::<4>::ones([1, 1, 17, 4], &device);
        let mask = AttentionMask::causal().with_lengths(&[0]);
        let out = config.init(1, 1, 4, &device).unwrap().forward(x.clone(), x.clone(), x, &mask).unwrap();
        assert!(numbers(out).iter().all(|&x| x == 0.0));
    }
}

/// What a convolution has learned of values is as wide as a head.
#[test]
fn values_of_another_width_than_heads() {
    for (name, device) in devices() {
        for config in mechanisms() {
            let reference = config.init(2, 2, 4, &Device::flex()).unwrap();
            let attention = on(&reference, config.init(2, 2, 4, &device).unwrap());
            for width in [3, 6] {
                let run = |attention: &Attention, device: &Device| {
                    let x = |width: usize| {
                        let numbers: Vec<f32> = (0..2 * 9 * width).map(|i| (i as f32 * 0.7).sin()).collect();
                        Tensor::<4>::from_data(TensorData::new(numbers, [1, 2, 9, width]), device)
                    };
                    attention.forward(x(4), x(attention.key_dim()), x(width), &AttentionMask::causal())
                };
                let what = format!("{name}, {config:?}, {width}");
                match (run(&attention, &device), run(&reference, &Device::flex())) {
                    (Ok(found), Ok(expected)) => assert_close(&what, &numbers(found), &numbers(expected), 5e-5),
                    (Err(found), Err(expected)) => assert_eq!(found.to_string(), expected.to_string(), "{what}"),
                    _ => panic!("{what}: an error on one device alone"),
                }
            }
        }
    }
}

/// Queries stand elsewhere than keys, also where tokens bring gates.
#[test]
fn positions_of_queries_and_of_keys() {
    for (name, device) in devices() {
        for options in [
            r#"{"mechanism": "fourier"}"#,
            r#"{"mechanism": "fourier", "axes": 2}"#,
            r#"{"mechanism": "fourier", "kernel": {"gates": true}}"#,
            r#"{"mechanism": "fourier", "normalizer": "unrotated", "rotary": true, "kernel": {"gates": true}}"#,
        ] {
            let config: AttentionConfig = serde_json::from_str(options).unwrap();
            let reference = config.init(2, 1, 4, &Device::flex()).unwrap();
            let attention = on(&reference, config.init(2, 1, 4, &device).unwrap());
            for tokens in [5, 70] {
                let run = |attention: &Attention, device: &Device| {
                    let Attention::Fourier(fourier) = attention else { panic!("fourier") };
                    let x = |heads: usize, width: usize, step: f32| {
                        let numbers: Vec<f32> = (0..heads * tokens * width).map(|i| (i as f32 * step).sin()).collect();
                        Tensor::<4>::from_data(TensorData::new(numbers, [1, heads, tokens, width]), device)
                    };
                    let place = |step| x(1, fourier.a.dims()[2], step).squeeze_dim::<3>(1) * 4.0;
                    let (q, k, v) = (x(2, 4, 0.3), x(1, attention.key_dim(), 0.7), x(1, 4, 0.9));
                    numbers(fourier.forward_at(q, k, v, [place(0.2), place(0.5)], &AttentionMask::causal()).unwrap())
                };
                let what = format!("{name}, {options}, {tokens}");
                assert_close(&what, &run(&attention, &device), &run(&reference, &Device::flex()), 5e-5);
            }
        }
    }
}
