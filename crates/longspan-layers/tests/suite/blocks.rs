//! The two parts of a block, held to their definitions in f64: results, and every gradient to the difference quotient of the
//! definition.

use longspan_kernels::aft::Variant;
use longspan_kernels::{
    Aft, AnyKernel, Call, Dims, FeatureMap, Kernel, KernelizedAttention, Mask, Mechanism, Score, Scratch, Shaw, State,
    View,
};
use longspan_layers::{
    Activation, Dropout, FeedForward, GatedNormWeights, KeptAttention, Linear, Memory, MultiHead, NormWeights,
    Projected, StepBuffers, Weights,
};
use longspan_testing::random::Random;

use crate::layers::{EPSILON, dot, gated_norm, is_slope, linear, near, norm, numbers, threads_do_not_matter, wide};

fn scaled(mut numbers: Vec<f32>, by: f32) -> Vec<f32> {
    numbers.iter_mut().for_each(|x| *x *= by);
    numbers
}

/// What a feed-forward part learns: `γ`, `β`, `W₁`, `b₁`, `W₂`, `b₂`.
fn feed_forward_weights(random: &mut Random, width: usize, hidden: usize, columns: usize) -> [Vec<f32>; 6] {
    let mut normal = |len: usize, scale: f32| scaled(numbers(random, len), scale);
    let (inner, outer) = (1.0 / (width as f32).sqrt(), 1.0 / (hidden as f32).sqrt());
    [
        normal(width, 1.0),
        normal(width, 1.0),
        normal(width * columns, inner),
        normal(columns, 1.0),
        normal(hidden * width, outer),
        normal(width, 1.0),
    ]
}

fn feed_forward<'a>(
    x: &'a [f32],
    [gamma, beta, w1, b1, w2, b2]: &'a [Vec<f32>; 6],
    hidden: usize,
    gated: bool,
    activation: Activation,
) -> FeedForward<'a> {
    FeedForward {
        x,
        width: gamma.len(),
        hidden,
        norm: Some(NormWeights { gamma, beta: Some(beta), centred: true, epsilon: EPSILON }),
        inner: Weights { weight: w1, bias: Some(b1) },
        activation,
        gated,
        outer: Weights { weight: w2, bias: Some(b2) },
        dropout: None,
        residual: true,
    }
}

