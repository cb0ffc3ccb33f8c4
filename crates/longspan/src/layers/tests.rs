//! Fused operations in f32 beside the same in plain tensor operations in f64: results and all gradients.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::LinearConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{AdamWConfig, AdjustLrFn, GradientsParams, ModuleOptimizer, MuonConfig, Optimizer};
use burn::tensor::{DType, Device, Distribution, Gradients, Int, Tensor, TensorData};

use super::*;

pub(crate) fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn flat<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[track_caller]
pub(crate) fn near(what: &str, got: &[f64], expected: &[f64], allowed: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0_f64, |a, b| a.max(b.abs()));
    for (n, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= allowed * largest, "{what} at {n}: {a}, not {b}");
    }
}

/// The same of several lists.
#[track_caller]
pub(crate) fn all_near(what: &str, got: &[Vec<f64>], expected: &[Vec<f64>], allowed: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (n, (got, expected)) in got.iter().zip(expected).enumerate() {
        near(&format!("{what}, number {n}"), got, expected, allowed);
    }
}

const ACTIVATIONS: [Activation; 5] =
    [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu];

#[test]
fn linear_layers_are_plain_ones_with_all_gradients() {
    let device = Device::flex().autodiff();
    for activation in ACTIVATIONS {
        for (with_bias, with_residual) in [(true, true), (false, false), (true, false)] {
            let (x, w) = (random([2, 7, 5], &device), random([5, 6], &device));
            let (b, r) = (random([6], &device), random([2, 7, 6], &device));
            let d = random([2, 7, 6], &device);
            let run = |dtype: DType| {
                let own = |x: &Tensor<3>| x.clone().detach().cast(dtype).require_grad();
                let (x, r) = (own(&x), own(&r));
                let w = w.clone().detach().cast(dtype).require_grad();
                let b = b.clone().detach().cast(dtype).require_grad();
                let after = After { dropout: 0.0, residual: with_residual.then(|| r.clone()) };
                let y = linear(x.clone(), w.clone(), with_bias.then(|| b.clone()), activation, after).unwrap();
                let gradients = (y.clone() * d.clone().cast(dtype)).sum().backward();
                let mut all =
                    vec![flat(y.inner()), flat(x.grad(&gradients).unwrap()), flat(w.grad(&gradients).unwrap())];
                if with_bias {
                    all.push(flat(b.grad(&gradients).unwrap()));
                }
                if with_residual {
                    all.push(flat(r.grad(&gradients).unwrap()));
                }
                all
            };
            all_near(&format!("{activation:?}"), &run(DType::F32), &run(DType::F64), 1e-5);
        }
    }
}

#[test]
fn the_pinball_loss_is_that_of_its_definition() {
    let device = Device::flex().autodiff();
    let y = Tensor::<2>::from_data([[1.0, 2.0], [0.0, 5.0], [7.0, 7.0]], &device).require_grad();
    let loss = pinball(y.clone(), &[1.5, -1.0, f32::NAN], &[0.1, 0.8]).unwrap();
    // 0.1·0.5 + 0.2·0.5 + 0.9·1 + 0.2·6; what is missing does not count.
    near("loss", &flat(loss.clone().inner()), &[2.25], 1e-6);
    let gradients = loss.backward();
    near("gradient", &flat(y.grad(&gradients).unwrap()), &[-0.1, 0.2, 0.9, 0.2, 0.0, 0.0], 1e-6);
    // Of many numbers it is least at their quantile.
    let numbers: Vec<f32> = (0..100).map(|n| (n * 37 % 100) as f32).collect();
    let at = |y: f64| {
        let y = Tensor::<2>::full([100, 1], y, &Device::flex());
        pinball(y, &numbers, &[0.9]).unwrap().into_scalar::<f32>()
    };
    assert!((0..100).all(|n| at(89.5) <= at(f64::from(n))), "{}", at(89.5));
    for (targets, quantiles, part) in [
        (&[1.0][..], &[0.1, 0.8][..], "targets"),
        (&[1.0; 3], &[0.5], "quantiles"),
        (&[1.0; 3], &[0.0, 0.5], "quantiles"),
    ] {
        assert!(pinball(y.clone(), targets, quantiles).unwrap_err().to_string().contains(part), "{part}");
    }
}

