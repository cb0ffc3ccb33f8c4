//! Tensor operations against the kernels, for every mechanism that a name can choose: outputs and gradients, in `f64`.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{self, DType, Device, FloatDType, Tensor};
use longspan_kernels::{Call, Cotangent, Dims, Gradients, Kernel, Order, Output, Scratch, View, ViewMut};

use super::fourier::FourierOptions;
use super::registry::Options;
use super::{Attention, AttentionConfig, AttentionMask, Heads};
use crate::backend;
use crate::backend::tests::numbers;
use crate::layers::tests::{disturbed, near, random};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 6;

/// In `f64`, with learned tensors moved away from their initial values.
fn widened<M: Module>(module: M, device: &Device) -> M {
    disturbed(module, device).map(&mut Cast(FloatDType::F64))
}

/// Every mechanism in `f64`, its learned tensors moved away from their initial values.
fn modules() -> Vec<(&'static str, Attention)> {
    let device = Device::flex().autodiff();
    let mut configs: Vec<AttentionConfig> =
        AttentionConfig::NAMES.iter().map(|name| AttentionConfig::by_name(name).unwrap()).collect();
    for options in [
        r#"{"mechanism": "fourier", "normalizer": "dominant"}"#,
        r#"{"mechanism": "fourier", "normalizer": "unrotated"}"#,
        r#"{"mechanism": "fourier", "normalizer": "none"}"#,
        r#"{"mechanism": "fourier", "normalizer": "unrotated", "rotary": true}"#,
        r#"{"mechanism": "fourier", "kernel": {"feature_map": "exp"}}"#,
        r#"{"mechanism": "kernelized", "kernel": {"feature_map": "prf:9:seed=3"}}"#,
        r#"{"mechanism": "kernelized", "kernel": {"feature_map": "nprf:5"}}"#,
        r#"{"mechanism": "kernelized", "kernel": {"feature_map": "dpfp:2"}}"#,
        r#"{"mechanism": "kernelized", "kernel": {"feature_map": "taylor2"}}"#,
        r#"{"mechanism": "kernelized", "kernel": {"feature_map": "hedgehog"}}"#,
        r#"{"mechanism": "kernelized", "kernel": {"feature_map": "hedgehog:4:exp", "decay": [0.9, 1.0]}}"#,
        r#"{"mechanism": "shaw", "kernel": {"feature_map": "prf"}}"#,
        r#"{"mechanism": "shaw", "kernel": {"feature_map": "prf", "normalize": false}, "relative": {"shared": true}}"#,
        r#"{"mechanism": "shaw", "kernel": {"feature_map": "dpfp"}, "relative": {"radius": 3}}"#,
        r#"{"mechanism": "shaw", "kernel": {"feature_map": "hedgehog", "normalize": false}, "relative": {"raw": true}}"#,
        r#"{"mechanism": "shaw", "kernel": {"feature_map": "hedgehog:4"}, "relative": {"radius": 3}}"#,
        r#"{"mechanism": "shaw", "kernel": {"feature_map": "hedgehog:exp"}, "relative": {"shared": true, "radius": 2}}"#,
        r#"{"mechanism": "fourier", "kernel": {"feature_map": "nprf:7"}}"#,
        r#"{"mechanism": "fourier", "kernel": {"feature_map": "hedgehog:exp"}}"#,
        r#"{"mechanism": "fourier", "normalizer": "unrotated", "rotary": true, "kernel": {"feature_map": "prf:8"}}"#,
        r#"{"mechanism": "toeplitz", "feature_map": "nprf:9"}"#,
        r#"{"mechanism": "toeplitz", "feature_map": "prf"}"#,
        r#"{"mechanism": "toeplitz", "feature_map": "hedgehog:4"}"#,
        r#"{"mechanism": "toeplitz", "feature_map": "hedgehog:exp", "bias": {"kind": "table", "reach": 200}}"#,
        r#"{"mechanism": "toeplitz", "feature_map": "exp", "bias": {"kind": "table", "reach": 200}}"#,
        r#"{"mechanism": "toeplitz", "bias": {"kind": "buckets", "buckets": 8, "max_distance": 20, "bidirectional": true}}"#,
        r#"{"mechanism": "toeplitz", "normalize": false}"#,
        r#"{"mechanism": "aft-conv", "taps": 4, "normalized": false}"#,
        r#"{"mechanism": "aft-conv", "taps": 4, "image": {"height": 7, "width": 10, "tap_rows": 3}}"#,
        r#"{"mechanism": "aft-local", "window": 1}"#,
        r#"{"mechanism": "short-convolution", "width": 1, "silu": false}"#,
        r#"{"mechanism": "short-convolution", "width": 20}"#,
        r#"{"mechanism": "aft-full", "length": 200, "rank": null}"#,
        r#"{"mechanism": "gated", "gate": "channel", "l2_norm": false}"#,
        r#"{"mechanism": "gated", "gate": "none"}"#,
        r#"{"mechanism": "kernelized", "kernel": {"gates": true}}"#,
        r#"{"mechanism": "kernelized", "kernel": {"gates": true, "feature_map": "exp", "normalize": false}}"#,
        r#"{"mechanism": "kernelized", "kernel": {"gates": true, "feature_map": "hedgehog:4:exp"}}"#,
        r#"{"mechanism": "shaw", "kernel": {"gates": true}}"#,
        r#"{"mechanism": "shaw", "kernel": {"gates": true, "feature_map": "prf"}, "relative": {"radius": 3}}"#,
        r#"{"mechanism": "shaw", "kernel": {"gates": true}, "relative": {"radius": 2, "content": false, "raw": true}}"#,
        r#"{"mechanism": "fourier", "kernel": {"gates": true}}"#,
        r#"{"mechanism": "fourier", "normalizer": "unrotated", "rotary": true, "kernel": {"gates": true}}"#,
        r#"{"mechanism": "delta", "beta_max": 2.0}"#,
        r#"{"mechanism": "gated-delta", "gate": "channel"}"#,
        r#"{"mechanism": "gated-delta", "convolution": 4}"#,
        r#"{"mechanism": "gated", "gate": "channel", "convolution": 3}"#,
        r#"{"mechanism": "delta", "convolution": 1}"#,
        r#"{"mechanism": "softmax-window", "window": 3}"#,
        r#"{"mechanism": "softmax-window", "window": 20}"#,
    ] {
        configs.push(serde_json::from_str(options).unwrap());
    }
    let make = |config: &AttentionConfig| widened(config.init(HEADS, KV_HEADS, DIM, &device).unwrap(), &device);
    configs.iter().map(|config| (config.name(), make(config))).collect()
}