#[test]
fn a_feed_forward_part_is_its_definition_with_all_gradients() {
    let mut random = Random::new(11);
    for [rows, width, hidden] in [[1, 1, 1], [3, 5, 7], [40, 16, 33], [1030, 6, 9]] {
        for (gated, f) in [
            (false, Activation::Relu),
            (false, Activation::Gelu),
            (true, Activation::Silu),
            (true, Activation::GeluTanh),
        ] {
            let columns = if gated { 2 * hidden } else { hidden };
            let x = numbers(&mut random, rows * width);
            let weights = feed_forward_weights(&mut random, width, hidden, columns);
            for (normed, residual) in [(true, true), (false, false)] {
                let define = |x: &[f64], [gamma, beta, w1, b1, w2, b2]: [&[f64]; 6]| -> Vec<f64> {
                    let n = if normed { norm(x, gamma, beta, true) } else { x.to_vec() };
                    let z = linear(&n, width, w1, b1);
                    let row = |z: &[f64]| -> Vec<f64> {
                        (0..hidden).map(|c| f.apply(z[c]) * if gated { z[hidden + c] } else { 1.0 }).collect()
                    };
                    let a: Vec<f64> = z.chunks(columns).flat_map(row).collect();
                    let y = linear(&a, hidden, w2, b2);
                    y.iter().zip(x).map(|(y, x)| if residual { y + x } else { *y }).collect()
                };
                let mut call = feed_forward(&x, &weights, hidden, gated, f);
                call.residual = residual;
                call.norm = if normed { call.norm } else { None };
                let what = format!("{rows} × {width} × {hidden}, {f:?}, gated {gated}, normed {normed}");
                // A norm of one number is its β, and has no slope but for ε.
                if normed && width == 1 {
                    continue;
                }
                let exact = weights.each_ref().map(|w| wide(w));
                let all = || exact.each_ref().map(Vec::as_slice);
                let expected = define(&wide(&x), all());
                near(&format!("{what}: forward"), &call.forward().unwrap(), &expected, 2e-5);
                let (out, sums) = call.training().unwrap();
                near(&format!("{what}: training"), &out, &expected, 2e-5);

                let d_out = numbers(&mut random, rows * width);
                let cotangent = wide(&d_out);
                let gradients = call.backward(Some(&sums), &d_out).unwrap();
                assert_eq!(gradients, call.backward(None, &d_out).unwrap(), "{what}: sums formed again");
                let allowed = 1e-4 * (rows as f64).sqrt().max(1.0) / 4.0;
                is_slope(&format!("{what}: dx"), &gradients.dx, &x, 1e-4, |x| dot(&define(x, all()), &cotangent));
                let [d_gamma, d_beta] = &gradients.d_norm;
                let [d_w1, d_b1] = &gradients.d_inner;
                let [d_w2, d_b2] = &gradients.d_outer;
                let x = wide(&x);
                let found = [d_gamma, d_beta, d_w1, d_b1, d_w2, d_b2];
                for (n, (gradient, at)) in found.into_iter().zip(&weights).enumerate() {
                    if !normed && n < 2 {
                        assert!(gradient.is_empty());
                        continue;
                    }
                    is_slope(&format!("{what}: weight {n}"), gradient, at, allowed, |moved| {
                        let mut with = all();
                        with[n] = moved;
                        dot(&define(&x, with), &cotangent)
                    });
                }
            }
        }
    }
}

fn kernelized(feature_map: FeatureMap, score: Score) -> KernelizedAttention {
    KernelizedAttention { feature_map, score, ..KernelizedAttention::default() }
}

/// A mechanism on projections in f64, one sequence after the other.
struct Definition<'a> {
    mechanism: &'a dyn Mechanism,
    dims: Dims,
    key_dim: usize,
    mask: Mask<'a>,
    normed: bool,
    gated: bool,
    residual: bool,
}

impl Definition<'_> {
    /// `γ, β, W, b, W₂, b₂`, the gated norm's `γ`, and then the mechanism's own.
    fn apply(&self, x: &[f64], memory: &[f64], weights: &[Vec<f64>]) -> Vec<f64> {
        let Dims { batch, heads, kv_heads, queries, keys, head_dim, .. } = self.dims;
        let width = heads * head_dim;
        let [gamma, beta, w, b, w2, b2, gated_gamma] = std::array::from_fn(|n| weights[n].as_slice());
        let n = if self.normed { norm(x, gamma, beta, true) } else { x.to_vec() };
        let own = linear(&n, width, w, b);
        let source = if memory.is_empty() { own.clone() } else { linear(memory, width, w, b) };
        let columns = b.len();
        let part = |rows: &[f64], tokens: usize, heads: usize, width: usize, first: usize| -> Vec<f64> {
            let mut part = Vec::new();
            for entry in 0..batch {
                for head in 0..heads {
                    for token in 0..tokens {
                        let at = (entry * tokens + token) * columns + first + head * width;
                        part.extend_from_slice(&rows[at..at + width]);
                    }
                }
            }
            part
        };
        let q = part(&own, queries, heads, head_dim, 0);
        let first = if self.gated { 2 * width } else { width };
        let k = part(&source, keys, kv_heads, self.key_dim, first);
        let v = part(&source, keys, kv_heads, head_dim, first + kv_heads * self.key_dim);
        let learned: Vec<&[f64]> = weights[7..].iter().map(Vec::as_slice).collect();
        let call = Call::row_major(self.dims, [&q, &k, &v]).with_mask(self.mask).with_parameters(&learned);
        let out = self.mechanism.reference(&call).unwrap().out;
        let mut merged = vec![0.0; out.len()];
        for (n, value) in out.iter().enumerate() {
            let (feature, row) = (n % head_dim, n / head_dim);
            let (token, unit) = (row % queries, row / queries);
            let (head, entry) = (unit % heads, unit / heads);
            merged[((entry * queries + token) * heads + head) * head_dim + feature] = *value;
        }
        if self.gated {
            let gates: Vec<f64> = own.chunks(columns).flat_map(|row| row[width..2 * width].to_vec()).collect();
            merged = gated_norm(&merged, &gates, gated_gamma, head_dim);
        }
        let y = linear(&merged, width, w2, b2);
        y.iter().zip(x).map(|(y, x)| if self.residual { y + x } else { *y }).collect()
    }
}

