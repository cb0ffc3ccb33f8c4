//! Kernels and tensor operations against the definition, in `f64`: outputs, and gradients by directional differences.

use burn::tensor::{DType, Device, Tensor, TensorData};
use longspan_kernels::{Call, Dims, FeatureMap, KernelizedAttention, Mechanism, RelativeMap, Score, Shaw, View};

use super::{AttentionState, Running, tensor};
use crate::attention::{self, AttentionMask, Heads};

/// xorshift64: the numbers stay the same whatever other crates do.
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Signed, in [−2, 2).
    pub(super) fn signed(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| (self.next() >> 11) as f64 / (1_u64 << 51) as f64 - 2.0).collect()
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n
    }
}

/// One call with all its numbers.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub options: KernelizedAttention,
    pub dims: Dims,
    pub mask: AttentionMask,
    /// q, k, v, table.
    pub inputs: [Vec<f64>; 4],
}

impl Case {
    pub(super) fn new(options: KernelizedAttention, dims: Dims, mask: AttentionMask, seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let table: usize = options.parameters(&dims).iter().map(|p| p.len()).sum();
        let len = |shape: [usize; 4]| shape.iter().product();
        let inputs = [len(dims.q()), len(dims.k()), len(dims.v()), table].map(|n| numbers.signed(n));
        Self { options, dims, mask, inputs }
    }

    pub(super) fn reference(&self, [q, k, v, table]: &[Vec<f64>; 4]) -> Vec<f64> {
        let parameters: Vec<&[f64]> = if table.is_empty() { vec![] } else { vec![table] };
        let call = Call::new(
            self.dims,
            View::contiguous(q, self.dims.q()),
            View::contiguous(k, self.dims.k()),
            View::contiguous(v, self.dims.v()),
        )
        .with_parameters(&parameters)
        .with_mask(self.mask.as_kernel());
        self.options.reference(&call).unwrap().out
    }

    /// A module with the table, and q, k and v, on a training device.
    pub(super) fn tensors(&self, dtype: DType) -> (attention::KernelizedAttention, [Tensor<4>; 3]) {
        let device = Device::flex().autodiff();
        let tensor = |numbers: &Vec<f64>, shape| {
            Tensor::<4>::from_data(TensorData::new(numbers.clone(), shape), (&device, dtype)).require_grad()
        };
        let [q, k, v, table] = &self.inputs;
        let Dims { heads, kv_heads, head_dim, .. } = self.dims;
        let table = self.options.score.shaw().map(|shaw| {
            let shape = [if shaw.shared { 1 } else { heads }, shaw.rows(), head_dim];
            Tensor::<3>::from_data(TensorData::new(table.clone(), shape), (&device, dtype))
        });
        let heads = Heads { heads, kv_heads, head_dim };
        let module = attention::KernelizedAttention::given(&self.options, table, heads);
        (module, [tensor(q, self.dims.q()), tensor(k, self.dims.k()), tensor(v, self.dims.v())])
    }
}

pub(crate) fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.try_into_vec_as::<f64>().unwrap()
}

/// Mechanisms of every kind.
pub(super) fn mechanisms(radius: usize) -> Vec<KernelizedAttention> {
    let mut all = Vec::new();
    for feature_map in FeatureMap::ELEMENTWISE {
        let shaw = |map, shared| Shaw { radius, map, shared };
        for score in [
            Score::Content,
            Score::Relative(shaw(RelativeMap::Same, false)),
            Score::Combined(shaw(RelativeMap::Same, true)),
            Score::Combined(shaw(RelativeMap::Identity, false)),
        ] {
            // Where denominators may have any sign, a difference quotient near 0 says nothing.
            let signed = feature_map == FeatureMap::Identity
                || score.shaw().is_some_and(|shaw| shaw.map == RelativeMap::Identity);
            let options = KernelizedAttention { feature_map, score, normalize: !signed, ..Default::default() };
            if !signed {
                all.push(KernelizedAttention { normalize: false, ..options.clone() });
            }
            all.push(options);
        }
    }
    all
}

