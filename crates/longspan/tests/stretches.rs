//! A sequence cut into stretches that are computed side by side has the loss and the gradients of the whole.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::AttentionConfig;
use longspan::backend::Peers;
use longspan::layers::CrossEntropyLoss;
use longspan::models::{LanguageModel, LanguageModelConfig, LanguageState, Positions};
use support::block;

const VOCAB: usize = 11;
const BATCH: usize = 2;

/// What threads in the place of processes tell each other.
type Board = (Barrier, Mutex<Vec<Vec<f32>>>);

#[derive(Debug)]
struct Threads {
    rank: usize,
    count: usize,
    board: Arc<Board>,
    /// Numbers that this one has sent to each other one.
    sent: AtomicUsize,
}

impl Peers for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn count(&self) -> usize {
        self.count
    }

    fn gather(&self, numbers: &[f32]) -> Vec<Vec<f32>> {
        let (barrier, all) = &*self.board;
        self.sent.fetch_add(numbers.len(), Ordering::Relaxed);
        all.lock().unwrap()[self.rank] = numbers.to_vec();
        barrier.wait();
        let found = all.lock().unwrap().clone();
        barrier.wait();
        found
    }
}

fn ids(from: usize, count: usize, device: &Device) -> (Tensor<2, Int>, Vec<Option<u32>>) {
    let token = |b: usize, t: usize| (t * t + 3 * t + t / 7 + 5 * b) % VOCAB;
    let rows = |first: usize| (0..BATCH).flat_map(move |b| (first..first + count).map(move |t| token(b, t)));
    let ids: Vec<i64> = rows(from).map(|id| id as i64).collect();
    let next: Vec<_> = rows(from + 1).map(|id| Some(id as u32)).collect();
    (Tensor::from_data(TensorData::new(ids, [BATCH, count]), device), next)
}

/// All gradients, tensor after tensor.
fn gradients(model: &LanguageModel, loss: CrossEntropyLoss) -> Vec<Vec<f32>> {
    struct Read<'a>(&'a GradientsParams, Vec<Vec<f32>>);
    impl ModuleVisitor for Read<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let found = self.0.get::<D>(param.id).expect("a gradient");
            self.1.push(found.try_into_vec_as().unwrap());
        }
    }
    let found = GradientsParams::from_grads(loss.smoothed.backward(), model);
    let mut read = Read(&found, Vec::new());
    model.visit(&mut read);
    read.1
}

fn number(x: Tensor<1>) -> f64 {
    f64::from(x.into_scalar::<f32>())
}

/// After ten tokens, `count` more: their loss, gradients and the loss of the five after them.
fn learn(model: &LanguageModel, count: usize, peers: Option<Arc<dyn Peers>>) -> (f64, Vec<Vec<f32>>, f64) {
    let device = Device::flex().autodiff();
    let mut state = LanguageState::default();
    let (before, next) = ids(0, 10, &device);
    model.loss_from(before, next, 0.0, &mut state).unwrap();
    let (tokens, next) = ids(10, count, &device);
    let loss = match &peers {
        None => model.loss_from(tokens, next, 0.1, &mut state).unwrap(),
        Some(peers) => model.loss_over(tokens, &next, 0.1, &mut state, peers).unwrap(),
    };
    assert_eq!(state.position(), 10 + count);
    let (after, next) = ids(10 + count, 5, &device);
    let later = number(model.loss_from(after, next, 0.0, &mut state).unwrap().plain);
    (number(loss.plain.clone()), gradients(model, loss), later)
}