/// Causal attention of one sequence with a residual sum; no norms, no biases, no dropout.
fn attention<'a>(
    kernel: &'a dyn Kernel<f32>,
    parameters: &'a [&'a [f32]],
    [heads, kv_heads, head_dim]: [usize; 3],
    x: &'a [f32],
    [weight, output]: [&'a [f32]; 2],
) -> MultiHead<'a> {
    MultiHead {
        x,
        batch: 1,
        queries: x.len() / (heads * head_dim),
        memory: None,
        heads,
        kv_heads,
        head_dim,
        norm: None,
        projection: Weights { weight, bias: None },
        kernel,
        parameters,
        mask: Mask::causal(),
        initial_state: None,
        stretches: None,
        gated_norm: None,
        output: Weights { weight: output, bias: None },
        dropout: None,
        residual: true,
    }
}

fn gate(gamma: &[f32]) -> GatedNormWeights<'_> {
    GatedNormWeights { gamma, epsilon: EPSILON }
}

/// What a mechanism may have learned.
fn learned(random: &mut Random, mechanism: &dyn Mechanism, dims: &Dims) -> Vec<Vec<f32>> {
    mechanism.parameters(dims).iter().map(|parameter| numbers(random, parameter.len())).collect()
}

#[test]
fn multi_head_attention_is_its_definition_with_all_gradients() {
    let mut random = Random::new(12);
    let shaw = kernelized(FeatureMap::EluPlusOne, Score::Combined(Shaw::new(2)));
    let plain = kernelized(FeatureMap::Softplus, Score::Content);
    let conv = Aft::new(Variant::Conv { taps: 3, normalized: true });
    let cases: [(&dyn AnyKernel, [usize; 6], bool); 5] = [
        (&shaw, [2, 4, 2, 9, 0, 3], true),
        (&plain, [1, 2, 1, 70, 0, 4], true),
        (&plain, [2, 2, 2, 5, 8, 3], false),
        (&conv, [1, 2, 2, 12, 0, 3], true),
        (&shaw, [1, 2, 2, 6, 7, 2], false),
    ];
    for (gated, (mechanism, [batch, heads, kv_heads, queries, memory_keys, head_dim], causal)) in
        [false, true].into_iter().flat_map(|gated| cases.map(|case| (gated, case)))
    {
        let crossed = memory_keys > 0;
        let keys = if crossed { memory_keys } else { queries };
        let dims = Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim: head_dim };
        let (width, key_dim) = (heads * head_dim, mechanism.key_dim(&dims));
        let columns = width * (1 + usize::from(gated)) + kv_heads * (key_dim + head_dim);
        let scale = 0.5 / (width as f32).sqrt();
        let x = numbers(&mut random, batch * queries * width);
        let memory = numbers(&mut random, if crossed { batch * keys * width } else { 0 });
        let mut weights = vec![
            numbers(&mut random, width),
            numbers(&mut random, width),
            scaled(numbers(&mut random, width * columns), scale),
            numbers(&mut random, columns),
            scaled(numbers(&mut random, width * width), scale),
            numbers(&mut random, width),
            numbers(&mut random, width),
        ];
        weights.extend(learned(&mut random, mechanism, &dims).into_iter().map(|numbers| scaled(numbers, 0.3)));
        let parameters: Vec<&[f32]> = weights[7..].iter().map(Vec::as_slice).collect();
        let mask = if causal { Mask::causal() } else { Mask::bidirectional() };
        for (normed, residual) in [(true, true), (false, false)] {
            let definition = Definition { mechanism, dims, key_dim, mask, normed, gated, residual };
            let (gamma, beta) = (&weights[0], Some(weights[1].as_slice()));
            let norm = NormWeights { gamma, beta, centred: true, epsilon: EPSILON };
            let sizes = [heads, kv_heads, head_dim];
            let call = MultiHead {
                batch,
                queries,
                memory: crossed.then_some(Memory { numbers: &memory, keys }),
                norm: normed.then_some(norm),
                projection: Weights { weight: &weights[2], bias: Some(&weights[3]) },
                mask,
                gated_norm: gated.then_some(gate(&weights[6])),
                output: Weights { weight: &weights[4], bias: Some(&weights[5]) },
                residual,
                ..attention(mechanism, &parameters, sizes, &x, [&weights[2], &weights[4]])
            };
            let what = format!("{} {dims:?}, normed {normed}, gated {gated}", mechanism.name());
            let exact: Vec<Vec<f64>> = weights.iter().map(|w| wide(w)).collect();
            let expected = definition.apply(&wide(&x), &wide(&memory), &exact);
            let mut scratch = Scratch::new();
            near(&format!("{what}: forward"), &call.forward(&mut scratch, None).unwrap(), &expected, 2e-5);
            let (out, kept) = call.training(&mut scratch, None).unwrap();
            near(&format!("{what}: training"), &out, &expected, 2e-5);

            let d_out = numbers(&mut random, x.len());
            let cotangent = wide(&d_out);
            let gradients = call.backward(Some(&kept), &d_out, &mut scratch).unwrap();
            assert_eq!(gradients, call.backward(None, &d_out, &mut scratch).unwrap(), "{what}: formed again");
            let allowed = 2e-4;
            is_slope(&format!("{what}: dx"), &gradients.dx, &x, allowed, |x| {
                dot(&definition.apply(x, &wide(&memory), &exact), &cotangent)
            });
            is_slope(&format!("{what}: d memory"), &gradients.d_memory, &memory, allowed, |memory| {
                dot(&definition.apply(&wide(&x), memory, &exact), &cotangent)
            });
            let [d_gamma, d_beta] = gradients.d_norm;
            let [d_w, d_b] = gradients.d_projection;
            let [d_w2, d_b2] = gradients.d_output;
            let mut rest = gradients.d_parameters.as_slice();
            let learned = weights[7..].iter().map(|weight| {
                let (own, others) = rest.split_at(weight.len());
                rest = others;
                own.to_vec()
            });
            let d_gated = gradients.d_gated_norm;
            let found: Vec<Vec<f32>> =
                [d_gamma, d_beta, d_w, d_b, d_w2, d_b2, d_gated].into_iter().chain(learned).collect();
            for (n, gradient) in found.iter().enumerate() {
                if (!normed && n < 2) || (!gated && n == 6) {
                    assert!(gradient.is_empty());
                    continue;
                }
                is_slope(&format!("{what}: weight {n}"), gradient, &weights[n], allowed, |moved| {
                    let mut with = exact.clone();
                    with[n] = moved.to_vec();
                    dot(&definition.apply(&wide(&x), &wide(&memory), &with), &cotangent)
                });
            }
        }
    }
}

