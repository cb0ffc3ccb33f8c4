//! What holds for every mechanism that a name can choose, on the CPU with and without autodiff.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Distribution, Tensor};
use longspan::attention::{Attention, AttentionConfig, AttentionMask, AttentionState, StoredState};

const HEADS: usize = 2;
const DIM: usize = 4;
const TOKENS: usize = 9;

fn mechanisms() -> impl Iterator<Item = AttentionConfig> {
    AttentionConfig::NAMES.iter().map(|name| AttentionConfig::by_name(name).unwrap())
}

/// The mechanism with learned tensors moved away from their initial values, at which some gradients are 0.
fn module(config: &AttentionConfig, device: &Device) -> Attention {
    struct Nudge;
    impl ModuleMapper for Nudge {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|x| {
                let noise = Tensor::random(x.dims(), Distribution::Normal(0.0, 0.3), &x.device());
                (x + noise).detach().require_grad()
            })
        }
    }
    let training = Device::flex().autodiff();
    training.seed(3);
    let module = config.init(HEADS, HEADS, DIM, &training).unwrap().map(&mut Nudge);
    if device.is_autodiff() { module } else { module.valid() }
}

/// q, k and v of `batch` sequences.
fn inputs(attention: &Attention, batch: usize, device: &Device) -> [Tensor<4>; 3] {
    device.seed(5);
    let random = |width| Tensor::random([batch, HEADS, TOKENS, width], Distribution::Normal(0.0, 1.0), device);
    [random(DIM), random(attention.key_dim()), random(DIM)]
}

fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.try_into_vec_as::<f32>().unwrap()
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0_f32, |a, b| a.max(b.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 2e-5 * largest, "{what}: {i} is {a}, not {b}");
    }
}

fn token(x: &Tensor<4>, at: usize) -> Tensor<4> {
    x.clone().narrow(2, at, 1)
}

#[test]
fn names_choose_and_options_go_through_json() {
    assert!(AttentionConfig::by_name("shw").is_none());
    for config in mechanisms() {
        let json = serde_json::to_string(&config).unwrap();
        assert!(json.contains(&format!("\"mechanism\":\"{}\"", config.name())), "{json}");
        assert_eq!(serde_json::from_str::<AttentionConfig>(&json).unwrap(), config);
        let surplus = json.replacen('{', "{\"surplus\":1,", 1);
        assert!(serde_json::from_str::<AttentionConfig>(&surplus).is_err(), "{surplus}");
        let alone = format!("{{\"mechanism\":\"{}\"}}", config.name());
        assert_eq!(serde_json::from_str::<AttentionConfig>(&alone).unwrap(), config);
    }
}

#[test]
fn every_input_and_parameter_has_a_gradient() {
    struct Silent(Vec<String>, burn::tensor::Gradients);
    impl ModuleVisitor for Silent {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let found = param.val().grad(&self.1).is_some_and(|g| g.abs().max().into_scalar::<f32>() > 0.0);
            if !found {
                self.0.push(format!("{:?}", param.val().dims()));
            }
        }
    }
    let device = Device::flex().autodiff();
    for config in mechanisms() {
        for mask in [AttentionMask::bidirectional(), AttentionMask::causal()] {
            let attention = module(&config, &device);
            let [q, k, v] = inputs(&attention, 2, &device).map(Tensor::require_grad);
            let out = attention.forward(q.clone(), k.clone(), v.clone(), &mask).unwrap();
            let weights = Tensor::random(out.dims(), Distribution::Normal(0.0, 1.0), &device);
            let gradients = (out * weights).sum().backward();
            for (name, x) in [("q", q), ("k", k), ("v", v)] {
                let largest = x.grad(&gradients).map_or(0.0, |g| g.abs().max().into_scalar::<f32>());
                assert!(largest > 0.0 && largest.is_finite(), "{}: {name} {largest}", config.name());
            }
            let mut silent = Silent(Vec::new(), gradients);
            attention.visit(&mut silent);
            assert!(silent.0.is_empty(), "{}: no gradient for {:?}", config.name(), silent.0);
        }
    }
}

