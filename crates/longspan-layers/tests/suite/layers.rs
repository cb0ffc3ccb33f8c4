//! Layers around attention, held to their definitions in f64: results, and every gradient to the difference quotient of the
//! definition.

use longspan_kernels::Error;
use longspan_kernels::threads::{Team, alone, on_team};
use longspan_layers::{
    Activation, AdamW, CrossEntropy, Dropout, Embedding, GatedNorm, GatedNormWeights, Linear, Muon, Norm, NormWeights,
};
use longspan_testing::random::Random;
use longspan_testing::threads::on_threads;

pub const EPSILON: f32 = 1e-5;

pub fn numbers(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| random.normal() as f32).collect()
}

pub fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|&x| f64::from(x)).collect()
}

#[track_caller]
pub fn near(what: &str, got: &[f32], expected: &[f64], allowed: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (n, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let scale = expected.abs().max(1.0);
        assert!((f64::from(got) - expected).abs() <= allowed * scale, "{what} at {n}: {got}, not {expected}");
    }
}

/// Compares a gradient with difference quotients of `definition`, which gets the argument with one number moved.
#[track_caller]
pub fn is_slope(what: &str, gradient: &[f32], at: &[f32], allowed: f64, definition: impl Fn(&[f64]) -> f64) {
    assert_eq!(gradient.len(), at.len(), "{what}");
    let mut moved = wide(at);
    // All of few, some of many.
    for n in (0..at.len()).step_by(at.len().div_ceil(40).max(1)) {
        const STEP: f64 = 1e-5;
        let before = moved[n];
        moved[n] = before + STEP;
        let above = definition(&moved);
        moved[n] = before - STEP;
        let slope = (above - definition(&moved)) / (2.0 * STEP);
        moved[n] = before;
        let scale = slope.abs().max(1.0);
        assert!(
            (f64::from(gradient[n]) - slope).abs() <= allowed * scale,
            "{what} at {n}: {}, not {slope}",
            gradient[n]
        );
    }
}

/// `x·W + b` for rows of `inputs` numbers.
pub fn linear(x: &[f64], inputs: usize, weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let outputs = bias.len();
    let row = |x: &[f64]| -> Vec<f64> {
        (0..outputs).map(|c| bias[c] + (0..inputs).map(|k| x[k] * weight[k * outputs + c]).sum::<f64>()).collect()
    };
    x.chunks(inputs).flat_map(row).collect()
}

/// A norm of rows: a layer norm if centred, otherwise an RMS norm.
pub fn norm(x: &[f64], gamma: &[f64], beta: &[f64], centred: bool) -> Vec<f64> {
    let width = gamma.len();
    let row = |x: &[f64]| -> Vec<f64> {
        let mean = if centred { x.iter().sum::<f64>() / width as f64 } else { 0.0 };
        let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let scale = 1.0 / (square + f64::from(EPSILON)).sqrt();
        x.iter().zip(gamma).zip(beta).map(|((x, g), b)| (x - mean) * scale * g + b).collect()
    };
    x.chunks(width).flat_map(row).collect()
}

/// Checks that `all` gives the same on 1, 2, 3 and 8 threads of a pool, and on the caller's thread alone.
pub fn threads_do_not_matter<R: PartialEq + Send>(all: impl Fn() -> R + Send + Sync) {
    let one = on_threads(1, &all);
    for threads in [2, 3, 8] {
        assert!(on_threads(threads, &all) == one, "{threads} threads");
    }
    assert!(alone(&all) == one, "the caller's thread");
    assert!(on_team(&Idle, &all) == one, "threads that do nothing");
}

/// Leaves all work to its caller.
struct Idle;

impl Team for Idle {
    fn size(&self) -> usize {
        4
    }