/// A sequence in two calls, the second after the state that the first left.
#[test]
fn a_prompt_leaves_the_state_from_which_attention_goes_on() {
    let mut random = Random::new(13);
    let kernel = kernelized(FeatureMap::EluPlusOne, Score::Combined(Shaw::new(3)));
    let (heads, head_dim, tokens) = (2, 4, 90);
    let width = heads * head_dim;
    let dims = Dims { batch: 1, heads, kv_heads: heads, queries: tokens, keys: tokens, head_dim, value_dim: head_dim };
    let x = numbers(&mut random, tokens * width);
    let (weight, output) = (numbers(&mut random, width * 4 * width), numbers(&mut random, width * width));
    let gamma = numbers(&mut random, width);
    let table = learned(&mut random, &kernel, &dims);
    let parameters: Vec<&[f32]> = table.iter().map(Vec::as_slice).collect();
    let call = |x, initial_state| MultiHead {
        initial_state,
        gated_norm: Some(gate(&gamma)),
        ..attention(&kernel, &parameters, [heads, heads, head_dim], x, [&weight, &output])
    };
    let mut scratch = Scratch::new();
    let whole = call(&x, None).forward(&mut scratch, None).unwrap();
    let mut state: State<f32> = Kernel::<f32>::empty_state(&kernel, &dims).unwrap();
    let (first, second) = x.split_at(37 * width);
    let mut parts = call(first, None).forward(&mut scratch, Some(&mut state)).unwrap();
    parts.extend(call(second, Some(&state)).forward(&mut scratch, None).unwrap());
    near("in two calls", &parts, &wide(&whole), 1e-4);
}