/// Weights are drawn when they are first looked at: after the seed that a user sets behind `init`, and not by `init` itself.
#[test]
fn making_attention_draws_nothing() {
    #[derive(Default)]
    struct There(Vec<f64>);
    impl ModuleVisitor for There {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_initialized() {
                self.0.extend(param.val().try_into_vec_as::<f64>().unwrap());
            }
        }
    }
    for name in AttentionConfig::NAMES {
        let attention = AttentionConfig::by_name(name).unwrap();
        let config =
            super::MultiHeadAttentionConfig::new(HEADS * DIM, HEADS).with_attention(attention).with_gated(true);
        // What is there is no draw: twice the same, whatever the generator gives.
        let [one, other] = [(); 2].map(|()| {
            let mut there = There::default();
            config.init(&Device::flex()).unwrap().visit(&mut there);
            there.0
        });
        assert_eq!(one, other, "{name}");
    }
}

pub(crate) fn masks(queries: usize, keys: usize, batch: usize) -> Vec<AttentionMask> {
    let mut all = Vec::new();
    for order in [AttentionMask::bidirectional(), AttentionMask::causal()] {
        for offset in [0, keys as isize - queries as isize, 3, -3] {
            let mask = order.clone().with_offset(offset);
            let lengths: Vec<usize> = (0..batch).map(|b| keys * b / batch).collect();
            let padding: Vec<bool> = (0..batch * keys).map(|at| at % 3 == 1).collect();
            all.extend([mask.clone().with_lengths(&lengths), mask.clone().with_padding(&padding), mask]);
        }
    }
    all
}