#[test]
fn dropout_drops_in_training_alone_and_the_residual_stays() {
    let training = Device::flex().autodiff();
    let x = random([1, 400, 8], &training);
    let (w, r) = (random([8, 32], &training), random([1, 400, 32], &training));
    let after = |r: &Tensor<3>| After { dropout: 0.5, residual: Some(r.clone()) };
    let whole = linear(x.clone(), w.clone(), None, Activation::Identity, After::default()).unwrap();
    let dropped = linear(x.clone(), w.clone(), None, Activation::Identity, after(&r)).unwrap() - r.clone();
    let (whole, dropped) = (flat(whole.inner()), flat(dropped.inner()));
    let lost = dropped.iter().filter(|&&y| y == 0.0).count();
    assert!((5_900..6_900).contains(&lost), "{lost} of 12,800");
    for (y, whole) in dropped.iter().zip(&whole) {
        assert!(*y == 0.0 || (y - 2.0 * whole).abs() < 1e-4, "{y} is neither 0 nor twice {whole}");
    }
    let (x, w, r) = (x.inner(), w.inner(), r.inner());
    let answer = linear(x, w, None, Activation::Identity, after(&r)).unwrap() - r;
    near("without training", &flat(answer), &whole, 1e-5);
}

/// The result of `run` and its gradients by `x` and by all that a module has learned, in the module's order.
pub(crate) fn with_gradients<M: Module>(
    module: &M,
    x: &Tensor<3>,
    d: &Tensor<3>,
    run: impl FnOnce(Tensor<3>) -> Tensor<3>,
) -> Vec<Vec<f64>> {
    struct Visit<'a> {
        gradients: &'a Gradients,
        found: Vec<Vec<f64>>,
    }
    impl ModuleVisitor for Visit<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.found.push(param.val().grad(self.gradients).map_or(Vec::new(), flat));
        }
    }
    let x = x.clone().detach().require_grad();
    let y = run(x.clone());
    let gradients = (y.clone() * d.clone()).sum().backward();
    let found = vec![flat(y.inner()), flat(x.grad(&gradients).unwrap())];
    let mut visit = Visit { gradients: &gradients, found };
    module.visit(&mut visit);
    visit.found
}

/// Learned numbers that are not what they are at the beginning.
pub(crate) fn disturbed<M: Module>(module: M, device: &Device) -> M {
    struct Disturb<'a>(&'a Device);
    impl ModuleMapper for Disturb<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|x| {
                let moved = x.clone().detach() + random(x.dims(), self.0) * 0.3;
                moved.detach().require_grad()
            })
        }
    }
    module.map(&mut Disturb(device))
}

#[test]
fn norms_are_plain_ones_with_all_gradients() {
    let device = Device::flex().autodiff();
    for shape in [[1, 1, 3], [2, 3, 5], [3, 70, 40], [1, 2, 128]] {
        for kind in [NormKind::Layer, NormKind::Rms] {
            let norm = disturbed(TokenNormConfig::new(shape[2]).with_kind(kind).init(&device).unwrap(), &device);
            let (x, d) = (random(shape, &device), random(shape, &device));
            let fused = with_gradients(&norm, &x, &d, |x| norm.forward(x).unwrap());
            let plain = with_gradients(&norm, &x, &d, |x| norm.in_tensors(x));
            assert_eq!(fused.len(), if kind == NormKind::Layer { 4 } else { 3 });
            all_near(&format!("{kind:?} {shape:?}"), &fused, &plain, 2e-5);
        }
    }
}

#[test]
fn gated_norms_are_plain_ones_with_all_gradients() {
    let device = Device::flex().autodiff();
    for [batch, tokens, heads, head_dim] in [[1, 1, 1, 3], [2, 3, 2, 5], [3, 70, 4, 8], [1, 2, 2, 64]] {
        let norm = disturbed(GatedRmsNormConfig::new(heads, head_dim).init(&device).unwrap(), &device);
        let shape = [batch, tokens, heads * head_dim];
        let [x, gate, d] = [(); 3].map(|()| random(shape, &device));
        // Either of the two arguments as the one whose gradient is looked at.
        let of_x = |run: &dyn Fn(Tensor<3>, Tensor<3>) -> Tensor<3>| {
            let by_x = with_gradients(&norm, &x, &d, |x| run(x, gate.clone()));
            let by_gate = with_gradients(&norm, &gate, &d, |gate| run(x.clone(), gate));
            [by_x, by_gate].concat()
        };
        let fused = of_x(&|x, gate| norm.forward(x, gate).unwrap());
        let plain = of_x(&|x, gate| norm.in_tensors(x, gate));
        assert_eq!(fused.len(), 6);
        all_near(&format!("{shape:?}"), &fused, &plain, 2e-5);
        let more = random([batch, tokens + 1, heads * head_dim], &device);
        let error = norm.forward(x.clone(), more).unwrap_err().to_string();
        assert!(error.contains("gate: expected ["), "{error}");
        let error = norm.forward(x.clone().repeat_dim(2, 2), gate.clone()).unwrap_err().to_string();
        assert!(error.contains(&format!("x: expected rows of {} numbers", heads * head_dim)), "{error}");
    }
}