/// Masks over `dims`: directions, offsets, padding.
pub(super) fn masks(dims: &Dims, seed: u64) -> Vec<AttentionMask> {
    let mut random = Numbers::new(seed);
    let padding: Vec<bool> = (0..dims.batch * dims.keys).map(|_| random.below(3) == 0).collect();
    // The second batch entry sees nothing at all.
    let empty: Vec<bool> = (0..dims.batch * dims.keys).map(|i| i >= dims.keys).collect();
    let lengths: Vec<usize> = (0..dims.batch).map(|_| random.below(dims.keys + 1)).collect();
    let mut all = Vec::new();
    for offset in [0, dims.keys as isize - dims.queries as isize, 2, -3, 500, -500] {
        for order in [AttentionMask::bidirectional(), AttentionMask::causal()] {
            let mask = order.with_offset(offset);
            all.push(mask.clone());
            all.push(mask.clone().with_padding(&padding));
            all.push(mask.clone().with_padding(&empty));
            all.push(mask.with_lengths(&lengths));
        }
    }
    all
}

pub(super) type Attend = fn(&attention::KernelizedAttention, [Tensor<4>; 3], &AttentionMask) -> Tensor<4>;

/// Asserts that outputs are those of the definition, and gradients its slopes along random directions.
pub(super) fn assert_is_the_definition(
    case: &Case,
    attend: impl Fn(&attention::KernelizedAttention, [Tensor<4>; 3], &AttentionMask) -> Tensor<4>,
    slopes: bool,
) {
    let (module, inputs) = case.tensors(DType::F64);
    let out = attend(&module, inputs.clone(), &case.mask);
    assert_eq!(out.dims(), case.dims.out(), "{case:?}");
    let expected = case.reference(&case.inputs);
    let largest = expected.iter().fold(1.0_f64, |a, b| a.max(b.abs()));
    for (i, (got, expected)) in numbers(out.clone()).into_iter().zip(&expected).enumerate() {
        assert!((got - expected).abs() <= 1e-11 * largest, "out[{i}] is {got}, not {expected}: {case:?}");
    }
    if !slopes {
        return;
    }
    let mut random = Numbers::new(99);
    let weights = random.signed(expected.len());
    let loss = |out: &[f64]| out.iter().zip(&weights).map(|(o, w)| o * w).sum::<f64>();
    let cotangent =
        Tensor::<4>::from_data(TensorData::new(weights.clone(), case.dims.out()), (&out.device(), DType::F64));
    let gradients = (out * cotangent).sum().backward();
    let table = module.relative.and_then(|table| table.val().grad(&gradients)).map(numbers);
    let found = inputs.map(|x| x.grad(&gradients).map(numbers)).into_iter().chain([table]);
    for (which, found) in found.enumerate() {
        let direction = random.signed(case.inputs[which].len());
        let step = 1e-5;
        let moved = |by: f64| {
            let mut inputs = case.inputs.clone();
            for (x, d) in inputs[which].iter_mut().zip(&direction) {
                *x += by * d;
            }
            loss(&case.reference(&inputs))
        };
        let (up, down) = (moved(step), moved(-step));
        let expected = (up - down) / (2.0 * step);
        // A parameter that the output does not depend on may have no gradient at all.
        let slope: f64 = found.map_or(0.0, |found| {
            assert!(found.iter().all(|g| g.is_finite()), "input {which} has a gradient that is not finite: {case:?}");
            found.iter().zip(&direction).map(|(g, d)| g * d).sum()
        });
        let scale = 1.0 + expected.abs() + (up.abs() + down.abs()) * 1e-3;
        assert!((slope - expected).abs() <= 2e-6 * scale, "slope along {which} is {slope}, not {expected}: {case:?}");
    }
}

/// Tensor operations in chunks so short that a few tokens fill several.
fn in_chunks(module: &attention::KernelizedAttention, [q, k, v]: [Tensor<4>; 3], mask: &AttentionMask) -> Tensor<4> {
    let table = module.relative.as_ref().map(|table| table.val());
    tensor::attend(module.options(), q, k, v, (table, &None), mask, 4)
}

fn dims(queries: usize, keys: usize) -> Dims {
    Dims { batch: 2, heads: 2, kv_heads: 1, queries, keys, head_dim: 3, value_dim: 2 }
}