/// Both directions, whole and in segments shorter and longer than what a mechanism sees row by row.
#[test]
fn segments_of_both_directions_make_the_whole() {
    let mut random = Random::new(14);
    let (heads, kv_heads, head_dim, tokens) = (4, 2, 4, 90);
    let width = heads * head_dim;
    let dims = Dims { batch: 1, heads, kv_heads, queries: tokens, keys: tokens, head_dim, value_dim: head_dim };
    let x = numbers(&mut random, tokens * width);
    let (gamma, gated_gamma) = (numbers(&mut random, width), numbers(&mut random, width));
    let scores = [
        (Score::Content, true),
        (Score::Combined(Shaw::new(0)), false),
        (Score::Combined(Shaw::new(9)), true),
        (Score::Relative(Shaw::new(2)), false),
    ];
    for (kernel, gated) in scores.map(|(score, gated)| (kernelized(FeatureMap::Exp, score), gated)) {
        let columns = width * (1 + usize::from(gated)) + 2 * kv_heads * head_dim;
        let (weight, output) = (numbers(&mut random, width * columns), numbers(&mut random, width * width));
        let table = learned(&mut random, &kernel, &dims);
        let parameters: Vec<&[f32]> = table.iter().map(Vec::as_slice).collect();
        let call = MultiHead {
            norm: Some(NormWeights { gamma: &gamma, beta: None, centred: false, epsilon: EPSILON }),
            mask: Mask::bidirectional(),
            gated_norm: gated.then_some(gate(&gated_gamma)),
            ..attention(&kernel, &parameters, [heads, kv_heads, head_dim], &x, [&weight, &output])
        };
        let mut scratch = Scratch::new();
        let twice = |rows: Vec<f32>| rows.iter().map(|x| 2.0 * x).collect::<Vec<f32>>();
        let whole = twice(call.forward(&mut scratch, None).unwrap());
        for segment in [1, 7, 13, 45, 89, 90, 200] {
            let mut rows = x.clone();
            call.in_segments(&mut rows, segment, &mut scratch, |segment| Ok(twice(segment))).unwrap();
            near(&format!("{} in segments of {segment}", kernel.name()), &rows, &wide(&whole), 1e-4);
        }
        call.in_segments(&mut [], 5, &mut scratch, Ok).unwrap();
        let failed = call.in_segments(&mut x.clone(), 5, &mut scratch, |_| Ok(Vec::new())).unwrap_err();
        assert!(failed.to_string().contains("results"), "{failed}");
        let conv = Aft::new(Variant::Conv { taps: 3, normalized: true });
        let refused = MultiHead { kernel: &conv, ..call }.in_segments(&mut x.clone(), 5, &mut scratch, Ok).unwrap_err();
        assert!(refused.to_string().contains("take the sequence whole"), "{refused}");
    }
}