#[test]
fn embeddings_are_plain_ones_with_all_gradients() {
    let device = Device::flex().autodiff();
    for (batch, count, vocabulary, width, scale) in [(1, 1, 1, 3, 1.0), (3, 40, 7, 16, 1.5), (2, 5, 100, 5, 1.0)] {
        let weight = random([vocabulary, width], &device);
        let (positions, d) = (random([count, width], &device.clone().inner()), random([batch, count, width], &device));
        let tokens: Vec<i64> = (0..batch * count).map(|n| (n * n * 5 % vocabulary) as i64).collect();
        for positions in [None, Some(positions)] {
            let run = |dtype: DType| {
                let weight = weight.clone().detach().cast(dtype).require_grad();
                let tokens = TensorData::new(tokens.clone(), [batch, count]);
                let tokens = Tensor::<2, Int>::from_data(tokens, &device);
                let positions = positions.clone().map(|p| Tensor::from_inner(p.cast(dtype)));
                let y = embedding(tokens, weight.clone(), scale, positions).unwrap();
                let gradients = (y.clone() * d.clone().cast(dtype)).sum().backward();
                [flat(y.inner()), flat(weight.grad(&gradients).unwrap())]
            };
            all_near(&format!("{count} of {vocabulary}"), &run(DType::F32), &run(DType::F64), 1e-5);
        }
        for beyond in [vocabulary as i64, -1] {
            let tokens = Tensor::<2, Int>::from_data([[beyond]], &device);
            let error = embedding(tokens, weight.clone(), 1.0, None).unwrap_err().to_string();
            assert!(error.contains(&format!("tokens: expected entries below {vocabulary}")), "{error}");
        }
        let tokens = Tensor::<2, Int>::from_data([[0, 0]], &device);
        let error = embedding(tokens, weight.clone(), 1.0, Some(random([1, width], &device))).unwrap_err().to_string();
        assert!(error.contains(&format!("positions: expected [2, {width}]")), "{error}");
    }
}

/// With norm and residual, and alone; keeping what the backward needs, and forming it again.
#[test]
fn feed_forward_parts_are_plain_ones_with_all_gradients() {
    let device = Device::flex().autodiff();
    let norm = disturbed(TokenNormConfig::new(6).init(&device).unwrap(), &device);
    for (activation, gated) in [(Activation::Relu, false), (Activation::Gelu, false), (Activation::Silu, true)] {
        let config = FeedForwardConfig::new(6, 10).with_activation(activation).with_gated(gated);
        let part = (disturbed(config.init(&device).unwrap(), &device), norm.clone());
        let (x, d) = (random([2, 9, 6], &device), random([2, 9, 6], &device));
        for (normed, residual) in [(true, true), (false, false)] {
            let around = |recompute| Around { norm: normed.then_some(&part.1), dropout: 0.0, residual, recompute };
            let plain = with_gradients(&part, &x, &d, |x| part.0.in_tensors(x, around(false)).unwrap());
            for recompute in [false, true] {
                let fused = with_gradients(&part, &x, &d, |x| part.0.forward_in(x, around(recompute)).unwrap());
                all_near(&format!("{activation:?}, normed {normed}"), &fused, &plain, 2e-5);
            }
        }
    }
}

#[test]
fn a_cross_entropy_is_a_plain_one_with_all_gradients() {
    let device = Device::flex().autodiff();
    for smoothing in [0.0, 0.2] {
        let output = LinearConfig::new(5, 9).init(&device);
        let x = random([2, 7, 5], &device);
        let targets: Vec<Option<u32>> = (0..14).map(|n| (n % 4 != 3).then_some(n * 5 % 9)).collect();
        let run = |dtype: DType| {
            let x = x.clone().detach().cast(dtype).require_grad();
            let mut output = output.clone();
            let w = Tensor::from_inner(output.weight.val().inner().cast(dtype)).require_grad();
            let b = Tensor::from_inner(output.bias.as_ref().unwrap().val().inner().cast(dtype)).require_grad();
            output.weight = Param::from_tensor(w);
            output.bias = Some(Param::from_tensor(b));
            let loss = cross_entropy(x.clone(), &output, targets.clone(), smoothing).unwrap();
            let gradients = loss.smoothed.clone().mul_scalar(0.5).backward();
            [
                flat(loss.plain.inner()),
                flat(loss.smoothed.inner()),
                flat(x.grad(&gradients).unwrap()),
                flat(output.weight.val().grad(&gradients).unwrap()),
                flat(output.bias.as_ref().unwrap().val().grad(&gradients).unwrap()),
            ]
        };
        all_near(&format!("smoothing {smoothing}"), &run(DType::F32), &run(DType::F64), 1e-5);
    }
}