#[test]
fn stored_states_go_on_as_if_nothing_had_happened() {
    for config in mechanisms() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            let attention = module(&config, &device);
            let [q, k, v] = inputs(&attention, 2, &device);
            let step = |at: usize, state: &mut AttentionState| {
                numbers(attention.step(token(&q, at), token(&k, at), token(&v, at), state).unwrap())
            };
            let mut state = AttentionState::default();
            for at in 0..TOKENS {
                let json = serde_json::to_string(&attention.store(&state).unwrap()).unwrap();
                let stored: StoredState = serde_json::from_str(&json).unwrap();
                let mut again = attention.restore(&stored, &device).unwrap();
                assert_eq!(attention.store(&again).unwrap(), stored);
                assert_eq!(step(at, &mut again), step(at, &mut state), "{} at {at}", config.name());
            }
        }
    }
}

#[test]
fn steps_are_the_rows_of_forward() {
    for config in mechanisms() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            let attention = module(&config, &device);
            let [q, k, v] = inputs(&attention, 2, &device);
            let whole = attention.forward(q.clone(), k.clone(), v.clone(), &AttentionMask::causal()).unwrap();
            let mut state = AttentionState::default();
            for at in 0..TOKENS {
                let row = attention.step(token(&q, at), token(&k, at), token(&v, at), &mut state).unwrap();
                let what = format!("{} at {at}", config.name());
                assert_close(&what, &numbers(row), &numbers(token(&whole, at)));
            }
        }
    }
}

#[test]
fn packed_sequences_are_computed_one_by_one() {
    let device = Device::flex();
    for config in mechanisms() {
        let attention = module(&config, &device);
        let [q, k, v] = inputs(&attention, 1, &device);
        for order in [AttentionMask::bidirectional(), AttentionMask::causal()] {
            let whole = attention.forward(q.clone(), k.clone(), v.clone(), &order.clone().with_packed(&[4, 0, 5]));
            let parts = [(0, 4), (4, 5)].map(|(start, length)| {
                let [q, k, v] = [&q, &k, &v].map(|x| x.clone().narrow(2, start, length));
                attention.forward(q, k, v, &order).unwrap()
            });
            let what = format!("{} {:?}", config.name(), order.order);
            assert_close(&what, &numbers(whole.unwrap()), &numbers(Tensor::cat(parts.to_vec(), 2)));
        }
        let wrong = AttentionMask::causal().with_packed(&[4, 4]);
        let error = attention.forward(q.clone(), k.clone(), v.clone(), &wrong).unwrap_err().to_string();
        assert!(error.contains("ascending from 0 to 9"), "{error}");
        let memory = attention.remember(k, v, &AttentionMask::bidirectional().with_packed(&[4, 5]));
        assert!(memory.unwrap_err().to_string().contains("packed"));
    }
}

#[test]
fn states_and_memories_of_others_are_refused() {
    let device = Device::flex();
    let all: Vec<(AttentionConfig, Attention)> =
        mechanisms().map(|config| (config.clone(), module(&config, &device))).collect();
    for (config, attention) in &all {
        let [q, k, v] = inputs(attention, 2, &device);
        let mut state = AttentionState::default();
        attention.step(token(&q, 0), token(&k, 0), token(&v, 0), &mut state).unwrap();
        let stored = attention.store(&state).unwrap();
        let memory = attention.remember(k.clone(), v.clone(), &AttentionMask::bidirectional());
        // A state that decays is of one sequence, and no query of another looks anything up in it.
        assert_eq!(memory.is_err(), ["gated", "delta", "gated-delta"].contains(&config.name()), "{}", config.name());
        for (other_config, other) in all.iter().filter(|(other, _)| other != config) {
            let what = format!("{} into {}", config.name(), other_config.name());
            let error = other.restore(&stored, &device).and_then(|mut state| {
                let [q, k, v] = inputs(other, 2, &device);
                // Of one mechanism with other options, which the numbers alone do not tell.
                other.step(token(&q, 0), token(&k, 0), token(&v, 0), &mut state)
            });
            let error = error.unwrap_err().to_string();
            assert!(error.contains("mechanism") || error.contains("same options"), "{what}: {error}");
            if let Ok(memory) = &memory {
                assert!(other.recall(q.clone(), 0, memory).unwrap_err().to_string().contains("memory"), "{what}");
            }
        }
        // A state of another batch.
        let three = |x: &Tensor<4>| Tensor::cat(vec![token(x, 0), token(x, 0)], 0);
        assert!(attention.step(three(&q), three(&k), three(&v), &mut state).is_err(), "{}", config.name());
        // A broken store.
        let mut value = serde_json::to_value(&stored).unwrap();
        value["tensors"] = serde_json::json!([]);
        let broken: StoredState = serde_json::from_value(value).unwrap();
        assert!(attention.restore(&broken, &device).unwrap_err().to_string().contains("numbers"));
    }
}