/// Token by token, with and without threads' help, a block's parts give the rows that they give of whole sequences.
#[test]
fn steps_give_the_rows_of_the_whole() {
    let mut random = Random::new(18);
    let kernel = kernelized(FeatureMap::EluPlusOne, Score::Combined(Shaw::new(2)));
    let sizes = [[1, 2, 1, 4, 7], [3, 2, 2, 4, 24], [6, 1, 1, 5, 9], [1, 4, 4, 64, 600]];
    for (gated, [batch, heads, kv_heads, head_dim, hidden]) in
        [false, true].into_iter().flat_map(|gated| sizes.map(|sizes| (gated, sizes)))
    {
        let (tokens, width) = (5, heads * head_dim);
        let dims = Dims { batch, heads, kv_heads, queries: 1, keys: 1, head_dim, value_dim: head_dim };
        let x = numbers(&mut random, batch * tokens * width);
        let columns = width * (1 + usize::from(gated)) + 2 * kv_heads * head_dim;
        let gamma = numbers(&mut random, width);
        let weights = feed_forward_weights(&mut random, width, hidden, 2 * hidden);
        let scale = 1.0 / (width as f32).sqrt();
        let weight = scaled(numbers(&mut random, width * columns), scale);
        let (bias, output) = (numbers(&mut random, columns), scaled(numbers(&mut random, width * width), scale));
        let table = learned(&mut random, &kernel, &dims);
        let parameters: Vec<&[f32]> = table.iter().map(Vec::as_slice).collect();
        let part = feed_forward(&x, &weights, hidden, true, Activation::Silu);
        let attention = MultiHead {
            batch,
            queries: tokens,
            norm: part.norm,
            projection: Weights { weight: &weight, bias: Some(&bias) },
            gated_norm: gated.then_some(gate(&gamma)),
            ..attention(&kernel, &parameters, [heads, kv_heads, head_dim], &x, [&weight, &output])
        };
        let middle = attention.forward(&mut Scratch::new(), None).unwrap();
        let whole = FeedForward { x: &middle, ..part }.forward().unwrap();
        let mut state: State<f32> = Kernel::<f32>::empty_state(&kernel, &dims).unwrap();
        let mut buffers = StepBuffers::default();
        for token in 0..tokens {
            let rows = |of: &[f32]| -> Vec<f32> {
                (0..batch).flat_map(|entry| of[(entry * tokens + token) * width..][..width].to_vec()).collect()
            };
            let x = rows(&x);
            let (mut middle, mut row) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            let attention = MultiHead { x: &x, queries: 1, ..attention };
            attention.step(&mut state, &mut buffers, &mut middle).unwrap();
            FeedForward { x: &middle, ..part }.step(&mut buffers, &mut row).unwrap();
            let what = format!("token {token} of {batch} × {heads} × {head_dim}, gated {gated}");
            near(&what, &row, &wide(&rows(&whole)), 5e-5);
            assert!(attention.step(&mut state, &mut buffers, &mut middle[1..]).is_err());
        }
        assert!(attention.step(&mut state, &mut buffers, &mut whole.clone()).is_err());
    }
}

/// Queries of two sequences, after keys and values that the projection's later columns have made of a memory.
#[test]
fn queries_recall_what_cross_attention_gives_them() {
    let mut random = Random::new(20);
    let kernel = kernelized(FeatureMap::EluPlusOne, Score::Content);
    let [batch, heads, queries, keys, head_dim] = [2, 2, 3, 7, 4];
    let width = heads * head_dim;
    let (x, memory) = (numbers(&mut random, batch * queries * width), numbers(&mut random, batch * keys * width));
    let (gamma, output) = (numbers(&mut random, width), numbers(&mut random, width * width));
    for gated in [false, true] {
        let (first, columns) = if gated { (2 * width, 4 * width) } else { (width, 3 * width) };
        let (weight, bias) = (numbers(&mut random, width * columns), numbers(&mut random, columns));
        let call = MultiHead {
            batch,
            queries,
            memory: Some(Memory { numbers: &memory, keys }),
            projection: Weights { weight: &weight, bias: Some(&bias) },
            mask: Mask::bidirectional(),
            gated_norm: gated.then_some(gate(&gamma)),
            ..attention(&kernel, &[], [heads, heads, head_dim], &x, [&weight, &output])
        };
        let expected = call.forward(&mut Scratch::new(), None).unwrap();
        let rows = Linear::new(&memory, &weight, [batch * keys, width, columns]).with_bias(Some(&bias));
        let rows = rows.forward().unwrap();
        let view = |first: usize| View::strided(&rows[first..], [keys * columns, head_dim, columns]);
        let projected = Projected { k: view(first), v: view(first + width), keys, outside: None };
        for mut buffers in [StepBuffers::default(), StepBuffers::independent()] {
            let mut out = vec![f32::NAN; x.len()];
            call.recall(&projected, &mut Scratch::new(), &mut buffers, &mut out).unwrap();
            near(&format!("gated {gated}"), &out, &wide(&expected), 1e-4);
        }
    }
}