#[test]
fn targets_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let output = LinearConfig::new(5, 9).init(&device);
    let refused = |targets: Vec<Option<u32>>, smoothing| {
        cross_entropy(random([1, 2, 5], &device), &output, targets, smoothing).unwrap_err().to_string()
    };
    assert!(refused(vec![None], 0.0).contains("targets"));
    assert!(refused(vec![Some(9), None], 0.0).contains("below 9"));
    assert!(refused(vec![None, None], 1.0).contains("smoothing"));
}

#[test]
fn vectors_do_not_decay_where_that_is_said() {
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(7, 5).init(&device);
    let x = random([4, 7], &device);
    let stepped = |decay, vectors: bool| {
        let adamw = FusedAdamW::new(0.9, 0.98, 1e-9, decay);
        let mut optimizer = ModuleOptimizer::from(if vectors { adamw } else { adamw.without_decay_of_vectors() });
        let gradients = GradientsParams::from_grads(model.forward(x.clone()).sum().backward(), &model);
        let model = optimizer.step(0.05, model.clone(), gradients);
        [flat(model.weight.val().inner()), flat(model.bias.unwrap().val().inner())]
    };
    let [matrix, vector] = stepped(0.5, false);
    assert_eq!(matrix, stepped(0.5, true)[0]);
    assert_eq!(vector, stepped(0.0, true)[1]);
    assert_ne!(vector, stepped(0.5, true)[1]);
}

/// Ours and Burn's in turn: the record of one is the other's.
#[test]
fn adamw_goes_on_where_burns_stopped_and_the_other_way_round() {
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(7, 5).init(&device);
    let ours = || ModuleOptimizer::from(FusedAdamW::new(0.9, 0.98, 1e-9, 0.1));
    let theirs =
        || AdamWConfig::new().with_beta_1(0.9).with_beta_2(0.98).with_epsilon(1e-9).with_weight_decay(0.1).init();
    let inputs: Vec<Tensor<2>> = (0..6).map(|_| random([4, 7], &device)).collect();
    let run = |optimizers: [&dyn Fn() -> ModuleOptimizer; 2]| {
        let (mut model, mut record) = (model.clone(), None);
        for (n, x) in inputs.iter().enumerate() {
            let mut optimizer = optimizers[n % 2]();
            if let Some(record) = record {
                optimizer = optimizer.from_bytes(record).unwrap();
            }
            let gradients = model.forward(x.clone()).powi_scalar(2).sum().backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = optimizer.step(0.05, model, gradients);
            record = Some(optimizer.into_bytes().unwrap());
        }
        [flat(model.weight.val().inner()), flat(model.bias.unwrap().val().inner())]
    };
    let expected = run([&theirs, &theirs]);
    for optimizers in [[&ours as &dyn Fn() -> ModuleOptimizer, &ours], [&ours, &theirs], [&theirs, &ours]] {
        for (got, expected) in run(optimizers).iter().zip(&expected) {
            near("after six steps", got, expected, 1e-5);
        }
    }
}

/// Ours in `f32`, and in `f64`, which Burn's steps, beside Burn's alone.
#[test]
fn muon_is_burns() {
    let device = Device::flex();
    for dims in [[7, 5], [5, 7]] {
        let (start, ours) = (random::<2>(dims, &device), FusedMuon::new(0.95, 0.1));
        let gradients: Vec<Tensor<2>> = (0..4).map(|_| random(dims, &device)).collect();
        let theirs = MuonConfig::new()
            .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW)
            .with_weight_decay(Some(WeightDecayConfig::new(0.1)))
            .build();
        let (mut expected, mut burns) = (start.clone(), None);
        let (mut narrow, mut state) = (start.clone(), None);
        let (mut wide, mut wide_state) = (start.cast(DType::F64), None);
        for gradient in gradients {
            (expected, burns) = theirs.step(0.05, expected, gradient.clone(), burns);
            (narrow, state) = ours.step(0.05, narrow, gradient.clone(), state);
            (wide, wide_state) = ours.step(0.05, wide, gradient.cast(DType::F64), wide_state);
        }
        let expected = flat(expected);
        near("in f32", &flat(narrow), &expected, 1e-5);
        near("in f64", &flat(wide.cast(DType::F32)), &expected, 1e-5);
    }
}