/// The output, and the gradients of q, k, v and all parameters; an input without part in the output has gradient 0.
pub(crate) fn outcome(
    attention: &Attention,
    inputs: &[Tensor<4>; 3],
    run: impl Fn([Tensor<4>; 3]) -> Tensor<4>,
) -> Vec<(&'static str, Vec<f64>)> {
    struct Collect<'a>(&'a tensor::Gradients, Vec<f64>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.extend(gradient(&param.val(), self.0));
        }
    }
    fn gradient<const D: usize>(x: &Tensor<D>, gradients: &tensor::Gradients) -> Vec<f64> {
        x.grad(gradients).map_or_else(|| vec![0.0; x.dims().iter().product()], numbers)
    }
    let inputs = inputs.clone().map(|x| x.detach().require_grad());
    let out = run(inputs.clone());
    let weights: Vec<f64> = (0..out.dims().iter().product()).map(|i: usize| (i as f64 * 0.7).sin()).collect();
    let weights = Tensor::<1>::from_data(weights.as_slice(), (&out.device(), out.dtype())).reshape(out.dims());
    let gradients = (out.clone() * weights).sum().backward();
    let mut learned = Collect(&gradients, Vec::new());
    attention.visit(&mut learned);
    let learned = learned.1;
    let [dq, dk, dv] = inputs.each_ref().map(|x| gradient(x, &gradients));
    vec![("out", numbers(out)), ("dq", dq), ("dk", dk), ("dv", dv), ("parameters", learned)]
}

#[test]
fn tensor_operations_are_the_kernels() {
    for (name, attention) in modules() {
        let layer = attention.layer();
        for (queries, keys) in [(1, 1), (5, 9), (9, 5), (70, 70)] {
            let batch = 2;
            let mut masks = masks(queries, keys, batch);
            let mut sizes = vec![batch; masks.len()];
            let packed = AttentionMask::causal().with_packed(&[queries / 2, 0, queries - queries / 2]);
            if queries == keys {
                masks.extend([AttentionMask { order: Order::Bidirectional, ..packed.clone() }, packed]);
                sizes.extend([1, 1]);
            }
            for (mask, batch) in masks.into_iter().zip(sizes) {
                let device = Device::flex().autodiff();
                let dims =
                    Dims { batch, heads: HEADS, kv_heads: KV_HEADS, queries, keys, head_dim: DIM, value_dim: DIM };
                let key_dim = layer.kernel().key_dim(&dims);
                let inputs = [dims.q(), [batch, KV_HEADS, keys, key_dim], dims.v()];
                let inputs = inputs.map(|shape| random(shape, &device).cast(FloatDType::F64));
                let what = format!("{name}, {queries} × {keys}, {mask:?}");
                let [q, k, v] = &inputs;
                if let Err(error) = backend::in_tensors(layer, q.clone(), k.clone(), v.clone(), &mask) {
                    // Refused with reason: a table by position has no row for a query before the first key, AFT over
                    // images takes whole images, a decay needs a causal mask, and a state that decays takes token after token.
                    let (both, text) = (mask.order == Order::Bidirectional, error.to_string());
                    let position = name.starts_with("aft") && (both && mask.offset < 0 || text.contains("image"));
                    let gated = text.contains("each token brings both") || text.contains("offset");
                    let gated =
                        gated && ["gated", "delta", "gated-delta"].contains(&name) || text.contains("brings a gate");
                    assert!(position || gated || both && text.contains("decay"), "{what}: {text}");
                    let same = backend::attend(layer, q.clone(), k.clone(), v.clone(), &mask).unwrap_err();
                    assert_eq!(error.to_string(), same.to_string());
                    continue;
                }
                let tensors =
                    outcome(&attention, &inputs, |[q, k, v]| backend::in_tensors(layer, q, k, v, &mask).unwrap());
                let fused = outcome(&attention, &inputs, |[q, k, v]| backend::attend(layer, q, k, v, &mask).unwrap());
                for ((part, found), (_, expected)) in tensors.iter().zip(&fused) {
                    near(&format!("{what}, {part}"), found, expected, 1e-9);
                }
                let kernel = layer.kernel();
                let [q, k, v] = inputs.clone().map(numbers);
                let parameters: Vec<Vec<f64>> = layer.parameters().into_iter().map(numbers).collect();
                let parameters: Vec<&[f64]> = parameters.iter().map(Vec::as_slice).collect();
                let call = Call::row_major(dims, [&q, &k, &v]).with_parameters(&parameters).with_mask(mask.as_kernel());
                let defined = kernel.reference(&call).unwrap().out;
                near(&format!("{what}, definition"), &fused[0].1, &defined, 1e-9);
            }
        }
    }
}