/// What is dropped is told by the linear layer alone: with its own dropout, both parts give what the parts without give after it.
#[test]
fn parts_of_a_block_drop_the_same_numbers_forward_and_backward() {
    let mut random = Random::new(14);
    let [rows, width, hidden] = [600, 8, 12];
    let x = numbers(&mut random, rows * width);
    let weights = feed_forward_weights(&mut random, width, hidden, hidden);
    let mut call = feed_forward(&x, &weights, hidden, false, Activation::Gelu);
    call.residual = false;
    let plain = call.forward().unwrap();
    call.dropout = Dropout::new(0.25, 9);
    let (out, sums) = call.training().unwrap();
    let kept: Vec<f32> =
        out.iter().zip(&plain).map(|(out, plain)| if *out == 0.0 { 0.0 } else { out / plain }).collect();
    let lost = kept.iter().filter(|&&x| x == 0.0).count();
    assert!((rows * width / 5..rows * width * 3 / 10).contains(&lost), "{lost} dropped");
    let ones = vec![1.0; rows * width];
    let got = call.backward(Some(&sums), &ones).unwrap();
    call.dropout = None;
    let d_out: Vec<f32> = kept.iter().map(|&x| if x == 0.0 { 0.0 } else { 1.0 / 0.75 }).collect();
    let expected = call.backward(Some(&sums), &d_out).unwrap();
    near("dx", &got.dx, &wide(&expected.dx), 1e-5);
    near("dW", &got.d_inner[0], &wide(&expected.d_inner[0]), 1e-5);
}

#[test]
fn bits_of_blocks_do_not_depend_on_the_number_of_threads() {
    let mut random = Random::new(15);
    let [tokens, heads, head_dim, hidden] = [2100, 2, 8, 24];
    let width = heads * head_dim;
    let x = numbers(&mut random, tokens * width);
    let d_out = numbers(&mut random, tokens * width);
    let weights = feed_forward_weights(&mut random, width, hidden, 2 * hidden);
    let (weight, bias) = (numbers(&mut random, width * 4 * width), numbers(&mut random, 4 * width));
    let (output, gamma) = (numbers(&mut random, width * width), numbers(&mut random, width));
    let kernel = kernelized(FeatureMap::EluPlusOne, Score::Content);
    let all = || {
        let part = feed_forward(&x, &weights, hidden, true, Activation::Silu);
        let (out, sums) = part.training().unwrap();
        let call = MultiHead {
            norm: part.norm,
            projection: Weights { weight: &weight, bias: Some(&bias) },
            gated_norm: Some(gate(&gamma)),
            dropout: Dropout::new(0.1, 3),
            ..attention(&kernel, &[], [heads, heads, head_dim], &x, [&weight, &output])
        };
        let mut scratch = Scratch::new();
        let (heads, kept): (_, KeptAttention) = call.training(&mut scratch, None).unwrap();
        (out, part.backward(Some(&sums), &d_out), heads, call.backward(Some(&kept), &d_out, &mut scratch))
    };
    threads_do_not_matter(all);
}