/// Numbers that each process sends to each other one.
fn hold(config: &LanguageModelConfig, count: usize, processes: usize) -> usize {
    let device = Device::flex().autodiff();
    Device::flex().seed(5);
    let model = config.init(&device).unwrap();
    let (loss, expected, later) = learn(&model, count, None);
    let board: Arc<Board> = Arc::new((Barrier::new(processes), Mutex::new(vec![Vec::new(); processes])));
    let peers = |rank| Arc::new(Threads { rank, count: processes, board: board.clone(), sent: AtomicUsize::new(0) });
    let peers: Vec<Arc<Threads>> = (0..processes).map(peers).collect();
    let found: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = peers
            .iter()
            .map(|own| {
                let model = model.clone().fork(&device);
                scope.spawn(move || learn(&model, count, Some(own.clone())))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let what = format!("{config:?}, {count} tokens of {processes}");
    let sum: f64 = found.iter().map(|(loss, ..)| loss).sum();
    assert!((sum - loss).abs() < 1e-5 * loss, "{what}: {sum} {loss}");
    for (n, expected) in expected.iter().enumerate() {
        let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        for (at, &expected) in expected.iter().enumerate() {
            let got: f32 = found.iter().map(|(_, gradients, _)| gradients[n][at]).sum();
            assert!((got - expected).abs() <= 2e-5 * largest, "{what}: tensor {n}, {at}: {got} {expected}, {largest}");
        }
    }
    for (_, _, found) in found {
        assert!((found - later).abs() < 1e-5 * later, "{what}: {found} {later} after it");
    }
    peers[0].sent.load(Ordering::Relaxed)
}

fn config(attention: &str) -> LanguageModelConfig {
    let attention = vec![serde_json::from_str(attention).unwrap()];
    LanguageModelConfig::new(VOCAB).with_block(block()).with_layers(2).with_attention(attention)
}

#[test]
fn stretches_have_the_gradients_of_the_whole() {
    let gated = || block().with_gated_attention(true);
    let configs = [
        config(r#"{"mechanism": "kernelized"}"#).with_positions(Positions::Sinusoidal).with_block(gated()),
        config(r#"{"mechanism": "kernelized", "kernel": {"feature_map": "exp", "decay": [0.9, 1.0]}}"#),
        config(r#"{"mechanism": "kernelized", "kernel": {"feature_map": "hedgehog"}}"#)
            .with_block(block().with_kv_heads(Some(1))),
        config(r#"{"mechanism": "shaw", "relative": {"radius": 3}, "kernel": {"decay": [0.9, 0.99]}}"#),
        config(r#"{"mechanism": "shaw", "relative": {"radius": 40}}"#).with_block(gated().with_recompute(true)),
        config(r#"{"mechanism": "fourier"}"#),
        config(r#"{"mechanism": "short-convolution", "width": 6}"#).with_block(block().with_kv_heads(Some(1))),
        config(r#"{"mechanism": "fourier", "kernel": {"decay": [0.9, 0.99]}}"#),
    ];
    for config in configs {
        for (count, processes) in [(61, 2), (61, 4), (7, 3), (4, 4)] {
            hold(&config, count, processes);
        }
    }
}

/// Forward and backward each send the states of all blocks once, however long the sequence is.
#[test]
fn what_is_sent_does_not_grow() {
    let config = config(r#"{"mechanism": "shaw", "relative": {"radius": 3}}"#);
    let (width, radius) = (8, 3);
    let state: usize = width * (width + 1) + 4 + (radius + 1) * (width + 1);
    let expected = 2 * 2 * BATCH * 2 * state.next_multiple_of(16);
    for count in [16, 64, 300] {
        assert_eq!(hold(&config, count, 2), expected);
    }
}

#[test]
fn mechanisms_without_a_sum_are_refused() {
    let device = Device::flex().autodiff();
    for (name, expected) in
        [("softmax", "states of constant size"), ("aft-simple", "gradients of the sum of two states")]
    {
        let model = LanguageModelConfig {
            attention: vec![AttentionConfig::by_name(name).unwrap()],
            ..config(r#"{"mechanism": "shaw"}"#)
        };
        let model = model.init(&device).unwrap();
        let board = Arc::new((Barrier::new(1), Mutex::new(vec![Vec::new()])));
        let peers: Arc<dyn Peers> = Arc::new(Threads { rank: 0, count: 2, board, sent: AtomicUsize::new(0) });
        let (tokens, next) = ids(0, 8, &device);
        let error = model.loss_over(tokens.clone(), &next, 0.0, &mut LanguageState::default(), &peers).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        let error = model.loss_over(tokens, &next[1..], 0.0, &mut LanguageState::default(), &peers).unwrap_err();
        assert!(error.to_string().contains("next: expected 16 tokens"), "{error}");
        let (tokens, next) = ids(0, 1, &device);
        let error = model.loss_over(tokens, &next, 0.0, &mut LanguageState::default(), &peers).unwrap_err();
        assert!(error.to_string().contains("tokens: expected one or more for each of 2 processes, got 1"), "{error}");
    }
}