/// One chunk holds all, there are many, or there is nothing.
#[test]
fn tensor_operations_are_the_definition() {
    let few = [(1, 1, 0), (2, 4, 1), (4, 3, 3), (7, 7, 20), (0, 3, 2), (3, 0, 2), (0, 0, 2)];
    for (queries, keys, radius) in [(4, 5, 2), (13, 7, 3), (9, 17, 6), (17, 17, 1), (12, 21, 0)].into_iter().chain(few)
    {
        let dims = dims(queries, keys);
        let decays = |options: KernelizedAttention| {
            let falls = options.feature_map != FeatureMap::Identity;
            let decays = [None, falls.then(|| vec![0.9, 0.99])];
            decays.map(|decay| KernelizedAttention { decay, ..options.clone() })
        };
        for (i, options) in mechanisms(radius).into_iter().flat_map(decays).enumerate() {
            let dims = Dims { kv_heads: options.decay.as_ref().map_or(1, Vec::len), ..dims };
            for (j, mask) in masks(&dims, 5).into_iter().enumerate() {
                if options.decay.is_some() && mask.order == longspan_kernels::Order::Bidirectional {
                    continue;
                }
                // Differences of the definition are slow: of long ones each mechanism takes another third of the grid.
                let slopes = queries * keys > 0 && (keys < 8 && queries < 8 || (i + j) % 3 == 0);
                assert_is_the_definition(&Case::new(options.clone(), dims, mask, 3), in_chunks, slopes);
            }
        }
    }
}

/// Asserts that NaN in ignored keys and values changes no output, and that its gradient is 0.
pub(super) fn assert_padding_is_ignored(attend: Attend) {
    let dims = dims(9, 11);
    let ignored: Vec<bool> = (0..22).map(|i| i % 3 == 1 || i == 12).collect();
    for options in mechanisms(2) {
        for order in [AttentionMask::bidirectional(), AttentionMask::causal()] {
            let clean = Case::new(options.clone(), dims, order.with_padding(&ignored), 3);
            let mut dirty = clean.clone();
            for (key, _) in ignored.iter().enumerate().filter(|(_, ignored)| **ignored) {
                dirty.inputs[1][key * 3..][..3].fill(f64::NAN);
                dirty.inputs[2][key * 2..][..2].fill(f64::NAN);
            }
            let run = |case: &Case| {
                let (module, inputs) = case.tensors(DType::F64);
                let out = attend(&module, inputs.clone(), &case.mask);
                let gradients = out.clone().powi_scalar(2).sum().backward();
                // Without content the keys play no part, and may have no gradient at all.
                let [dq, dk, dv] = inputs.map(|x| x.grad(&gradients).map_or(Vec::new(), numbers));
                [numbers(out), dq, dk, dv]
            };
            let (expected, found) = (run(&clean), run(&dirty));
            for (expected, found) in expected.iter().zip(&found) {
                assert_eq!(expected.len(), found.len());
                let largest = expected.iter().fold(1.0_f64, |a, b| a.max(b.abs()));
                for (expected, found) in expected.iter().zip(found) {
                    // Beside a NaN the kernels sum in another order, so the last bits may differ.
                    assert!((expected - found).abs() <= 1e-12 * largest, "{found}, not {expected}: {clean:?}");
                }
            }
            let [_, _, dk, dv] = found;
            for (key, _) in ignored.iter().enumerate().filter(|(_, ignored)| **ignored) {
                assert!(dk.is_empty() || dk[key * 3..][..3] == [0.0; 3], "{clean:?}");
                assert_eq!(dv[key * 2..][..2], [0.0; 2], "{clean:?}");
            }
        }
    }
}

#[test]
fn padding_goes_nowhere() {
    assert_padding_is_ignored(in_chunks);
    assert_padding_is_ignored(|module, [q, k, v], mask| module.forward(q, k, v, mask).unwrap());
}

mod fused {
    use std::sync::Arc;

    use crate::cpu::{FlexTensor, to_flex};
    use burn::tensor::Distribution;

    use super::super::flex::{self, Operands, Settings};
    use super::*;

    /// `[batch, tokens, heads, width]` seen as `[batch, heads, tokens, width]`.
    fn projected(batch: usize, heads: usize, tokens: usize, width: usize) -> Tensor<4> {
        let device = Device::flex();
        Tensor::<4>::random([batch, tokens, heads, width], Distribution::Default, &device).swap_dims(1, 2)
    }

    fn primitive(x: Tensor<4>) -> FlexTensor {
        to_flex(x).unwrap()
    }

    fn address(x: &FlexTensor) -> *const f32 {
        &raw const x.storage::<f32>()[x.layout().start_offset()]
    }