/// A layer of some columns of a weight is the layer of those columns alone.
#[test]
fn some_columns_of_a_weight_are_a_layer() {
    let mut random = Random::new(16);
    let [rows, inputs, all, first, outputs] = [7, 5, 9, 2, 4];
    let (x, weight) = (numbers(&mut random, rows * inputs), numbers(&mut random, inputs * all));
    let own: Vec<f32> = weight.chunks(all).flat_map(|row| row[first..first + outputs].to_vec()).collect();
    let alone = Linear::new(&x, &own, [rows, inputs, outputs]);
    let part = Linear::new(&x, &weight[first..], [rows, inputs, outputs]).with_stride(all);
    let (out, kept) = part.training().unwrap();
    assert_eq!(alone.forward().unwrap(), out);
    assert_eq!(alone.backward(&out, &kept, &out), part.backward(&out, &kept, &out));
    assert!(part.with_stride(3).forward().is_err() && part.with_stride(10).forward().is_err());
}

#[test]
fn nothing_is_computed_of_no_rows() {
    let mut random = Random::new(19);
    let weights = feed_forward_weights(&mut random, 4, 6, 12);
    let call = feed_forward(&[], &weights, 6, true, Activation::Silu);
    assert_eq!(call.forward().unwrap(), []);
    let gradients = call.backward(None, &[]).unwrap();
    assert_eq!((gradients.dx.len(), &gradients.d_inner[0], &gradients.d_outer[1]), (0, &vec![0.0; 48], &vec![0.0; 4]));
    let kernel = kernelized(FeatureMap::EluPlusOne, Score::Content);
    let (weight, output) = (numbers(&mut random, 4 * 16), numbers(&mut random, 16));
    let call = MultiHead {
        batch: 2,
        norm: call.norm,
        gated_norm: Some(gate(&[1.0; 4])),
        ..attention(&kernel, &[], [2, 2, 2], &[], [&weight, &output])
    };
    let mut scratch = Scratch::new();
    let (out, kept) = call.training(&mut scratch, None).unwrap();
    assert_eq!(out, []);
    for kept in [Some(&kept), None] {
        let gradients = call.backward(kept, &[], &mut scratch).unwrap();
        assert_eq!((gradients.dx.len(), gradients.d_projection[0].len()), (0, 64));
        assert_eq!(gradients.d_gated_norm, [0.0; 4]);
        assert!(gradients.d_projection[0].iter().chain(&gradients.d_output[0]).all(|&d| d == 0.0));
    }
    let refused = |call: MultiHead<'_>, argument: &str| {
        let error = call.forward(&mut Scratch::new(), None).unwrap_err().to_string();
        assert!(error.contains(argument), "{error}");
    };
    refused(MultiHead { gated_norm: None, ..call }, "projection: expected 4 × 12");
    refused(MultiHead { gated_norm: Some(gate(&[1.0; 2])), ..call }, "γ of 4 numbers");
}

#[test]
fn sizes_that_do_not_fit_are_refused_by_name() {
    let mut random = Random::new(17);
    let weights = feed_forward_weights(&mut random, 4, 6, 6);
    let x = [0.0; 8];
    let call = feed_forward(&x, &weights, 6, false, Activation::Relu);
    let refused = |call: FeedForward<'_>, argument: &str| {
        let error = call.forward().unwrap_err().to_string();
        assert!(error.contains(argument), "{error}");
    };
    refused(FeedForward { x: &x[1..], ..call }, "x: expected rows of 4");
    refused(FeedForward { gated: true, ..call }, "inner: expected 4 × 12");
    refused(FeedForward { hidden: 5, ..call }, "inner");
    refused(FeedForward { outer: call.inner, ..call }, "outer");
    refused(FeedForward { hidden: usize::MAX, ..call }, "inner");
    assert!(call.backward(Some(&x), &x).unwrap_err().to_string().contains("sums: expected 2 × 6"));
    assert!(call.backward(None, &x[1..]).unwrap_err().to_string().contains("d_out"));
}