    fn run(&self, _: usize, _: &(dyn Fn() + Sync)) {}
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn a_linear_layer_is_its_definition_with_all_gradients() {
    let mut random = Random::new(1);
    for sizes in [[1, 1, 1], [3, 5, 7], [70, 16, 33], [1030, 9, 12], [2, 300, 4]] {
        let [rows, k, n] = sizes;
        for f in Activation::ALL {
            let (x, mut weight) = (numbers(&mut random, rows * k), numbers(&mut random, k * n));
            weight.iter_mut().for_each(|w| *w /= (k as f32).sqrt());
            let (bias, residual) = (numbers(&mut random, n), numbers(&mut random, rows * n));
            let call = Linear::new(&x, &weight, sizes).with_bias(Some(&bias)).with_activation(f);
            for call in [call, call.with_residual(Some(&residual))] {
                let zeros = vec![0.0; rows * n];
                let added = if call.residual.is_some() { wide(&residual) } else { zeros };
                let define = |x: &[f64], weight: &[f64], bias: &[f64]| -> Vec<f64> {
                    linear(x, k, weight, bias).iter().zip(&added).map(|(&z, residual)| residual + f.apply(z)).collect()
                };
                let expected = define(&wide(&x), &wide(&weight), &wide(&bias));
                let allowed = 4.0 * f64::from(f32::EPSILON) * (k as f64).sqrt().max(2.0);
                near("forward", &call.forward().unwrap(), &expected, allowed);
                let (out, kept) = call.training().unwrap();
                near("training", &out, &expected, allowed);

                let d_out = numbers(&mut random, rows * n);
                let cotangent = wide(&d_out);
                let gradients = call.backward(&out, &kept, &d_out).unwrap();
                let allowed = 16.0 * f64::from(f32::EPSILON) * (rows.max(n) as f64).sqrt() + 1e-8;
                let what = format!("{sizes:?} {f:?}");
                let (w, b) = (wide(&weight), wide(&bias));
                is_slope(&format!("{what} dx"), &gradients.dx, &x, allowed, |x| dot(&define(x, &w, &b), &cotangent));
                let x = wide(&x);
                is_slope(&format!("{what} dW"), &gradients.d_weight, &weight, allowed, |w| {
                    dot(&define(&x, w, &b), &cotangent)
                });
                is_slope(&format!("{what} db"), &gradients.d_bias, &bias, allowed, |b| {
                    dot(&define(&x, &w, b), &cotangent)
                });
            }
        }
    }
}

/// Where a number is dropped the residual alone is left, and no gradient comes through.
#[test]
fn a_linear_layer_drops_the_same_numbers_forward_and_backward() {
    let mut random = Random::new(2);
    let sizes @ [rows, k, n] = [600, 8, 12];
    let (x, weight, residual) =
        (numbers(&mut random, rows * k), numbers(&mut random, k * n), numbers(&mut random, rows * n));
    let call = Linear::new(&x, &weight, sizes).with_activation(Activation::Gelu);
    let plain = call.forward().unwrap();
    let dropping = call.with_dropout(Dropout::new(0.25, 5)).with_residual(Some(&residual));
    let (out, kept) = dropping.training().unwrap();
    let mut dropped = 0;
    let scaled: Vec<f32> = (0..rows * n)
        .map(|n| {
            let branch = out[n] - residual[n];
            if branch == 0.0 {
                dropped += 1;
                return 0.0;
            }
            assert!((branch - plain[n] / 0.75).abs() <= 1e-5 * (1.0 + plain[n].abs() + residual[n].abs()), "at {n}");
            1.0 / 0.75
        })
        .collect();
    assert!((rows * n / 5..rows * n * 3 / 10).contains(&dropped), "{dropped} dropped");
    let ones = vec![1.0; rows * n];
    let (plain, kept_plain) = call.training().unwrap();
    let expected = call.backward(&plain, &kept_plain, &scaled).unwrap();
    let got = dropping.backward(&out, &kept, &ones).unwrap();
    near("dx", &got.dx, &wide(&expected.dx), 1e-5);
    near("dW", &got.d_weight, &wide(&expected.d_weight), 1e-5);
}

#[test]
fn a_norm_is_its_definition_with_all_gradients() {
    let mut random = Random::new(3);
    for [rows, width] in [[1, 1], [3, 5], [70, 40], [130, 16], [2, 257]] {
        for (centred, shifted) in [(true, true), (true, false), (false, false), (false, true)] {
            let (x, gamma) = (numbers(&mut random, rows * width), numbers(&mut random, width));
            let beta = if shifted { numbers(&mut random, width) } else { vec![0.0; width] };
            let weights = NormWeights { gamma: &gamma, beta: shifted.then_some(&beta), centred, epsilon: EPSILON };
            let call = Norm { x: &x, weights };
            let define = |x: &[f64], gamma: &[f64], beta: &[f64]| norm(x, gamma, beta, centred);
            near("norm", &call.forward().unwrap(), &define(&wide(&x), &wide(&gamma), &wide(&beta)), 1e-5);
            // One number less its mean is nothing, and so is its slope but for ε: difference quotients say nothing of it.
            if width == 1 {
                continue;
            }
            let d_out = numbers(&mut random, rows * width);
            let (cotangent, g, b) = (wide(&d_out), wide(&gamma), wide(&beta));
            let gradients = call.backward(&d_out).unwrap();
            let what = format!("{rows} × {width}, centred {centred}");
            is_slope(&format!("{what}: dx"), &gradients.dx, &x, 3e-5, |x| dot(&define(x, &g, &b), &cotangent));
            let x = wide(&x);
            is_slope(&format!("{what}: dγ"), &gradients.d_gamma, &gamma, 3e-5, |g| {
                dot(&define(&x, g, &b), &cotangent)
            });
            is_slope(&format!("{what}: dβ"), &gradients.d_beta, &beta, 3e-5, |b| dot(&define(&x, &g, b), &cotangent));
        }
    }
}

#[test]
fn an_embedding_is_its_definition_with_its_gradient() {
    let mut random = Random::new(3);
    for [count, vocabulary, width, positions] in [[1, 1, 1, 0], [12, 5, 3, 4], [700, 40, 128, 700], [3000, 9000, 33, 0]]
    {
        let (table, rows) = (numbers(&mut random, vocabulary * width), numbers(&mut random, positions * width));
        let tokens: Vec<usize> = (0..count).map(|n| n * n * 7 % vocabulary).collect();
        let call = Embedding { table: &table, width, tokens: &tokens, scale: 2.5, positions: &rows };
        let define = |table: &[f64]| -> Vec<f64> {
            let entry = |n: usize| {
                let position = if positions > 0 { f64::from(rows[n % rows.len()]) } else { 0.0 };
                2.5 * table[tokens[n / width] * width + n % width] + position
            };
            (0..count * width).map(entry).collect()
        };
        near("forward", &call.forward().unwrap(), &define(&wide(&table)), 1e-6);
        let d_out = numbers(&mut random, count * width);
        let cotangent = wide(&d_out);
        let one = on_threads(1, || call.backward(&d_out).unwrap());
        assert_eq!(call.backward(&d_out).unwrap(), one);
        is_slope("dE", &one, &table, 1e-5, |table| dot(&define(table), &cotangent));
    }
}

/// A gated RMS norm of rows of heads.
pub fn gated_norm(x: &[f64], gate: &[f64], gamma: &[f64], head_dim: usize) -> Vec<f64> {
    let head = |(n, x): (usize, &[f64])| -> Vec<f64> {
        let square = x.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
        let scale = 1.0 / (square + f64::from(EPSILON)).sqrt();
        let at = n * head_dim;
        let open = gate[at..].iter().map(|&z| Activation::Silu.apply(z));
        x.iter().zip(&gamma[at % gamma.len()..]).zip(open).map(|((x, g), open)| x * scale * g * open).collect()
    };
    x.chunks(head_dim).enumerate().flat_map(head).collect()
}

#[test]
fn a_gated_norm_is_its_definition_with_all_gradients() {
    let mut random = Random::new(7);
    for [rows, heads, head_dim] in [[1, 1, 1], [3, 2, 5], [70, 4, 8], [130, 1, 16], [2, 3, 67], [1, 2, 64]] {
        let width = heads * head_dim;
        let (x, gate) = (numbers(&mut random, rows * width), numbers(&mut random, rows * width));
        let (gamma, d_out) = (numbers(&mut random, width), numbers(&mut random, rows * width));
        let norm =
            GatedNorm { x: &x, gate: &gate, head_dim, weights: GatedNormWeights { gamma: &gamma, epsilon: EPSILON } };
        let define = |x: &[f64], gate: &[f64], gamma: &[f64]| gated_norm(x, gate, gamma, head_dim);
        let [wx, wz, wg] = [&x, &gate, &gamma].map(|numbers| wide(numbers));
        let what = format!("{rows} × {heads} × {head_dim}");
        near(&what, &norm.forward().unwrap(), &define(&wx, &wz, &wg), 1e-5);
        let cotangent = wide(&d_out);
        let gradients = norm.backward(&d_out).unwrap();
        // One number over its size is its sign, whose slope is 0 but for ε: difference quotients say nothing of it.
        if head_dim > 1 {
            is_slope(&format!("{what}: dx"), &gradients.dx, &x, 3e-5, |x| dot(&define(x, &wz, &wg), &cotangent));
        }
        is_slope(&format!("{what}: dz"), &gradients.d_gate, &gate, 3e-5, |z| dot(&define(&wx, z, &wg), &cotangent));
        is_slope(&format!("{what}: dγ"), &gradients.d_gamma, &gamma, 3e-5, |g| dot(&define(&wx, &wz, g), &cotangent));
    }
}

#[test]
fn a_cross_entropy_is_its_definition_with_all_gradients() {
    let mut random = Random::new(4);
    for [rows, width, vocabulary] in [[1, 1, 1], [5, 3, 7], [150, 8, 40], [90, 4, 3000]] {
        for smoothing in [0.0_f32, 0.1] {
            let (h, weight) = (numbers(&mut random, rows * width), numbers(&mut random, width * vocabulary));
            let bias = numbers(&mut random, vocabulary);
            let targets: Vec<Option<u32>> =
                (0..rows).map(|row| (row % 5 != 3).then(|| random.below(vocabulary) as u32)).collect();
            let call = CrossEntropy {
                h: &h,
                weight: &weight,
                bias: Some(&bias),
                targets: &targets,
                width,
                vocabulary,
                smoothing,
            };
            let define = |h: &[f64], weight: &[f64], bias: &[f64]| -> [f64; 2] {
                let (mut plain, mut smoothed) = (0.0, 0.0);
                for (z, target) in linear(h, width, weight, bias).chunks(vocabulary).zip(&targets) {
                    let Some(target) = *target else { continue };
                    let most = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let log_sum = most + z.iter().map(|z| (z - most).exp()).sum::<f64>().ln();
                    let own = log_sum - z[target as usize];
                    let mean = log_sum - z.iter().sum::<f64>() / vocabulary as f64;
                    plain += own;
                    smoothed += own + f64::from(smoothing) * (mean - own);
                }
                [plain, smoothed]
            };
            let (x, w, b) = (wide(&h), wide(&weight), wide(&bias));
            let expected = define(&x, &w, &b);
            let (loss, gradients) = call.training().unwrap();
            assert_eq!(loss, call.loss().unwrap());
            for (got, expected) in [loss.plain, loss.smoothed].into_iter().zip(expected) {
                assert!((got - expected).abs() <= 1e-5 * expected.max(1.0), "{got}, not {expected}");
            }
            let what = format!("{rows} × {width} × {vocabulary}, smoothing {smoothing}");
            is_slope(&format!("{what}: dh"), &gradients.dh, &h, 2e-5, |h| define(h, &w, &b)[1]);
            is_slope(&format!("{what}: dW"), &gradients.d_weight, &weight, 2e-5, |w| define(&x, w, &b)[1]);
            is_slope(&format!("{what}: db"), &gradients.d_bias, &bias, 2e-5, |b| define(&x, &w, b)[1]);
            for (row, target) in targets.iter().enumerate() {
                if target.is_none() {
                    assert!(gradients.dh[row * width..][..width].iter().all(|&d| d == 0.0), "row {row} does not count");
                }
            }
        }
    }
}

#[test]
fn adamw_is_its_definition_over_many_steps() {
    let mut random = Random::new(6);
    let adamw = AdamW { beta_1: 0.9, beta_2: 0.98, epsilon: 1e-9, weight_decay: 0.1 };
    for len in [0, 1, 17, 20_000] {
        let mut values = numbers(&mut random, len);
        let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
        let (mut wide_values, mut wide_m, mut wide_v) = (wide(&values), vec![0.0; len], vec![0.0; len]);
        for time in 1..=20_usize {
            let (gradient, rate) = (numbers(&mut random, len), 0.01 / time as f64);
            adamw.step(rate, time, &mut values, &gradient, [&mut m, &mut v]).unwrap();
            let [b1, b2] = [adamw.beta_1, adamw.beta_2].map(f64::from);
            for n in 0..len {
                let g = f64::from(gradient[n]);
                wide_m[n] = b1 * wide_m[n] + (1.0 - b1) * g;
                wide_v[n] = b2 * wide_v[n] + (1.0 - b2) * g * g;
                let hat = |x: f64, beta: f64| x / (1.0 - beta.powi(time as i32));
                let delta = hat(wide_m[n], b1) / (hat(wide_v[n], b2).sqrt() + f64::from(adamw.epsilon));
                wide_values[n] = (1.0 - rate * f64::from(adamw.weight_decay)) * wide_values[n] - rate * delta;
            }
        }
        near("values", &values, &wide_values, 1e-5);
        near("m", &m, &wide_m, 1e-5);
        near("v", &v, &wide_v, 1e-5);
    }
    let refused = |rate, time| adamw.step(rate, time, &mut [0.0], &[0.0], [&mut [0.0], &mut [0.0]]).is_err();
    assert!(refused(f64::NAN, 1) && refused(0.1, 0) && !refused(0.1, 1));
    assert!(adamw.step(0.1, 1, &mut [0.0], &[], [&mut [0.0], &mut [0.0]]).is_err());
}

/// `A·B` of rows.
fn times(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let entry = |row: usize, column: usize| (0..k).map(|i| a[row * k + i] * b[i * n + column]).sum();
    (0..m * n).map(|at| entry(at / n, at % n)).collect()
}

/// Their sums are biases alone, with gradients all the same.
#[test]
fn rows_without_numbers_have_a_bias() {
    let bias = [-1.0, 1.0, 2.0, -3.0];
    let call = Linear::new(&[], &[], [3, 0, 4]).with_bias(Some(&bias)).with_activation(Activation::Relu);
    let (out, kept) = call.training().unwrap();
    assert_eq!(call.backward(&out, &kept, &[1.0; 12]).unwrap().d_bias, [0.0, 3.0, 3.0, 0.0]);
    let (h, weight, bias, targets) = (&[][..], &[][..], Some(&[0.0; 3][..]), &[None, Some(0)][..]);
    let call = CrossEntropy { h, weight, bias, targets, width: 0, vocabulary: 3, smoothing: 0.0 };
    let (_, gradients) = call.training().unwrap();
    near("d_bias", &gradients.d_bias, &[-2.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0], 1e-6);
}

#[test]
fn muon_is_its_definition_over_some_steps() {
    let mut random = Random::new(8);
    let muon = Muon { momentum: 0.95, weight_decay: 0.1 };
    for [rows, columns] in [[0, 3], [1, 1], [3, 5], [5, 3], [16, 40], [128, 256], [256, 128]] {
        let len = rows * columns;
        let (mut values, mut velocity) = (numbers(&mut random, len), vec![0.0; len]);
        let (mut wide_values, mut wide_velocity) = (wide(&values), vec![0.0; len]);
        for time in 1..=3 {
            // A step without a gradient goes on by its momentum.
            let gradient = if time == 2 { vec![0.0; len] } else { numbers(&mut random, len) };
            muon.step(0.05, [rows, columns], &mut values, &gradient, &mut velocity).unwrap();
            let momentum = f64::from(muon.momentum);
            wide_velocity.iter_mut().zip(&gradient).for_each(|(v, g)| *v = momentum * *v + f64::from(*g));
            let mut o: Vec<f64> =
                wide_velocity.iter().zip(&gradient).map(|(v, g)| f64::from(*g) + momentum * v).collect();
            let norm = o.iter().map(|o| o * o).sum::<f64>().sqrt();
            o.iter_mut().for_each(|o| *o /= norm);
            for _ in 0..5 {
                let turned: Vec<f64> = (0..len).map(|at| o[at % rows * columns + at / rows]).collect();
                let gram = times(&o, &turned, [rows, columns, rows]);
                let once = times(&gram, &o, [rows, rows, columns]);
                let twice = times(&gram, &once, [rows, rows, columns]);
                o = (0..len).map(|n| 3.4445 * o[n] - 4.775 * once[n] + 2.0315 * twice[n]).collect();
            }
            let size = 0.05 * 0.2 * (rows.max(columns) as f64).sqrt();
            wide_values.iter_mut().zip(&o).for_each(|(x, o)| *x = (1.0 - 0.05 * 0.1) * *x - size * o);
        }
        near("values", &values, &wide_values, 2e-6);
        near("velocity", &velocity, &wide_velocity, 1e-6);
    }
    let mut zero = [0.0; 6];
    muon.step(0.05, [2, 3], &mut zero, &[0.0; 6], &mut [0.0; 6]).unwrap();
    assert_eq!(zero, [0.0; 6], "nothing to learn");
    // However large a gradient is, its direction counts alone.
    let [small, large] = [1.0, 1e25].map(|scale| {
        let mut values = [0.0; 6];
        let gradient = [0.3, -0.2, 0.5, 0.1, 0.4, -0.6].map(|g| g * scale);
        muon.step(0.05, [2, 3], &mut values, &gradient, &mut [0.0; 6]).unwrap();
        values
    });
    near("a large gradient", &large, &wide(&small), 1e-5);
    let refused = |rate, columns| muon.step(rate, [2, columns], &mut [0.0; 6], &[0.0; 6], &mut [0.0; 6]).is_err();
    assert!(refused(f64::NAN, 3) && refused(0.1, 4) && !refused(0.1, 3));
}

#[test]
fn bits_of_layers_do_not_depend_on_the_number_of_threads() {
    let mut random = Random::new(5);
    let sizes @ [rows, k, n] = [3000, 24, 40];
    let (x, weight, bias) = (numbers(&mut random, rows * k), numbers(&mut random, k * n), numbers(&mut random, n));
    let d_out = numbers(&mut random, rows * n);
    let targets: Vec<Option<u32>> = (0..rows).map(|row| Some((row % n) as u32)).collect();
    let all = || {
        let linear = Linear::new(&x, &weight, sizes).with_bias(Some(&bias)).with_activation(Activation::Silu);
        let (out, kept) = linear.training().unwrap();
        let gradients = linear.backward(&out, &kept, &d_out).unwrap();
        let norm = Norm { x: &x, weights: NormWeights { gamma: &x[..k], beta: None, centred: true, epsilon: EPSILON } };
        let weights = GatedNormWeights { gamma: &x[..k], epsilon: EPSILON };
        let gated = GatedNorm { x: &x, gate: &x, head_dim: 8, weights };
        let norms = (norm.backward(&x).unwrap(), gated.forward().unwrap(), gated.backward(&x).unwrap());
        let loss = CrossEntropy {
            h: &x,
            weight: &weight,
            bias: None,
            targets: &targets,
            width: k,
            vocabulary: n,
            smoothing: 0.1,
        };
        (out, gradients, norms, loss.training().unwrap())
    };
    threads_do_not_matter(all);
}

#[test]
fn nothing_is_computed_of_nothing() {
    for sizes in [[0, 3, 4], [2, 0, 4], [2, 3, 0]] {
        let [rows, k, n] = sizes;
        let (x, weight, bias) = (vec![1.0; rows * k], vec![1.0; k * n], vec![2.0; n]);
        let call = Linear::new(&x, &weight, sizes).with_bias(Some(&bias));
        let (out, kept) = call.training().unwrap();
        assert_eq!(out, if k == 0 { vec![2.0; rows * n] } else { vec![5.0; rows * n] });
        let gradients = call.backward(&out, &kept, &vec![1.0; rows * n]).unwrap();
        assert_eq!(gradients.d_bias, vec![rows as f32; n]);
        assert_eq!(gradients.dx, vec![n as f32; rows * k]);
    }
    let norm = Norm { x: &[], weights: NormWeights { gamma: &[1.0; 3], beta: None, centred: true, epsilon: EPSILON } };
    assert_eq!(norm.forward().unwrap(), []);
    assert_eq!(norm.backward(&[]).unwrap().d_gamma, [0.0; 3]);
    let weights = GatedNormWeights { gamma: &[1.0; 6], epsilon: EPSILON };
    let norm = GatedNorm { x: &[], gate: &[], head_dim: 3, weights };
    assert_eq!(norm.forward().unwrap(), []);
    assert_eq!(norm.backward(&[]).unwrap().d_gamma, [0.0; 6]);
    let none = Embedding { table: &[1.0; 6], width: 3, tokens: &[], scale: 1.0, positions: &[] };
    assert_eq!((none.forward().unwrap(), none.backward(&[]).unwrap()), (vec![], vec![0.0; 6]));
    let loss =
        CrossEntropy { h: &[], weight: &[1.0; 6], bias: None, targets: &[], width: 2, vocabulary: 3, smoothing: 0.0 };
    assert_eq!(loss.training().unwrap().1.d_weight, [0.0; 6]);
}

#[test]
fn lengths_and_targets_that_do_not_fit_are_refused_by_name() {
    #[track_caller]
    fn refused<R>(result: Result<R, Error>, argument: &str) {
        let error = result.err().expect("it does not fit").to_string();
        assert!(error.contains(argument), "{error}");
    }
    let (x, weight) = ([0.0; 6], [0.0; 12]);
    let lookup = Embedding { table: &weight, width: 3, tokens: &[3, 0], scale: 1.0, positions: &[] };
    refused(Embedding { tokens: &[0, 4], ..lookup }.forward(), "tokens: expected entries below 4, got 4");
    refused(Embedding { width: 0, ..lookup }.forward(), "width");
    refused(Embedding { table: &weight[1..], ..lookup }.forward(), "table: expected rows of 3");
    refused(Embedding { positions: &weight[..9], ..lookup }.forward(), "tokens: expected sequences of 3");
    refused(lookup.backward(&x[1..]), "d_out: expected 6 numbers");
    refused(Linear::new(&x[..5], &weight, [2, 3, 4]).forward(), "x: expected 2 × 3");
    refused(Linear::new(&x, &weight[1..], [2, 3, 4]).forward(), "weight");
    refused(Linear::new(&x, &weight, [2, 3, 4]).with_bias(Some(&x)).forward(), "bias");
    refused(Linear::new(&x, &weight, [2, 3, 4]).with_residual(Some(&x)).forward(), "residual");
    refused(Linear::new(&x, &weight, [usize::MAX, 3, 4]).forward(), "x: expected");
    let call = Linear::new(&x, &weight, [2, 3, 4]).with_activation(Activation::Gelu);
    let (out, kept) = call.training().unwrap();
    refused(call.backward(&out, &kept, &x), "d_out");
    refused(call.with_activation(Activation::Relu).backward(&out, &kept, &out), "kept");
    let weights = NormWeights { gamma: &x[..4], beta: None, centred: true, epsilon: EPSILON };
    refused(Norm { x: &x, weights }.forward(), "norm: x");
    let weights = GatedNormWeights { gamma: &x[..3], epsilon: EPSILON };
    let norm = GatedNorm { x: &x, gate: &x, head_dim: 3, weights };
    refused(GatedNorm { x: &x[1..], ..norm }.forward(), "gated norm: x: expected rows of 3");
    refused(GatedNorm { gate: &x[1..], ..norm }.forward(), "gate: expected 6 numbers, as x");
    refused(GatedNorm { head_dim: 2, ..norm }.forward(), "gamma: expected heads of 2");
    refused(GatedNorm { head_dim: 0, ..norm }.forward(), "gamma: expected heads of 0 numbers, at least 1");
    refused(norm.backward(&x[1..]), "d_out: expected 6");
    let loss = CrossEntropy {
        h: &x,
        weight: &weight,
        bias: None,
        targets: &[Some(4), None],
        width: 3,
        vocabulary: 4,
        smoothing: 0.0,
    };
    refused(loss.loss(), "targets: expected entries below 4, got 4");
    refused(CrossEntropy { smoothing: 1.0, targets: &[None, None], ..loss }.loss(), "smoothing");
    refused(CrossEntropy { targets: &[None], ..loss }.loss(), "h: expected 1 × 3");
}

/// The loss of a row that is nearly certain is far below the rounding of its logits, and so is its gradient.
#[test]
fn the_loss_of_a_confident_row_keeps_its_digits() {
    // Logits 30 + n, and n: others weigh e^−13 in all.
    let (weight, bias) = ([1.0; 3], [30.0, 17.0, 15.0]);
    let others = (-13f64).exp() + (-15f64).exp();
    for (target, expected) in [(0, others.ln_1p()), (1, 13.0 + others.ln_1p()), (2, 15.0 + others.ln_1p())] {
        let (h, targets) = ([3.0], [Some(target)]);
        let call = CrossEntropy {
            h: &h,
            weight: &weight,
            bias: Some(&bias),
            targets: &targets,
            width: 1,
            vocabulary: 3,
            smoothing: 0.0,
        };
        let (loss, gradients) = call.training().unwrap();
        assert!((loss.plain / expected - 1.0).abs() < 1e-6, "{}, not {expected}", loss.plain);
        if target == 0 {
            let expected = -others / (1.0 + others);
            assert!((f64::from(gradients.d_bias[0]) / expected - 1.0).abs() < 1e-6, "{:?}", gradients.d_bias);
        }
    }
}