/// A row's direction does not depend on its length, as long as that has any; where there are no rows there is none.
#[test]
fn the_shortest_rows_have_directions() {
    let device = Device::flex().autodiff();
    let config: AttentionConfig =
        serde_json::from_str(r#"{"mechanism": "kernelized", "kernel": {"feature_map": "nprf:5"}}"#).unwrap();
    let attention = widened(config.init(HEADS, KV_HEADS, DIM, &device).unwrap(), &device);
    let (layer, mask) = (attention.layer(), AttentionMask::causal());
    let [q, k, v] = [HEADS, KV_HEADS, KV_HEADS].map(|heads| random([1, heads, 9, DIM], &device).cast(FloatDType::F64));
    let out = |scale: f64| {
        let [q, k] = [q.clone() * scale, k.clone() * scale];
        numbers(backend::in_tensors(layer, q, k, v.clone(), &mask).unwrap())
    };
    near("short rows", &out(1e-200), &out(1.0), 1e-9);
    let [q, k, v] = [HEADS, KV_HEADS, KV_HEADS].map(|heads| Tensor::zeros([1, heads, 0, DIM], (&device, DType::F64)));
    assert_eq!(backend::in_tensors(layer, q, k, v, &mask).unwrap().dims(), [1, HEADS, 0, DIM]);
}

/// Of equal taps the kernel is `β`, also where rounding leaves something of their distances from their mean.
#[test]
fn equal_taps_are_flat() {
    struct Equal;
    impl ModuleMapper for Equal {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|x| x.full_like(0.1))
        }
    }
    let device = Device::flex().autodiff();
    for taps in [1, 15] {
        let config: AttentionConfig =
            serde_json::from_str(&format!(r#"{{"mechanism": "aft-conv", "taps": {taps}}}"#)).unwrap();
        let attention = widened(config.init(HEADS, KV_HEADS, DIM, &device).unwrap(), &device).map(&mut Equal);
        let (layer, mask) = (attention.layer(), AttentionMask::causal());
        let dims = Dims { heads: HEADS, kv_heads: KV_HEADS, ..Dims::square(1, 1, 40, DIM) };
        let inputs = [dims.q(), [1, KV_HEADS, 40, layer.kernel().key_dim(&dims)], dims.v()]
            .map(|shape| random(shape, &device).cast(FloatDType::F64));
        let tensors = outcome(&attention, &inputs, |[q, k, v]| backend::in_tensors(layer, q, k, v, &mask).unwrap());
        let fused = outcome(&attention, &inputs, |[q, k, v]| backend::attend(layer, q, k, v, &mask).unwrap());
        for ((part, found), (_, expected)) in tensors.iter().zip(&fused) {
            near(&format!("{taps} taps, {part}"), found, expected, 1e-9);
        }
    }
}

/// Casts to another number type.
struct Cast(FloatDType);
impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|x| {
            let cast = x.cast(self.0);
            if cast.device().is_autodiff() { cast.detach().require_grad() } else { cast }
        })
    }
}