    #[test]
    fn views_reach_the_kernels_without_a_copy() {
        let all = projected(2, 6, 5, 4);
        let parts = [0, 2, 4].map(|first| primitive(all.clone().narrow(1, first, 2)));
        let addresses = parts.each_ref().map(address);
        let [q, k, v] = parts;
        assert!(!q.is_contiguous());
        let operands = Operands { q, k, v, parameters: None }.with_adjacent_rows();
        assert_eq!([&operands.q, &operands.k, &operands.v].map(address), addresses);
        // The output lies in the order of the projection that follows.
        let settings = Settings::new(Arc::new(KernelizedAttention::default()), AttentionMask::causal());
        let out = operands.forward(&settings).unwrap().out;
        assert_eq!(out.layout().strides(), [5 * 2 * 4, 4, 2 * 4, 1]);
        assert!(out.transpose(1, 2).is_contiguous());
        // Rows that are not adjacent are the one case that is copied.
        let crosswise = primitive(projected(2, 2, 4, 4).swap_dims(2, 3));
        let before = address(&crosswise);
        let operands = Operands { q: crosswise, ..operands }.with_adjacent_rows();
        assert_ne!(address(&operands.q), before);
    }

    #[test]
    fn a_model_trains_without_a_copy() {
        use crate::attention::AttentionConfig;
        use crate::models::{BlockConfig, Seq2SeqConfig};
        use burn::tensor::Int;

        let device = Device::flex().autodiff();
        for cross in [AttentionConfig::kernelized(), AttentionConfig::shaw()] {
            let block = BlockConfig::new().with_d_model(16).with_heads(2).with_dropout(0.0);
            let model = Seq2SeqConfig::new(9, 9).with_block(block).with_cross_attention(cross);
            let model = model.init(&device).unwrap();
            let ids = |n: usize| Tensor::<2, Int>::from_data(TensorData::new(vec![3_i64; 2 * n], [2, n]), &device);
            flex::copies::COUNT.set(0);
            let logits = model.forward(ids(5), &[5, 3], ids(7)).unwrap();
            logits.powi_scalar(2).sum().backward();
            assert_eq!(flex::copies::COUNT.get(), 0);
        }
    }
}

/// A state of sums as devices without kernels have it: segments of several lengths give the rows of the whole, in chunks of 4 tokens.
#[test]
fn segments_after_a_state_of_tensors_give_the_rows_of_the_whole() {
    for (radius, segments) in [(0, vec![1, 1, 5]), (1, vec![3, 1, 9, 2]), (3, vec![2, 1, 1, 17, 30]), (6, vec![4, 13])]
    {
        let tokens = segments.iter().sum();
        let dims = Dims { kv_heads: 2, ..dims(tokens, tokens) };
        for mut options in mechanisms(radius) {
            for decay in [None, Some(vec![0.9, 0.6])] {
                options.decay = decay.filter(|_| options.feature_map != FeatureMap::Identity);
                let case = Case::new(options.clone(), dims, AttentionMask::causal(), 3);
                let by_segments = |module: &attention::KernelizedAttention, qkv: [Tensor<4>; 3], _: &AttentionMask| {
                    let table = || module.relative.as_ref().map(|table| table.val());
                    let mut state = Running::empty(module.options(), &qkv[0], qkv[2].dims()[3], None);
                    let (mut first, causal) = (0, AttentionMask::causal());
                    let rows = segments.iter().map(|&count| {
                        let part = qkv.each_ref().map(|x| x.clone().narrow(2, first, count));
                        first += count;
                        let (places, learned) = ((&causal, None), (table(), &None));
                        state.advance(module.options(), part, places, learned, 4, |_, q, k| (q, k))
                    });
                    Tensor::cat(rows.collect(), 2)
                };
                assert_is_the_definition(&case, by_segments, tokens < 20);
            }
        }
    }
}

/// Without kernels sums are tensors, and each segment has a backward of its own. On a training device a step makes such a state.
#[test]
fn a_gradient_ends_where_a_segment_of_tensors_begins() {
    use burn::tensor::Distribution;

    let device = Device::flex().autodiff();
    let layer = attention::AttentionConfig::shaw().init(2, 2, 4, &device).unwrap();
    let draw = |n| Tensor::<4>::random([1, 2, n, 4], Distribution::Uniform(0.5, 1.0), &device).require_grad();
    let (mut state, token) = (AttentionState::default(), draw(1));
    layer.step(token.clone(), token.clone(), token.clone(), &mut state).unwrap();
    let [first, second] = [draw(3), draw(3)];
    for x in [&first, &second] {
        let out = layer.advance(x.clone(), x.clone(), x.clone(), &mut state).unwrap();
        let gradients = out.sum().backward();
        assert!(x.grad(&gradients).is_some());
        assert!(first.grad(&gradients).is_none() || std::ptr::eq(x, &first));
        // What a step alone has made is still on the graph.
        assert_eq!(token.grad(&gradients).is_some(), std::ptr::eq(x, &first));
    }
}
