//! Tensor operations in chunks of a few tokens beside the kernels, in `f64`: outputs and all gradients.

use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use longspan_kernels::{Dims, FeatureMap, KernelizedAttention, Order, RelativeMap, Score, Shaw};

use super::{AttentionState, Running, tensor};
use crate::attention::tests::{masks, outcome};
use crate::attention::{self, Attention, AttentionMask, Heads};
use crate::layers::tests::near;

pub(crate) fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.try_into_vec_as::<f64>().unwrap()
}

/// Mechanisms of every kind.
fn mechanisms(radius: usize) -> Vec<KernelizedAttention> {
    let mut all = Vec::new();
    for feature_map in FeatureMap::ELEMENTWISE {
        let shaw = |map, shared| Shaw { radius, map, shared };
        for score in [
            Score::Content,
            Score::Relative(shaw(RelativeMap::Same, false)),
            Score::Combined(shaw(RelativeMap::Same, true)),
            Score::Combined(shaw(RelativeMap::Identity, false)),
        ] {
            // Where denominators may have any sign, those near 0 leave no digits.
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

/// The same numbers each time: of those that are drawn, some have denominators near 0.
fn spread<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let numbers = (0..len).map(|n| 2.0 * (0.7 * n as f64 + shape[D - 1] as f64).sin()).collect::<Vec<f64>>();
    Tensor::from_data(TensorData::new(numbers, shape), (device, DType::F64))
}

/// A module with a table, and queries, keys and values of two sequences, on a training device.
fn drawn(options: &KernelizedAttention, dims: &Dims) -> (Attention, [Tensor<4>; 3]) {
    let device = Device::flex().autodiff();
    let Dims { heads, kv_heads, head_dim, .. } = *dims;
    let table = options.score.shaw().map(|shaw| {
        let tables = if shaw.shared { 1 } else { heads };
        spread([tables, shaw.rows(), head_dim], &device)
    });
    let module = attention::KernelizedAttention::given(options, table, Heads { heads, kv_heads, head_dim });
    let inputs = [dims.q(), dims.k(), dims.v()].map(|shape| spread(shape, &device));
    (Attention::Kernelized(module), inputs)
}

fn kernelized(attention: &Attention) -> &attention::KernelizedAttention {
    let Attention::Kernelized(module) = attention else { unreachable!("made by `drawn`") };
    module
}

/// Tensor operations in chunks so short that a few tokens fill several.
fn in_chunks(attention: &Attention, [q, k, v]: [Tensor<4>; 3], mask: &AttentionMask) -> Tensor<4> {
    let module = kernelized(attention);
    let table = module.relative.as_ref().map(|table| table.val());
    tensor::attend(module.options(), q, k, v, (table, &None), mask, 4)
}

fn forward(attention: &Attention, [q, k, v]: [Tensor<4>; 3], mask: &AttentionMask) -> Tensor<4> {
    attention.forward(q, k, v, mask).unwrap()
}

fn assert_are_the_kernels(
    (attention, inputs): &(Attention, [Tensor<4>; 3]),
    mask: &AttentionMask,
    run: impl Fn([Tensor<4>; 3]) -> Tensor<4>,
) {
    let found = outcome(attention, inputs, run);
    let expected = outcome(attention, inputs, |qkv| forward(attention, qkv, mask));
    for ((part, found), (_, expected)) in found.iter().zip(&expected) {
        near(&format!("{:?}, {mask:?}, {part}", kernelized(attention).options()), found, expected, 1e-11);
    }
}

fn dims(queries: usize, keys: usize) -> Dims {
    Dims { batch: 2, heads: 2, kv_heads: 1, queries, keys, head_dim: 3, value_dim: 2 }
}

/// One chunk holds all, there are many, or there is nothing.
#[test]
fn tensor_operations_in_chunks_are_the_kernels() {
    let few = [(1, 1, 0), (2, 4, 1), (4, 3, 3), (7, 7, 20), (0, 3, 2), (3, 0, 2), (0, 0, 2)];
    for (queries, keys, radius) in [(4, 5, 2), (13, 7, 3), (9, 17, 6), (17, 17, 1), (12, 21, 0)].into_iter().chain(few)
    {
        let decays = |options: KernelizedAttention| {
            let falls = options.feature_map != FeatureMap::Identity;
            let decays = [None, falls.then(|| vec![0.9, 0.99])];
            decays.map(|decay| KernelizedAttention { decay, ..options.clone() })
        };
        // The second batch entry sees nothing at all.
        let empty: Vec<bool> = (0..2 * keys).map(|i| i >= keys).collect();
        let mut masks = masks(queries, keys, 2);
        for order in [AttentionMask::bidirectional(), AttentionMask::causal()] {
            masks.extend([500, -500].map(|offset| order.clone().with_offset(offset)));
            masks.push(order.with_padding(&empty));
        }
        for options in mechanisms(radius).into_iter().flat_map(decays) {
            let dims = Dims { kv_heads: options.decay.as_ref().map_or(1, Vec::len), ..dims(queries, keys) };
            let case = drawn(&options, &dims);
            for mask in masks.iter().filter(|mask| options.decay.is_none() || mask.order == Order::Causal) {
                if queries * keys > 0 {
                    assert_are_the_kernels(&case, mask, |qkv| in_chunks(&case.0, qkv, mask));
                } else {
                    let out = in_chunks(&case.0, case.1.clone(), mask);
                    assert_eq!(out.dims(), dims.out());
                    assert!(numbers(out).iter().all(|&x| x == 0.0));
                }
            }
        }
    }
}

/// NaN in ignored keys and values changes no output, and its gradient is 0.
#[test]
fn padding_goes_nowhere() {
    let dims = dims(9, 11);
    let ignored: Vec<bool> = (0..22).map(|i| i % 3 == 1 || i == 12).collect();
    let places = TensorData::new(ignored.clone(), [2, 1, 11, 1]);
    let places = Tensor::<4, Bool>::from_data(places, &Device::flex().autodiff());
    for options in mechanisms(2) {
        let (attention, [q, k, v]) = drawn(&options, &dims);
        let nan = |x: &Tensor<4>| x.clone().mask_fill(places.clone().expand(x.dims()), f64::NAN);
        let (clean, dirty) = ([q.clone(), k.clone(), v.clone()], [q, nan(&k), nan(&v)]);
        for mask in [AttentionMask::bidirectional(), AttentionMask::causal()].map(|mask| mask.with_padding(&ignored)) {
            for run in [in_chunks, forward] {
                let run = |qkv| run(&attention, qkv, &mask);
                let found = outcome(&attention, &dirty, run);
                for ((part, found), (_, expected)) in found.iter().zip(&outcome(&attention, &clean, run)) {
                    // Beside a NaN the kernels sum in another order, so the last bits may differ.
                    near(&format!("{options:?}, {mask:?}, {part}"), found, expected, 1e-12);
                    let width = found.len() / ignored.len();
                    let padding = found.iter().enumerate().filter(|(n, _)| ignored[n / width]);
                    assert!(!["dk", "dv"].contains(part) || padding.into_iter().all(|(_, &d)| d == 0.0), "{options:?}");
                }
            }
        }
    }
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
    let causal = AttentionMask::causal();
    for (radius, segments) in [(0, vec![1, 1, 5]), (1, vec![3, 1, 9, 2]), (3, vec![2, 1, 1, 17, 30]), (6, vec![4, 13])]
    {
        let tokens = segments.iter().sum();
        let dims = Dims { kv_heads: 2, ..dims(tokens, tokens) };
        for mut options in mechanisms(radius) {
            for decay in [None, Some(vec![0.9, 0.6])] {
                options.decay = decay.filter(|_| options.feature_map != FeatureMap::Identity);
                let case = drawn(&options, &dims);
                let module = kernelized(&case.0);
                let by_segments = |qkv: [Tensor<4>; 3]| {
                    let table = || module.relative.as_ref().map(|table| table.val());
                    let mut state = Running::empty(module.options(), &qkv[0], qkv[2].dims()[3], None);
                    let mut first = 0;
                    let rows = segments.iter().map(|&count| {
                        let part = qkv.each_ref().map(|x| x.clone().narrow(2, first, count));
                        first += count;
                        let (places, learned) = ((&causal, None), (table(), &None));
                        state.advance(module.options(), part, places, learned, 4, |_, q, k| (q, k))
                    });
                    Tensor::cat(rows.collect(), 2)
                };
                assert_are_the_kernels(&case, &causal, by_segments);
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