#[test]
fn half_width_numbers_are_widened_once_and_rounded_once() {
    for (name, attention) in modules() {
        for half in [FloatDType::BF16, FloatDType::F16] {
            let narrow = attention.clone().map(&mut Cast(half));
            // As a projection gives them: tokens before heads.
            let projected =
                |heads, width| random([2, 70, heads, width], &Device::flex().autodiff()).cast(half).swap_dims(1, 2);
            let dims = Dims { kv_heads: KV_HEADS, ..Dims::square(2, HEADS, 70, DIM) };
            let key_dim = narrow.layer().kernel().key_dim(&dims);
            let inputs = [projected(HEADS, DIM), projected(KV_HEADS, key_dim), projected(KV_HEADS, DIM)];
            let layer = narrow.layer();
            let [q, k, v] = inputs.clone();
            // Images have no causal order.
            let causal = backend::attend(layer, q, k, v, &AttentionMask::causal()).is_ok();
            let mask = if causal { AttentionMask::causal() } else { AttentionMask::bidirectional() };
            let found = outcome(&narrow, &inputs, |[q, k, v]| backend::attend(layer, q, k, v, &mask).unwrap());
            let rounded = |numbers: &[f32]| -> Vec<f32> {
                let rounded = Tensor::<1>::from_data(numbers, &Device::flex()).cast(half);
                rounded.try_into_vec_as().unwrap()
            };
            // The kernel alone, on the same numbers: its backward is given the output as it was rounded.
            let widened = |x: Tensor<4>| -> Vec<f32> { x.try_into_vec_as().unwrap() };
            let [q, k, v] = inputs.map(widened);
            let parameters: Vec<Vec<f32>> =
                layer.parameters().into_iter().map(|x| x.try_into_vec_as().unwrap()).collect();
            let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
            let key_shape = [2, KV_HEADS, 70, key_dim];
            let call = Call::row_major(dims, [&q, &k, &v]).with_parameters(&parameters).with_mask(mask.as_kernel());
            let kernel = layer.kernel();
            let kernel: &dyn Kernel<f32> = &*kernel;
            let mut scratch = Scratch::new();
            let (mut out, mut denominators) =
                (vec![0.0; 2 * HEADS * 70 * DIM], vec![0.0; kernel.denominators(&dims).iter().product()]);
            let output = Output::training(ViewMut::contiguous(&mut out, dims.out()), &mut denominators);
            kernel.forward(&call, output, &mut scratch).unwrap();
            let out = rounded(&out);
            let weights: Vec<f32> = (0..out.len()).map(|i| (i as f64 * 0.7).sin() as f32).collect();
            let weights = rounded(&weights);
            let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| vec![0.0; x.len()]);
            let mut learned: Vec<Vec<f32>> = parameters.iter().map(|x| vec![0.0; x.len()]).collect();
            let mut slices: Vec<&mut [f32]> = learned.iter_mut().map(Vec::as_mut_slice).collect();
            let cotangent = Cotangent {
                out: View::contiguous(&out, dims.out()),
                denominators: &denominators,
                d_out: View::contiguous(&weights, dims.out()),
                final_state: None,
            };
            let gradients = Gradients {
                dq: ViewMut::contiguous(&mut dq, dims.q()),
                dk: ViewMut::contiguous(&mut dk, key_shape),
                dv: ViewMut::contiguous(&mut dv, dims.v()),
                parameters: &mut slices,
                initial_state: None,
            };
            kernel.backward(&call, &cotangent, gradients, &mut scratch).unwrap();
            let expected = [out, rounded(&dq), rounded(&dk), rounded(&dv), rounded(&learned.concat())];
            for ((part, found), expected) in found.into_iter().zip(expected) {
                let mut found: Vec<f32> = found.into_iter().map(|x| x as f32).collect();
                let mut expected = expected;
                if part == "parameters" {
                    // A module lists them in an order of its own.
                    found.sort_by(f32::total_cmp);
                    expected.sort_by(f32::total_cmp);
                }
                assert_eq!(found, expected, "{name}, {half:?}, {part}");
            }
        }
    }
}

#[test]
fn tokens_of_half_width_step_through_states_of_full_width() {
    for name in AttentionConfig::NAMES {
        let device = Device::flex();
        let attention = AttentionConfig::by_name(name).unwrap().init(HEADS, KV_HEADS, DIM, &device).unwrap();
        let narrow = attention.map(&mut Cast(FloatDType::BF16));
        let dims = Dims { kv_heads: KV_HEADS, ..Dims::square(2, HEADS, 9, DIM) };
        let key_dim = narrow.layer().kernel().key_dim(&dims);
        let [q, k, v] = [(HEADS, DIM), (KV_HEADS, key_dim), (KV_HEADS, DIM)]
            .map(|(heads, width)| random([2, heads, 9, width], &device).cast(FloatDType::BF16));
        let whole = backend::attend(narrow.layer(), q.clone(), k.clone(), v.clone(), &AttentionMask::causal()).unwrap();
        let mut state = backend::AttentionState::default();
        for t in 0..9 {
            let [q, k, v] = [&q, &k, &v].map(|x| x.clone().narrow(2, t, 1));
            let out = backend::step(narrow.layer(), q, k, v, &mut state).unwrap();
            assert_eq!(out.dtype(), DType::BF16);
            let expected = numbers(whole.clone().narrow(2, t, 1));
            let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            for (a, b) in numbers(out).iter().zip(&expected) {
                // One unit in the last of bf16's eight bits: two `f32` sums may round to different neighbours. Where terms of either
                // sign nearly cancel, it is the rounding of the terms that is left.
                let most = b.abs() / 128.0 + f64::from(f32::EPSILON) * largest;
                assert!((a - b).abs() <= most, "{name}, token {t}: {a}, not {b}");
            }
        }
    }
}

#[test]
fn layers_of_another_type_are_refused() {
    let device = Device::flex();
    let attention = AttentionConfig::by_name("shaw").unwrap().init(HEADS, KV_HEADS, DIM, &device).unwrap();
    let x = |heads| Tensor::<4>::zeros([1, heads, 3, DIM], &device).cast(FloatDType::BF16);
    let [q, k, v] = [x(HEADS), x(KV_HEADS), x(KV_HEADS)];
    let error = backend::attend(attention.layer(), q, k, v, &AttentionMask::causal()).unwrap_err().to_string();
    assert!(error.contains("F32") && error.contains("BF16") && error.contains("cast"), "{error}");
}

#[test]
fn positions_may_be_given() {
    let device = Device::flex().autodiff();
    let wide = |shape: [usize; 3]| (random(shape, &device) * 2.0).cast(FloatDType::F64);
    let (queries, keys, batch) = (5, 9, 2);
    let masks = [AttentionMask::bidirectional(), AttentionMask::causal().with_offset(3)];
    for options in [
        r#"{"axes": 2}"#,
        r#"{"axes": 3, "normalizer": "dominant", "kernel": {"feature_map": "prf:6"}}"#,
        r#"{"axes": 2, "normalizer": "unrotated", "rotary": true}"#,
    ] {
        let options: FourierOptions = serde_json::from_str(options).unwrap();
        let heads = Heads { heads: HEADS, kv_heads: KV_HEADS, head_dim: DIM };
        let module = widened(options.init(heads, &device).unwrap(), &device);
        let [q, k, v] = [(HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys)]
            .map(|(heads, tokens)| random([batch, heads, tokens, DIM], &device).cast(FloatDType::F64));
        let places = [wide([batch, queries, options.axes]), wide([batch, keys, options.axes])];
        for mask in &masks {
            let outcome = |fused: bool| -> Vec<Vec<f64>> {
                let places = places.clone().map(|x| x.detach().require_grad());
                let out = if fused {
                    module.forward_at(q.clone(), k.clone(), v.clone(), places.clone(), mask).unwrap()
                } else {
                    backend::in_tensors(&module.placed(places.clone()), q.clone(), k.clone(), v.clone(), mask).unwrap()
                };
                let gradients = out.clone().powi_scalar(2).sum().backward();
                let found = places.iter().map(|x| numbers(x.grad(&gradients).unwrap()));
                std::iter::once(numbers(out)).chain(found).collect()
            };
            for (found, expected) in outcome(true).iter().zip(&outcome(false)) {
                near(&format!("{options:?}, {mask:?}"), found, expected, 1e-9);
            }
        }
        let error = module.forward(q.clone(), k.clone(), v.clone(), &masks[0]).unwrap_err().to_string();
        assert!(error.contains("forward_at"), "{error}");
        let short = [places[0].clone(), places[0].clone()];
        let error = module.forward_at(q, k, v, short, &masks[0]).unwrap_err().to_string();
        assert!(error.contains("key positions") && error.contains("[2, 9,"), "{error}");
    }
}
